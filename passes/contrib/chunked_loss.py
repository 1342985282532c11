"""Compute the loss over a vocabulary, and its gradients, for some rows at a time, so that logits are never held whole.

    %z: f32[12, 50] = mm(%x, %t)                     %z0: f32[6, 50] = mm(%x[:6], %t)
    %p = _log_softmax(%z, 1, False)                  %p0 = _log_softmax(%z0, 1, False)
    %l, %n = nll_loss_forward(%p, %y, ...)           %l0, %n0 = nll_loss_forward(%p0, %y[:6], ...)
    return %l, saved %p, %n                          %g0 = its gradient, of the sum, for a tangent of 1
                                                     %w0, %x0 = mm(t(%g0), %x[:6]), mm(%g0, t(%t))
    %g = ... nll_loss_backward(%tangent, %p, ...)    the same of %x[6:], added to %w0, appended to %x0
    %dw = mm(t(%g), %x)                              return (%l0 + %l1) / (%n0 + %n1), saved %w1, %x01
    %dx = mm(%g, t(%t))
                                                     %f = %tangent / (%n0 + %n1)
                                                     %dw, %dx = %w1 * %f, %x01 * %f

Gradients are computed in forward, where the logits are: they are linear in the tangent of the loss, a scalar, and
backward multiplies by it. Nothing is computed twice, and backward does not gather the head again. Instead of logits,
forward saves a gradient of the head's size and one of the rows' size.

Sums over rows are taken in parts (in float32 for a head of bfloat16), and the tangent is multiplied in at the end, so
results are equal up to rounding. The pass skips heads of float16, whose gradients must be scaled before they are
computed, logits with other readers than this loss, class weights, smoothed labels, losses per row, and dynamic sizes.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from graphshard.errors import PassError
from graphshard.ir.graph import aten, calls_of, erase_dead, fake
from graphshard.ir.program import Phase, Program
from graphshard.ir.recompute import IN_FORWARD
from graphshard.passes.base import Pass
from graphshard.passes.contrib.vocabulary_loss import SUM, LossRewriter, VocabularyLoss, vocabulary_loss


@dataclass(frozen=True)
class ChunkedLoss(Pass):
    """Requires: a joint graph, or a forward alone.  Preserves: values up to rounding.

    Attributes:
        rows: number of rows whose logits exist at once.
    """

    name: ClassVar[str] = "chunked-loss"
    runs: ClassVar = "joint"
    exact: ClassVar[bool] = False
    rows: int = 1024

    def requires(self, program: Program) -> None:
        super().requires(program)
        if not isinstance(self.rows, int) or self.rows < 1:
            raise PassError(f"{self.name}: rows must be a number from 1 on, got {self.rows!r}")

    def rewrite_phase(self, phase: Phase, program: Program) -> int:
        count = 0
        for node in calls_of(phase, aten.nll_loss_forward.default):
            found = vocabulary_loss(node)
            if found is not None and self._applies(found):
                _RowChunks(found, self.rows).rewrite()
                count += 1
        if count:
            erase_dead(phase.module.graph)
        return count

    def _applies(self, found: VocabularyLoss) -> bool:
        return len(fake(found.product)) > self.rows and fake(found.product).dtype != torch.float16


class _RowChunks(LossRewriter):
    """The rewriting of one loss into chunks of `size` rows."""

    def __init__(self, found: VocabularyLoss, size: int) -> None:
        super().__init__(found)
        self._size = size
        # Sums over the chunks so far: of losses, of rows that count, and of gradients.
        self._sums: dict[str, Node] = {}
        self._of_rows: list[Node] = []

    def rewrite(self) -> None:
        found, (rows, weight, _) = self.found, self.found.operands
        length = len(fake(rows))
        with self.graph.inserting_before(found.loss):
            transposed = self.emit(aten.t.default, weight) if found.of_rows else None
            for start in range(0, length, self._size):
                self._chunk(start, min(start + self._size, length), transposed)
            loss, counted = self._sums["loss"], self._sums["counted"]
            if found.is_mean:
                loss = self.emit(aten.div.Tensor, loss, counted)
            if self._of_rows:
                self._sums["rows"] = self.emit(aten.cat.default, self._of_rows)
            self.replace_loss(loss)
        if found.backward:
            self._replace_gradients(counted)

    def _chunk(self, start: int, end: int, transposed: Node | None) -> None:
        found, (rows, weight, bias) = self.found, self.found.operands
        own = self.emit(aten.slice.Tensor, rows, 0, start, end)
        logits = self.emit(found.product.target, *([bias] if bias is not None else []), own, weight)
        made = {found.product: logits}
        self.recompute(found.forward, made)
        targets = self.emit(aten.slice.Tensor, found.loss.args[1], 0, start, end)
        ignored = found.loss.args[4]
        softmax = made[found.forward[-1]]
        loss = self.emit(aten.nll_loss_forward.default, softmax, targets, None, SUM, ignored)
        total, counted = (self.emit(operator.getitem, loss, index) for index in (0, 1))
        self._add("loss", total)
        self._add("counted", counted)
        if not found.backward:
            return
        first, second, *others = found.backward
        one = self.emit(aten.ones_like.default, total)
        made[first] = self.emit(first.target, one, softmax, targets, None, SUM, ignored, counted)
        made[second] = self.emit(second.target, made[first], softmax, *second.args[2:])
        self.recompute(others, made)
        gradient = made[found.backward[-1]]
        if transposed is not None:
            self._of_rows.append(self.emit(aten.mm.default, gradient, transposed))
        if found.of_weight:
            transposed_gradient = self.emit(aten.t.default, gradient)
            self._sums["weight"] = self.add_product(self._sums.get("weight"), transposed_gradient, own)
        if found.of_bias:
            self._add("bias", self.widen(self.emit(aten.sum.dim_IntList, gradient, [0], True)))

    def _add(self, name: str, value: Node) -> None:
        before = self._sums.get(name)
        self._sums[name] = value if before is None else self.emit(aten.add.Tensor, before, value)

    def _replace_gradients(self, counted: Node) -> None:
        found = self.found
        self.like = found.backward[0]
        with self.graph.inserting_before(found.backward[0]):
            factor = self.tangent(counted)
        for name, nodes in (("rows", found.of_rows), ("weight", found.of_weight), ("bias", found.of_bias)):
            for node in nodes:
                self._sums[name].meta[IN_FORWARD] = True
                with self.graph.inserting_before(node):
                    scaled = self.emit(aten.mul.Tensor, self._sums[name], factor)
                    node.replace_all_uses_with(self.cast(scaled, fake(node).dtype))
