"""Pattern of a cross-entropy over a vocabulary, from the product of the head to the loss and back to its gradients.

    %z: f32[12, 50] = mm(%x, %t)                                the head
    %p = _log_softmax(%z, 1, False)
    %l, %n = nll_loss_forward(%p, %y, None, 1, -100)
    %q = nll_loss_backward(%tangent, %p, %y, None, 1, -100, %n)
    %g: f32[12, 50] = _log_softmax_backward_data(%q, %p, 1, f32)
    %dw = mm(t(%g), %x)                                         the ends
    %dx = mm(%g, t(%t))

Elementwise operators (casts, views, factors, `tanh`) may lie between the product and the softmax, and between the
softmax's gradient and the ends. Each row of logits is then made of one row of `x`, and only the loss reads it.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node, map_arg

from graphshard.ir.graph import aten, fake

# Reductions of the rows' losses, in ATen's numbers; without one, each row has its own tangent.
_MEAN, SUM = 1, 2
_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.detach.default})
# Elementwise; on a gradient each is linear in it.
_FORWARD = frozenset({aten._to_copy.default, aten.mul.Tensor, aten.div.Tensor, aten.tanh.default})
_BACKWARD = frozenset({aten._to_copy.default, aten.mul.Tensor, aten.div.Tensor, aten.tanh_backward.default})


@dataclass(frozen=True)
class VocabularyLoss:
    """A loss over the vocabulary.

    Attributes:
        product: `mm` or `addmm` that makes the logits.
        forward: the nodes between it and `loss`, in order, the softmax last.
        loss: `nll_loss_forward`.
        backward: from `nll_loss_backward` to the gradient of the logits, in order; empty without a gradient.
        of_rows, of_weight, of_bias: the ends: gradients of the product's operands that are computed.
    """

    product: Node
    forward: tuple[Node, ...]
    loss: Node
    backward: tuple[Node, ...] = ()
    of_rows: tuple[Node, ...] = ()
    of_weight: tuple[Node, ...] = ()
    of_bias: tuple[Node, ...] = ()

    @property
    def operands(self) -> tuple[Node, Node, Node | None]:
        """Return the rows, the weight as it is multiplied, and the bias."""
        *bias, rows, weight = self.product.all_input_nodes
        return rows, weight, bias[0] if bias else None

    @property
    def is_mean(self) -> bool:
        """Return whether the sum over rows is divided by the number of rows that count."""
        return bool(self.loss.args[3] == _MEAN)

    @property
    def values(self) -> dict[Node, Node]:
        """Return the values that the loss and its gradients are made of, as arguments for `trace`."""
        nodes = (*self.forward, *self.backward[2:])
        read = {same_numbers(each): each for node in nodes for each in node.all_input_nodes if fake(each).dim() == 0}
        targets, tangent = self.loss.args[1], [node.all_input_nodes[0] for node in self.backward[:1]]
        others = (*self.operands, targets, *tangent)
        return read | {node: node for node in others if isinstance(node, Node)}

    def scaled(self, tangent: Tensor, counted: Tensor) -> Tensor:
        """Return the tangent of each row's loss: of a mean it is divided by the number of rows that count."""
        # The gradient of rows that do not count is zero, also if none counts.
        return tangent / counted.clamp_min(1) if self.is_mean else tangent

    def replace_loss(self, loss: Node) -> None:
        """Let the readers of the loss read another node."""
        for user in list(self.loss.users):
            if user.target is operator.getitem and user.args[1] == 0:
                user.replace_all_uses_with(loss)


def widen(value: Tensor) -> Tensor:
    """Cast a value to a dtype that sums can be taken in: float32 at least."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def run(node: Node, *args: Any, **kwargs: Any) -> Tensor:
    """Call the operator of a node."""
    assert callable(node.target)
    return node.target(*args, **kwargs)


def recompute(nodes: Iterable[Node], made: dict[Node, Tensor]) -> None:
    """Compute nodes for a part of the rows or words; `made` maps nodes of the whole to values of the part."""
    for node in nodes:
        same = same_numbers(node)
        args = map_arg(node.args, lambda each: made[same_numbers(each)])
        made[node] = made[same] if same is not node else run(node, *args, **node.kwargs)


def add_product(before: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Add a product of matrices to the sum of earlier products (`before`), in float32 at least."""
    if before is not None and before.dtype == left.dtype:
        return torch.addmm(before, left, right)
    product = widen(left @ right)
    return product if before is None else before + product


def same_numbers(node: Node) -> Node:
    """Return the source of a chain of views: it has the same numbers, perhaps in another shape."""
    while node.target in _VIEWS:
        node = node.all_input_nodes[0]
    return node


def vocabulary_loss(loss: Node) -> VocabularyLoss | None:
    """Match a call of `nll_loss_forward`; None if the logits have other readers, or sizes are dynamic."""
    if loss.target is not aten.nll_loss_forward.default or loss.args[2] is not None or loss.args[3] not in (_MEAN, SUM):
        return None
    softmax = loss.all_input_nodes[0]
    if not all(isinstance(size, int) for size in fake(softmax).shape):
        return None
    chain = _up_to_product(softmax)
    if chain is None:
        return None
    product, *forward = chain
    logits = {alias: node for node in chain for alias in _with_detached(node)}
    reads = [user for alias, node in logits.items() if node is softmax for user in alias.users if user not in logits]
    reads.remove(loss)
    found = VocabularyLoss(product, tuple(forward), loss)
    if reads:
        differentiated = _with_backward(found, reads, logits)
        if differentiated is None:
            return None
        found = differentiated
    inside = {*logits, *found.backward, *found.of_rows, *found.of_weight, *found.of_bias, loss}
    inside |= {view for end in found.of_weight for view in end.all_input_nodes if view.target is aten.t.default}
    closed = all(user in inside for node in (*logits, *found.backward) for user in node.users)
    return found if closed else None


def _up_to_product(softmax: Node) -> list[Node] | None:
    """Return the product that makes logits, and the nodes from there to their softmax, which is the last."""
    if softmax.target is not aten._log_softmax.default or softmax.args[1] not in (1, -1):
        return None
    chain, width = [softmax], fake(softmax).shape[-1]
    while chain[0].target not in (aten.mm.default, aten.addmm.default):
        source = chain[0].all_input_nodes[0]
        plain = chain[0] is softmax or (chain[0].target in _VIEWS | _FORWARD and _is_elementwise(chain[0], source))
        if source.op != "call_function" or not plain or fake(source).shape[-1:] != (width,):
            return None
        chain.insert(0, source)
    product = chain[0]
    plain = not product.kwargs and (product.target is aten.mm.default or fake(product.all_input_nodes[0]).dim() == 1)
    return chain if plain and len(product.all_input_nodes) == len(product.args) else None


def _is_elementwise(node: Node, source: Node) -> bool:
    """Return whether a node reads a value, and otherwise only tensors without dims."""
    others = [each for each in node.all_input_nodes if each is not source]
    return node.args[0] is source and all(fake(each).dim() == 0 for each in others)


def _with_detached(value: Node) -> list[Node]:
    """Return a value and its detached copies, in which autograd saves results."""
    found = [value]
    for node in found:
        found += [user for user in node.users if user.target is aten.detach.default]
    return found


def _with_backward(found: VocabularyLoss, reads: list[Node], logits: Collection[Node]) -> VocabularyLoss | None:
    """Follow the gradient from the nodes that read the softmax to the ends."""
    starts = [node for node in reads if node.target is aten.nll_loss_backward.default]
    ends = [node for node in reads if node.target is aten._log_softmax_backward_data.default]
    if len(starts) != 1 or len(ends) != 1 or len(reads) != 2 or ends[0].args[0] is not starts[0]:
        return None
    chain = [*starts, *ends]
    if starts[0].args[2:6] != found.loss.args[1:5]:
        return None
    while (gradients := _ends(found, chain[-1])) is None:
        if len(chain[-1].users) != 1:
            return None
        (user,) = chain[-1].users
        others = [each for each in user.all_input_nodes if each is not chain[-1]]
        known = all(each in logits or fake(each).dim() == 0 for each in others)
        if user.target not in _VIEWS | _BACKWARD or user.args[0] is not chain[-1] or not known:
            return None
        chain.append(user)
    of_rows, of_weight, of_bias = map(tuple, gradients)
    return replace(found, backward=tuple(chain), of_rows=of_rows, of_weight=of_weight, of_bias=of_bias)


def _ends(found: VocabularyLoss, gradient: Node) -> tuple[list[Node], list[Node], list[Node]] | None:
    """Return gradients of rows, weight and bias, if only these read the gradient of the logits."""
    rows, weight, bias = found.operands
    of_rows, of_weight, of_bias = [], [], []
    for user in _readers(gradient):
        source, *others = (arg for arg in user.args if isinstance(arg, Node))
        if user.target is aten.mm.default and source is gradient and _is_transposed(others[0], weight):
            of_rows.append(user)
        elif user.target is aten.mm.default and _is_transposed(source, gradient) and others[0] is rows:
            of_weight.append(user)
        elif user.target is aten.sum.dim_IntList and bias is not None and user.args[1:] == ([0], True):
            of_bias.append(user)
        else:
            return None
    return (of_rows, of_weight, of_bias) if of_rows or of_weight or of_bias else None


def _readers(value: Node) -> Iterator[Node]:
    """Yield the users of a value and of its transpose."""
    for user in value.users:
        yield from user.users if user.target is aten.t.default else (user,)


def _is_transposed(node: Node, other: Node) -> bool:
    return aten.t.default in (node.target, other.target) and (node.args[:1] == (other,) or other.args[:1] == (node,))
