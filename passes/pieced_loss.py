"""Compute the loss over a vocabulary for some words at a time, so that the head is never whole, and logits neither.

    %g = all_gather_into_tensor(%s, 2, shard)        %b1 = joining(%s[2:], 2, shard)      under way beside what follows
    %w: f32[8, 3] = wait_tensor(%g)                  %w0: f32[4, 3] = settled(%b0)        rows 0, 1 of each rank's shard
    %z: f32[6, 8] = mm(%x, t(%w))                    %z0: f32[6, 4] = mm(%x, t(%w0))
    %p = _log_softmax(%z, 1, False)                  %m0, %e0 = the largest logits, and the sums of exp(%z0 - %m0)
    %l, %n = nll_loss_forward(%p, %y, ...)           %t0 = logits of those targets that are among these words
                                                     the same of %w1, joined to %m, %e and %t
                                                     %l = the sum of (log(%e) + %m - %t), divided by how many count
    %g = ... nll_loss_backward(%tangent, %p, ...)
    %dx = mm(%g, %w)                                 in backward once more, the last piece first, which has stayed:
    %dw = mm(t(%g), %x)                              %g1 = (exp(%z1 - log(%e) - %m) - 1 at targets) * factor
                                                     %dx1, %dw1 = mm(%g1, %w1), mm(t(%g1), %x)

A piece has the same rows of every rank's shard, so it is gathered by one collective, and what it has of the gradient
may be reduced by one (`reduce-in-pieces`). While a piece is multiplied the next one is gathered; the first beside as
many multiplications before the loss as a piece takes. Backward multiplies again: a third more for the head.

A head that is tied to the embedding is gathered whole for the lookup, unless `exchange-rows` does without; nothing of
that is left when its pieces arrive.

A bias of the head has a number for each word, and is gathered whole; a piece takes those of its words.

Sums are taken piece by piece, in float32, so results are equal up to rounding. Left alone are heads of float16, those
that are tied to more than an embedding, and all that `chunked-loss` leaves alone.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from graphshard.errors import PassError
from graphshard.ir.graph import GATHERS, aten, calls_of, emit, erase_dead, fake, is_backward
from graphshard.ir.layout import Collective, collectives
from graphshard.ir.params import ParamRow
from graphshard.ir.program import Program
from graphshard.ir.recomputed import IN_FORWARD
from graphshard.ir.row_pieces import RowPieces
from graphshard.ir.transport import landing
from graphshard.ir.vocabulary_loss import VocabularyLoss, added_product, computed_again, same_numbers, vocabulary_loss
from graphshard.passes.base import Pass


@dataclass(frozen=True)
class PiecedLoss(Pass):
    """Requires: a joint graph, or a forward alone, with collectives.  Preserves: values up to rounding.

    Attributes:
        pieces: into how many a head is cut, if each rank has so many rows.
    """

    name: ClassVar[str] = "pieced-loss"
    exact: ClassVar[bool] = False
    pieces: int = 4

    def requires(self, program: Program) -> None:
        if not isinstance(self.pieces, int) or self.pieces < 2:
            raise PassError(f"{self.name}: pieces must be a number from 2 on, got {self.pieces!r}")
        gathered = any(calls_of(phase, target) for phase in program.phases.values() for target in GATHERS)
        sharded = any(row.num_shards > 1 and not row.ignored for row in program.params)
        if "backward" in program.phases or (sharded and not gathered):
            raise PassError(f"{self.name}: insert this pass after 'mixed-precision' and before 'partition'")

    def rewrite(self, program: Program) -> int:
        count = 0
        for phase in program.phases.values():
            heads = {}
            for collective in collectives(phase):
                row = program.params[collective.params[0]]
                if collective.kind == "gather" and _fits(row):
                    heads[_landed(collective, row)] = collective, row
            for node in calls_of(phase, aten.nll_loss_forward.default):
                found = vocabulary_loss(node)
                weight = _head(found) if found is not None else None
                if found is None or weight not in heads or not _alone(found, weight):
                    continue
                gather, row = heads[weight]
                is_looked_up = any(user.target is aten.embedding.default for user in weight.users)
                _Pieces(found, gather, row, min(self.pieces, row.shard_len), is_looked_up=is_looked_up).rewrite()
                count += 1
            if count:
                erase_dead(phase.module.graph)
        return count


def _fits(row: ParamRow) -> bool:
    """Whether shards are rows of the parameter as they are, in a dtype whose gradients need no scale."""
    plain = row.extension is None and row.split is None and not row.order and not row.ignored
    wide = row.compute_dtype != torch.float16 and row.reduce_dtype != torch.float16
    return plain and wide and row.num_shards > 1 and row.dim == 0 and len(row.shape) == 2 and row.shard_len > 1


def _landed(gather: Collective, row: ParamRow) -> Node:
    """The parameter as it is computed with."""
    (whole,) = gather.waits
    for _ in landing(row):
        if len(whole.users) != 1:
            break
        (whole,) = whole.users
    return whole


def _head(found: VocabularyLoss) -> Node | None:
    """What the weight of the product is the transpose of."""
    weight = found.operands[1]
    return weight.all_input_nodes[0] if weight.target is aten.t.default else None


def _alone(found: VocabularyLoss, weight: Node) -> bool:
    """Whether a head is multiplied for this loss alone, in its forward and its backward, and else looked up at most."""
    ends = {found.product, *found.of_rows}
    seen, left = set(), [weight]
    while left:
        for user in left.pop().users:
            if user.target is aten.t.default:
                left.append(user)
            elif user.target is not aten.embedding.default:
                seen.add(user)
    return seen <= ends


class _Pieces:
    """The rewriting of one loss.

    Args:
        found: the loss.
        gather: of the head.
        row: the head.
        pieces: into how many it is cut.
        is_looked_up: whether it is an embedding, too, which its gather is for.
    """

    def __init__(
        self, found: VocabularyLoss, gather: Collective, row: ParamRow, pieces: int, *, is_looked_up: bool
    ) -> None:
        self._found, self._gather, self._row, self._is_looked_up = found, gather, row, is_looked_up
        self._graph: Graph = found.product.graph
        self._like = found.product
        self._rows = found.operands[0]
        assert isinstance(found.loss.args[1], Node)
        self._targets = found.loss.args[1]
        self._pieces = RowPieces(row, gather.axis, pieces, self._targets, self._emit)

    def rewrite(self) -> None:
        last = len(self._pieces.ranges) - 1
        begun: Node | None = self._begin_first()
        with self._graph.inserting_before(self._found.loss):
            targets = self._place_targets()
            most = total = logit = whole = None
            for number in range(last + 1):
                following = self._pieces.begin(self._shard, number + 1) if number < last else None
                whole, begun = self._pieces.settle(begun, number), following
                logits = self._logits(whole, number)[1]
                most, total = self._summed(logits, most, total)
                column, inside = self._columns(number, *targets)
                logit = self._at_targets(logits, column, inside, logit)
            assert most is not None
            assert total is not None
            assert whole is not None
            normal = self._emit(aten.add.Tensor, self._emit(aten.log.default, total), most)
            counted = self._replace_loss(normal, logit, targets[2])
        if self._found.backward:
            for value in (normal, counted, whole):  # the last piece is the first that backward needs
                value.meta[IN_FORWARD] = True
            self._like = self._found.backward[0]
            with self._graph.inserting_before(self._found.backward[0]):
                self._backward(whole, normal, counted)

    def _backward(self, whole: Node, normal: Node, counted: Node) -> None:
        found, targets = self._found, self._place_targets()
        begun: Node | None = None
        factor = self._factor(counted, targets[2])
        shifted = self._emit(aten.unsqueeze.default, normal, 1)
        of_rows: Node | None = None
        of_weight: dict[int, Node] = {}
        of_bias: dict[int, Node] = {}
        for number in reversed(range(len(self._pieces.ranges))):
            following = self._pieces.begin(self._shard, number - 1) if number else None
            whole, begun = (whole if begun is None else self._pieces.settle(begun, number)), following
            made, logits = self._logits(whole, number)
            share = self._emit(aten.exp.default, self._emit(aten.sub.Tensor, logits, shifted))
            column, inside = self._columns(number, *targets)
            minus = self._emit(aten.neg.default, self._emit(aten._to_copy.default, inside, dtype=fake(share).dtype))
            index = [self._emit(aten.unsqueeze.default, each, 1) for each in (column, minus)]
            share = self._emit(aten.scatter_add.default, share, 1, *index)
            _, second, *others = found.backward
            made[second] = self._in_dtype(self._emit(aten.mul.Tensor, share, factor), fake(second).dtype)
            for node in others:
                made[node] = computed_again(node, made, self._emit)
            gradient = made[found.backward[-1]]
            if found.of_rows:
                of_rows = added_product(of_rows, gradient, whole, self._emit)
            if found.of_weight:
                of_weight[number] = self._emit(aten.mm.default, self._emit(aten.t.default, gradient), self._rows)
            if found.of_bias:
                of_bias[number] = self._emit(aten.sum.dim_IntList, gradient, [0], True)
        joined = self._pieces.joined(of_weight, 0), self._pieces.joined(of_bias, 1)
        for nodes, value in ((found.of_rows, of_rows), (found.of_weight, joined[0]), (found.of_bias, joined[1])):
            for node in nodes:
                assert value is not None
                node.replace_all_uses_with(self._in_dtype(value, fake(node).dtype))

    def _begin_first(self) -> Node:
        """Start to gather the first piece beside as many multiplications as a piece takes."""
        length, (at, end) = len(fake(self._rows)), self._pieces.ranges[0]
        wanted = length * (end - at) * self._row.num_shards * self._row.shape[1]
        sources = [self._gather.node.all_input_nodes[0]]
        while sources[-1].op != "placeholder":
            sources.append(sources[-1].all_input_nodes[0])
        self._shard = sources[-1] if self._is_looked_up else sources[0]
        place = self._found.product
        for node in reversed(list(self._graph.nodes)):
            if node.op == "placeholder" or wanted <= 0:
                break
            if node < self._found.product and node.op == "call_function" and not is_backward(node):
                place = place if node in sources else node
                wanted -= _multiplied(node)
        with self._graph.inserting_before(place):
            for node in reversed(sources[:-1]):
                if self._is_looked_up:  # the gather for the lookup keeps what it is made of
                    self._shard = self._graph.node_copy(node, {node.all_input_nodes[0]: self._shard}.__getitem__)
                elif place < node:
                    place.prepend(node)
            return self._pieces.begin(self._shard, 0)

    def _logits(self, whole: Node, number: int) -> tuple[dict[Node, Node], Node]:
        """Logits of a piece, those of words that are none very small, and what they are computed by."""
        found = self._found
        operands = self._rows, self._emit(aten.t.default, whole)
        bias = found.operands[2]
        with_bias = () if bias is None else (self._pieces.of_vector(bias, number),)
        product = self._emit(found.product.target, *with_bias, *operands)
        made = {found.product: product}
        for node in found.forward[:-1]:
            made[node] = computed_again(node, made, self._emit)
        softmax = found.forward[-1].all_input_nodes[0]
        logits = self._in_dtype(made[same_numbers(softmax)], torch.float32)
        none = self._pieces.padding(number)
        if none is not None:
            logits = self._emit(aten.masked_fill.Scalar, logits, self._emit(aten.t.default, none), -math.inf)
        return made, logits

    def _summed(self, logits: Node, most: Node | None, total: Node | None) -> tuple[Node, Node]:
        """The largest logit of each row so far, and the sum of the exponentials of what is less than it."""
        largest = self._emit(aten.amax.default, logits, [1])
        if most is not None:
            largest = self._emit(aten.maximum.default, most, largest)
        less = self._emit(aten.sub.Tensor, logits, self._emit(aten.unsqueeze.default, largest, 1))
        added = self._emit(aten.sum.dim_IntList, self._emit(aten.exp.default, less), [1])
        if most is not None:
            scale = self._emit(aten.exp.default, self._emit(aten.sub.Tensor, most, largest))
            added = self._emit(aten.add.Tensor, self._emit(aten.mul.Tensor, total, scale), added)
        return largest, added

    def _place_targets(self) -> tuple[Node, Node, Node]:
        """On which rank the row of each target lies, where in its shard, and whether the target counts."""
        length = self._row.shard_len
        counts = self._emit(aten.ne.Scalar, self._targets, self._found.loss.args[4])
        owner = self._emit(aten.div.Tensor_mode, self._targets, length, rounding_mode="floor")
        place = self._emit(aten.sub.Tensor, self._targets, self._emit(aten.mul.Tensor, owner, length))
        if not self._row.is_even:  # a word that is none must not find what lies in the padding
            none = self._emit(aten.ge.Scalar, self._targets, self._row.shape[0])
            owner = self._emit(aten.add.Tensor, owner, self._emit(aten.mul.Tensor, none, self._row.num_shards))
        return owner, place, counts

    def _columns(self, number: int, owner: Node, place: Node, counts: Node) -> tuple[Node, Node]:
        """In which column of a piece targets are, and which are in one."""
        at, end = self._pieces.ranges[number]
        bounds = self._emit(aten.ge.Scalar, place, at), self._emit(aten.lt.Scalar, place, end)
        inside = self._emit(aten.logical_and.default, self._emit(aten.logical_and.default, *bounds), counts)
        column = self._emit(aten.add.Tensor, self._emit(aten.mul.Tensor, owner, end - at), place)
        return self._emit(aten.mul.Tensor, self._emit(aten.sub.Tensor, column, at), inside), inside

    def _at_targets(self, logits: Node, column: Node, inside: Node, before: Node | None) -> Node:
        """The logits of targets, of those that are in the pieces so far."""
        index = self._emit(aten.unsqueeze.default, column, 1)
        chosen = self._emit(aten.squeeze.dim, self._emit(aten.gather.default, logits, 1, index), 1)
        other = before if before is not None else self._emit(aten.zeros_like.default, chosen)
        return self._emit(aten.where.self, inside, chosen, other)

    def _replace_loss(self, normal: Node, logit: Node | None, counts: Node) -> Node:
        """Let what reads the loss read the one of the pieces; how many rows count."""
        found, losses = self._found, self._emit(aten.sub.Tensor, normal, logit)
        losses = self._emit(aten.where.self, counts, losses, self._emit(aten.zeros_like.default, losses))
        loss = self._emit(aten.sum.default, losses)
        counted = self._emit(aten.sum.default, self._emit(aten._to_copy.default, counts, dtype=torch.float32))
        if found.is_mean:
            loss = self._emit(aten.div.Tensor, loss, counted)
        for user in list(found.loss.users):
            if user.target is operator.getitem and user.args[1] == 0:
                user.replace_all_uses_with(self._in_dtype(loss, fake(user).dtype))
        return counted

    def _factor(self, counted: Node, counts: Node) -> Node:
        """What the gradient of each row's loss is multiplied by."""
        tangent = self._found.backward[0].all_input_nodes[0]
        if self._found.is_mean:  # rows that do not count have a gradient of zero, also where none counts
            tangent = self._emit(aten.div.Tensor, tangent, self._emit(aten.clamp_min.default, counted, 1))
        factor = self._emit(aten.mul.Tensor, self._emit(aten._to_copy.default, counts, dtype=torch.float32), tangent)
        return self._emit(aten.unsqueeze.default, factor, 1)

    def _in_dtype(self, value: Node, dtype: torch.dtype) -> Node:
        return value if fake(value).dtype == dtype else self._emit(aten._to_copy.default, value, dtype=dtype)

    def _emit(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return emit(self._graph, target, *args, like=self._like, **kwargs)


def _multiplied(node: Node) -> int:
    """How many pairs of numbers a product of matrices multiplies; 0 for what is none."""
    if node.target in (aten.mm.default, aten.addmm.default):
        left = node.args[-2]
        assert isinstance(left, Node)
        return math.prod(fake(node).shape) * fake(left).shape[1]
    return 0
