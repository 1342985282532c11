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

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from graphshard.errors import PassError
from graphshard.ir.graph import aten, calls_of, erase_dead, fake, trace
from graphshard.ir.program import Phase, Program
from graphshard.ir.recompute import IN_FORWARD
from graphshard.passes.base import Pass
from graphshard.passes.contrib.vocabulary_loss import (
    SUM,
    VocabularyLoss,
    add_product,
    recompute,
    run,
    vocabulary_loss,
    widen,
)


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
                _rewrite(found, self.rows)
                count += 1
        if count:
            erase_dead(phase.module.graph)
        return count

    def _applies(self, found: VocabularyLoss) -> bool:
        return len(fake(found.product)) > self.rows and fake(found.product).dtype != torch.float16


def _rewrite(found: VocabularyLoss, size: int) -> None:
    sums = trace(found.loss, partial(_sums, found, size), found.values, like=found.product)
    found.replace_loss(sums["loss"])
    if not found.backward:
        return
    first = found.backward[0]
    factor = trace(first, found.scaled, first.all_input_nodes[0], sums["counted"])
    for name, nodes in (("rows", found.of_rows), ("weight", found.of_weight), ("bias", found.of_bias)):
        for node in nodes:
            sums[name].meta[IN_FORWARD] = True
            given = sums[name], factor, fake(node).dtype
            scaled = trace(node, lambda value, by, dtype: (value * by).to(dtype), *given, like=first)
            node.replace_all_uses_with(scaled)


def _sums(found: VocabularyLoss, size: int, values: dict[Any, Tensor]) -> dict[str, Tensor]:
    """Return the sums over chunks of `size` rows: of losses, of rows that count, and of gradients."""
    rows, weight, *bias = (values[each] for each in found.operands if each is not None)
    _, targets, _, _, ignored = found.loss.args
    sums: dict[str, Tensor] = {}
    of_rows: list[Tensor] = []

    def add(name: str, value: Tensor) -> None:
        sums[name] = sums[name] + value if name in sums else value

    transposed = weight.t() if found.of_rows else weight
    for start in range(0, len(rows), size):
        own, chosen = (each[start : start + size] for each in (rows, values[targets]))
        made = {**values, found.product: run(found.product, *bias, own, weight)}
        recompute(found.forward, made)
        softmax = made[found.forward[-1]]
        total, counted = aten.nll_loss_forward.default(softmax, chosen, None, SUM, ignored)
        add("loss", total)
        add("counted", counted)
        if not found.backward:
            continue
        first, second, *others = found.backward
        made[first] = run(first, aten.ones_like.default(total), softmax, chosen, None, SUM, ignored, counted)
        made[second] = run(second, made[first], softmax, *second.args[2:])
        recompute(others, made)
        gradient = made[found.backward[-1]]
        if found.of_rows:
            of_rows.append(gradient @ transposed)
        if found.of_weight:
            sums["weight"] = add_product(sums.get("weight"), gradient.t(), own)
        if found.of_bias:
            add("bias", widen(gradient.sum([0], keepdim=True)))
    if found.is_mean:
        sums["loss"] = sums["loss"] / sums["counted"]
    return {**sums, "rows": torch.cat(of_rows)} if of_rows else sums
