"""Compute the loss over a vocabulary for some words at a time, so that neither the head nor the logits are ever whole.

    %g = all_gather_into_tensor(%s, 2, shard)        %b1 = start_all_gather(%s[2:], 2, shard)     overlaps what follows
    %w: f32[8, 3] = wait_tensor(%g)                  %w0: f32[4, 3] = wait(%b0)          rows 0, 1 of each rank's shard
    %z: f32[6, 8] = mm(%x, t(%w))                    %z0: f32[6, 4] = mm(%x, t(%w0))
    %p = _log_softmax(%z, 1, False)                  %m0, %e0 = the largest logits, and the sums of exp(%z0 - %m0)
    %l, %n = nll_loss_forward(%p, %y, ...)           %t0 = logits of the targets that are among these words
                                                     the same of %w1, combined to %m, %e and %t
                                                     %l = the sum of (log(%e) + %m - %t), divided by how many count
    %g = ... nll_loss_backward(%tangent, %p, ...)
    %dx = mm(%g, %w)                                 again in backward, the last chunk first, which is still there:
    %dw = mm(t(%g), %x)                              %g1 = (exp(%z1 - log(%e) - %m) - 1 at targets) * factor
                                                     %dx1, %dw1 = mm(%g1, %w1), mm(t(%g1), %x)

A chunk has the same rows of every rank's shard, so one collective gathers it, and one may reduce its gradient
(`chunked-reduce-scatter`):

    %s: f32[4, 3]    of rank 0: rows 0 1 2 3      rank 1: rows 4 5 6 and padding
    chunk 0          rows 0 1 4 5                 gathered from %s[:2]
    chunk 1          rows 2 3 6, and zeros        gathered from %s[2:]

While a chunk is multiplied the next one is gathered; the first gather overlaps the same number of multiplications
before the loss as a chunk takes. Backward multiplies again: a third more work for the head.

A head that is tied to the embedding is gathered whole for the lookup, unless `embedding-row-exchange` avoids that; the
whole is freed before the chunks arrive. A bias of the head is gathered whole, and each chunk takes its entries.

Sums are taken chunk by chunk, in float32, so results are equal up to rounding. The pass skips heads of float16, heads
that are tied to anything else than an embedding, and whatever `chunked-loss` skips.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Node

from graphshard.errors import PassError
from graphshard.ir.collective_regions import Collective
from graphshard.ir.graph import GATHERS, aten, calls_of, erase_dead, fake, is_backward
from graphshard.ir.operators import MODEL_WAIT, START_ALL_GATHER, STARTED_EARLY
from graphshard.ir.param_table import ParamSpec
from graphshard.ir.program import Phase, Program
from graphshard.ir.recompute import IN_FORWARD
from graphshard.passes.base import Pass, full_parameter, gathers_of
from graphshard.passes.contrib.vocabulary_loss import LossRewriter, VocabularyLoss, same_numbers, vocabulary_loss

# Mark of the concatenation of the chunks of a gradient: one after another for each rank.
OF_PIECES = "of_pieces"


@dataclass(frozen=True)
class VocabShardedLoss(Pass):
    """Requires: a joint graph, or a forward alone, with collectives.  Preserves: values up to rounding.

    Attributes:
        pieces: number of chunks of a head; a rank with fewer rows has fewer chunks.
    """

    name: ClassVar[str] = "vocab-sharded-loss"
    exact: ClassVar[bool] = False
    pieces: int = 4

    def requires(self, program: Program) -> None:
        if not isinstance(self.pieces, int) or self.pieces < 2:
            raise PassError(f"{self.name}: pieces must be a number from 2 on, got {self.pieces!r}")
        gathered = any(calls_of(phase, target) for phase in program.phases.values() for target in GATHERS)
        sharded = any(spec.num_shards > 1 and not spec.ignored for spec in program.params)
        if "backward" in program.phases or (sharded and not gathered):
            raise PassError(f"{self.name}: insert this pass after 'mixed-precision' and before 'partition'")

    def rewrite_phase(self, phase: Phase, program: Program) -> int:
        count = 0
        gathers = [(gather, spec) for gather, spec in gathers_of(phase, program) if _applies(spec)]
        heads = {full_parameter(gather, spec): (gather, spec) for gather, spec in gathers}
        for node in calls_of(phase, aten.nll_loss_forward.default):
            found = vocabulary_loss(node)
            if found is None or (transposed := found.operands[1]).target is not aten.t.default:
                continue
            (weight,) = transposed.all_input_nodes
            if weight not in heads or not _is_read_by_loss_alone(found, weight):
                continue
            gather, spec = heads[weight]
            is_looked_up = any(user.target is aten.embedding.default for user in weight.users)
            _VocabChunks(found, gather, spec, min(self.pieces, spec.shard_len), is_looked_up=is_looked_up).rewrite()
            count += 1
        if count:
            erase_dead(phase.module.graph)
        return count


def _applies(spec: ParamSpec) -> bool:
    """Return whether shards are rows of the parameter, in a dtype whose gradients need no scale."""
    wide = torch.float16 not in (spec.compute_dtype, spec.reduce_dtype)
    return spec.has_plain_rows and wide and len(spec.shape) == 2 and spec.shard_len > 1


def _is_read_by_loss_alone(found: VocabularyLoss, weight: Node) -> bool:
    """Return whether a head is multiplied for this loss alone, and otherwise looked up at most."""
    seen, left = set(), [weight]
    while left:
        for user in left.pop().users:
            if user.target is aten.t.default:
                left.append(user)
            elif user.target is not aten.embedding.default:
                seen.add(user)
    return seen <= {found.product, *found.of_rows}


class _VocabChunks(LossRewriter):
    """The rewriting of one loss into chunks of the head; a head that `is_looked_up`, too, needs its gather."""

    def __init__(
        self, found: VocabularyLoss, gather: Collective, spec: ParamSpec, chunks: int, *, is_looked_up: bool
    ) -> None:
        super().__init__(found)
        self._gather, self._spec, self._is_looked_up = gather, spec, is_looked_up
        self._ranks, self._length, self._rows = spec.num_shards, spec.shard_len, found.operands[0]
        assert isinstance(found.loss.args[1], Node)
        self._targets = found.loss.args[1]
        size = math.ceil(self._length / chunks)
        # The rows of a shard that each chunk has.
        self._ranges = [(at, min(at + size, self._length)) for at in range(0, self._length, size)]

    def rewrite(self) -> None:
        last = len(self._ranges) - 1
        begun: Node | None = self._start_first()
        with self.graph.inserting_before(self.found.loss):
            targets = self._place_targets()
            most = total = logit = whole = None
            for number in range(last + 1):
                following = self._start(number + 1) if number < last else None
                whole, begun = self._settle(begun, number), following
                logits = self._logits(whole, number)[1]
                most, total = self._sum(logits, most, total)
                column, inside = self._columns(number, *targets)
                logit = self._at_targets(logits, column, inside, logit)
            assert most is not None
            assert total is not None
            assert whole is not None
            normal = self.emit(aten.add.Tensor, self.emit(aten.log.default, total), most)
            counted = self._finish_loss(normal, logit, targets[2])
        if self.found.backward:
            for value in (normal, counted, whole):  # the last chunk is the first that backward needs
                value.meta[IN_FORWARD] = True
            self.like = self.found.backward[0]
            with self.graph.inserting_before(self.found.backward[0]):
                self._differentiate(whole, normal, counted)

    def _differentiate(self, whole: Node, normal: Node, counted: Node) -> None:
        found, targets = self.found, self._place_targets()
        begun: Node | None = None
        tangent = self.tangent(counted)
        factor = self.emit(aten.mul.Tensor, self.emit(aten._to_copy.default, targets[2], dtype=torch.float32), tangent)
        factor = self.emit(aten.unsqueeze.default, factor, 1)
        shifted = self.emit(aten.unsqueeze.default, normal, 1)
        of_rows: Node | None = None
        of_weight: dict[int, Node] = {}
        of_bias: dict[int, Node] = {}
        for number in reversed(range(len(self._ranges))):
            following = self._start(number - 1) if number else None
            whole, begun = (whole if begun is None else self._settle(begun, number)), following
            made, logits = self._logits(whole, number)
            share = self.emit(aten.exp.default, self.emit(aten.sub.Tensor, logits, shifted))
            column, inside = self._columns(number, *targets)
            minus = self.emit(aten.neg.default, self.emit(aten._to_copy.default, inside, dtype=fake(share).dtype))
            index = [self.emit(aten.unsqueeze.default, each, 1) for each in (column, minus)]
            share = self.emit(aten.scatter_add.default, share, 1, *index)
            _, second, *others = found.backward
            made[second] = self.cast(self.emit(aten.mul.Tensor, share, factor), fake(second).dtype)
            self.recompute(others, made)
            gradient = made[found.backward[-1]]
            if found.of_rows:
                of_rows = self.add_product(of_rows, gradient, whole)
            if found.of_weight:
                of_weight[number] = self.emit(aten.mm.default, self.emit(aten.t.default, gradient), self._rows)
            if found.of_bias:
                of_bias[number] = self.emit(aten.sum.dim_IntList, gradient, [0], True)
        joined = self._concatenate(of_weight, 0), self._concatenate(of_bias, 1)
        for nodes, value in ((found.of_rows, of_rows), (found.of_weight, joined[0]), (found.of_bias, joined[1])):
            for node in nodes:
                assert value is not None
                node.replace_all_uses_with(self.cast(value, fake(node).dtype))

    def _start_first(self) -> Node:
        """Start to gather the first chunk before the number of multiplications that a chunk takes."""
        at, end = self._ranges[0]
        wanted = len(fake(self._rows)) * (end - at) * self._ranks * self._spec.shape[1]
        sources = [self._gather.node.all_input_nodes[0]]
        while sources[-1].op != "placeholder":
            sources.append(sources[-1].all_input_nodes[0])
        self._shard = sources[-1] if self._is_looked_up else sources[0]
        place = self.found.product
        for node in reversed(list(self.graph.nodes)):
            if node.op == "placeholder" or wanted <= 0:
                break
            if node < self.found.product and node.op == "call_function" and not is_backward(node):
                place = place if node in sources else node
                if node.target in (aten.mm.default, aten.addmm.default):  # pairs of numbers that it multiplies
                    left: Any = node.args[-2]
                    wanted -= math.prod(fake(node).shape) * fake(left).shape[1]
        with self.graph.inserting_before(place):
            for node in reversed(sources[:-1]):
                if self._is_looked_up:  # the gather for the lookup keeps its sources
                    self._shard = self.graph.node_copy(node, {node.all_input_nodes[0]: self._shard}.__getitem__)
                elif place < node:
                    place.prepend(node)
            return self._start(0)

    def _start(self, number: int) -> Node:
        """Start to gather a chunk."""
        chunk = self.emit(aten.slice.Tensor, self._shard, 0, *self._ranges[number])
        begun = self.emit(START_ALL_GATHER, chunk, self._ranks, self._gather.axis)
        begun.meta[STARTED_EARLY] = True
        return begun

    def _settle(self, begun: Node | None, number: int) -> Node:
        """Wait for a chunk; rows of padding become zero."""
        assert begun is not None
        chunk, dtype = self.emit(MODEL_WAIT, begun), self._spec.compute_dtype
        chunk = chunk if fake(chunk).dtype == dtype else self.emit(aten.view.dtype, chunk, dtype)
        padding = self._padding(number)
        return chunk if padding is None else self.emit(aten.masked_fill.Scalar, chunk, padding, 0)

    def _padding(self, number: int) -> Node | None:
        """Return a mask, in one column, of the rows of a chunk that are padding; None if there are none."""
        (at, end), ranks, length = self._ranges[number], self._ranks, self._length
        if (ranks - 1) * length + end <= self._spec.shape[0]:
            return None
        ones = self.emit(aten.new_ones.default, self._targets, [ranks, end - at])
        before = self.emit(aten.mul.Tensor, self.emit(aten.cumsum.default, ones, 0), length)
        rows = self.emit(aten.add.Tensor, self.emit(aten.cumsum.default, ones, 1), before)
        # Row numbers are too large by one, and by one shard.
        mask = self.emit(aten.gt.Scalar, rows, self._spec.shape[0] + length - at)
        return self.emit(aten.view.default, mask, [ranks * (end - at), 1])

    def _logits(self, whole: Node, number: int) -> tuple[dict[Node, Node], Node]:
        """Return the nodes that compute the logits of a chunk, and the logits, very small for padding."""
        found = self.found
        operands = self._rows, self.emit(aten.t.default, whole)
        bias = found.operands[2]
        with_bias = () if bias is None else (self._of_vector(bias, number),)
        product = self.emit(found.product.target, *with_bias, *operands)
        made = {found.product: product}
        self.recompute(found.forward[:-1], made)
        softmax = found.forward[-1].all_input_nodes[0]
        logits = self.cast(made[same_numbers(softmax)], torch.float32)
        padding = self._padding(number)
        if padding is not None:
            logits = self.emit(aten.masked_fill.Scalar, logits, self.emit(aten.t.default, padding), -math.inf)
        return made, logits

    def _of_vector(self, vector: Node, number: int) -> Node:
        """Select the entries of a per-row vector that belong to one chunk."""
        (at, end), ranks, length = self._ranges[number], self._ranks, self._length
        if not self._spec.is_even:
            vector = self.emit(aten.constant_pad_nd.default, vector, [0, ranks * length - self._spec.shape[0]])
        chunk = self.emit(aten.slice.Tensor, self.emit(aten.view.default, vector, [ranks, length]), 1, at, end)
        whole = self.emit(aten.clone.default, chunk, memory_format=torch.contiguous_format)
        return self.emit(aten.view.default, whole, [ranks * (end - at)])

    def _sum(self, logits: Node, most: Node | None, total: Node | None) -> tuple[Node, Node]:
        """Update the largest logit of each row, and the sum of exponentials of the logits less the largest."""
        largest = self.emit(aten.amax.default, logits, [1])
        if most is not None:
            largest = self.emit(aten.maximum.default, most, largest)
        less = self.emit(aten.sub.Tensor, logits, self.emit(aten.unsqueeze.default, largest, 1))
        added = self.emit(aten.sum.dim_IntList, self.emit(aten.exp.default, less), [1])
        if most is not None:
            scale = self.emit(aten.exp.default, self.emit(aten.sub.Tensor, most, largest))
            added = self.emit(aten.add.Tensor, self.emit(aten.mul.Tensor, total, scale), added)
        return largest, added

    def _place_targets(self) -> tuple[Node, Node, Node]:
        """Return the rank that has the row of each target, the place in its shard, and whether the target counts."""
        counts = self.emit(aten.ne.Scalar, self._targets, self.found.loss.args[4])
        owner = self.emit(aten.div.Tensor_mode, self._targets, self._length, rounding_mode="floor")
        place = self.emit(aten.sub.Tensor, self._targets, self.emit(aten.mul.Tensor, owner, self._length))
        if not self._spec.is_even:  # a target out of range must not find padding
            out = self.emit(aten.ge.Scalar, self._targets, self._spec.shape[0])
            owner = self.emit(aten.add.Tensor, owner, self.emit(aten.mul.Tensor, out, self._ranks))
        return owner, place, counts

    def _columns(self, number: int, owner: Node, place: Node, counts: Node) -> tuple[Node, Node]:
        """Return the columns of targets in a chunk, and which targets are in it."""
        at, end = self._ranges[number]
        bounds = self.emit(aten.ge.Scalar, place, at), self.emit(aten.lt.Scalar, place, end)
        inside = self.emit(aten.logical_and.default, self.emit(aten.logical_and.default, *bounds), counts)
        column = self.emit(aten.add.Tensor, self.emit(aten.mul.Tensor, owner, end - at), place)
        return self.emit(aten.mul.Tensor, self.emit(aten.sub.Tensor, column, at), inside), inside

    def _at_targets(self, logits: Node, column: Node, inside: Node, before: Node | None) -> Node:
        """Return the logits of the targets in the chunks so far."""
        index = self.emit(aten.unsqueeze.default, column, 1)
        chosen = self.emit(aten.squeeze.dim, self.emit(aten.gather.default, logits, 1, index), 1)
        other = before if before is not None else self.emit(aten.zeros_like.default, chosen)
        return self.emit(aten.where.self, inside, chosen, other)

    def _finish_loss(self, normal: Node, logit: Node | None, counts: Node) -> Node:
        """Replace the loss; return the number of rows that count."""
        losses = self.emit(aten.sub.Tensor, normal, logit)
        losses = self.emit(aten.where.self, counts, losses, self.emit(aten.zeros_like.default, losses))
        loss = self.emit(aten.sum.default, losses)
        counted = self.emit(aten.sum.default, self.emit(aten._to_copy.default, counts, dtype=torch.float32))
        if self.found.is_mean:
            loss = self.emit(aten.div.Tensor, loss, counted)
        self.replace_loss(loss)
        return counted

    def _concatenate(self, parts: dict[int, Node], dim: int) -> Node | None:
        """Concatenate the chunks of a gradient along its dim of words; None if there are no chunks."""
        if not parts:
            return None
        ranks, width = self._ranks, (self._spec.shape[1],) if dim == 0 else ()
        by_rank = [
            self.emit(aten.view.default, parts[number], [ranks, end - at, *width])
            for number, (at, end) in enumerate(self._ranges)
        ]
        joined = self.emit(aten.cat.default, by_rank, 1)
        if width:
            joined.meta[OF_PIECES] = True
        joined = self.emit(aten.view.default, joined, [*([1] * dim), ranks * self._length, *width])
        return joined if self._spec.is_even else self.emit(aten.slice.Tensor, joined, dim, 0, self._spec.shape[0])
