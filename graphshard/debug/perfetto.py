"""Trace events of a step, for ui.perfetto.dev and chrome://tracing.

The Trace Event Format: complete events ("X") on one track for compute and one for each link, counters ("C") for memory,
names as metadata ("M"); times in microseconds. Events of one track must not overlap: overlapping ones get more tracks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from graphshard.debug.html_report import LANES, Span
from graphshard.schedule.memory import MemoryTimeline
from graphshard.schedule.timeline import Estimate

_PROCESS = 1
# Lanes of a measured step, and how many tracks each may have.
_MEASURED_LANES, _MOST_TRACKS = ("compute", "communication"), 1000


def trace_events(timeline: Estimate, memory: MemoryTimeline, title: str) -> dict[str, Any]:
    """Return the trace of a predicted step as plain data for JSON."""
    tracks = {link: track for track, link in enumerate(LANES, start=1)}
    used = {step.link for step in timeline.steps}
    events = [_name("process_name", 0, title)]
    events += [_name("thread_name", tracks[link], lane) for link, lane in LANES.items() if link in used]
    for step in timeline.steps:
        arguments: dict[str, Any] = {"phase": step.phase, "modules": step.where}
        if step.num_bytes:
            arguments["bytes"] = step.num_bytes
        if step.why:
            arguments |= {"why": step.why, "behind": step.behind}
        name = step.name if step.kind == "exposed" else f"{step.name} {step.where}".strip()
        event = _complete(name, step.kind, _PROCESS, tracks[step.link], step.start, step.seconds)
        events.append({**event, "args": arguments})
    for point in memory.points:
        value = {"bytes": point.num_bytes}
        events.append({"ph": "C", "name": "memory", "pid": _PROCESS, "ts": point.time * 1e6, "args": value})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def process_events(process: int, title: str, spans: Iterable[Span]) -> Iterator[dict[str, Any]]:
    """Yield the events of a step as a separate process; its spans, ordered by start, are on two lanes."""
    yield _name("process_name", 0, title, process)
    ends: dict[str, list[float]] = {lane: [] for lane in _MEASURED_LANES}
    for span in spans:
        rows = ends[span.lane]
        row = next((row for row, end in enumerate(rows) if end <= span.start), len(rows))
        # Tracks are sorted by number, so the rows of a lane stay together.
        track = _MEASURED_LANES.index(span.lane) * _MOST_TRACKS + row + 1
        if row == len(rows):
            rows.append(span.end)
            yield _name("thread_name", track, span.lane, process)
        rows[row] = span.end
        yield _complete(span.name, span.kind, process, track, span.start, span.end - span.start)


def _complete(name: str, kind: str, process: int, track: int, start: float, seconds: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": f"wait {name}" if kind == "exposed" else name,
        "cat": kind,
        "pid": process,
        "tid": track,
        "ts": start * 1e6,
        "dur": seconds * 1e6,
    }


def _name(what: str, track: int, name: str, process: int = _PROCESS) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}
