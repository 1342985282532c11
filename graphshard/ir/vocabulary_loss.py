"""The cross-entropy of what a head makes of rows, in a graph: from the product to the loss, and back to its gradients.

    %z: f32[12, 50] = mm(%x, %t)                                the head
    %p = _log_softmax(%z, 1, False)
    %l, %n = nll_loss_forward(%p, %y, None, 1, -100)
    %q = nll_loss_backward(%tangent, %p, %y, None, 1, -100, %n)
    %g: f32[12, 50] = _log_softmax_backward_data(%q, %p, 1, f32)
    %dw = mm(t(%g), %x)                                         the ends
    %dx = mm(%g, t(%t))

Between the product and the softmax, and between the softmax's gradient and its ends, may be what treats each number
alone: casts, views, factors, `tanh`. Every row of logits is then made of one row of `x`, and read for the loss alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Node, map_arg

from graphshard.ir.graph import aten, fake

# How losses of rows become one, in ATen's numbers; without, each row has a tangent of its own.
MEAN, SUM = 1, 2
_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.detach.default})
# They treat each number alone. On a gradient each is linear in it.
_FORWARD = frozenset({aten._to_copy.default, aten.mul.Tensor, aten.div.Tensor, aten.tanh.default})
_BACKWARD = frozenset({aten._to_copy.default, aten.mul.Tensor, aten.div.Tensor, aten.tanh_backward.default})


@dataclass(frozen=True)
class VocabularyLoss:
    """A loss over the vocabulary.

    Attributes:
        product: `mm` or `addmm` that makes the logits.
        forward: what lies between it and `loss`, in order, the softmax last.
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
        """The rows, the weight as it is multiplied, and the bias."""
        *bias, rows, weight = self.product.all_input_nodes
        return rows, weight, bias[0] if bias else None

    @property
    def is_mean(self) -> bool:
        """Whether the sum over rows is divided by how many count."""
        return bool(self.loss.args[3] == MEAN)


def same_numbers(node: Node) -> Node:
    """What has the same numbers, behind views that give them another shape at most."""
    while node.target in _VIEWS:
        node = node.all_input_nodes[0]
    return node


def computed_again(node: Node, made: Mapping[Node, Node], emit_call: Callable[..., Node]) -> Node:
    """What a node computes, of a part of the rows or words.

    Args:
        made: what was computed of the part, by what it is of the whole.
        emit_call: is given an operator and its arguments.
    """
    same = same_numbers(node)
    if same is not node:
        return made[same]
    args = map_arg(node.args, lambda each: made.get(same_numbers(each), each))
    return emit_call(node.target, *args, **node.kwargs)


def added_product(before: Node | None, left: Node, right: Node, emit_call: Callable[..., Node]) -> Node:
    """A product of matrices, added to those of other rows or words in float32 at least.

    Args:
        before: the sum of those so far.
        emit_call: is given an operator and its arguments.
    """
    if before is not None and fake(before).dtype == fake(left).dtype:
        return emit_call(aten.addmm.default, before, left, right)
    product = widened(emit_call(aten.mm.default, left, right), emit_call)
    return product if before is None else emit_call(aten.add.Tensor, before, product)


def widened(value: Node, emit_call: Callable[..., Node]) -> Node:
    """A value in a dtype that sums can be taken in: float32 at least."""
    wide = torch.promote_types(fake(value).dtype, torch.float32)
    return value if fake(value).dtype == wide else emit_call(aten._to_copy.default, value, dtype=wide)


def vocabulary_loss(loss: Node) -> VocabularyLoss | None:
    """What a call of `nll_loss_forward` is the end of; None if logits are read otherwise, or sizes are dynamic."""
    if loss.target is not aten.nll_loss_forward.default or loss.args[2] is not None or loss.args[3] not in (MEAN, SUM):
        return None
    softmax = loss.all_input_nodes[0]
    if not all(isinstance(size, int) for size in fake(softmax).shape):
        return None
    chain = _up_to_product(softmax)
    if chain is None:
        return None
    product, *forward = chain
    logits = {alias: node for node in (product, *forward) for alias in _with_detached(node)}
    reads = [user for alias, node in logits.items() if node is softmax for user in alias.users if user not in logits]
    reads.remove(loss)
    found = VocabularyLoss(product, tuple(forward), loss)
    if reads:
        back = _backward(found, reads, logits)
        if back is None:
            return None
        found = back
    inside = {*logits, *found.backward, *found.of_rows, *found.of_weight, *found.of_bias, loss}
    inside |= {view for end in found.of_weight for view in end.all_input_nodes if view.target is aten.t.default}
    closed = all(user in inside for node in (*logits, *found.backward) for user in node.users)
    return found if closed else None


def _up_to_product(softmax: Node) -> list[Node] | None:
    """The product that makes logits, and what lies between it and their softmax, which is the last."""
    if softmax.target is not aten._log_softmax.default or softmax.args[1] not in (1, -1):
        return None
    chain, width = [softmax], fake(softmax).shape[-1]
    while chain[0].target not in (aten.mm.default, aten.addmm.default):
        source = chain[0].all_input_nodes[0]
        alone = chain[0] is softmax or (chain[0].target in _VIEWS | _FORWARD and _of_numbers(chain[0], source))
        if source.op != "call_function" or not alone or fake(source).shape[-1:] != (width,):
            return None
        chain.insert(0, source)
    product = chain[0]
    plain = not product.kwargs and (product.target is aten.mm.default or fake(product.all_input_nodes[0]).dim() == 1)
    return chain if plain and len(product.all_input_nodes) == len(product.args) else None


def _of_numbers(node: Node, source: Node) -> bool:
    """Whether it is computed from a value, with nothing else but what has no dims."""
    others = [each for each in node.all_input_nodes if each is not source]
    return node.args[0] is source and all(fake(each).dim() == 0 for each in others)


def _with_detached(value: Node) -> list[Node]:
    """A value, and itself detached, as autograd saves results."""
    found = [value]
    for node in found:
        found += [user for user in node.users if user.target is aten.detach.default]
    return found


def _backward(found: VocabularyLoss, reads: Collection[Node], logits: Collection[Node]) -> VocabularyLoss | None:
    """The way back from what reads the softmax."""
    starts = [node for node in reads if node.target is aten.nll_loss_backward.default]
    ends = [node for node in reads if node.target is aten._log_softmax_backward_data.default]
    if len(starts) != 1 or len(ends) != 1 or len(reads) != 2 or ends[0].args[0] is not starts[0]:
        return None
    chain: list[Node] = [starts[0], ends[0]]
    if starts[0].args[2:6] != found.loss.args[1:5]:
        return None
    while True:
        sorted_ends = _ends(found, chain[-1])
        if sorted_ends is not None:
            of_rows, of_weight, of_bias = sorted_ends
            return VocabularyLoss(found.product, found.forward, found.loss, tuple(chain), of_rows, of_weight, of_bias)
        if len(chain[-1].users) != 1:
            return None
        (user,) = chain[-1].users
        others = [each for each in user.all_input_nodes if each is not chain[-1]]
        known = all(each in logits or fake(each).dim() == 0 for each in others)
        if user.target not in _VIEWS | _BACKWARD or user.args[0] is not chain[-1] or not known:
            return None
        chain.append(user)


def _ends(found: VocabularyLoss, gradient: Node) -> tuple[tuple[Node, ...], tuple[Node, ...], tuple[Node, ...]] | None:
    """Gradients of rows, weight and bias, if the gradient of logits is read for these alone."""
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
    return (tuple(of_rows), tuple(of_weight), tuple(of_bias)) if of_rows or of_weight or of_bias else None


def _readers(value: Node) -> Iterator[Node]:
    """The users of a value, and those of its transpose."""
    for user in value.users:
        yield from user.users if user.target is aten.t.default else (user,)


def _is_transposed(node: Node, other: Node) -> bool:
    """Whether one is the other with its two dims changed."""
    return aten.t.default in (node.target, other.target) and (node.args[:1] == (other,) or other.args[:1] == (node,))
