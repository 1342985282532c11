"""The order of compilation, its history, and what it does to a pass that breaks its contract."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from graphshard.errors import PassError
from graphshard.observe import Observer
from graphshard.passes import DropUnusedTangents, MakePlan, Pass
from graphshard.pipeline import DEFAULT_PASSES, Pipeline, run_pass, run_pipeline
from graphshard.printer import print_communication, print_program
from graphshard.program import Program
from tests.helpers import COALESCED, Blocks, Scale, captured

BATCH = (torch.ones(3, 4),)


def _compiled(model: nn.Module, used: frozenset[str] | None = None, *, grad: bool = True) -> Program:
    program = captured(model, BATCH, grad=grad)
    observer = Observer("each")
    observer.after(program, "capture", 0, 0.0)
    pipeline = Pipeline().replace("plan", MakePlan(COALESCED))
    run_pipeline(pipeline.replace("drop-unused-tangents", DropUnusedTangents(used)), program, observer)
    return program


STAGES = [
    "capture",
    "insert-collectives",
    "mixed-precision",
    "reshard-after-forward",
    "partition",
    "drop-unused-tangents",
    "plan",
    "bucket",
    "reorder",
]


@pytest.mark.parametrize("grad", [True, False])
def test_history(grad: bool) -> None:
    """Every stage is kept, in order, with the program's text after it and the time it took."""
    program = _compiled(Blocks(2, bias=True), grad=grad)
    assert [stage.name for stage in program.history] == STAGES
    assert all(stage.seconds >= 0 for stage in program.history)
    texts = {stage.name: stage.text for stage in program.history}
    assert texts["reorder"] == print_program(program)
    assert texts["capture"].startswith("joint:" if grad else "forward:")
    assert "all_gather" not in texts["capture"]
    assert "coalesced" in texts["bucket"]
    changed = {stage.name for before, stage in zip(program.history, program.history[1:]) if before.text != stage.text}
    expected = {"insert-collectives", "bucket", "reorder"}
    expected |= {"reshard-after-forward", "partition"} if grad else set()
    assert changed == expected
    assert all(stage.rewrites for stage in program.history if stage.name in changed)


def test_the_communication_is_kept() -> None:
    program = _compiled(Blocks(2))
    assert program.communication == print_communication(program)
    assert len(program.communication) == 5


class _TwoOutputs(Blocks):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x), x * self.layers[0].weight[0]


@pytest.mark.parametrize(
    ("used", "tangents"),
    [(None, ["tangent:0"]), ("1", ["tangent:1"]), ("01", ["tangent:0", "tangent:1"])],
)
def test_used_tangents(used: str | None, tangents: list[str]) -> None:
    program = _compiled(_TwoOutputs(2), None if used is None else frozenset(used))
    assert [str(s) for s in program.phases["backward"].inputs if s.kind == "tangent"] == tangents


@dataclass(frozen=True)
class _Broken(Pass):
    """Uses a value before it exists."""

    name: ClassVar[str] = "broken"

    def rewrite(self, program: Program) -> int:
        graph = program.phases["joint"].module.graph
        first, *_, last = (node for node in graph.nodes if node.op == "call_function")
        first.prepend(last)
        return 1


@dataclass(frozen=True)
class _Unhappy(Pass):
    """Finds the program wrong before or after."""

    name: ClassVar[str] = "unhappy"
    before: bool = False

    def requires(self, program: Program) -> None:
        if self.before:
            raise PassError("unhappy: not what I need")

    def rewrite(self, program: Program) -> int:
        return 0

    def ensures(self, program: Program) -> None:
        raise PassError("unhappy: not what I promise")


def test_a_pass_that_breaks_the_graph() -> None:
    program = captured(Scale(4), (torch.ones(4),))
    for step in DEFAULT_PASSES[:2]:
        run_pass(step, program)
    with pytest.raises(
        PassError, match=r"broken broke the rule computed_before_use in joint: .* is used before it is computed"
    ):
        run_pass(_Broken(), program)
    assert [stage.name for stage in program.history] == ["insert-collectives", "mixed-precision", "broken"]


@pytest.mark.parametrize(("before", "message"), [(True, "not what I need"), (False, "not what I promise")])
def test_a_broken_contract(before: bool, message: str) -> None:
    program = captured(Scale(4), (torch.ones(4),))
    with pytest.raises(PassError, match=f"unhappy: {message}"):
        run_pass(_Unhappy(before), program)
    assert len(program.history) == (0 if before else 1)


def test_passes_are_plain_values() -> None:
    """Frozen dataclasses with distinct names: equal options, equal passes."""
    assert Pipeline() == Pipeline()
    assert len({step.name for step in Pipeline()}) == len(DEFAULT_PASSES)
