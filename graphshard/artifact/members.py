"""What is in a `.gshard` file, by member.

manifest.json                       what it was made for (the fingerprint), its programs and regions, checksums
summary.txt                         for people
meshes/0.json                       the parameter table on that mesh
programs/0.json  0.txt  0.plan.json   the code that calls regions and collectives, its scheduled graph as text, its plan
programs/0.trace.txt                the graph that was traced, as text, to say what another trace computes instead
programs/0.partitioned.json         where another backward of it begins
programs/0.backward-1.json          its backward for gradients through output 1
programs/0.backward-0-no-sync-first.json   its backward for the first of several microbatches
regions/9f3c....json  9f3c....pt2   a region's operators, and its AOTInductor package if it was compiled
regions/9f3c....sm_90.json          its code for GPUs of compute capability 9.0, see `codec/gpu_code.py`
cubins/1b2c....cubin                a kernel of such code, by the hash of its content; regions share them

`artifact/archive.py` reads and writes the file, `artifact/fingerprint.py` compares, `artifact/export.py` fills
it and `artifact/load.py` uses it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphshard.artifact.archive import Archive, read_archive, write_archive
from graphshard.artifact.cubins import cubin_file, gpu_file, kernel_facts
from graphshard.artifact.facts import Facts
from graphshard.artifact.signing import Signer
from graphshard.artifact.summary import summarize
from graphshard.codec.converter import read, write
from graphshard.codec.gpu_code import cubin_name, encode_gpu_code
from graphshard.codec.lowered import encode_region
from graphshard.errors import ArtifactError
from graphshard.frontend.signature import Signature
from graphshard.ir.mesh import Mesh
from graphshard.ir.param_table import ParamTable
from graphshard.ir.program import Region
from graphshard.lower.aoti_package import Package, check_package
from graphshard.lower.kernels import dotted

# What there is of a region: a package, code for GPUs, its operators, which run as they are, or operators to compile.
CODES = ("native", "gpu", "operators", "later")


@dataclass(frozen=True)
class StoredBackward:
    """Another backward of a program on its way into a file.

    Attributes:
        outputs: those that gradients come through.
        microbatch: which of a step of several, such as "no-sync-first"; "" is a step of one.
        data: the lowered program, and under "accumulate" the pass that made it one of several, or None.
    """

    outputs: frozenset[str]
    microbatch: str
    data: Mapping[str, Any]

    @property
    def row(self) -> dict[str, Any]:
        """What the manifest says of it."""
        return {"outputs": sorted(self.outputs), "microbatch": self.microbatch}


@dataclass(frozen=True)
class Captured:
    """A program on its way into a file.

    Attributes:
        entry: name of the submodule that is called; "" is the model.
        digests: of the traces that it serves, see `graph_digest`: of all blocks, and of a few of equal ones.
        signature: the call that it was captured for. It describes the program, and does not choose it.
        data: the lowered program, see `codec/lowered.py`.
        backwards: further backwards.
        text: the scheduled graphs, as they print.
        trace: the traced graph, as it prints.
        plan: JSON.
        partitioned: where another backward begins, see `codec/partitioned.py`; None if there is none.
        prediction: what a step is expected to take, as text; "" for inference.
        period: after how many ranks it may be that of a rank again, see `places.period_of`.
    """

    entry: str
    digests: Sequence[str]
    signature: Signature
    data: Mapping[str, Any]
    backwards: Sequence[StoredBackward]
    text: str
    trace: str
    plan: str
    partitioned: Mapping[str, Any] | None = None
    prediction: str = ""
    period: int = 1


@dataclass(frozen=True)
class MeshPrograms:
    """What there is for one mesh; `options` are those of `compile` there, see `artifact/fingerprint.py`.

    `shape` has the sizes of axes as they were given, where several may shard as one. `place` is that on the axes along
    which the model communicates; None is all of them.
    """

    mesh: Mesh
    shape: Mapping[str, int]
    options: Mapping[str, Any]
    params: ParamTable
    programs: tuple[Captured, ...]
    place: int | None = None


@dataclass(frozen=True)
class StoredRegion:
    """A region on its way into a file, or out of it: its operators, and its package or why there is none."""

    region: Mapping[str, Any]
    code: str
    package: Package = field(default_factory=Package)


@dataclass(frozen=True)
class Artifact:
    """A file that was read and checked; nothing in it has been executed."""

    archive: Archive

    @property
    def path(self) -> Path:
        return self.archive.path

    @property
    def facts(self) -> Mapping[str, Any]:
        return self.archive.facts

    @property
    def native(self) -> bool:
        """Whether some region is native code."""
        return any(region["code"] == "native" for region in self.facts["regions"].values())

    @property
    def later(self) -> list[str]:
        """Keys of the regions that are still to be compiled."""
        return [key for key, region in self.facts["regions"].items() if region["code"] == "later"]

    @property
    def meshes(self) -> list[dict[str, Any]]:
        """What the manifest says of each mesh."""
        return list(self.facts["meshes"])

    def params(self, index: int) -> ParamTable:
        """The parameter table on a mesh."""
        try:
            return read(self.archive.json(f"meshes/{index}.json"), ParamTable)
        except ArtifactError:
            raise
        except Exception as error:  # whatever is said of odd values
            raise ArtifactError(f"{self.path}: meshes/{index}.json is no parameter table ({error!r}).") from error

    def package_of(self, key: str) -> bytes:
        """The package of a native region."""
        return self.archive.members[f"regions/{key}.pt2"]


def read_artifact(path: Path, trust: Sequence[Any] = ()) -> Artifact:
    """Read a file and check that it is whole and what it says; nothing is executed.

    Args:
        trust: public keys, of which one must have signed it.

    Raises:
        ArtifactError: it is not.
    """
    artifact = Artifact(read_archive(path, trust))
    try:
        read(dict(artifact.facts), Facts)
        expected = set(_members(artifact.facts))
        for key, region in artifact.facts["regions"].items():
            if region["code"] not in CODES:
                raise ArtifactError(f"{path}: region {key} is {region['code']!r}, which this version does not know.")
            if region["code"] == "native":
                check_package(f"{path}: regions/{key}.pt2", artifact.package_of(key))
    except ArtifactError:
        raise
    except Exception as error:  # a manifest with the right checksums and other keys
        raise ArtifactError(f"{path}: manifest.json is not one of graphshard.export ({error!r}).") from None
    found = set(artifact.archive.members)
    if found != expected:
        name = min(found ^ expected)
        what = "has no" if name in expected else "has an unexpected"
        raise ArtifactError(f"{path} {what} {name}: it was changed after it was exported. Copy or export it again.")
    return artifact


def _members(facts: Mapping[str, Any]) -> Iterator[str]:
    """The members that a manifest asks for."""
    yield "summary.txt"
    for index, mesh in enumerate(facts["meshes"]):
        yield f"meshes/{index}.json"
        for program in mesh["programs"]:
            yield from (f"{program['file']}{ending}" for ending in (".json", ".txt", ".trace.txt", ".plan.json"))
            yield from partitioned_file(program)
            yield from (backward_file(program["file"], row) for row in program["backwards"])
    for key, region in facts["regions"].items():
        yield f"regions/{key}.json"
        if region["code"] == "native":
            yield f"regions/{key}.pt2"
        for capability, kernels in region["gpus"].items():
            yield gpu_file(key, capability)
            yield from (cubin_file(kernel["cubin"]) for kernel in kernels)


def partitioned_file(program: Mapping[str, Any]) -> list[str]:
    """The member that says where another backward of a program begins, if it has one; the manifest's words on it."""
    return [f"{program['file']}.partitioned.json"] if "backward" in program["phases"] else []


def backward_file(program: str, row: Mapping[str, Any]) -> str:
    """The member with a further backward of a program; `row` is what the manifest says of it."""
    outputs = "-".join(sorted(row["outputs"])) or "none"
    return f"{program}.backward-{outputs}{'-' if row['microbatch'] else ''}{row['microbatch']}.json"


def write_artifact(
    path: Path,
    fingerprint: Mapping[str, Any],
    meshes: Sequence[MeshPrograms],
    regions: Mapping[str, StoredRegion],
    sign: Signer | None = None,
) -> None:
    """Write a file that is either whole or not there.

    Args:
        fingerprint: "environment" and "model", see `artifact/fingerprint.py`.
        regions: by key.
        sign: signs the file.
    """
    members: dict[str, bytes] = {}
    listed = []
    number = 0
    for index, item in enumerate(meshes):
        members[f"meshes/{index}.json"] = _json(write(item.params))
        programs = []
        for captured in item.programs:
            programs.append(_add_program(f"programs/{number}", captured, members))
            number += 1
        listed.append(
            {
                "mesh": write(item.mesh),
                "shape": item.shape,
                "place": item.place,
                "options": item.options,
                "num_parameters": len(item.params),
                "shard_bytes": sum(row.shard_bytes(row.compute_dtype) for row in item.params),
                "programs": programs,
            }
        )
    for key, stored in regions.items():
        members[f"regions/{key}.json"] = _json(stored.region)
        members.update(code_members(key, stored.package))
    facts = {key: region_facts(stored.code, stored.package) for key, stored in regions.items()}
    write_facts(path, {**fingerprint, "meshes": listed, "regions": facts}, members, sign)


def write_facts(path: Path, facts: Mapping[str, Any], members: Mapping[str, bytes], sign: Signer | None = None) -> None:
    """Write a file of these facts and members, with the summary that belongs to them."""
    write_archive(path, facts, {**members, "summary.txt": summarize(facts).encode()}, sign)


def code_members(key: str, package: Package) -> Iterator[tuple[str, bytes]]:
    """The members that hold a region's code."""
    if package.content:
        yield f"regions/{key}.pt2", package.content
    for code in package.codes:
        yield gpu_file(key, dotted(code.capability)), _json(encode_gpu_code(code))
        yield from ((cubin_file(cubin_name(kernel.cubin)), kernel.cubin) for kernel in code.kernels.values())


def code_kind(package: Package) -> str:
    """Which of `CODES` a region's code is; "" if there is none."""
    return "native" if package.content else "gpu" if package.codes else ""


def region_facts(code: str, package: Package) -> dict[str, Any]:
    """What the manifest says of a region."""
    gpus = {dotted(code.capability): kernel_facts(code) for code in package.codes}
    size = len(package.content) + sum(kernel["bytes"] for kernels in gpus.values() for kernel in kernels)
    return {"code": code, "why": package.problem, "bytes": size, "gpus": gpus}


def _add_program(file: str, captured: Captured, members: dict[str, bytes]) -> dict[str, Any]:
    """Add a program's members; what the manifest says of it."""
    members[f"{file}.json"] = _json(captured.data)
    members[f"{file}.txt"] = captured.text.encode()
    members[f"{file}.trace.txt"] = captured.trace.encode()
    members[f"{file}.plan.json"] = captured.plan.encode()
    if captured.partitioned is not None:
        members[f"{file}.partitioned.json"] = _json(captured.partitioned)
    for backward in captured.backwards:
        members[backward_file(file, backward.row)] = _json(backward.data)
    return {
        "file": file,
        "entry": captured.entry,
        "digests": list(captured.digests),
        "signature": write(captured.signature),
        "backwards": [backward.row for backward in captured.backwards],
        "phases": list(captured.data["phases"]),
        "region_calls": len(captured.data["region_calls"]),
        "collectives": len(captured.data["communication"]),
        "prediction": captured.prediction,
    }


def stored_region(region: Region, package: Package, *, later: bool) -> StoredRegion:
    """A region for a file: its package if there is one, otherwise its operators."""
    code = code_kind(package) or ("later" if later else "operators")
    return StoredRegion(encode_region(region), code, package)


def _json(value: Any) -> bytes:
    return (json.dumps(value, allow_nan=False) + "\n").encode()
