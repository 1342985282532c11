"""Products of rows that the model's own collectives gather before them, or scatter behind them.

    %g = joined(%x, 2, tp)                      gathered along dim 0
    %y = mm(%g, %w)

    %g = joined(%x, 2, tp)                      gathered along dim 1, as sequences are
    %s = split(%g, 4)
    %c = cat([%s[0], %s[1]], 1)
    %y = mm(view(%c, [64, 8]), %w)

and the same from the end, with `scattered`. Each row of such a product is made of one row, so it may be cut in pieces.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from graphshard.ir.graph import aten, fake
from graphshard.ir.operators import JOINED, SCATTERED

# Products whose rows are made of the rows of one operand, and which of their arguments that is.
OPERAND: dict[Any, int] = {aten.mm.default: 0, aten.addmm.default: 1}
_RESHAPES = (aten.view.default, aten._unsafe_view.default)


@dataclass(frozen=True)
class RowProducts:
    """A collective of rows, and the products at it.

    Attributes:
        collective: `joined` or `scattered`.
        whole: what has the rows of all ranks in the model's order: what is gathered, or what is scattered.
        dim: along which the ranks' rows lie one behind another there, 0 or 1.
        length: of that dim on one rank.
        products: of the rows of `whole`, or the one that makes them.
    """

    collective: Node
    whole: Node
    dim: int
    length: int
    products: tuple[Node, ...]

    @property
    def is_gather(self) -> bool:
        """Whether the products are behind the collective."""
        return self.collective.target is JOINED

    @property
    def ranks(self) -> int:
        """How many there are along the axis."""
        return int(fake(self.whole).shape[self.dim]) // self.length

    @property
    def source(self) -> Node:
        """What this rank sends."""
        return _source(self.collective)


def row_products(node: Node) -> RowProducts | None:
    """What a collective of the model is at, if its sizes are fixed; None for any other node."""
    if node.target not in (JOINED, SCATTERED) or not all(isinstance(size, int) for size in fake(node).shape):
        return None
    return _gathered(node) if node.target is JOINED else _scattered(node)


def rows_of(product: Node) -> Node:
    """The operand of a product that has its rows."""
    rows = product.args[OPERAND[product.target]]
    assert isinstance(rows, Node)
    return rows


def _is_product(node: Node) -> bool:
    """Whether each row of a product depends on one row of an operand alone."""
    if node.target is aten.addmm.default:
        return node.args[0].meta["val"].dim() == 1 and not node.kwargs  # type: ignore[union-attr]
    return node.target is aten.mm.default


def _gathered(node: Node) -> RowProducts | None:
    """Rows that are gathered and multiplied."""
    joins = [_joined_along(user, node.args[1]) for user in node.users]
    wholes = [join for join in joins if join is not None]
    if len(wholes) == len(joins) == 1:
        ((whole, dim),) = wholes
    elif not wholes:
        whole, dim = node, 0
    else:
        return None
    users = [(user, rows) for rows in _as_rows(whole) for user in rows.users]
    products = tuple(
        user for user, rows in users if _is_product(user) and rows_of(user) is rows and not _needs(user, node, rows)
    )
    if not products:
        return None
    return RowProducts(node, whole, dim, int(fake(_source(node)).shape[dim]), products)


def _source(collective: Node) -> Node:
    """What a rank sends."""
    source = collective.args[0]
    assert isinstance(source, Node)
    return source


def _joined_along(split: Node, ranks: Any) -> tuple[Node, int] | None:
    """The ranks' parts of what was gathered, which are split and lie one behind another along the second dim."""
    if split.target is not aten.split.Tensor or (len(split.args) > 2 and split.args[2]):
        return None
    parts = sorted(split.users, key=lambda part: part.args[1])  # type: ignore[arg-type,return-value]
    ends = {user for part in parts for user in part.users}
    if not len(parts) == len(split.meta["val"]) == ranks or len(ends) != 1:
        return None
    (end,) = ends
    if end.target is not aten.cat.default or end.args[1:] != (1,) or list(end.args[0]) != parts:  # type: ignore[arg-type]
        return None
    return end, 1


def _as_rows(whole: Node) -> Iterator[Node]:
    """A value, and views of it, as a matrix with the same last dim."""
    shape = fake(whole).shape
    if len(shape) == 2:
        yield whole
    for user in whole.users:
        if user.target in _RESHAPES and fake(user).dim() == 2 and fake(user).shape[-1] == shape[-1]:
            yield user


def _needs(node: Node, source: Node, apart_from: Node) -> bool:
    """Whether a node needs another one otherwise than through one of its inputs."""
    left = [each for each in node.all_input_nodes if each is not apart_from]
    seen: set[Node] = set()
    while left:
        current = left.pop()
        if current is source:
            return True
        if current > source and current not in seen:
            seen.add(current)
            left += current.all_input_nodes
    return False


def _scattered(node: Node) -> RowProducts | None:
    """Rows of one product that are summed up and scattered."""
    whole, dim = _source(node), 0
    if whole.target is aten.cat.default and (found := _split_along(whole, node.args[2])) is not None:
        whole, dim = found, 1
    product = whole
    while product.target in _RESHAPES:
        product = product.all_input_nodes[0]
    rows = fake(whole).shape[:-1]
    fits = _is_product(product) and fake(product).shape == (rows.numel(), fake(whole).shape[-1])
    if not fits or _users_outside(product, node):
        return None
    return RowProducts(node, whole, dim, int(fake(node).shape[dim]), (product,))


def _split_along(cat: Node, ranks: Any) -> Node | None:
    """What was split along its second dim, whose parts now lie one behind another along the first."""
    parts = list(cat.args[0])  # type: ignore[arg-type]
    splits = [part.args[0] for part in parts if part.target is operator.getitem]
    sources = {split.args[0] for split in splits if split.target is aten.split.Tensor and split.args[2:] == (1,)}
    in_order = [part.args[1:] for part in parts] == [(index,) for index in range(len(parts))]
    if not len(splits) == len(parts) == ranks or len(sources) != 1 or not in_order or cat.args[1:] not in ((), (0,)):
        return None
    if any(len(split.meta["val"]) != len(parts) for split in splits):
        return None
    (source,) = sources
    return source if isinstance(source, Node) else None


def _users_outside(product: Node, end: Node) -> bool:
    """Whether what a product makes is used for anything but a collective."""
    moves = (*_RESHAPES, aten.split.Tensor, aten.cat.default, operator.getitem)
    left = list(product.users)
    while left:
        user = left.pop()
        if user is not end:
            if user.target not in moves:
                return True
            left += user.users
    return False
