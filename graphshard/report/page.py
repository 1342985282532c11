"""The HTML report of one compiled program: one file that opens without a network.

Tables are written here, so that they can be read and printed as they are. What depends on a choice or on the zoom
(the diff of two stages, the timeline, the memory curve) is drawn by the page from data it carries. Texts of stages
are carried compressed: at 126 layers they are megabytes each, and few of them are ever looked at.

Times are in seconds and sizes in bytes, here and in the page's data; only what is shown has other units.
"""

from __future__ import annotations

import base64
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from graphshard.ir.text import format_bytes, format_seconds
from graphshard.passes import InsertCollectives
from graphshard.schedule.memory import Memory


@dataclass(frozen=True)
class Spread:
    """A measured number, in seconds or bytes, on all ranks: the least, the median and the most."""

    least: float
    median: float
    most: float

    @staticmethod
    def of(values: Iterable[float]) -> Spread:
        """Of one value for each rank."""
        ordered = sorted(values)
        return Spread(ordered[0], median(ordered), ordered[-1])


@dataclass(frozen=True)
class StageView:
    """The program after one pass.

    Attributes:
        exact: False if the pass says that it may change numerics.
        folded: the text with repeated blocks folded; `full` is the whole text.
        file: relative link to the text, or "".
    """

    name: str
    rewrites: int
    seconds: float
    nodes: int
    exact: bool
    folded: str
    full: str
    file: str = ""


@dataclass(frozen=True)
class BucketView:
    """Tensors that travel in one collective.

    Attributes:
        name: equals the `name` of the bucket's spans in the timeline.
        kind: "gather" or "reduce".
        phase: "forward" or "backward".
        params: parameters that travel as they are; those in `packed` share one flat buffer.
        start: where the collective is launched, in words; `wait` is where its result is waited for.
        hidden_by: names of the regions that run in between, or "".
        exposed_seconds: how much of `seconds` the compute stream waits.
        slack_seconds: by how much it could be later or longer, and the step no longer.
        in_flight: measured, from its launch until compute has waited for it: what it took at most; None if nothing was.
        waited: measured, how long compute waited for it.
    """

    name: str
    kind: str
    phase: str
    params: tuple[str, ...]
    packed: tuple[str, ...]
    num_bytes: int
    dtype: str
    axis: str
    start: str
    wait: str
    hidden_by: str
    seconds: float
    exposed_seconds: float
    slack_seconds: float
    in_flight: Spread | None = None
    waited: Spread | None = None


@dataclass(frozen=True)
class Span:
    """A stretch of time on one lane, such as "compute" or "communication".

    `kind` is "compute", "gather", "reduce", or "exposed": the compute lane is idle, waiting for a bucket. `slack` is by
    how many seconds it could be later or longer, and the step no longer; None of a wait. The spans that are `critical`
    follow each other without a gap: the step is as long as they are.
    """

    lane: str
    kind: str
    name: str
    start: float
    end: float
    detail: str = ""
    slack: float | None = None
    critical: bool = False


@dataclass(frozen=True)
class Measured:
    """One step as it ran on all ranks.

    `spans` are those of `rank`, on lanes of their own and the time axis of the prediction. `exposed` is what compute
    waited in all; `memory` is the peak in bytes, if it was measured.
    """

    rank: int
    num_ranks: int
    spans: tuple[Span, ...]
    step: Spread
    compute: Spread
    exposed: Spread
    memory: Spread | None = None


@dataclass(frozen=True)
class Timeline:
    """One step as the cost model sees it.

    `phases` are (name, start, end); `critical_seconds` is the communication on the critical path; `assumptions` is one
    sentence; `measured` is the step as it ran, if somebody has measured it.
    """

    spans: tuple[Span, ...]
    phases: tuple[tuple[str, float, float], ...]
    seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    critical_seconds: float
    assumptions: str
    measured: Measured | None = None


@dataclass(frozen=True)
class RegionView:
    """A distinct compiled region.

    `seconds` is for one call, `measured` for all of a step; `file` and `kernels` are relative links, or "". `resources`
    is what kernels for GPUs take, if they were compiled where there is none.
    """

    name: str
    key: str
    calls: int
    ops: int
    modules: str
    seconds: float
    file: str = ""
    kernels: str = ""
    resources: str = ""
    measured: Spread | None = None


@dataclass(frozen=True)
class Report:
    """All that a report shows. `error` is the traceback of the pass that failed; later parts may be missing then."""

    title: str
    facts: tuple[tuple[str, str], ...]
    stages: tuple[StageView, ...]
    buckets: tuple[BucketView, ...] = ()
    timeline: Timeline | None = None
    memory: Memory | None = None
    regions: tuple[RegionView, ...] = ()
    error: str = ""


def render(data: Report) -> str:
    """The report as the text of one HTML file; equal data give equal text."""
    loader = PackageLoader("graphshard.report", "")
    env = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.filters |= {"size": format_bytes, "time": format_seconds, "pack": _pack}
    env.globals |= {"format_bytes": format_bytes, "format_seconds": format_seconds}
    env.globals["asset"] = lambda name: Markup(loader.get_source(env, name)[0])
    groups = Counter[str]()
    for value in data.memory.alive if data.memory else ():
        groups[value.what] += value.num_bytes
    return env.get_template("page.html.j2").render(report=data, page=_page(data), groups=groups.most_common())


def _pack(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode())).decode()


def _page(data: Report) -> dict[str, Any]:
    """What the page's scripts need, apart from texts."""
    texts = [stage.full for stage in data.stages]
    differ = [i for i in range(1, len(texts)) if texts[i - 1] != texts[i]]
    telling = [i for i in differ if data.stages[i].name == InsertCollectives.name]
    after = (telling or differ or [len(texts) - 1])[-1]
    memory = data.memory
    return {
        "compare": [max(after - 1, 0), after],
        "timeline": data.timeline and asdict(data.timeline),
        "memory": memory and asdict(replace(memory, alive=())),
    }
