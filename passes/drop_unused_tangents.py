"""Remove outputs that receive no gradient from the backward graph.

    %t: f32[8, 16, 256] = tangent:1
    %b: f32[8, 16, 256] = nll_backward(%t0)
    %s = add(%b, %t)                         %s = %b

A model that returns its loss and its logits is differentiated through the loss alone; autograd would pass zeros for
the logits, of the size of the logits. A gradient is linear in each tangent, so whatever depends on a zero tangent alone
is zero.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass
from typing import ClassVar

import sympy
import torch
from torch.fx import Graph, Node

from graphshard.ir.graph import WAIT, aten, c10d, emit, erase_dead, fake, is_view
from graphshard.ir.operators import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_REDUCE_IN_ORDER,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    REDUCE_SCATTER_IN_ORDER,
)
from graphshard.ir.param_table import memory_order
from graphshard.ir.program import Phase, Program
from graphshard.ir.sizes import SizeBuilder, expression, size_inputs, symbols_of
from graphshard.ir.strides import laid_out, restride
from graphshard.passes.base import Pass
from graphshard.torch_compat.fake_tensors import fake_mode_of
from graphshard.torch_compat.torch_ops import OpOverload

# Operators with a zero result if any input is zero.
_ZERO_IF_ANY = frozenset(
    {
        *(operator.getitem, aten._to_copy.default, aten.clone.default, aten.constant_pad_nd.default),
        *(aten.bmm.default, aten.mm.default, aten.mul.Scalar, aten.mul.Tensor, aten.neg.default),
        *(aten.sum.dim_IntList, aten.sum.default),
        *(c10d.all_reduce.default, c10d.reduce_scatter_tensor.default, WAIT),
        *(ALL_REDUCE_IN_ORDER.default, REDUCE_SCATTER_IN_ORDER.default),
        *(ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL),
    }
)
_ZERO_IF_FIRST = frozenset({aten.div.Tensor, aten.div.Scalar, aten.embedding_dense_backward.default})
# Operators that add to places of the first argument, with the position of the addend.
_ADDEND = {aten.index_add.default: 3, aten.index_put.default: 2, aten.scatter_add.default: 3}


@dataclass(frozen=True)
class DropUnusedTangents(Pass):
    """Requires: a partitioned program.  Ensures: every tangent input is in `used`.
    Preserves: gradients with respect to the used outputs; others become None, as in eager autograd.

    Attributes:
        used: names of the tangents that arrive; None guesses: the scalars if there are any, else all.
    """

    name: ClassVar[str] = "drop-unused-tangents"
    used: frozenset[str] | None = None

    def rewrite(self, program: Program) -> int:
        phase = program.phases.get("backward")
        if phase is None:
            return 0
        tangents = {node: slot.name for node, slot in phase.slot_of().items() if slot.kind == "tangent"}
        # Scalar outputs are likely losses; a model without one is differentiated through every output.
        scalars = frozenset(name for node, name in tangents.items() if fake(node).dim() == 0)
        used = (scalars or frozenset(tangents.values())) if self.used is None else self.used
        unused = {node for node, name in tangents.items() if name not in used}
        if unused:
            if used:
                # Regions that write only buffers of unused outputs do not run again.
                idle = {name for name, through in program.rewritten.items() if used.isdisjoint(through)}
                pairs = zip(phase.results, phase.outputs)
                phase.set_results([None if slot.of == "late" and slot.name in idle else v for v, slot in pairs])
                _propagate(phase, set(unused))
            else:  # a backward that only reduces sums of earlier ones, whatever its operators are
                phase.set_results([None] * len(phase.outputs))
            _erase(phase, unused)
            program.differentiated = phase.differentiated
        return len(unused)


def _propagate(phase: Phase, zeros: set[Node]) -> None:
    """Follow zeros through the graph: drop them from sums, materialize them for any operator that is not known."""
    graph = phase.module.graph
    for node in list(graph.nodes):
        dead = [n for n in node.all_input_nodes if n in zeros]
        if not dead or node.op == "output":
            continue
        if _is_zero(node, zeros):
            zeros.add(node)
        elif (other := _other_addend(node, zeros)) is not None:
            strides = [[*map(expression, fake(each).stride())] for each in (node, other)]
            if strides[0] != strides[1] and not restride(node, fake(other)):
                other = laid_out(other, memory_order(fake(node)))
            node.replace_all_uses_with(other)
        elif node.target is aten.masked_scatter.default and dead == [node.args[2]]:
            node.target, node.args = aten.masked_fill.Scalar, (*node.args[:2], 0)
        else:
            for zero in dead:
                node.replace_input_with(zero, _materialize(graph, zero, node))
    phase.set_results([None if n in zeros else n for n in phase.results])


def _is_zero(node: Node, zeros: set[Node]) -> bool:
    first = node.args[0] if node.args else None
    if is_view(node) or node.target in _ZERO_IF_ANY:
        return True
    if node.target is aten.add.Tensor:
        return all(isinstance(n, Node) and n in zeros for n in node.args)
    if isinstance(first, (list, tuple)):
        return node.target is aten.cat.default and all(n in zeros for n in first)
    name = node.target._opname if isinstance(node.target, OpOverload) else ""
    return first in zeros and (node.target in _ZERO_IF_FIRST or name.endswith(("_backward", "_backward_data")))


def _other_addend(node: Node, zeros: set[Node]) -> Node | None:
    """Return the addend that a sum is equal to because the other one is zero."""
    if node.target in _ADDEND and node.args[_ADDEND[node.target]] in zeros:
        accumulates = node.target is not aten.index_put.default or node.args[3:] == (True,)
        first = node.args[0]
        return first if accumulates and isinstance(first, Node) and first not in zeros else None
    if node.target is not aten.add.Tensor or node.kwargs:
        return None
    rest = [a for a in node.args if isinstance(a, Node) and a not in zeros]
    if len(rest) != 1 or len(node.args) != 2:
        return None
    addend, result = fake(rest[0]), fake(node)
    return rest[0] if addend.shape == result.shape and addend.dtype == result.dtype else None


def _materialize(graph: Graph, zero: Node, before: Node) -> Node:
    val = fake(zero)
    shape = list(map(SizeBuilder(graph, _sizes_of_values(graph, zero) | size_inputs(graph)), val.shape))
    with graph.inserting_before(before), fake_mode_of(val):
        return emit(graph, aten.full.default, shape, 0, dtype=val.dtype, device=val.device, like=before)


def _sizes_of_values(graph: Graph, zero: Node) -> dict[sympy.Symbol, Node]:
    """Insert reads of the data-dependent sizes of `zero` from other inputs."""
    found: dict[sympy.Symbol, Node] = {}
    placeholders = graph.find_nodes(op="placeholder")
    for symbol in symbols_of(fake(zero)) - set(size_inputs(graph)):
        others = (n for n in placeholders if n is not zero and isinstance(n.meta["val"], torch.Tensor))
        dims = ((n, dim) for n in others for dim, size in enumerate(fake(n).shape) if expression(size) == symbol)
        for source, dim in itertools.islice(dims, 1):
            with graph.inserting_after(placeholders[-1]):
                found[symbol] = graph.call_function(aten.sym_size.int, (source, dim))
            found[symbol].meta["val"] = fake(source).shape[dim]
    return found


def _erase(phase: Phase, unused: set[Node]) -> None:
    """Erase dead nodes, and the saved values that no other gradient reads."""
    graph = phase.module.graph
    erase_dead(graph, random=[node for node in graph.nodes if node.users])  # eager mode would not draw these either
    phase.erase_inputs(lambda node, slot: slot.kind != "size" and (node in unused or not node.users))
