"""`summary.json` of a dump: what `graphshard show` prints without reading programs."""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path

from graphshard.errors import ArgumentError
from graphshard.ir.files import read_file
from graphshard.ir.plain import read, write
from graphshard.ir.text import brief

SUMMARY = "summary.json"
_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class StageSummary:
    """A stage of the dump, as `graphshard.ir.program.Stage` has it; `file` is its text."""

    name: str
    rewrites: int
    seconds: float
    nodes: int
    exact: bool
    file: str = ""


@dataclass(frozen=True)
class Regions:
    """How many regions are called, and how many of them are different."""

    calls: int
    distinct: int


@dataclass(frozen=True)
class Summary:
    """What a dump says of itself; it has begun with the number of its process alone.

    Attributes:
        pid: the process.
        title, reason: the program, and why it was captured.
        torch: version.
        axes: sizes of the mesh by name.
        stages: those that are there.
        regions: None before lowering.
        communication: one line per collective.
        kernels: what those of a region take at most, a line for each kind of GPU that it was compiled for.
        error: of the pass that failed; "" for none.
    """

    pid: int | None = None
    title: str = ""
    reason: str = ""
    torch: str = ""
    axes: dict[str, int] = field(default_factory=dict)
    stages: tuple[StageSummary, ...] = ()
    regions: Regions | None = None
    communication: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    error: str = ""

    def to_json(self) -> str:
        return json.dumps(write(self), indent=1) + "\n"


def read_summary(path: Path) -> Summary:
    """Inverse of `Summary.to_json`; what has a default may be missing.

    Raises:
        ArgumentError: the file is no summary.
    """
    try:
        data = json.loads(read_file(path, _MOST_BYTES))
        if not isinstance(data, dict):
            raise ArgumentError(f"it is {brief(data)}")
        stages = data.get("stages", [])
        if isinstance(stages, list):
            data["stages"] = [_filled(stage, StageSummary) for stage in stages]
        return read(_filled(data, Summary), Summary)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} is not the summary of a dump: {error}") from None


def _filled(data: object, kind: type) -> object:
    """With the defaults of what is missing."""
    if not isinstance(data, dict):
        return data
    plain = {f.name: write(f.default) for f in fields(kind) if f.default is not MISSING}
    made = {f.name: write(f.default_factory()) for f in fields(kind) if f.default_factory is not MISSING}
    return {**plain, **made, **data}
