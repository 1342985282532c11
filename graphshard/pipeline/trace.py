"""Stages and reasons of captures as artifacts of torch's structured trace (`TORCH_TRACE=dir`), for tlparse."""

from __future__ import annotations

import json

from graphshard.ir.program import Program, Stage
from graphshard.torch_compat.fx_code import trace_structured
from graphshard.utils.best_effort_writer import BestEffort

# One for the process, as torch's trace is.
_aid = BestEffort("TORCH_TRACE")


def trace_stage(program: Program, stage: Stage) -> None:
    """Add the stage's folded text; costs nothing where the trace is off."""
    name = f"graphshard_{program.title}_{len(program.history) - 1:02d}_{stage.name}"
    metadata = {"name": name, "encoding": "string"}
    _aid(lambda: trace_structured("artifact", lambda: metadata, payload_fn=lambda: stage.folded))


def trace_recapture(label: str, number: int, reason: str) -> None:
    """Add why a model was captured again, under the name that Dynamo gives such reasons."""
    metadata = {"name": "recompile_reasons", "encoding": "json"}
    reasons = json.dumps([f"{label}-{number}: {reason}"])
    _aid(lambda: trace_structured("artifact", lambda: metadata, payload_fn=lambda: reasons))
