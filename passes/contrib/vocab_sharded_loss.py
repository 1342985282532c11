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
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn.functional import pad

from graphshard.errors import PassError
from graphshard.ir.collective_regions import Collective
from graphshard.ir.graph import GATHERS, aten, calls_of, erase_dead, fake, is_backward, trace
from graphshard.ir.operators import MODEL_WAIT, START_ALL_GATHER, STARTED_EARLY
from graphshard.ir.param_table import ParamSpec
from graphshard.ir.program import Phase, Program
from graphshard.ir.recompute import IN_FORWARD
from graphshard.passes.base import Pass, full_parameter, gathers_of
from graphshard.passes.contrib.vocabulary_loss import (
    VocabularyLoss,
    add_product,
    recompute,
    run,
    same_numbers,
    vocabulary_loss,
)

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
            size = math.ceil(spec.shard_len / min(self.pieces, spec.shard_len))
            ranges = tuple((at, min(at + size, spec.shard_len)) for at in range(0, spec.shard_len, size))
            _rewrite(_Head(found, gather, spec, ranges), is_looked_up=is_looked_up)
            count += 1
        if count:
            for begun in calls_of(phase, START_ALL_GATHER):
                begun.meta[STARTED_EARLY] = True
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


Values = Mapping[Any, Tensor]


@dataclass
class _Head:
    """A head in chunks, and its loss; `ranges` has the rows of a shard that each chunk has.

    Functions of tensors are traced, with the `values` of the nodes that they read.
    """

    found: VocabularyLoss
    gather: Collective
    spec: ParamSpec
    ranges: tuple[tuple[int, int], ...]
    values: Values = field(default_factory=dict)

    def start(self, shard: Tensor, number: int) -> Tensor:
        """Start to gather a chunk."""
        at, end = self.ranges[number]
        return START_ALL_GATHER(shard[at:end], self.spec.num_shards, self.gather.axis)

    def wait(self, begun: Tensor, number: int) -> Tensor:
        """Wait for a chunk; rows of padding become zero."""
        chunk, dtype = MODEL_WAIT(begun), self.spec.compute_dtype
        chunk = chunk if chunk.dtype == dtype else chunk.view(dtype)
        padding = self.padding(number)
        return chunk if padding is None else chunk.masked_fill(padding, 0)

    def padding(self, number: int) -> Tensor | None:
        """Return a mask, in one column, of the rows of a chunk that are padding; None if there are none."""
        (at, end), ranks, length = self.ranges[number], self.spec.num_shards, self.spec.shard_len
        if (ranks - 1) * length + end <= self.spec.shape[0]:
            return None
        ones = aten.new_ones.default(self.values[self.found.loss.args[1]], [ranks, end - at])
        # Row numbers are too large by one, and by one shard.
        rows = ones.cumsum(1) + ones.cumsum(0) * length
        return (rows > self.spec.shape[0] + length - at).view([ranks * (end - at), 1])

    def logits(self, whole: Tensor, number: int) -> tuple[dict[Any, Tensor], Tensor]:
        """Return the values that make the logits of a chunk, and the logits, very small for padding."""
        found, (rows, _, bias) = self.found, self.found.operands
        with_bias = () if bias is None else (self.entries(self.values[bias], number),)
        made = {**self.values, found.product: run(found.product, *with_bias, self.values[rows], whole.t())}
        recompute(found.forward[:-1], made)
        logits = made[same_numbers(found.forward[-1].all_input_nodes[0])].float()
        padding = self.padding(number)
        return made, logits if padding is None else logits.masked_fill(padding.t(), -math.inf)

    def entries(self, vector: Tensor, number: int) -> Tensor:
        """Select the entries of a per-row vector that belong to one chunk."""
        (at, end), ranks, length = self.ranges[number], self.spec.num_shards, self.spec.shard_len
        if not self.spec.is_even:
            vector = pad(vector, [0, ranks * length - self.spec.shape[0]])
        entries = aten.slice.Tensor(vector.view([ranks, length]), 1, at, end)
        return aten.contiguous.default(entries).view([ranks * (end - at)])

    def place_targets(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rank that has the row of each target, the place in its shard, and whether the target counts."""
        ignored: Any = self.found.loss.args[4]
        targets = self.values[self.found.loss.args[1]]
        owner = targets.div(self.spec.shard_len, rounding_mode="floor")
        place = targets - owner * self.spec.shard_len
        if not self.spec.is_even:  # a target out of range must not find padding
            owner = owner + (targets >= self.spec.shape[0]) * self.spec.num_shards
        return owner, place, targets != ignored

    def columns(self, number: int, owner: Tensor, place: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns of targets in a chunk, and which targets are in it."""
        at, end = self.ranges[number]
        inside = (place >= at).logical_and(place < end).logical_and(counts)
        return (owner * (end - at) + place - at) * inside, inside

    def compute_loss(self, values: Values, shard: Tensor, begun: Tensor) -> tuple[Tensor, ...]:
        """Return the loss, the logarithms of the sums of exponentials, the number of targets that count, and a chunk.

        The last chunk is the first that backward needs.
        """
        self.values = values
        owner, place, counts = self.place_targets()
        most = total = logit = whole = begun
        for number in range(len(self.ranges)):
            following = self.start(shard, number + 1) if number + 1 < len(self.ranges) else begun
            whole, begun = self.wait(begun, number), following
            _, logits = self.logits(whole, number)
            largest = logits.amax([1]) if number == 0 else torch.maximum(most, logits.amax([1]))
            added = (logits - largest.unsqueeze(1)).exp().sum([1])
            total = added if number == 0 else total * (most - largest).exp() + added
            column, inside = self.columns(number, owner, place, counts)
            chosen = logits.gather(1, column.unsqueeze(1)).squeeze(1)
            logit = torch.where(inside, chosen, aten.zeros_like.default(chosen) if number == 0 else logit)
            most = largest
        normal = total.log() + most
        losses = normal - logit
        loss = torch.where(counts, losses, aten.zeros_like.default(losses)).sum()
        counted = counts.to(torch.float32).sum()
        loss = loss / counted if self.found.is_mean else loss
        return loss.to(self.found.loss.meta["val"][0].dtype), normal, counted, whole

    def differentiate(
        self, values: Values, shard: Tensor, normal: Tensor, counted: Tensor, whole: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the rows, the head and the bias; None for one that is not computed."""
        self.values = values
        found, targets, begun = self.found, self.place_targets(), whole
        tangent = found.scaled(self.values[found.backward[0].all_input_nodes[0]], counted)
        factor = (targets[2].to(torch.float32) * tangent).unsqueeze(1)
        shifted, of_rows = normal.unsqueeze(1), None
        of_weight: list[Tensor] = []
        of_bias: list[Tensor] = []
        _, second, *others = found.backward
        last = len(self.ranges) - 1
        for number in range(last, -1, -1):
            following = self.start(shard, number - 1) if number else begun
            whole, begun = whole if number == last else self.wait(begun, number), following
            made, logits = self.logits(whole, number)
            share = (logits - shifted).exp()
            column, inside = self.columns(number, *targets)
            share = share.scatter_add(1, column.unsqueeze(1), -inside.to(share.dtype).unsqueeze(1))
            made[second] = (share * factor).to(fake(second).dtype)
            recompute(others, made)
            gradient = made[found.backward[-1]]
            if found.of_rows:
                of_rows = add_product(of_rows, gradient, whole)
            if found.of_weight:
                of_weight.insert(0, gradient.t() @ self.values[found.operands[0]])
            if found.of_bias:
                of_bias.insert(0, gradient.sum([0], keepdim=True))
        joined = (
            self.concatenate(of_weight, 0) if of_weight else None,
            self.concatenate(of_bias, 1) if of_bias else None,
        )
        ends = zip((of_rows, *joined), (found.of_rows, found.of_weight, found.of_bias))
        return tuple(value.to(fake(nodes[0]).dtype) if value is not None else None for value, nodes in ends)

    def concatenate(self, parts: list[Tensor], dim: int) -> Tensor:
        """Concatenate the chunks of a gradient along its dim of words."""
        ranks, width = self.spec.num_shards, self.spec.shape[1:] if dim == 0 else ()
        by_rank = [part.view([ranks, end - at, *width]) for part, (at, end) in zip(parts, self.ranges)]
        joined = torch.cat(by_rank, 1).view([*([1] * dim), ranks * self.spec.shard_len, *width])
        return joined if self.spec.is_even else joined.narrow(dim, 0, self.spec.shape[0])


def _rewrite(head: _Head, *, is_looked_up: bool) -> None:
    """Rewrite a loss; a head that is looked up, too, needs its gather."""
    found = head.found
    shard, begun = _start_first(head, is_looked_up=is_looked_up)
    loss, *kept = trace(found.loss, head.compute_loss, found.values, shard, begun, like=found.product)
    found.replace_loss(loss)
    if not found.backward:
        return
    for value in kept:
        value.meta[IN_FORWARD] = True
    gradients = trace(found.backward[0], head.differentiate, found.values, shard, *kept)
    for gradient, nodes in zip(gradients, (found.of_rows, found.of_weight, found.of_bias)):
        for node in nodes:
            node.replace_all_uses_with(gradient)
    joined = gradients[1]
    while joined is not None and joined.target is not aten.cat.default:
        (joined,) = joined.all_input_nodes
    if joined is not None:
        joined.meta[OF_PIECES] = True


def _start_first(head: _Head, *, is_looked_up: bool) -> tuple[Node, Node]:
    """Start to gather the first chunk before the number of multiplications that a chunk takes.

    Return the shard and the start.
    """
    found, graph, (at, end) = head.found, head.found.product.graph, head.ranges[0]
    wanted = len(fake(found.operands[0])) * (end - at) * head.spec.num_shards * head.spec.shape[1]
    sources = [head.gather.node.all_input_nodes[0]]
    while sources[-1].op != "placeholder":
        sources.append(sources[-1].all_input_nodes[0])
    shard = sources[-1] if is_looked_up else sources[0]
    place = found.product
    for node in reversed(list(graph.nodes)):
        if node.op == "placeholder" or wanted <= 0:
            break
        if node < found.product and node.op == "call_function" and not is_backward(node):
            place = place if node in sources else node
            if node.target in (aten.mm.default, aten.addmm.default):  # pairs of numbers that it multiplies
                left: Any = node.args[-2]
                wanted -= math.prod(fake(node).shape) * fake(left).shape[1]
    for node in reversed(sources[:-1]):
        if is_looked_up:  # the gather for the lookup keeps its sources
            with graph.inserting_before(place):
                shard = graph.node_copy(node, {node.all_input_nodes[0]: shard}.__getitem__)
        elif place < node:
            place.prepend(node)
    return shard, trace(place, head.start, shard, 0, like=found.product)
