"""A predicted step as trace events, for ui.perfetto.dev and chrome://tracing.

The Trace Event Format: complete events ("X") on one track for compute and one for each link, counters ("C") for memory,
names as metadata ("M"); times in microseconds.
"""

from __future__ import annotations

from typing import Any

from graphshard.schedule.memory import Memory
from graphshard.schedule.timeline import Estimate

_PROCESS = 1
_TRACKS = {"": (1, "compute"), "node": (2, "communication"), "network": (3, "communication between nodes")}
_TRACKS |= {"host": (4, "copies to and from the host")}


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


def _name(what: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": track, "args": {"name": name}}
