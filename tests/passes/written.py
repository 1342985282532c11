"""Phases that tests write down call by call, without a model."""

from __future__ import annotations

import functools
import operator
from dataclasses import replace

import torch
from torch.fx import Graph, GraphModule, Node

from graphshard.ir.graph import emit
from graphshard.ir.program import Phase, Program, Slot
from tests.helpers import Blocks, captured, copied, target_name, through


@functools.cache
def two_layers() -> Program:
    """A partitioned program without communication of the model's own."""
    return through(captured(Blocks(2), (torch.ones(3, 4),)), "partition")


class Written:
    """A phase in the making.

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
        """One result of several."""
        return emit(self.graph, operator.getitem, node, index)

    def returning(self, *results: Node) -> Program:
        """A program of this phase alone."""
        self.graph.output(tuple(results))
        slots = tuple(Slot("input", str(index)) for index in range(len(self.inputs)))
        outputs = tuple(Slot("output", str(index)) for index in range(len(results)))
        phase = Phase(GraphModule(torch.nn.Module(), self.graph), slots, outputs)
        program = copied(two_layers())
        return replace(program, phases={"forward": phase}, established=set(), history=[], next_number=0)


def order_of(program: Program) -> list[str]:
    """Names of the operators of the phase, in order."""
    return [target_name(n) for n in program.phases["forward"].module.graph.nodes if n.op == "call_function"]
