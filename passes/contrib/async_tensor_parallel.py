"""Cut a matrix product, and the all-gather before it or the reduce-scatter after it, into chunks that overlap.

    %g: f32[8, 4] = all_gather(%x, 2, tp)       %g0: f32[4, 4] = all_gather(%x[:2], 2, tp)
    %y: f32[8, 6] = mm(%g, %w)                  %y0: f32[4, 6] = mm(%g0, %w)
                                                %g1: f32[4, 4] = all_gather(%x[2:], 2, tp)   overlaps mm(%g0, %w)
                                                %y1: f32[4, 6] = mm(%g1, %w)
                                                %y: f32[8, 6] = rows of %y0 and %y1, in the order of %g

In sequence and tensor parallelism (`SequenceParallel`, `ColwiseParallel`, `RowwiseParallel`) the model gathers or
reduce-scatters rows, and one product needs all of them. Only the first or the last chunk is exposed:
`overlap-model-collectives` starts each chunk while the one before it is multiplied.

Rows may lie along dim 0, or along dim 1, as sequences do; then the ranks' parts are split and concatenated:

    %g = all_gather(%x, 2, tp)
    %s = split(%g, 4)
    %c = cat([%s[0], %s[1]], 1)
    %y = mm(view(%c, [64, 8]), %w)

A product of fewer rows may run another kernel, so results are equal up to rounding. Rows are copied: rows of the
product after a gather, and rows of the operand before a reduce-scatter.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, Node

from graphshard.cost.costs import Costs, model_collective
from graphshard.cost.kernels import num_bytes
from graphshard.errors import PassError
from graphshard.ir.graph import aten, emit, fake, trace
from graphshard.ir.mesh import Mesh
from graphshard.ir.operators import ALL_GATHER, REDUCE_SCATTER
from graphshard.ir.program import Program
from graphshard.passes.base import Pass, ancestors

# Products whose rows are made of the rows of one operand, and the position of that operand.
_OPERAND: dict[Any, int] = {aten.mm.default: 0, aten.addmm.default: 1}
_RESHAPES = (aten.view.default, aten._unsafe_view.default)
_MOVES = (*_RESHAPES, aten.split.Tensor, aten.cat.default, operator.getitem)
# Mark of a collective that is a chunk already.
_CHUNK = "chunk of a product"


@dataclass(frozen=True)
class AsyncTensorParallel(Pass):
    """Requires: a partitioned program without a plan.  Preserves: values up to rounding.

    Attributes:
        costs: of the machine: cut a product if that pays, into the cheapest number of chunks. None cuts every product
            into the largest possible number of chunks.
        pieces: allowed numbers of chunks.
    """

    name: ClassVar[str] = "async-tensor-parallel"
    runs: ClassVar = "before overlap"
    exact: ClassVar[bool] = False
    costs: Costs | None = None
    pieces: tuple[int, ...] = (2, 4, 8)

    def requires(self, program: Program) -> None:
        super().requires(program)
        if not self.pieces or not all(isinstance(count, int) and count > 1 for count in self.pieces):
            raise PassError(f"{self.name}: pieces must be numbers from 2 on, got {self.pieces!r}")

    def rewrite(self, program: Program) -> int:
        cut = 0
        for phase in program.phases.values():
            for node in list(phase.module.graph.nodes):
                found = None if _CHUNK in node.meta else _row_products(node)
                if found is not None and (count := self._num_chunks(program, found)):
                    (_cut_gather if found.is_gather else _cut_reduce_scatter)(found, count)
                    cut += 1
        return cut

    def _num_chunks(self, program: Program, found: _RowProducts) -> int:
        """Return into how many chunks to cut; 0 if it does not pay."""
        counts = [count for count in self.pieces if found.length % count == 0]
        if self.costs is None or not counts:
            return max(counts, default=0)
        costs = replace(self.costs, mesh=program.mesh)
        seconds = {count: _seconds(costs, program.mesh, found, count) for count in (1, *counts)}
        best = min(seconds, key=lambda count: seconds[count])
        return best if best > 1 else 0


@dataclass(frozen=True)
class _RowProducts:
    """A collective of the model that gathers or reduce-scatters rows, and the products that read or make them.

    Attributes:
        collective: `all_gather` or `reduce_scatter`.
        whole: the tensor with the rows of all ranks in the model's order: gathered, or to be scattered.
        dim: along which the ranks' rows follow each other in `whole`, 0 or 1.
        products: of the rows of `whole`, or the one that makes them.
    """

    collective: Node
    whole: Node
    dim: int
    products: tuple[Node, ...]

    @property
    def is_gather(self) -> bool:
        """Return whether the products follow the collective."""
        return self.collective.target is ALL_GATHER

    @property
    def length(self) -> int:
        """Return the size of `dim` on one rank."""
        own = self.collective.all_input_nodes[0] if self.is_gather else self.collective
        return int(fake(own).shape[self.dim])

    @property
    def ranks(self) -> int:
        """Return the number of ranks along the axis."""
        return int(fake(self.whole).shape[self.dim]) // self.length


def _row_products(node: Node) -> _RowProducts | None:
    """Match a collective of static sizes with its products; None for any other node."""
    if node.target not in (ALL_GATHER, REDUCE_SCATTER) or not all(isinstance(size, int) for size in fake(node).shape):
        return None
    return _after_gather(node) if node.target is ALL_GATHER else _before_reduce_scatter(node)


def _rows_of(product: Node) -> Node:
    """Return the operand that has the rows of a product."""
    rows = product.args[_OPERAND[product.target]]
    assert isinstance(rows, Node)
    return rows


def _is_product(node: Node) -> bool:
    """Return whether each row of a product depends on one row of one operand alone."""
    if node.target is aten.addmm.default:
        return fake(node.all_input_nodes[0]).dim() == 1 and not node.kwargs
    return node.target is aten.mm.default


def _after_gather(node: Node) -> _RowProducts | None:
    wholes = [whole for user in node.users if (whole := _joined_along_dim_1(user, node.args[1])) is not None]
    if wholes and len(node.users) > 1:
        return None
    whole, dim = (wholes[0], 1) if wholes else (node, 0)
    users = [(user, rows) for rows in _as_rows(whole) for user in rows.users]
    products = tuple(
        user
        for user, rows in users
        if _is_product(user)
        and _rows_of(user) is rows
        # Nothing else of the product depends on the collective.
        and node not in ancestors(*set(user.all_input_nodes) - {rows}, within=lambda source: source >= node)
    )
    return _RowProducts(node, whole, dim, products) if products else None


def _joined_along_dim_1(split: Node, ranks: Any) -> Node | None:
    """Return the concatenation along dim 1 of the ranks' parts of a gathered tensor."""
    if split.target is not aten.split.Tensor or (len(split.args) > 2 and split.args[2]):
        return None
    parts = sorted(split.users, key=lambda part: part.args[1])  # type: ignore[arg-type,return-value]
    ends = {user for part in parts for user in part.users}
    if not len(parts) == len(split.meta["val"]) == ranks or len(ends) != 1:
        return None
    (end,) = ends
    joined = end.target is aten.cat.default and end.args[1:] == (1,) and list(end.args[0]) == parts  # type: ignore[arg-type]
    return end if joined else None


def _as_rows(whole: Node) -> Iterator[Node]:
    """Yield a value, and views of it, as matrices with the same last dim."""
    shape = fake(whole).shape
    if len(shape) == 2:
        yield whole
    for user in whole.users:
        if user.target in _RESHAPES and fake(user).dim() == 2 and fake(user).shape[-1] == shape[-1]:
            yield user


def _before_reduce_scatter(node: Node) -> _RowProducts | None:
    whole, dim = node.all_input_nodes[0], 0
    if whole.target is aten.cat.default and (found := _split_along_dim_1(whole, node.args[2])) is not None:
        whole, dim = found, 1
    product = whole
    while product.target in _RESHAPES:
        product = product.all_input_nodes[0]
    rows = fake(whole).shape[:-1]
    fits = _is_product(product) and fake(product).shape == (rows.numel(), fake(whole).shape[-1])
    return _RowProducts(node, whole, dim, (product,)) if fits and not _has_other_users(product, node) else None


def _split_along_dim_1(cat: Node, ranks: Any) -> Node | None:
    """Return the tensor that was split along dim 1 into the parts that are concatenated along dim 0."""
    parts: Any = cat.args[0]
    splits = [part.args[0] for part in parts if part.target is operator.getitem]
    sources = {split.args[0] for split in splits if split.target is aten.split.Tensor and split.args[2:] == (1,)}
    in_order = [part.args[1:] for part in parts] == [(index,) for index in range(len(parts))]
    if not len(splits) == len(parts) == ranks or len(sources) != 1 or not in_order or cat.args[1:] not in ((), (0,)):
        return None
    if any(len(split.meta["val"]) != len(parts) for split in splits):
        return None
    (source,) = sources
    return source if isinstance(source, Node) else None


def _has_other_users(product: Node, end: Node) -> bool:
    """Return whether a product is read by anything else than a collective, through moves."""
    left = list(product.users)
    while left:
        user = left.pop()
        if user is not end:
            if user.target not in _MOVES:
                return True
            left += user.users
    return False


def _seconds(costs: Costs, mesh: Mesh, found: _RowProducts, count: int) -> float:
    """Predict the collective, the products, and the copies of rows, in `count` chunks."""
    whole = model_collective(found.collective)
    assert whole is not None
    sent = float(replace(whole, num_bytes=whole.num_bytes / count).seconds(costs, mesh.named(whole.axis)))
    multiplied = sum(_product_seconds(costs, product, count) for product in found.products)
    if count == 1:
        copied = costs.copy(whole.num_bytes) if found.dim else 0.0
    else:
        copied = sum(costs.copy(num_bytes(each if found.is_gather else _rows_of(each))) for each in found.products)
    return sent + (count - 1) * max(sent, multiplied) + multiplied + float(copied)


def _product_seconds(costs: Costs, product: Node, count: int) -> float:
    """Predict a product of one `count`-th of its rows."""
    graph = Graph()
    args = []
    for place, arg in enumerate(product.args):
        if isinstance(arg, Node):
            val = fake(arg)
            if place == _OPERAND[product.target]:
                val = val.new_empty(val.shape[0] // count, val.shape[1])
            arg = graph.placeholder(f"x{place}")
            arg.meta["val"] = val
        args.append(arg)
    return float(costs.compute([emit(graph, product.target, *args)]))  # type: ignore[arg-type]


def _cut_gather(found: _RowProducts, count: int) -> None:
    collective, size = found.collective, found.length // count
    for product in found.products:
        for each in product.all_input_nodes:
            if each is not _rows_of(product):
                _move_before(each, collective)
    parts: list[Node] = []
    made: dict[Node, list[Node]] = {product: [] for product in found.products}

    def gathered(value: Tensor, at: int) -> tuple[Tensor, Tensor]:
        shard = aten.contiguous.default(aten.slice.Tensor(value, found.dim, at, at + size))
        part = ALL_GATHER(shard, *collective.args[1:])
        return part, part.view([part.numel() // part.shape[-1], part.shape[-1]])

    for index in range(count):
        part, rows = trace(collective, gathered, collective.all_input_nodes[0], index * size)
        part.meta[_CHUNK] = True
        parts.append(part)
        for product in found.products:
            made[product].append(_product_of(product, rows, collective))
    for product, chunks in made.items():
        _replace(product, trace(product, partial(_whole_rows, found, fake(product).shape), chunks, like=collective))
    if found.whole.users:
        whole = trace(found.whole, partial(_whole_rows, found, fake(found.whole).shape), parts, like=collective)
        _replace(found.whole, whole)


def _whole_rows(found: _RowProducts, whole: Sequence[int], chunks: list[Tensor]) -> Tensor:
    """Put the rows of chunks into the order of the whole, in a shape."""
    shape = list(fake(found.whole).shape)
    shape[found.dim] = found.length // len(chunks)
    by_rank = [chunk.view([found.ranks, *shape[:-1], chunk.shape[-1]]) for chunk in chunks]
    if found.dim:
        by_rank = [chunk.permute([1, 0, *range(2, len(shape) + 1)]) for chunk in by_rank]
    return torch.cat(by_rank, found.dim + 1).view(whole)


def _cut_reduce_scatter(found: _RowProducts, count: int) -> None:
    collective, (product,) = found.collective, found.products
    size = found.length // count
    *around, _ = fake(found.whole).shape
    width = fake(_rows_of(product)).shape[-1]
    by_rank = [*around[: found.dim], found.ranks, count, size, *around[found.dim + 1 :], width]
    sent = list(fake(collective.all_input_nodes[0]).shape)
    sent[found.dim] = size * (1 if found.dim else found.ranks)

    def rows_of_chunk(view: Tensor, index: int) -> Tensor:
        own = view.select(found.dim + 1, index)
        if found.dim:
            own = own.permute([1, 0, *range(2, len(by_rank) - 1)])
        return aten.contiguous.default(own).view([own.numel() // width, width])

    def reduced(part: Tensor) -> Tensor:
        return REDUCE_SCATTER(part.view(sent), *collective.args[1:])

    chunks = []
    view = trace(collective, lambda rows: aten.contiguous.default(rows).view(by_rank), _rows_of(product))
    for index in range(count):
        part = _product_of(product, trace(collective, rows_of_chunk, view, index), collective)
        chunks.append(trace(collective, reduced, part))
        chunks[-1].meta[_CHUNK] = True
    _replace(collective, trace(collective, lambda *parts: torch.cat(parts, found.dim), *chunks))


def _product_of(product: Node, rows: Node, before: Node) -> Node:
    """Insert the same product of other rows."""
    args: list[Any] = list(product.args)
    args[_OPERAND[product.target]] = rows
    with before.graph.inserting_before(before):
        return emit(product.graph, product.target, *args, like=product)  # type: ignore[arg-type]


def _move_before(node: Node, place: Node) -> None:
    """Move a node, and its sources, before another node that it does not depend on."""
    needed: dict[Node, None] = {}

    def collect(current: Node) -> None:
        if current > place and current not in needed:
            for source in current.all_input_nodes:
                collect(source)
            needed[current] = None

    collect(node)
    for each in needed:
        place.prepend(each)


def _replace(old: Node, new: Node) -> None:
    """Replace a node, and erase it with its sources that have no other users."""
    old.replace_all_uses_with(new)
    left = {old: None}
    while left:
        node, _ = left.popitem()
        if node.op == "call_function" and not node.users:
            left |= dict.fromkeys(node.all_input_nodes)
            node.graph.erase_node(node)
