"""The order of passes, the history, and errors for passes that violate their contract."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from graphshard.errors import ArgumentError, PassError
from graphshard.ir.printer import print_communication, print_program
from graphshard.ir.program import Program
from graphshard.passes import Bucketing, DropUnusedTangents, MakePlan, Pass
from graphshard.pipeline.instrumentation import Observer
from graphshard.pipeline.pipeline import DEFAULT_PASSES, Pipeline, run_pass, run_pipeline
from tests.helpers import COALESCED, Blocks, Scale, assert_gradients, calls, captured

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
    "overlap-model-collectives",
    "coalesce-model-collectives",
    "plan",
    "bucket",
    "reorder",
]


@pytest.mark.parametrize("grad", [True, False])
def test_history(grad: bool) -> None:
    """Every stage is kept in order, with the program's text after it and its duration."""
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
    """Uses a value before its definition."""

    name: ClassVar[str] = "broken"

    def rewrite(self, program: Program) -> int:
        graph = program.phases["joint"].module.graph
        first, *_, last = (node for node in graph.nodes if node.op == "call_function")
        first.prepend(last)
        return 1


@dataclass(frozen=True)
class _Unhappy(Pass):
    """A pass whose pre- or postcondition fails."""

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
    """Frozen dataclasses with distinct names: equal options make equal passes."""
    assert Pipeline() == Pipeline()
    assert len({step.name for step in Pipeline()}) == len(DEFAULT_PASSES)


# Custom pipelines.


@dataclass(frozen=True)
class _Nothing(Pass):
    """Does nothing."""

    name: ClassVar[str] = "nothing"

    def rewrite(self, program: Program) -> int:
        return 0


@dataclass(frozen=True)
class _Silu(Pass):
    """Declares that it changes numerics."""

    name: ClassVar[str] = "silu"
    exact: ClassVar[bool] = False

    def rewrite(self, program: Program) -> int:
        relus = calls(program.phases["forward"], "relu")
        for node in relus:
            node.target = torch.ops.aten.silu.default
        return len(relus)


def _names(pipeline: Pipeline) -> list[str]:
    return [step.name for step in pipeline]


def test_default_pipeline_is_exact() -> None:
    assert all(step.exact for step in Pipeline())
    assert _names(Pipeline()) == STAGES[1:]


def test_insert_replace_disable() -> None:
    """An edit returns a new pipeline and does not change the old one."""
    default = Pipeline()
    assert _names(default.insert(_Nothing(), after="plan"))[7:10] == ["plan", "nothing", "bucket"]
    assert _names(default.insert(_Nothing(), before="insert-collectives"))[:2] == ["nothing", "insert-collectives"]
    assert _names(default.replace("reorder", _Nothing()))[-1] == "nothing"
    assert _names(default.disable("reorder", "bucket")) == STAGES[1:-2]
    assert default == Pipeline()


def test_pipeline_as_text() -> None:
    lines = str(Pipeline().insert(_Silu(), after="partition")).splitlines()
    assert len(lines) == len(DEFAULT_PASSES) + 1
    assert re.fullmatch(r"silu +Declares that it changes numerics\.  \[inexact\]", lines[4])
    assert re.fullmatch(r"bucket +Merge collectives into .*\.", lines[9])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda p: p.disable("reoder"), r"the pipeline has no pass 'reoder'\. It has .*\. Did you mean 'reorder'\?"),
        (
            lambda p: p.replace("x", _Nothing()),
            r"the pipeline has no pass 'x'\. It has insert-collectives, .*reorder\.$",
        ),
        (lambda p: p.insert(_Nothing()), r"insert nothing: give either after= or before="),
        (lambda p: p.insert(_Nothing(), after="plan", before="plan"), r"give either after= or before="),
        (lambda p: p.insert(Bucketing(), after="plan"), r"has a pass 'bucket' already. Rename yours, or use replace"),
        (lambda p: p.insert(_Nothing, after="plan"), r"nothing is not a pass: derive a frozen dataclass"),
        (lambda p: p.insert(print, after="plan"), r"print is not a pass"),
    ],
)
def test_wrong_edits(edit: Callable[[Pipeline], Pipeline], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        edit(Pipeline())


def _run(pipeline: Pipeline) -> Program:
    program = captured(Blocks(2), BATCH)
    run_pipeline(pipeline.replace("plan", MakePlan(COALESCED)), program, Observer("each"))
    return program


def test_a_pass_of_a_user_runs() -> None:
    """At its position, and the history says that it may change numerics."""
    program = _run(Pipeline().insert(_Silu(), after="bucket"))
    assert len(calls(program.phases["forward"], "silu")) == 2
    stage = program.history[-2]
    assert (stage.name, stage.rewrites, stage.exact) == ("silu", 2, False)


def test_without_buckets() -> None:
    """Without bucket and reorder a program keeps the captured order, with one collective per parameter."""
    program = _run(Pipeline().disable("bucket", "reorder"))
    assert len(program.communication) == 2 + 1 + 2
    model = Blocks(2)
    assert_gradients(program, model, [BATCH, BATCH])


@dataclass(frozen=True)
class _Faulty(Pass):
    """Violates its contract in one of many ways."""

    name: ClassVar[str] = "faulty"
    how: str = ""

    def requires(self, program: Program) -> None:
        if self.how == "requires":
            raise KeyError("nothing there")

    def rewrite(self, program: Program) -> int:
        if self.how == "rewrite":
            raise ZeroDivisionError("division by zero")
        if self.how == "none":
            return None  # type: ignore[return-value]
        if self.how == "too many":
            return 3
        if self.how == "too few":
            calls(program.phases["forward"], "relu")[0].target = torch.ops.aten.neg.default
            return 0
        return 0

    def ensures(self, program: Program) -> None:
        if self.how == "ensures":
            raise AssertionError("no")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("requires", r"faulty: tests.pipeline.test_pipeline._Faulty.requires failed with KeyError: 'nothing there'"),
        (
            "rewrite",
            r"faulty: tests.pipeline.test_pipeline._Faulty.rewrite failed with ZeroDivisionError: division by zero",
        ),
        ("ensures", r"faulty: tests.pipeline.test_pipeline._Faulty.ensures failed with AssertionError: no"),
        ("none", r"faulty: rewrite must return the number of rewrites, it returned None"),
        ("too many", r"faulty: rewrite returned 3, but the program is what it was. Return 0"),
        ("too few", r"faulty: rewrite returned 0, but the program changed. Return the number of rewrites"),
    ],
)
def test_errors_are_addressed_to_the_author(how: str, message: str) -> None:
    with pytest.raises(PassError, match=message):
        _run(Pipeline().insert(_Faulty(how), after="partition"))
