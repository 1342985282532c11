"""Exchange the rows of a sharded embedding that are looked up, instead of gathering the table.

  * %g = all_gather_into_tensor(%s, 2, shard)        %a: i64[24] = all_to_all(%ids - [[0], [25]], ...)
    %w: f32[50, 8] = wait_tensor(%g)                 %r: f32[24, 8] = embedding(%s, clamp(%a, 0, 24))
    %y: f32[12, 8] = embedding(%w, %ids)             %o: f32[24, 8] = all_to_all(%r, ...)
                                                     %y: f32[12, 8] = embedding(%o, %ids // 25 * 12 + place)

Its gradient: each rank needs the rows that it owns.

    %d = embedding_dense_backward(%dy, %ids, 50)     %a: i64[24] = all_to_all(%ids - [[0], [25]], ...)
  * %r = reduce_scatter_tensor(%d, avg, 2, shard)    %t: f32[24, 8] = all_gather(%dy, 2, shard)
    %ds: f32[25, 8] = wait_tensor(%r)                %ds: f32[25, 8] = a sum for each rank, added and divided

Sizes are static: every rank asks every rank for all of its rows, and picks the rows that the other rank owns. So it
pays roughly where the tokens of all ranks are fewer than the words of the vocabulary.

The forward has the same bits. So has the gradient on two ranks; on more, rows are summed in the order of the ranks, in
the reduce dtype, while reduce-scatters of gloo and NCCL have their own orders: equal up to rounding.

The pass skips tables with other readers (such as a tied head that is not in chunks) and tables that are split over a
tensor axis. Gradients that are added to the ones of earlier microbatches, or reduced over replicas, too, are reduced as
before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor
from torch.fx import Node

from graphshard.cost.costs import Costs
from graphshard.ir.collective_regions import Collective
from graphshard.ir.graph import aten, erase_dead, fake, trace
from graphshard.ir.mesh import Axis
from graphshard.ir.operators import ALL_GATHER, ALL_TO_ALL
from graphshard.ir.param_table import ParamSpec
from graphshard.ir.program import Program
from graphshard.ir.transport import OF_A_REDUCTION, ROWS_REDUCED, reduced_over
from graphshard.passes.accumulate_gradients import ARITHMETIC, apply, full_gradient, until_reduced
from graphshard.passes.base import Pass, full_parameter, gathers_of, gradients_of

_INDEX_BYTES = 8
# The number of ranks on which a sum has the same bits in either order.
_PAIR = 2


@dataclass(frozen=True)
class EmbeddingRowExchange(Pass):
    """Requires: a partitioned program without a plan.  Preserves: outputs; gradients up to rounding.

    Attributes:
        costs: of the machine: exchange rows where that is cheaper, decided separately for forward and backward. None
            exchanges them wherever possible.
    """

    name: ClassVar[str] = "embedding-row-exchange"
    runs: ClassVar = "before overlap"
    exact: ClassVar[bool] = False
    costs: Costs | None = None

    def rewrite(self, program: Program) -> int:
        costs = replace(self.costs, mesh=program.mesh) if self.costs is not None else None
        count = 0
        for phase in program.phases.values():
            before = count
            for gather, spec in gathers_of(phase, program):
                if spec.has_plain_rows:
                    count += _exchange_lookups(gather, _Table(spec, spec.on(program.mesh).shard, costs))
            for value, spec in gradients_of(phase, program):
                if spec.has_plain_rows and len(reduced_over(spec, program)) == 1:
                    count += _exchange_gradient(value, _Table(spec, spec.on(program.mesh).shard, costs))
            if count > before:
                erase_dead(phase.module.graph)
        return count


@dataclass(frozen=True)
class _Table:
    """A table, the ranks that have its rows, and the costs that decide."""

    spec: ParamSpec
    axis: Axis
    costs: Costs | None

    @property
    def length(self) -> int:
        """Return the rows of each rank, padding included."""
        return self.spec.shard_len

    def lookups_pay(self, tokens: int) -> bool:
        """Return whether it is cheaper to exchange this number of rows than to gather the table."""
        if self.costs is None:
            return True
        item = self.spec.compute_dtype.itemsize
        rows = self._numel(tokens) * item
        exchanged = self._sent("all_to_all", self.axis.size * tokens * _INDEX_BYTES)
        exchanged += self._sent("all_to_all", rows) + 2 * float(self.costs.copy(rows))
        return exchanged < self._sent("gather", math.prod(self.spec.shape) * item)

    def gradient_pays(self, tokens: int) -> bool:
        """Return whether it is cheaper to send this number of gradient rows than to reduce the table's gradient."""
        if self.costs is None:
            return True
        full = math.prod(self.spec.shape)
        rows = self._numel(tokens) * self.spec.compute_dtype.itemsize
        own = full / self.axis.size * self.spec.reduce_dtype.itemsize
        sums = self.axis.size if self.axis.size == _PAIR else 1
        exchanged = self._sent("all_to_all", self.axis.size * tokens * _INDEX_BYTES) + self._sent("gather", rows)
        exchanged += float(self.costs.copy(rows)) + sums * float(self.costs.addition(own))
        reduced = self._sent("reduce", full * self.spec.reduce_dtype.itemsize)
        return exchanged < reduced + float(self.costs.copy(full * self.spec.compute_dtype.itemsize))

    def _numel(self, tokens: int) -> int:
        return self.axis.size * tokens * math.prod(self.spec.shape[1:])

    def _sent(self, kind: str, num_bytes: float) -> float:
        assert self.costs is not None
        return float(self.costs.collective(kind, num_bytes, 1, self.axis))


def _exchange_lookups(gather: Collective, table: _Table) -> int:
    """Replace the lookups in a gathered table; return how many there were."""
    whole = full_parameter(gather, table.spec)
    lookups = list(whole.users) if whole is not None else []
    static = all(
        user.target is aten.embedding.default
        and user.args[0] is whole
        and all(isinstance(size, int) for size in fake(user).shape)
        for user in lookups
    )
    tokens = [fake(user.args[1]).numel() for user in lookups] if static else []  # type: ignore[arg-type]
    if not tokens or not all(tokens) or not table.lookups_pay(sum(tokens)):
        return 0
    for lookup in lookups:
        rows = trace(lookup, partial(_look_up, table), gather.node.all_input_nodes[0], lookup.args[1])
        lookup.replace_all_uses_with(rows)
    return len(lookups)


def _look_up(table: _Table, shard: Tensor, ids: Tensor) -> Tensor:
    """Exchange the rows that a lookup reads."""
    flat, ranks = ids.reshape(-1), table.axis.size
    sizes = [len(flat)] * ranks
    asked = _asked(table, flat).clamp(0, table.length - 1)
    received = ALL_TO_ALL(aten.embedding.default(shard, asked), sizes, sizes, table.axis.name)
    owner = flat.div(table.length, rounding_mode="floor")
    if not table.spec.is_even:  # an id out of range must not find padding
        owner = _or_else(owner, flat < table.spec.shape[0], ranks)
    place = aten.ones_like.default(owner).cumsum(0) - 1
    return aten.embedding.default(received, (owner * len(flat) + place).view(ids.shape))


def _or_else(numbers: Tensor, kept: Tensor, other: int) -> Tensor:
    """Return integers where a mask holds, and `other` elsewhere."""
    return (numbers - other) * kept + other


def _asked(table: _Table, flat: Tensor) -> Tensor:
    """Return the rows that each rank wants, rank after rank, as positions in this rank's shard; others are outside."""
    starts = aten.new_full.default(flat, [table.axis.size, 1], table.length).cumsum(0) - table.length
    sizes = [len(flat)] * table.axis.size
    return ALL_TO_ALL((flat - starts).view(-1), sizes, sizes, table.axis.name)


def _exchange_gradient(value: Node, table: _Table) -> bool:
    """Replace the reduction of a table's gradient, if it comes from lookups alone."""
    full = full_gradient(value)
    if full is None or full.target is not aten.embedding_dense_backward.default:
        return False
    args: Any = full.args
    gradient, ids, _, padding, by_frequency = args
    tokens = fake(ids).numel()
    chain = until_reduced(full)
    if not chain or by_frequency or not isinstance(tokens, int) or not tokens or not table.gradient_pays(tokens):
        return False
    *steps, launch, wait = chain
    total = trace(wait, partial(_sum_rows, table, steps, launch.args[1] == "avg", padding), gradient, ids, like=full)
    total.meta.update({OF_A_REDUCTION: True, ROWS_REDUCED: table.axis.name})
    wait.replace_all_uses_with(total)
    for node in dict.fromkeys((wait, launch)):
        node.graph.erase_node(node)
    return True


def _sum_rows(
    table: _Table, steps: Sequence[Node], average: bool, padding: int, gradient: Tensor, ids: Tensor
) -> Tensor:
    """Return this rank's shard of the sum over ranks of gradient rows.

    Rows of other ranks are added to an extra row at the end. On two ranks each rank's rows are summed first, in their
    own dtype, as they are before a reduction.
    """
    flat, ranks, length = ids.reshape(-1), table.axis.size, table.length
    if padding >= 0:
        flat = _or_else(flat, flat != padding, -1)
    asked = _asked(table, flat)
    rows = ALL_GATHER(gradient.reshape([len(flat), *table.spec.shape[1:]]), ranks, table.axis.name)
    places = _or_else(asked, (asked >= 0).logical_and(asked < length), length)

    def shard_of(some: Tensor, where: Tensor) -> Tensor:
        return aten.embedding_dense_backward.default(some, where, length + 1, length, False)[:length]

    if ranks == _PAIR:
        ends = ((0, len(flat)), (len(flat), len(rows)))
        first, second = (apply(steps, shard_of(rows[at:end], places[at:end])) for at, end in ends)
        total = first + second
    else:
        casts = frozenset({aten._to_copy.default})
        total = apply(steps, shard_of(apply(steps, rows, casts), places), ARITHMETIC - casts)
    return total / ranks if average else total
