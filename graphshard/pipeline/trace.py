"""Stages as artifacts of torch's structured trace (`TORCH_TRACE=dir`), where the tlparse tool finds them."""

from __future__ import annotations

from graphshard.ir.program import Program, Stage
from graphshard.ir.torch_internals import trace_structured


def trace_stage(program: Program, stage: Stage) -> None:
    """Add the stage's folded text; costs nothing where the trace is off."""
    name = f"graphshard_{program.title}_{len(program.history) - 1:02d}_{stage.name}"
    trace_structured("artifact", lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: stage.folded)
