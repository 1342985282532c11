"""Base class of passes, and the checks and look-ups that several passes share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch.fx import Node

from graphshard.errors import PassError
from graphshard.ir.collective_regions import Collective, collectives
from graphshard.ir.graph import calls_of
from graphshard.ir.operators import STARTED_EARLY, STARTS
from graphshard.ir.param_table import ParamSpec
from graphshard.ir.program import Phase, Program
from graphshard.ir.transport import gather_epilogue


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
        runs: stage of the program that the pass needs: a joint graph, a partitioned program, one that is not planned
            yet, one whose model's own collectives are still synchronous, too, or one with a plan.
    """

    name: ClassVar[str]
    exact: ClassVar[bool] = True
    establishes: ClassVar[frozenset[str]] = frozenset()
    runs: ClassVar[Literal["anytime", "joint", "partitioned", "before plan", "before overlap", "planned"]] = "anytime"

    def requires(self, program: Program) -> None:
        """Check the program before the pass: by default, its stage."""
        planned = "joint" in program.phases or program.plan is not None
        problem = ""
        if self.runs == "joint" and "backward" in program.phases:
            problem = "the program is already partitioned; run this pass before 'partition'"
        elif self.runs == "partitioned" and "joint" in program.phases:
            problem = "the program is not partitioned yet; run this pass after 'partition'"
        elif self.runs == "before plan" and planned:
            problem = "insert this pass after 'partition' and before 'plan'"
        elif self.runs == "before overlap" and (planned or _overlaps(program)):
            problem = "insert this pass after 'partition' and before 'overlap-model-collectives'"
        elif self.runs == "planned" and program.plan is None:
            problem = "the program has no plan; run a planner first"
        if problem:
            raise PassError(f"{self.name}: {problem}")

    def rewrite(self, program: Program) -> int:
        """Rewrite the program; return the number of rewrites, 0 exactly for an unchanged program."""
        return sum(self.rewrite_phase(phase, program) for phase in program.phases.values())

    def rewrite_phase(self, phase: Phase, program: Program) -> int:
        """Rewrite one phase, for a pass that rewrites each alone; return the number of rewrites."""
        raise NotImplementedError

    def ensures(self, program: Program) -> None:
        """Check what only this pass knows about its result."""


def _overlaps(program: Program) -> bool:
    """Return whether collectives of the model were split into start and wait by `overlap-model-collectives`."""
    starts = (node for phase in program.phases.values() for start in STARTS.values() for node in calls_of(phase, start))
    return any(STARTED_EARLY not in node.meta for node in starts)


def ancestors(*nodes: Node, within: Callable[[Node], bool] = lambda _: True) -> dict[Node, None]:
    """Return nodes and their sources, as an ordered set, without going beyond those for which `within` is false."""
    found: dict[Node, None] = {}
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found and within(node):
            found[node] = None
            stack += node.all_input_nodes
    return found


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
    for _ in gather_epilogue(spec):
        if len(node.users) != 1:
            return None
        (node,) = node.users
    return node
