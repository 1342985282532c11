"""What nodes of a foreign graph do besides making values: memory that they share and write, and effects that stay put.

    %v = view(%x)          shares the memory of %x
    %a = add_(%v, 1)       writes it: what reads %x or %v before stays before, and what reads it behind stays behind
    %p = print(...)        no collective crosses it
    %r = rand(...)         stays in its place among compute, which keeps its order

Two inputs may be the same memory. Fake tensors of one mode tell; where each has a mode of its own (`make_fx` of real
tensors), all inputs are taken for one memory.
"""

from __future__ import annotations

import builtins
import math
import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from graphshard.ir.graph import WAIT, aten, is_random, is_view
from graphshard.torch_compat.fake_tensors import FakeTensor
from graphshard.torch_compat.operators import HigherOrderOperator, OpOverload

# Shares its input's memory, though its schema does not say so.
_SHARES = frozenset({aten._unsafe_view.default, WAIT})
# Modules whose functions compute numbers, and those of them that do something else.
_NUMBERS = {module.__name__.lstrip("_") for module in (operator, math, builtins)}
_DOING = {"print", "setitem", "delitem", "setattr", "delattr", "exec", "eval", "open", "input"}
_IN_PLACE = {name for name in vars(operator) if name.startswith("i") and name[1:] in {*vars(operator), "concat"}}


def is_pure(node: Node) -> bool:
    """A call that makes a value and does nothing else, so that it may run elsewhere."""
    return node.op == "call_function" and not (is_barrier(node) or written(node) or is_random(node))


def written(node: Node) -> list[Node]:
    """The arguments that a call writes."""
    if not isinstance(node.target, OpOverload):
        return []
    found: list[Node] = []
    for argument, given in _arguments(node, node.target):
        if argument.alias_info is not None and argument.alias_info.is_write:
            torch.fx.map_arg(given, found.append)
    return found


def is_barrier(node: Node) -> bool:
    """A call whose effect is not known from its schema: a print, an assertion, a module or a method."""
    if node.op in ("call_module", "call_method"):
        return True
    if node.op != "call_function":
        return False
    target: Any = node.target
    if isinstance(target, OpOverload):
        effect = not target._schema.returns or node.is_impure(impure_random=False)
        return effect and not written(node)
    if isinstance(target, HigherOrderOperator):
        return node.is_impure(impure_random=False) or target.name() == "with_effects"
    name, module = str(getattr(target, "__name__", "")), str(getattr(target, "__module__", "")).lstrip("_")
    number = module in _NUMBERS and name not in _DOING | _IN_PLACE
    return not (number or name.startswith("sym_"))


class Memory:
    """Which values may share memory."""

    def __init__(self, graph: Graph) -> None:
        self._up: dict[Node, Node] = {}
        inputs = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
        tensors = [node for node in inputs if isinstance(node.meta.get("val"), torch.Tensor)]
        vals = [node.meta["val"] for node in tensors]
        modes = {id(val.fake_mode) for val in vals if isinstance(val, FakeTensor)}
        told = len(modes) == 1 and all(isinstance(val, FakeTensor) for val in vals)
        first: dict[Any, Node] = {}
        for node in inputs:
            val = node.meta.get("val")
            memory = val.untyped_storage()._cdata if told and isinstance(val, torch.Tensor) else None
            self._join(node, first.setdefault(memory, node))
        for node in graph.nodes:
            for source in shared(node):
                self._join(node, source)

    def of(self, node: Node) -> Node:
        """The same node for all values that may share memory."""
        while (up := self._up.get(node, node)) is not node:
            node = up
        return node

    def _join(self, one: Node, other: Node) -> None:
        one, other = self.of(one), self.of(other)
        if one is not other:
            self._up[one] = other


def shared(node: Node) -> list[Node]:
    """The inputs whose memory the results of a call may have."""
    if node.op in ("call_module", "call_method") or isinstance(node.target, HigherOrderOperator):
        return node.all_input_nodes
    if node.op != "call_function":
        return []
    if not isinstance(node.target, OpOverload) or node.target in _SHARES:
        return node.all_input_nodes
    if is_view(node) or written(node):
        found: list[Node] = []
        for argument, given in _arguments(node, node.target):
            if argument.alias_info is not None:
                torch.fx.map_arg(given, found.append)
        return found
    return []


def _arguments(node: Node, target: OpOverload) -> list[tuple[Any, Any]]:
    """The arguments of a call, with what the schema says of each."""
    found = []
    for index, argument in enumerate(target._schema.arguments):
        if argument.name in node.kwargs:
            found.append((argument, node.kwargs[argument.name]))
        elif index < len(node.args):
            found.append((argument, node.args[index]))
    return found
