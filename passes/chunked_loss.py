"""Compute the loss over a vocabulary, and its gradients, for some rows at a time, so that all logits are never held.

    %z: f32[12, 50] = mm(%x, %t)                     %z0: f32[6, 50] = mm(%x[:6], %t)
    %p = _log_softmax(%z, 1, False)                  %p0 = _log_softmax(%z0, 1, False)
    %l, %n = nll_loss_forward(%p, %y, ...)           %l0, %n0 = nll_loss_forward(%p0, %y[:6], ...)
    return %l, saved %p, %n                          %g0 = its gradient, of the sum, for a tangent of 1
                                                     %w0, %x0 = mm(t(%g0), %x[:6]), mm(%g0, t(%t))
    %g = ... nll_loss_backward(%tangent, %p, ...)    the same of %x[6:], added to %w0 and behind %x0
    %dw = mm(t(%g), %x)                              return (%l0 + %l1) / (%n0 + %n1), saved %w1, %x01
    %dx = mm(%g, t(%t))
                                                     %f = %tangent / (%n0 + %n1)
                                                     %dw, %dx = %w1 * %f, %x01 * %f

Gradients are computed in forward, where logits are: they are linear in the loss's tangent, which is a number, and
backward multiplies. Nothing is computed twice, and backward does not need the head, so it does not gather it again.
Instead of logits, forward saves a gradient of the head's size and one of the rows'.

Sums over rows are taken in parts, and the tangent is multiplied in at the end, so results are equal up to rounding.
Those for a head of bfloat16 are taken in float32. A head of float16 is left alone: its gradients must be scaled before
they are computed. So are logits that are read for anything but this loss, classes with weights, smoothed labels, losses
of each row, and dynamic sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from graphshard.errors import PassError
from graphshard.ir.graph import aten, emit, erase_dead, fake
from graphshard.ir.program import Program
from graphshard.ir.recomputed import IN_FORWARD
from graphshard.ir.vocabulary_loss import SUM, VocabularyLoss, added_product, computed_again, vocabulary_loss, widened
from graphshard.passes.base import Pass


@dataclass(frozen=True)
class ChunkedLoss(Pass):
    """Requires: a joint graph, or a forward alone.  Preserves: values up to rounding.

    Attributes:
        rows: for how many rows there are logits at once.
    """

    name: ClassVar[str] = "chunked-loss"
    exact: ClassVar[bool] = False
    rows: int = 1024

    def requires(self, program: Program) -> None:
        if "backward" in program.phases:
            raise PassError(f"{self.name}: the program is already partitioned; insert this pass before 'partition'")
        if not isinstance(self.rows, int) or self.rows < 1:
            raise PassError(f"{self.name}: rows must be a number from 1 on, got {self.rows!r}")

    def rewrite(self, program: Program) -> int:
        count = 0
        for phase in program.phases.values():
            graph = phase.module.graph
            for node in graph.find_nodes(op="call_function", target=aten.nll_loss_forward.default):
                found = vocabulary_loss(node)
                if found is not None and self._applies(found):
                    _Chunks(found, self.rows).rewrite()
                    count += 1
            if count:
                erase_dead(graph)
        return count

    def _applies(self, found: VocabularyLoss) -> bool:
        return len(fake(found.product)) > self.rows and fake(found.product).dtype != torch.float16


class _Chunks:
    """The rewriting of one loss.

    Args:
        found: the loss.
        size: rows of a chunk.
    """

    def __init__(self, found: VocabularyLoss, size: int) -> None:
        self._found = found
        self._graph: Graph = found.product.graph
        self._size = size
        self._like = found.product
        # What chunks have made so far: the losses, how many rows they count, and the gradients.
        self._sums: dict[str, Node] = {}
        self._parts: list[Node] = []

    def rewrite(self) -> None:
        found, (rows, weight, _) = self._found, self._found.operands
        length = len(fake(rows))
        with self._graph.inserting_before(found.loss):
            transposed = self._emit(aten.t.default, weight) if found.of_rows else None
            for start in range(0, length, self._size):
                self._chunk(start, min(start + self._size, length), transposed)
            total, counted = self._sums["loss"], self._sums["counted"]
            loss = self._emit(aten.div.Tensor, total, counted) if found.is_mean else total
            of_rows = self._emit(aten.cat.default, self._parts) if self._parts else None
        for user in list(found.loss.users):
            if user.target is operator.getitem and user.args[1] == 0:
                user.replace_all_uses_with(loss)
        if found.backward:
            self._replace_gradients(of_rows, counted)

    def _chunk(self, start: int, end: int, transposed: Node | None) -> None:
        found, (rows, weight, bias) = self._found, self._found.operands
        own = self._emit(aten.slice.Tensor, rows, 0, start, end)
        logits = self._emit(found.product.target, *([bias] if bias is not None else []), own, weight)
        made = {found.product: logits}
        for node in found.forward:
            made[node] = computed_again(node, made, self._emit)
        targets = self._emit(aten.slice.Tensor, found.loss.args[1], 0, start, end)
        ignored = found.loss.args[4]
        softmax = made[found.forward[-1]]
        loss = self._emit(aten.nll_loss_forward.default, softmax, targets, None, SUM, ignored)
        total, counted = (self._emit(operator.getitem, loss, index) for index in (0, 1))
        self._add("loss", total)
        self._add("counted", counted)
        if not found.backward:
            return
        first, second, *others = found.backward
        one = self._emit(aten.ones_like.default, total)
        made[first] = self._emit(first.target, one, softmax, targets, None, SUM, ignored, counted)
        made[second] = self._emit(second.target, made[first], softmax, *second.args[2:])
        for node in others:
            made[node] = computed_again(node, made, self._emit)
        gradient = made[found.backward[-1]]
        if transposed is not None:
            self._parts.append(self._emit(aten.mm.default, gradient, transposed))
        if found.of_weight:
            transposed_gradient = self._emit(aten.t.default, gradient)
            self._sums["weight"] = added_product(self._sums.get("weight"), transposed_gradient, own, self._emit)
        if found.of_bias:
            self._add("bias", widened(self._emit(aten.sum.dim_IntList, gradient, [0], True), self._emit))

    def _add(self, name: str, value: Node) -> None:
        before = self._sums.get(name)
        self._sums[name] = value if before is None else self._emit(aten.add.Tensor, before, value)

    def _replace_gradients(self, of_rows: Node | None, counted: Node) -> None:
        found = self._found
        ends: list[tuple[Sequence[Node], Node | None]] = [
            (found.of_rows, of_rows),
            (found.of_weight, self._sums.get("weight")),
            (found.of_bias, self._sums.get("bias")),
        ]
        tangent = found.backward[0].all_input_nodes[0]
        with self._graph.inserting_before(found.backward[0]):
            factor = tangent
            if found.is_mean:  # rows that do not count have a gradient of zero, also where none counts
                least = self._after(aten.clamp_min.default, counted, 1)
                factor = self._after(aten.div.Tensor, tangent, least)
        for nodes, value in ends:
            for node in nodes:
                assert value is not None
                value.meta[IN_FORWARD] = True
                with self._graph.inserting_before(node):
                    scaled = self._after(aten.mul.Tensor, value, factor)
                    if fake(scaled).dtype != fake(node).dtype:
                        scaled = self._after(aten._to_copy.default, scaled, dtype=fake(node).dtype)
                node.replace_all_uses_with(scaled)

    def _emit(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return emit(self._graph, target, *args, like=self._like, **kwargs)

    def _after(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """In backward."""
        return emit(self._graph, target, *args, like=self._found.backward[0], **kwargs)
