"""Events of the Trace Event Format, for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def trace_event(name: str, kind: str, process: int, track: int, start: float, seconds: float) -> dict[str, Any]:
    """Return a complete event of the Trace Event Format; events of one track must not overlap."""
    name = f"wait {name}" if kind == "exposed" else name
    time = {"ts": start * 1e6, "dur": seconds * 1e6}
    return {"ph": "X", "name": name, "cat": kind, "pid": process, "tid": track, **time}


def trace_flow(name: str, number: int, process: int, launch: tuple[int, float], wait: tuple[int, float]) -> list[Any]:
    """Return the two events of an arrow, each on a track at a time: from a collective's launch to the wait for it."""
    common = {"name": name, "cat": "wait", "id": number, "pid": process}
    (track, start), (waiting, end) = launch, wait
    return [
        {"ph": "s", **common, "tid": track, "ts": start * 1e6},
        {"ph": "f", "bp": "e", **common, "tid": waiting, "ts": end * 1e6},
    ]


def trace_counter(name: str, process: int, time: float, values: Mapping[str, float]) -> dict[str, Any]:
    """Return the values of a counter from a time on; several are drawn on top of each other."""
    return {"ph": "C", "name": name, "pid": process, "ts": time * 1e6, "args": dict(values)}


def trace_name(what: str, track: int, name: str, process: int = 1) -> dict[str, Any]:
    """Return the event that names a process ("process_name") or a track ("thread_name")."""
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}
