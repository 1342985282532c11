"""Base class of passes, and the checks and look-ups that several passes share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from graphshard.errors import PassError
from graphshard.ir.collective_regions import Collective, collectives
from graphshard.ir.graph import calls_of
from graphshard.ir.operators import BEGINS, BEGUN
from graphshard.ir.param_table import ParamSpec
from graphshard.ir.program import Phase, Program
from graphshard.ir.transport import landing


@dataclass(frozen=True)
class Pass:
    """Rewrite of a program in place: a frozen dataclass with a name, options as fields, and no other state.

    The pipeline calls `requires`, `rewrite`, checks the rules of `graphshard.pipeline.rules`, then calls `ensures`.
    `requires` and `ensures` raise `PassError` if the program is not as the pass needs or promises it.

    Attributes:
        name: identifies the pass in the pipeline, the history and messages.
        exact: False if the pass may change the numbers that a program computes. Every pass of the default pipeline is
            exact; to insert another one is to opt in.
        establishes: names of the rules that hold from this pass on.
    """

    name: ClassVar[str]
    exact: ClassVar[bool] = True
    establishes: ClassVar[frozenset[str]] = frozenset()

    def requires(self, program: Program) -> None:
        """Check the program before the pass."""

    def rewrite(self, program: Program) -> int:
        """Rewrite the program; return the number of rewrites, 0 exactly for an unchanged program."""
        raise NotImplementedError

    def ensures(self, program: Program) -> None:
        """Check what only this pass knows about its result."""


def check_joint(step: Pass, program: Program) -> None:
    """Raise PassError for a partitioned program."""
    if "backward" in program.phases:
        raise PassError(f"{step.name}: the program is already partitioned; run this pass before 'partition'")


def check_partitioned(step: Pass, program: Program) -> None:
    """Raise PassError for a program that is still a joint graph."""
    if "joint" in program.phases:
        raise PassError(f"{step.name}: the program is not partitioned yet; run this pass after 'partition'")


def check_planned(step: Pass, program: Program) -> None:
    """Raise PassError for a program without a plan."""
    if program.plan is None:
        raise PassError(f"{step.name}: the program has no plan; run a planner first")


def check_before(step: Pass, program: Program, other: str = "plan") -> None:
    """Raise PassError unless the program is partitioned, not planned, and not changed by the pass named `other`."""
    overlapped = other == "overlap-model-collectives" and any(
        BEGUN not in node.meta
        for phase in program.phases.values()
        for start in BEGINS.values()
        for node in calls_of(phase, start)
    )
    if "joint" in program.phases or program.plan is not None or overlapped:
        raise PassError(f"{step.name}: insert this pass after 'partition' and before {other!r}")


def gathers_of(phase: Phase, program: Program) -> Iterator[tuple[Collective, ParamSpec]]:
    """Yield the all-gathers of a phase that carry one parameter, each with the parameter."""
    for collective in collectives(phase):
        if collective.kind == "gather":
            yield collective, program.params[collective.params[0]]


def gradients_of(phase: Phase, program: Program) -> Iterator[tuple[Node, ParamSpec]]:
    """Yield the gradients that a phase returns, each with its parameter."""
    for value, slot in zip(phase.results, phase.outputs, strict=True):
        if slot.kind == "grad" and slot.of == "param" and isinstance(value, Node):
            yield value, program.params[slot.name]


def full_parameter(gather: Collective, spec: ParamSpec) -> Node | None:
    """Return the node that the model reads, the last of a gather's epilogue; None if an earlier one has other users."""
    (node,) = gather.waits
    for _ in landing(spec):
        if len(node.users) != 1:
            return None
        (node,) = node.users
    return node
