"""Values that traced code reads, where they depend on no input.

A trace knows shapes, not values, so `bool(tensor)` fails in it. Some values are the same at every call:

    positions = torch.arange(x.shape[1])                     transformers, of sequences that may be packed
    if (positions.diff() != 1).any(): ...

Such a value is computed at once, from the nodes that were traced so far, and read. Only integers and truth values are:
they are exact on any device.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from graphshard.ir.torch_internals import traced_node, without_tracing

# Code decides by them; numbers that are only computed with can be traced.
_DECIDERS = {
    Tensor.__bool__,
    Tensor.__contains__,
    Tensor.__index__,
    Tensor.equal,
    Tensor.is_nonzero,
    torch.equal,
    torch.is_nonzero,
}
_READERS = {*_DECIDERS, Tensor.__float__, Tensor.__int__, Tensor.item}


class UnknownValueError(Exception):
    """Code that is traced decides by a value that depends on an input."""


class KnownValues(TorchFunctionMode):
    """Lets code that is traced read the values of tensors that depend on no input.

    Args:
        strict: raise UnknownValueError where code decides by another value, before torch prints what it has traced.
    """

    def __init__(self, *, strict: bool) -> None:
        super().__init__()
        self.strict = strict

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in _READERS:
            nodes = [traced_node(arg) for arg in args if isinstance(arg, Tensor)]
            if all(node is not None and _is_known(node) for node in nodes):
                values = [_value(arg) if isinstance(arg, Tensor) else arg for arg in args]
                with without_tracing():
                    return func(*values, **(kwargs or {}))
            if self.strict and func in _DECIDERS and any(nodes):
                raise UnknownValueError(func.__name__)
        return func(*args, **(kwargs or {}))


def _is_known(node: Node) -> bool:
    """Made from no input, by exact operators, in memory that nothing writes to."""
    needed = _needed([node])
    return all(map(_is_exact, needed)) and not any(_needed(_written(n)) & needed for n in node.graph.nodes)


def _needed(nodes: Iterable[Node]) -> set[Node]:
    """Some nodes, and all that they are computed from."""
    needed: set[Node] = set()
    todo = list(nodes)
    while todo:
        if (node := todo.pop()) not in needed:
            needed.add(node)
            todo += node.all_input_nodes
    return needed


def _is_exact(node: Node) -> bool:
    """A deterministic operator on integers and truth values, or one of its results."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return node.target is operator.getitem
    made = pytree.tree_leaves(node.meta["val"])
    inexact = any(isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()) for v in made)
    return not inexact and torch.Tag.nondeterministic_seeded not in node.target.tags


def _written(node: Node) -> list[Node]:
    """Values that an operator writes to."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return []
    given = {**dict(zip((a.name for a in node.target._schema.arguments), node.args)), **node.kwargs}
    written = [given.get(a.name) for a in node.target._schema.arguments if a.alias_info and a.alias_info.is_write]
    return [leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, Node)]


def _value(tensor: Tensor) -> Tensor:
    """Compute what a traced tensor will be, on the CPU."""
    node = traced_node(tensor)
    assert node is not None
    needed = _needed([node])
    values: dict[Node, Any] = {}
    with without_tracing():
        for each in node.graph.nodes:
            if each in needed:
                arguments = map_arg((each.args, each.kwargs), values.__getitem__)
                args, kwargs = pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), arguments)
                assert callable(each.target)
                values[each] = each.target(*args, **kwargs)
    return values[node]
