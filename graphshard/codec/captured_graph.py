"""What capture returned, kept while passes rewrite the program in place.

It is a list of what each node was: nodes replace their arguments and never change them, so no graph is copied before
somebody asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from graphshard.codec.joint_program import to_exported
from graphshard.ir.program import Phase, Program, Slot
from graphshard.torch_compat.operators import pytree


@dataclass(frozen=True)
class CapturedGraph:
    """A program as it was captured.

    Attributes:
        program: its fields, without its graph.
        nodes: each node, and its operation, target, arguments and marks then.
        returned: structure of what the module returns, with the results as its leaves; None if it is not known.
    """

    program: Program
    phase: str
    nodes: tuple[tuple[Node, str, Any, Any, Any, dict[str, Any]], ...]
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    returned: pytree.TreeSpec | None

    @classmethod
    def of(cls, program: Program) -> CapturedGraph:
        """Remember a program that no pass has seen."""
        ((name, phase),) = program.phases.items()
        nodes = tuple((n, n.op, n.target, n.args, n.kwargs, dict(n.meta)) for n in phase.module.graph.nodes)
        returned = None if program.trace is None else program.trace.returned
        return cls(replace(program, phases={}, trace=None), name, nodes, phase.inputs, phase.outputs, returned)

    def again(self) -> Program:
        """Return the program with a graph of its own."""
        graph, known = Graph(), dict[Node, Node]()
        for node, op, target, args, kwargs, meta in self.nodes:
            args, kwargs = map_arg(args, known.__getitem__), map_arg(kwargs, known.__getitem__)
            known[node] = graph.create_node(op, target, args, kwargs, name=node.name)
            known[node].meta = dict(meta)
        return replace(
            self.program, phases={self.phase: Phase(GraphModule(nn.Module(), graph), self.inputs, self.outputs)}
        )

    def exported(self) -> ExportedProgram:
        """Return the program as torch's."""
        return to_exported(self.again(), self.returned)
