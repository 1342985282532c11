"""Phases that tests write call by call, without a model."""

from __future__ import annotations

import functools
import operator
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch.fx import Graph, GraphModule, Node, map_arg

from graphshard.ir.graph import aten, emit
from graphshard.ir.operators import ALL_GATHER, ALL_REDUCE, COALESCED_FORMS, MODEL_WAIT, STARTS
from graphshard.ir.program import Phase, Program, Slot
from tests.helpers import Blocks, captured, copied, target_name, through


@functools.cache
def two_layers() -> Program:
    """Build a partitioned program without collectives of the model."""
    return through(captured(Blocks(2), (torch.ones(3, 4),)), "partition")


class Written:
    """A phase under construction.

    Args:
        shapes: of its inputs.
    """

    def __init__(self, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        self.graph = Graph()
        self.inputs = [self.graph.placeholder(f"x{index}") for index in range(len(shapes))]
        like = two_layers().phases["forward"].placeholders[0].meta["val"]
        for node, shape in zip(self.inputs, shapes):
            node.meta["val"] = like.new_empty(shape, dtype=dtype)

    def __call__(self, target: torch._ops.OpOverload, *args: object) -> Node:
        return emit(self.graph, target, *args)

    def part(self, node: Node, index: int) -> Node:
        """Select one of several results."""
        return emit(self.graph, operator.getitem, node, index)

    def returning(self, *results: Node) -> Program:
        """Build a program of this phase only."""
        self.graph.output(tuple(results))
        slots = tuple(Slot("input", str(index)) for index in range(len(self.inputs)))
        outputs = tuple(Slot("output", str(index)) for index in range(len(results)))
        phase = Phase(GraphModule(torch.nn.Module(), self.graph), slots, outputs)
        program = copied(two_layers())
        return replace(program, phases={"forward": phase}, established=set(), history=[], next_number=0)


def order_of(program: Program) -> list[str]:
    """Return the names of the phase's operators, in order."""
    return [target_name(n) for n in program.phases["forward"].module.graph.nodes if n.op == "call_function"]


SQUARE = (2, 2)
MM, ADD, RAND = aten.mm.default, aten.add.Tensor, aten.rand_like.default
# The operator, and the positions of its arguments among the earlier values.
CALLS = st.lists(
    st.tuples(st.sampled_from([MM, ADD, RAND, ALL_REDUCE, ALL_GATHER]), st.integers(0, 7), st.integers(0, 7)),
    min_size=3,
    max_size=25,
)


def drawn(calls: list[tuple[torch._ops.OpOverload, int, int]]) -> Program:
    """Build a phase of these calls that returns its last three values."""
    write = Written(SQUARE, SQUARE, SQUARE)
    values = list(write.inputs)
    for target, first, second in calls:
        a, b = values[-1 - first % len(values)], values[-1 - second % len(values)]
        others = {MM: (b,), ADD: (b,), RAND: (), ALL_REDUCE: ("sum", "shard"), ALL_GATHER: (1, "shard")}[target]
        values.append(write(target, a, *others))
    return write.returning(*values[-3:])


def results_of(program: Program) -> tuple[list[torch.Tensor], list[int]]:
    """Compute a phase on fixed values, with collectives that triple; also return the order of random operators."""
    values: dict[Node, Any] = {}
    draws: list[int] = []
    sends = {*STARTS, *STARTS.values()}
    generator = torch.Generator().manual_seed(0)
    phase = program.phases["forward"]
    for index, node in enumerate(phase.placeholders):
        values[node] = torch.full((2, 2), 1.0 + index, dtype=torch.float64)
    for node in phase.module.graph.nodes:
        if node.op == "call_function":
            args: Any = map_arg(node.args, values.__getitem__)
            if node.target in sends:
                values[node] = 3 * args[0] / 10
            elif node.target in COALESCED_FORMS.values():
                values[node] = [3 * each / 10 for each in args[0]]
            elif node.target is MODEL_WAIT:
                values[node] = args[0]
            elif node.target is operator.getitem:
                values[node] = args[0][args[1]]
            elif node.target is RAND:
                draws.append(id(node))
                values[node] = torch.rand(2, 2, generator=generator, dtype=torch.float64)
            else:
                values[node] = node.target(*args) / 7
    return [values[result] for result in phase.results], draws
