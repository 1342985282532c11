"""A step as trace events, for ui.perfetto.dev and chrome://tracing.

The Trace Event Format: complete events ("X") on one track for compute and one for each link, counters ("C") for memory,
names as metadata ("M"); times in microseconds. Events of one track must not overlap: what does gets a track beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from graphshard.report.page import Span
from graphshard.schedule.memory import Memory
from graphshard.schedule.timeline import Estimate

_PROCESS = 1
_LANES = ("compute", "communication")
_MOST_ROWS = 1000  # of one lane
_TRACKS = {"": (1, "compute"), "node": (2, "communication"), "network": (3, "communication between nodes")}
_TRACKS |= {"host": (4, "copies from the host"), "to_host": (5, "copies to the host")}


def trace_events(timeline: Estimate, memory: Memory, title: str) -> dict[str, Any]:
    """The trace as plain data for JSON."""
    events: list[dict[str, Any]] = [_name("process_name", 0, title)]
    used = {step.link for step in timeline.steps}
    events += [_name("thread_name", track, name) for link, (track, name) in _TRACKS.items() if link in used]
    for step in timeline.steps:
        arguments: dict[str, Any] = {"phase": step.phase, "modules": step.where}
        if step.num_bytes:
            arguments["bytes"] = step.num_bytes
        if step.why:
            arguments |= {"why": step.why, "behind": step.behind}
        events.append(
            {
                "ph": "X",
                "name": f"wait {step.name}" if step.kind == "exposed" else f"{step.name} {step.where}".strip(),
                "cat": step.kind,
                "pid": _PROCESS,
                "tid": _TRACKS[step.link][0],
                "ts": step.start * 1e6,
                "dur": step.seconds * 1e6,
                "args": arguments,
            }
        )
    for point in memory.points:
        value = {"bytes": point.num_bytes}
        events.append({"ph": "C", "name": "memory", "pid": _PROCESS, "ts": point.time * 1e6, "args": value})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def process_events(process: int, title: str, spans: Iterable[Span]) -> Iterator[dict[str, Any]]:
    """A step as a process of its own.

    Args:
        process: its number among those of the trace.
        title: its name.
        spans: on the lanes "compute" and "communication", in the order in which they begin.
    """
    yield _name("process_name", 0, title, process)
    ends: dict[str, list[float]] = {lane: [] for lane in _LANES}
    for span in spans:
        rows = ends[span.lane]
        row = next((row for row, end in enumerate(rows) if end <= span.start), len(rows))
        # Rows of a lane lie together, as tracks are sorted by their numbers.
        track = _LANES.index(span.lane) * _MOST_ROWS + row + 1
        if row == len(rows):
            rows.append(span.end)
            yield _name("thread_name", track, span.lane, process)
        rows[row] = span.end
        yield {
            "ph": "X",
            "name": f"wait {span.name}" if span.kind == "exposed" else span.name,
            "cat": span.kind,
            "pid": process,
            "tid": track,
            "ts": span.start * 1e6,
            "dur": (span.end - span.start) * 1e6,
        }


def _name(what: str, track: int, name: str, process: int = _PROCESS) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}
