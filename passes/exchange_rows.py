"""Look up rows of a sharded embedding where they lie, instead of gathering the table.

  * %g = all_gather_into_tensor(%s, 2, shard)        %a: i64[24] = exchanged(%ids - [[0], [25]], ...)
    %w: f32[50, 8] = wait_tensor(%g)                 %r: f32[24, 8] = embedding(%s, clamp(%a, 0, 24))
    %y: f32[12, 8] = embedding(%w, %ids)             %o: f32[24, 8] = exchanged(%r, ...)
                                                     %y: f32[12, 8] = embedding(%o, %ids // 25 * 12 + place)

and its gradient, of which each rank needs the rows that it has:

    %d = embedding_dense_backward(%dy, %ids, 50)     %a: i64[24] = exchanged(%ids - [[0], [25]], ...)
  * %r = reduce_scatter_tensor(%d, avg, 2, shard)    %t: f32[24, 8] = joined(%dy, 2, shard)
    %ds: f32[25, 8] = wait_tensor(%r)                %ds: f32[25, 8] = a sum for each rank, added and divided

Sizes are fixed: every rank asks every rank for all of its rows, and picks those that are the other's own. So it pays
where all ranks' tokens together are fewer than the words of the vocabulary, about.

The forward has the same bits. On two ranks so has the gradient; on more, the ranks' rows are summed in the order of the
ranks, in the reduce dtype, and reduce-scatters of gloo and NCCL have orders of their own: equal up to rounding there.

A table that is used for anything else, such as a tied head that is not in pieces, is gathered as before; so is one that
is split over a tensor axis. Reduced as before are gradients that are added to those of earlier microbatches, and those
that are reduced over replicas, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch.fx import Graph, Node

from graphshard.cost.costs import Costs
from graphshard.errors import PassError
from graphshard.ir.graph import WAIT, aten, calls_of, emit, erase_dead, fake
from graphshard.ir.layout import Collective, collectives
from graphshard.ir.mesh import Axis
from graphshard.ir.operators import BEGINS, BEGUN, EXCHANGED, JOINED, SCATTERED
from graphshard.ir.params import ParamRow
from graphshard.ir.program import Program
from graphshard.ir.transport import OF_A_REDUCTION, ROWS_REDUCED, landing, reduced_over
from graphshard.passes.accumulate_gradients import full_gradient
from graphshard.passes.base import Pass

_INDEX_BYTES = 8
# Of what lies between a full gradient and its reduction, what changes numbers; the rest is about rows of other ranks.
ARITHMETIC = frozenset({aten._to_copy.default, aten.mul.Tensor, aten.div.Tensor})
_MOVES = frozenset({aten.constant_pad_nd.default, aten.clone.default})
# On so many ranks a sum has the same bits in either order.
_PAIR = 2


@dataclass(frozen=True)
class ExchangeRows(Pass):
    """Requires: a partitioned program without a plan.  Preserves: outputs; gradients up to rounding.

    Attributes:
        costs: of the machine; rows are exchanged where they say that it is cheaper, in forward and in backward. None
            exchanges them wherever it can be done.
    """

    name: ClassVar[str] = "exchange-rows"
    exact: ClassVar[bool] = False
    costs: Costs | None = None

    def requires(self, program: Program) -> None:
        begun = any(
            BEGUN not in node.meta
            for phase in program.phases.values()
            for start in BEGINS.values()
            for node in calls_of(phase, start)
        )
        if "joint" in program.phases or program.plan is not None or begun:
            raise PassError(f"{self.name}: insert this pass after 'partition' and before 'overlap-collectives'")

    def rewrite(self, program: Program) -> int:
        costs = replace(self.costs, mesh=program.mesh) if self.costs is not None else None
        count = 0
        for phase in program.phases.values():
            before = count
            for collective in collectives(phase):
                row = program.params[collective.params[0]]
                if collective.kind == "gather" and _fits(row):
                    count += _exchange_lookups(collective, _Table(row, row.on(program.mesh).shard, costs))
            for value, slot in zip(phase.results, phase.outputs):
                if slot.kind == "grad" and slot.of == "param" and isinstance(value, Node):
                    row = program.params[slot.name]
                    alone = _fits(row) and len(reduced_over(row, program)) == 1
                    count += alone and _exchange_gradient(value, _Table(row, row.on(program.mesh).shard, costs))
            if count > before:
                erase_dead(phase.module.graph)
        return count


def _fits(row: ParamRow) -> bool:
    """Whether shards are rows of the parameter as they are."""
    plain = row.extension is None and row.split is None and not row.order and not row.ignored
    return plain and row.num_shards > 1 and row.dim == 0 and len(row.shape) > 1


@dataclass(frozen=True)
class _Table:
    """A table of rows, the ranks that have them, and what decides."""

    row: ParamRow
    axis: Axis
    costs: Costs | None

    @property
    def length(self) -> int:
        """Rows on each rank, with those that are padding."""
        return self.row.shard_len

    def lookups_pay(self, tokens: int) -> bool:
        """Whether so many rows are exchanged sooner than the table is gathered."""
        if self.costs is None:
            return True
        item = self.row.compute_dtype.itemsize
        rows = self._rows(tokens) * item
        exchanged = self._sent("all_to_all", self.axis.size * tokens * _INDEX_BYTES)
        exchanged += self._sent("all_to_all", rows) + 2 * float(self.costs.copy(rows))
        return exchanged < self._sent("gather", math.prod(self.row.shape) * item)

    def gradient_pays(self, tokens: int) -> bool:
        """Whether so many rows of gradients are sent sooner than the table's gradient is reduced."""
        if self.costs is None:
            return True
        full = math.prod(self.row.shape)
        rows = self._rows(tokens) * self.row.compute_dtype.itemsize
        own = full / self.axis.size * self.row.reduce_dtype.itemsize
        sums = self.axis.size if self.axis.size == _PAIR else 1
        exchanged = self._sent("all_to_all", self.axis.size * tokens * _INDEX_BYTES) + self._sent("gather", rows)
        exchanged += float(self.costs.copy(rows)) + sums * float(self.costs.addition(own))
        reduced = self._sent("reduce", full * self.row.reduce_dtype.itemsize)
        return exchanged < reduced + float(self.costs.copy(full * self.row.compute_dtype.itemsize))

    def _rows(self, tokens: int) -> int:
        """Numbers in as many rows of each rank."""
        return self.axis.size * tokens * math.prod(self.row.shape[1:])

    def _sent(self, kind: str, num_bytes: float) -> float:
        assert self.costs is not None
        return float(self.costs.collective(kind, num_bytes, 1, self.axis))


class _Emitter:
    """Writes calls at the insertion point, as part of the module that another node belongs to."""

    def __init__(self, like: Node) -> None:
        self._like = like
        self._graph: Graph = like.graph

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return emit(self._graph, target, *args, like=self._like, **kwargs)


def _exchange_lookups(gather: Collective, table: _Table) -> int:
    """Replace the lookups in a gathered table; how many there were."""
    (whole,) = gather.waits
    for _ in landing(table.row):
        if len(whole.users) != 1:
            return 0
        (whole,) = whole.users
    lookups = list(whole.users)
    fixed = all(
        user.target is aten.embedding.default
        and user.args[0] is whole
        and all(isinstance(size, int) for size in fake(user).shape)
        for user in lookups
    )
    tokens = [fake(user.args[1]).numel() for user in lookups] if fixed else []  # type: ignore[arg-type]
    if not tokens or not all(tokens) or not table.lookups_pay(sum(tokens)):
        return 0
    shard = gather.node.all_input_nodes[0]
    for lookup in lookups:
        with lookup.graph.inserting_before(lookup):
            lookup.replace_all_uses_with(_looked_up(lookup, shard, table))
    return len(lookups)


def _looked_up(lookup: Node, shard: Node, table: _Table) -> Node:
    """The rows that a lookup reads, from the ranks that have them."""
    write, (ids, ranks) = _Emitter(lookup), (lookup.args[1], table.axis.size)
    flat = write(aten.view.default, ids, [-1]) if fake(ids).is_contiguous() else write(aten.reshape.default, ids, [-1])  # type: ignore[arg-type]
    tokens = fake(flat).numel()
    asked = write(aten.clamp.default, _asked(write, flat, table), 0, table.length - 1)
    rows = write(aten.embedding.default, shard, asked)
    sizes = [tokens] * ranks
    received = write(EXCHANGED, rows, sizes, sizes, table.axis.name)
    owner = write(aten.div.Tensor_mode, flat, table.length, rounding_mode="floor")
    if not table.row.is_even:  # a word that is none must not find what lies in the padding
        known = write(aten.lt.Scalar, flat, table.row.shape[0])
        owner = _or_else(write, owner, known, ranks)
    ones = write(aten.ones_like.default, owner)
    place = write(aten.sub.Tensor, write(aten.cumsum.default, ones, 0), 1)
    index = write(aten.add.Tensor, write(aten.mul.Tensor, owner, tokens), place)
    return write(aten.embedding.default, received, write(aten.view.default, index, list(fake(ids).shape)))  # type: ignore[arg-type]


def _or_else(write: _Emitter, numbers: Node, kept: Node, other: int) -> Node:
    """Integers where a mask says so, and another one elsewhere."""
    apart = write(aten.mul.Tensor, write(aten.sub.Tensor, numbers, other), kept)
    return write(aten.add.Tensor, apart, other)


def _asked(write: _Emitter, flat: Node, table: _Table) -> Node:
    """Which rows each rank wants, the ranks one behind another: their places in this rank's shard if they lie there."""
    ranks, tokens = table.axis.size, fake(flat).numel()
    ends = write(aten.cumsum.default, write(aten.new_full.default, flat, [ranks, 1], table.length), 0)
    starts = write(aten.sub.Tensor, ends, table.length)
    places = write(aten.view.default, write(aten.sub.Tensor, flat, starts), [ranks * tokens])
    return write(EXCHANGED, places, [tokens] * ranks, [tokens] * ranks, table.axis.name)


def _exchange_gradient(value: Node, table: _Table) -> bool:
    """Replace the reduction of a table's gradient, if it comes of lookups alone."""
    full = full_gradient(value)
    if full is None or full.target is not aten.embedding_dense_backward.default:
        return False
    gradient, ids, _, padding, by_frequency = full.args
    tokens = fake(ids).numel()  # type: ignore[arg-type]
    chain = until_reduced(full)
    if not chain or by_frequency or not isinstance(tokens, int) or not tokens or not table.gradient_pays(tokens):
        return False
    *steps, launch, wait = chain
    write = _Emitter(full)
    with full.graph.inserting_before(wait):
        flat = write(aten.reshape.default, ids, [-1])
        if padding >= 0:  # type: ignore[operator]
            other = write(aten.ne.Scalar, flat, padding)
            flat = _or_else(write, flat, other, -1)
        asked = _asked(write, flat, table)
        rows = write(aten.reshape.default, gradient, [tokens, *table.row.shape[1:]])
        every = write(JOINED, rows, table.axis.size, table.axis.name)
        total = _summed(write, every, asked, table, [node for node in steps if node.target in ARITHMETIC])
        if launch.args[1] == "avg":
            total = write(aten.div.Tensor, total, table.axis.size)
    total.meta.update({OF_A_REDUCTION: True, ROWS_REDUCED: table.axis.name})
    wait.replace_all_uses_with(total)
    for node in dict.fromkeys((wait, launch)):
        node.graph.erase_node(node)
    return True


def until_reduced(full: Node) -> list[Node]:
    """What lies between a gradient and its sum over ranks, with the launch and the wait; empty if it is not alone.

    Both are one node where `reduce-in-pieces` reduces it by itself.
    """
    chain = [full]
    while chain[-1].target not in (WAIT, SCATTERED):
        if len(chain[-1].users) != 1:
            return []
        chain += chain[-1].users
        if OF_A_REDUCTION not in chain[-1].meta:
            return []
    if chain[-1].target is SCATTERED:
        chain.append(chain[-1])
    return chain[1:] if all(node.target in ARITHMETIC | _MOVES for node in chain[1:-2]) else []


def _summed(write: _Emitter, rows: Node, asked: Node, table: _Table, steps: list[Node]) -> Node:
    """This rank's shard of the sum over ranks, from what all ranks have for their rows.

    Rows that lie elsewhere are added to one behind the shard's. On two ranks each rank's own are summed first, in the
    dtype that they have, as they are before a reduction.
    """
    ranks, length = table.axis.size, table.length
    tokens = fake(asked).numel() // ranks
    here = write(aten.logical_and.default, write(aten.ge.Scalar, asked, 0), write(aten.lt.Scalar, asked, length))
    places = _or_else(write, asked, here, length)

    def changed(value: Node, targets: frozenset[Any]) -> Node:
        for step in steps:
            if step.target in targets:
                value = write(step.target, value, *step.args[1:], **step.kwargs)
        return value

    def shard_of(some: Node, where: Node) -> Node:
        summed = write(aten.embedding_dense_backward.default, some, where, length + 1, length, False)
        return write(aten.slice.Tensor, summed, 0, 0, length)

    if ranks != _PAIR:
        wide = changed(rows, frozenset({aten._to_copy.default}))
        return changed(shard_of(wide, places), ARITHMETIC - {aten._to_copy.default})
    first, second = (
        changed(
            shard_of(
                *(write(aten.slice.Tensor, each, 0, rank * tokens, (rank + 1) * tokens) for each in (rows, places))
            ),
            ARITHMETIC,
        )
        for rank in range(ranks)
    )
    return write(aten.add.Tensor, first, second)
