"""Stages as artifacts of torch's structured trace (`TORCH_TRACE=dir`), where the tlparse tool finds them."""

from __future__ import annotations

from graphshard.ir.aid import Aid
from graphshard.ir.program import Program, Stage
from graphshard.ir.torch_internals import trace_structured

# One for the process, as torch's trace is.
_aid = Aid("TORCH_TRACE")


def trace_stage(program: Program, stage: Stage) -> None:
    """Add the stage's folded text; costs nothing where the trace is off."""
    name = f"graphshard_{program.title}_{len(program.history) - 1:02d}_{stage.name}"
    metadata = {"name": name, "encoding": "string"}
    _aid(lambda: trace_structured("artifact", lambda: metadata, payload_fn=lambda: stage.folded))
