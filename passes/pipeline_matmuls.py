"""Cut a matrix product together with the gather before it, or the reduce-scatter behind it, into pieces that overlap.

    %g: f32[8, 4] = joined(%x, 2, tp)           %g0: f32[4, 4] = joined(%x[:2], 2, tp)
    %y: f32[8, 6] = mm(%g, %w)                  %y0: f32[4, 6] = mm(%g0, %w)
                                                %g1: f32[4, 4] = joined(%x[2:], 2, tp)     beside mm(%g0, %w)
                                                %y1: f32[4, 6] = mm(%g1, %w)
                                                %y: f32[8, 6] = rows of %y0 and %y1, as they lie in %g

Known as asynchronous tensor parallelism: the model's own gathers and reduce-scatters of rows (`SequenceParallel`,
`ColwiseParallel`, `RowwiseParallel`) have a product on one side that needs all of them. Of pieces only the first or the
last has nothing beside it. `overlap-collectives` starts each piece while the one before it is multiplied.

A product of fewer rows may be computed by another kernel, so results are equal up to rounding. Rows are copied: those
of the product behind a gather, and what is multiplied before a reduce-scatter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from graphshard.cost.costs import Costs
from graphshard.cost.kernels import num_bytes
from graphshard.cost.model_collectives import model_collective
from graphshard.errors import PassError
from graphshard.ir.graph import aten, calls_of, emit, fake
from graphshard.ir.mesh import Mesh
from graphshard.ir.operators import BEGINS, BEGUN, JOINED, SCATTERED
from graphshard.ir.program import Program
from graphshard.ir.row_products import OPERAND, RowProducts, row_products, rows_of
from graphshard.passes.base import Pass

# Mark of a collective that is a piece already.
_PIECE = "piece of a product"


@dataclass(frozen=True)
class PipelineMatmuls(Pass):
    """Requires: a partitioned program without a plan.  Preserves: values up to rounding.

    Attributes:
        costs: of the machine; a product is cut where they say that it pays, into as many pieces as are cheapest. None
            cuts all that can be cut, into as many pieces as can be.
        pieces: how many there may be.
    """

    name: ClassVar[str] = "pipeline-matmuls"
    exact: ClassVar[bool] = False
    costs: Costs | None = None
    pieces: tuple[int, ...] = (2, 4, 8)

    def requires(self, program: Program) -> None:
        begun = any(
            BEGUN not in node.meta
            for phase in program.phases.values()
            for start in BEGINS.values()
            for node in calls_of(phase, start)
        )
        if "joint" in program.phases or program.plan is not None or begun:
            raise PassError(f"{self.name}: insert this pass after 'partition' and before 'overlap-collectives'")
        if not self.pieces or not all(isinstance(count, int) and count > 1 for count in self.pieces):
            raise PassError(f"{self.name}: pieces must be numbers from 2 on, got {self.pieces!r}")

    def rewrite(self, program: Program) -> int:
        cut = 0
        for phase in program.phases.values():
            for node in list(phase.module.graph.nodes):
                found = None if _PIECE in node.meta else row_products(node)
                if found is not None and (count := self._pieces(program, found)):
                    (_cut_gather if found.is_gather else _cut_scatter)(found, count)
                    cut += 1
        return cut

    def _pieces(self, program: Program, found: RowProducts) -> int:
        """Into how many pieces to cut; 0 if it does not pay."""
        counts = [count for count in self.pieces if found.length % count == 0]
        if self.costs is None or not counts:
            return max(counts, default=0)
        costs = replace(self.costs, mesh=program.mesh)
        seconds = {count: _seconds(costs, program.mesh, found, count) for count in (1, *counts)}
        best = min(seconds, key=lambda count: seconds[count])
        return best if best > 1 else 0


def _seconds(costs: Costs, mesh: Mesh, found: RowProducts, count: int) -> float:
    """Of the collective, the products, and copies of rows, in so many pieces."""
    whole = model_collective(found.collective)
    assert whole is not None
    sent = float(replace(whole, num_bytes=whole.num_bytes / count).seconds(costs, mesh.named(whole.axis)))
    multiplied = sum(_product_seconds(costs, product, count) for product in found.products)
    if count == 1:
        copied = costs.copy(whole.num_bytes) if found.dim else 0.0
    else:
        copied = sum(costs.copy(num_bytes(each if found.is_gather else rows_of(each))) for each in found.products)
    return sent + (count - 1) * max(sent, multiplied) + multiplied + float(copied)


def _product_seconds(costs: Costs, product: Node, count: int) -> float:
    """Of a product of one of so many parts of its rows."""
    graph = Graph()
    args = []
    for place, arg in enumerate(product.args):
        if isinstance(arg, Node):
            val = fake(arg)
            if place == OPERAND[product.target]:
                val = val.new_empty(val.shape[0] // count, val.shape[1])
            arg = graph.placeholder(f"x{place}")
            arg.meta["val"] = val
        args.append(arg)
    return float(costs.compute([emit(graph, product.target, *args)]))  # type: ignore[arg-type]


def _cut_gather(found: RowProducts, count: int) -> None:
    collective, graph = found.collective, found.collective.graph
    for product in found.products:
        for each in product.all_input_nodes:
            if each is not rows_of(product):
                _bring_before(each, collective)
    parts: list[Node] = []
    made: dict[Node, list[Node]] = {product: [] for product in found.products}
    size = found.length // count
    with graph.inserting_before(collective):
        for index in range(count):
            shard = _emit(found, aten.slice.Tensor, found.source, found.dim, index * size, (index + 1) * size)
            part = _emit(found, JOINED, _contiguous(found, shard), *collective.args[1:])
            part.meta[_PIECE] = True
            parts.append(part)
            width = fake(part).shape[-1]
            rows = _emit(found, aten.view.default, part, [fake(part).numel() // width, width])
            for product in found.products:
                made[product].append(_emit(found, product.target, *_with_rows(product, rows), like=product))
    for product, pieces in made.items():
        _replace(product, functools.partial(_whole_rows, found, pieces))
    if found.whole.users:
        _replace(found.whole, functools.partial(_whole_rows, found, parts))


def _whole_rows(found: RowProducts, pieces: Sequence[Node], like: Node) -> Node:
    """What pieces of the ranks' rows make in the order of the whole."""
    shape = list(fake(found.whole).shape)
    shape[found.dim] = found.length // len(pieces)
    width = fake(pieces[0]).shape[-1]
    apart = [_emit(found, aten.view.default, piece, [found.ranks, *shape[:-1], width]) for piece in pieces]
    if found.dim:
        apart = [_emit(found, aten.permute.default, piece, [1, 0, *range(2, len(shape) + 1)]) for piece in apart]
    whole = _emit(found, aten.cat.default, apart, found.dim + 1)
    return _emit(found, aten.view.default, whole, list(fake(like).shape))


def _cut_scatter(found: RowProducts, count: int) -> None:
    collective, graph = found.collective, found.collective.graph
    (product,) = found.products
    rows, size = rows_of(product), found.length // count
    *around, _ = fake(found.whole).shape
    width = fake(rows).shape[-1]
    apart = [*around[: found.dim], found.ranks, count, size, *around[found.dim + 1 :], width]
    sent = list(fake(found.source).shape)
    sent[found.dim] = size * (1 if found.dim else found.ranks)
    pieces = []
    with graph.inserting_before(collective):
        shown = _emit(found, aten.view.default, _contiguous(found, rows), apart)
        for index in range(count):
            own = _emit(found, aten.select.int, shown, found.dim + 1, index)
            if found.dim:
                own = _emit(found, aten.permute.default, own, [1, 0, *range(2, len(apart) - 1)])
            own = _contiguous(found, own)
            own = _emit(found, aten.view.default, own, [fake(own).numel() // width, width])
            part = _emit(found, product.target, *_with_rows(product, own), like=product)
            part = _emit(found, aten.view.default, part, sent)
            piece = _emit(found, SCATTERED, part, *collective.args[1:])
            piece.meta[_PIECE] = True
            pieces.append(piece)
    _replace(collective, lambda _: _emit(found, aten.cat.default, pieces, found.dim))


def _with_rows(product: Node, rows: Node) -> tuple[Any, ...]:
    """The arguments of a product with other rows."""
    args = list(product.args)
    args[OPERAND[product.target]] = rows
    return tuple(args)


def _contiguous(found: RowProducts, value: Node) -> Node:
    if fake(value).is_contiguous():
        return value
    return _emit(found, aten.clone.default, value, memory_format=torch.contiguous_format)


def _emit(found: RowProducts, target: Any, *args: Any, like: Node | None = None, **kwargs: Any) -> Node:
    return emit(found.collective.graph, target, *args, like=like or found.collective, **kwargs)


def _bring_before(node: Node, place: Node) -> None:
    """Move a node, and what it is made of, before another one that it does not need."""
    needed: dict[Node, None] = {}

    def collect(current: Node) -> None:
        if current > place and current not in needed:
            for source in current.all_input_nodes:
                collect(source)
            needed[current] = None

    collect(node)
    for each in needed:
        place.prepend(each)


def _replace(old: Node, make: Callable[[Node], Node]) -> None:
    """Use something else in the place of a node, and erase the node with what was made for it alone."""
    with old.graph.inserting_before(old):
        new = make(old)
    old.replace_all_uses_with(new)
    left = {old: None}
    while left:
        node, _ = left.popitem()
        if node.op == "call_function" and not node.users:
            left |= dict.fromkeys(node.all_input_nodes)
            node.graph.erase_node(node)
