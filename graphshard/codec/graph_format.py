"""Graphs as JSON, node by node, the values of nodes, and dynamic sizes. `program_format.py` shows a whole program.

    None, bools, numbers, strings, lists     themselves
    {"node": "mm"}                           value of another node
    {"tuple": [1, 2]}  {"slice": [0, 4, 1]}  {"complex": [0.0, 1.0]}  {"float": "-inf"}
    {"dtype": "float32"}  {"device": "cuda:0"}  {"layout": "strided"}  {"memory_format": "contiguous_format"}
    {"operator": "aten.bernoulli.p"}
    {"tensor": ["float32", [4, 4], [4, 1], "cpu"]}    fake tensor: dtype, shape, stride, device; no values
    {"size": "s0*s1"}                        dynamic size, by the program's names of symbols
    {"dict": {"BACKEND": "AUTO"}}            with strings as keys
    {"graph": [...]}                         graph that a higher-order operator is given
    {"unsupported": "Generator"}             anything else: written, so that a dump never fails, but not read

Reading looks names up in tables: it imports and evaluates nothing. Of each symbol in sizes is known:

    {"s0": {"hint": 128, "range": [2, null]}}    value in the example inputs; least and largest, null if open
    {"s1": {"hint": -3, "range": [null, null]}, "s2": {"hint": 0.1, "range": null}}    numbers that are not sizes

A symbol that depends on values of tensors has no hint. Conditions beyond ranges, such as "Eq(Mod(s0*s1, 8), 0)", are
stored with lowered programs only.
"""

from __future__ import annotations

import ast
import functools
import json
import keyword
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from graphshard.errors import ArgumentError
from graphshard.ir.printer import print_graph
from graphshard.ir.sizes import SymNumber, numbers_in, rename
from graphshard.ir.subgraph import HIGHER_ORDER, Subgraph, subgraph_of
from graphshard.ir.triton_launches import LAUNCHES, kwargs_of, numbered
from graphshard.torch_compat.aot_autograd import CheckpointPolicy, run_and_save_rng_state, run_with_rng_state
from graphshard.torch_compat.fake_tensors import fake_tensor, new_fake_mode
from graphshard.torch_compat.symbolic_sizes import (
    hint,
    is_unknown,
    new_number,
    new_size,
    new_unknown_float,
    new_unknown_size,
)
from graphshard.torch_compat.torch_ops import OpOverload, dispatcher_operators
from graphshard.utils.json_dataclasses import typed

_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
# Operators by which graphs compute sizes.
SIZE_OPERATORS: tuple[Callable[..., Any], ...] = (
    *_OPERATORS.values(),
    *(operator.truediv, operator.neg, operator.eq, operator.ne, torch.sym_max, torch.sym_min),
)
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Max": torch.sym_max,
    "Min": torch.sym_min,
    "FloatTrueDiv": operator.truediv,
    "IntTrueDiv": operator.truediv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Eq": operator.eq,
    "Ne": operator.ne,
}


def encode_symbols(sizes: Iterable[tuple[str, SymNumber]], graphs: Iterable[Graph]) -> dict[str, Any]:
    """Return what is known of symbols by name: of dynamic sizes, and of those in graphs that depend on values."""
    found: dict[str, Any] = {}
    for name, size in sizes:
        if isinstance(size, torch.SymFloat):
            found[name] = {"hint": float(size.node.hint), "range": None}
        else:
            assert isinstance(size, torch.SymInt)
            found[name] = {"hint": hint(size), "range": _ends(size.node.shape_env.bound_sympy(size.node.expr))}
    numbers = [n for graph in graphs for node in graph.nodes for n in numbers_in(node.meta.get("val")) if is_unknown(n)]
    unknown = {symbol: n.node.shape_env for n in numbers for symbol in n.node.expr.free_symbols}
    for symbol, env in sorted(unknown.items(), key=str):
        found[str(symbol)] = {"hint": None, "range": _ends(env.var_to_range[symbol]) if symbol.is_integer else None}
    return found


def _ends(known: Any) -> list[int | None]:
    return [int(end) if end.is_Integer else None for end in (known.lower, known.upper)]


def decode_symbols(data: Mapping[str, Any], mode: Any) -> dict[str, SymNumber]:
    """Inverse of `encode_symbols`: sizes of a fake mode."""
    found: dict[str, SymNumber] = {}
    for name, item in data.items():
        ends = item["range"] or ()
        numbers = [number for number in (item["hint"], *ends) if number is not None]
        is_number = item["hint"] is not None and (not ends or ends[0] is None or ends[0] < 0)
        sized = all(type(n) is int and (n >= 0 or is_number) for n in numbers)
        if not name.isidentifier() or not (sized or (is_number and not ends and type(item["hint"]) is float)):
            raise ArgumentError(f"{name!r}: {item} is no size")
        if is_number:
            found[name] = new_number(mode, name, item["hint"])
        elif item["hint"] is not None:
            found[name] = new_size(mode, name, item["hint"], *ends)
        else:
            found[name] = new_unknown_size(mode, *ends) if ends else new_unknown_float(mode)
    return found


def parse_size(text: str, sizes: Mapping[str, Any]) -> Any:
    """Return the value of an expression or comparison of sizes; raise ArgumentError for more than arithmetic."""

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.Name(id=name) if name in sizes:
                return sizes[name]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]) if (
                type(op) in _OPERATORS
            ):
                return _OPERATORS[type(op)](value(left), value(right))
            case ast.Call(func=ast.Name(id=name), args=[first, second], keywords=[]) if name in _FUNCTIONS:
                return _FUNCTIONS[name](value(first), value(second))
        raise ArgumentError(f"{text[:60]!r} is no size")

    try:
        return value(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError):
        raise ArgumentError(f"{text[:60]!r} is no size") from None


# Targets of calls that are not operators of the dispatcher.
_TARGETS: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "run_and_save_rng_state": run_and_save_rng_state,
    "run_with_rng_state": run_with_rng_state,
    **{f"higher_order.{name}": operator for name, operator in HIGHER_ORDER.items()},
    **{f"higher_order.{operator}": operator for operator in LAUNCHES},
    **{f"size.{function.__name__}": function for function in SIZE_OPERATORS},
}
_NAMES = {target: name for name, target in _TARGETS.items()}
_THEMSELVES = frozenset({type(None), bool, int, str})
# Types whose values are attributes of torch, such as torch.float32 and torch.strided.
_TAGS: dict[type, str] = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}
_STACKS = {"modules": "nn_module_stack", "fwd_modules": "fwd_nn_module_stack"}
# Marks of `node.meta` that are kept. Dropped are paths on the machine of the capture and numbers of its process.
_MARKS = frozenset({bool, int, float, str, CheckpointPolicy})
_NOT_MARKS = frozenset({"stack_trace", "seq_nr", "val", *_STACKS.values()})


@functools.cache
def short_name(value: object) -> str:
    """Return the name of a dtype, layout or memory format within torch: "float32"."""
    return str(value).removeprefix("torch.")


_NAMED: dict[str, dict[str, Any]] = {
    tag: {short_name(value): value for value in vars(torch).values() if isinstance(value, kind)}
    for kind, tag in _TAGS.items()
}


# --- writing -----------------------------------------------------------------------------------------------------


def encode_graph(graph: Graph, names: Mapping[Any, str] = MappingProxyType({})) -> list[dict[str, Any]]:
    """Return the nodes of a graph as JSON; `names` has the names of its dynamic sizes, by symbol."""
    known: dict[tuple[str, ...], str] = {}  # the first node of each stack of modules, by which others refer to it
    found = []
    for node in graph.nodes:
        data: dict[str, Any] = {
            "name": node.name,
            "op": node.op,
            "target": node.target if isinstance(node.target, str) else _NAMES.get(node.target, str(node.target)),
            "args": [encode(arg) for arg in node.args],
            "kwargs": {name: encode(arg) for name, arg in kwargs_of(node).items()},
        }
        if "val" in node.meta:
            data["val"] = encode(node.meta["val"], names)
        for key, stack in _STACKS.items():
            if calls := node.meta.get(stack):
                modules = {call: name for call, (name, _) in calls.items()}
                first = known.setdefault((key, *modules, *modules.values()), node.name)
                data[key] = first if first != node.name else modules
        marks = {key: value for key, value in node.meta.items() if _is_mark(key, value)}
        data["meta"] = {key: m.name if isinstance(m, CheckpointPolicy) else encode(m) for key, m in marks.items()}
        found.append(data)
    return found


def _is_mark(key: str, value: Any) -> bool:
    """Return whether a file keeps an entry of `node.meta`; the value and the modules are kept otherwise."""
    return type(value) in _MARKS and key not in _NOT_MARKS


def encode(value: Any, names: Mapping[Any, str] = MappingProxyType({})) -> Any:
    """Return a value as JSON, with dynamic sizes under the names of their symbols; never fails."""
    if type(value) in _THEMSELVES:
        return value
    if isinstance(value, Node):
        return {"node": value.name}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, list):
        return [encode(item, names) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item, names) for item in value]}
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        extents = (value.shape, value.stride())
        shape, stride = ([size if type(size) is int else encode(size, names) for size in each] for each in extents)
        return {"tensor": [short_name(value.dtype), shape, stride, str(value.device)]}
    if isinstance(value, slice):
        return {"slice": [encode(item) for item in (value.start, value.stop, value.step)]}
    if isinstance(value, complex):
        return {"complex": [encode(value.real), encode(value.imag)]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, OpOverload):
        return {"operator": str(value)}
    if isinstance(value, SymNumber):
        return {"size": rename(value, names)}
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return {"dict": {key: encode(item, names) for key, item in value.items()}}
    if isinstance(value, Subgraph):
        return {"graph": encode_graph(value.graph, names)}
    tag = _TAGS.get(type(value))
    return {tag: short_name(value)} if tag else unsupported(value)


def unsupported(value: object) -> dict[str, str]:
    """Return what stands for a value that a file cannot hold."""
    return {"unsupported": type(value).__name__}


# Writes one line; values that are not JSON are marked.
to_json = json.JSONEncoder(allow_nan=False, default=unsupported).encode


# --- reading -----------------------------------------------------------------------------------------------------


@dataclass
class Decoder:
    """Reads the values and graphs of one file; its fake tensors share a mode.

    Attributes:
        callees: names of the modules that a graph may call: regions, or kernels.
        device: replaces devices of its type; None keeps them as written.
        cubins: code of kernels, by its name in the file.
    """

    nodes: dict[str, Node] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)
    mode: Any = field(default_factory=new_fake_mode)
    callees: frozenset[str] = frozenset()
    device: torch.device | None = None
    module_of: Callable[[Graph], GraphModule] = lambda graph: GraphModule(nn.Module(), graph)
    cubins: Mapping[str, bytes] = field(default_factory=dict)
    _targets: dict[str, Callable[..., Any]] = field(default_factory=lambda: dict(_TARGETS))

    @functools.cached_property
    def _operators(self) -> frozenset[str]:
        return dispatcher_operators()

    def value(self, data: Any) -> Any:
        """Inverse of `encode`; raise ArgumentError for what it does not write, or what does not exist."""
        if type(data) in _THEMSELVES or type(data) is float:
            return data
        if isinstance(data, list):
            return [self.value(item) for item in data]
        tag: str
        content: Any
        tag, content = next(iter(data.items())) if len(data) == 1 else ("", None)
        if tag in _NAMED:
            return named(tag, content)
        match tag:
            case "node":
                return self.node(content)
            case "tensor":
                return self._tensor(*content)
            case "tuple":
                return tuple(map(self.value, content))
            case "dict":
                return {typed(key, str): self.value(item) for key, item in typed(content, dict).items()}
            case "slice":
                return slice(*map(self.value, content))
            case "complex":
                return complex(*map(self.value, content))
            case "float" if content in ("inf", "-inf", "nan"):
                return float(content)
            case "device":
                return self._device(content)
            case "size":
                return parse_size(content, self.sizes)
            case "operator":
                return self._target(content)
            case "graph":
                around, self.nodes = self.nodes, {}
                try:
                    return subgraph_of(self.graph(content, of_call=True), print_graph)
                finally:
                    self.nodes = around
            case "unsupported":
                raise ArgumentError(f"it holds a value of type {content}, which a file cannot hold")
        raise ArgumentError(f"{json.dumps(data)[:60]} is no value")

    def graph(self, nodes: list[dict[str, Any]], *, of_call: bool = False) -> Graph:
        """Inverse of `encode_graph`; a graph `of_call`, which an operator is given, may return one value."""
        graph = Graph()
        self.nodes.clear()
        for item in typed(nodes, list):
            self._add_node(item, graph)
        for output in graph.find_nodes(op="output"):
            kinds = (tuple, list, Node) if of_call else (tuple, list)
            if len(output.args) != 1 or not isinstance(output.args[0], kinds):
                raise ArgumentError(f"{output.name} returns no list of values")
        return graph

    def node(self, name: str) -> Node:
        """Return a node that was read before; raise ArgumentError if there is none of the name."""
        if name not in self.nodes:
            raise ArgumentError(f"the value {name!r} is used before it is computed")
        return self.nodes[name]

    def _marks(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return the marks of a node; raise ArgumentError for anything else."""
        marks = {key: self.value(value) for key, value in data.items()}
        for key, value in marks.items():
            if not _is_mark(key, value):
                raise ArgumentError(f"{key!r} is no mark of a node")
        if "recompute" in marks:
            marks["recompute"] = CheckpointPolicy[marks["recompute"]]
        return marks

    def _add_node(self, data: dict[str, Any], graph: Graph) -> None:
        name, op, target = identifier(data["name"]), data["op"], typed(data["target"], str)
        if op not in ("placeholder", "call_function", "output") and (op != "call_module" or target not in self.callees):
            lowered = ": it is lowered, take a stage before" if op == "call_module" else ""
            raise ArgumentError(f"{name} is a {op}{lowered}")
        if name in self.nodes:
            raise ArgumentError(f"two values are called {name!r}")
        args = tuple(self.value(arg) for arg in data["args"])
        kwargs = {identifier(key): self.value(arg) for key, arg in data["kwargs"].items()}
        callee = self._target(target) if op == "call_function" else identifier(target)
        if callee in LAUNCHES:
            kwargs = numbered(kwargs)
        node = graph.create_node(op, callee, args, kwargs, name=name)
        if node.name != name:  # a graph that makes up names avoids some that passes give
            node.name = name
        if "val" in data:
            node.meta["val"] = self.value(data["val"])
        for key, stack in _STACKS.items():
            if key in data:
                if isinstance(calls := data[key], str):
                    node.meta[stack] = self.node(calls).meta[stack]
                else:  # classes are not stored
                    node.meta[stack] = {call: (typed(path, str), "") for call, path in typed(calls, dict).items()}
        node.meta.update(self._marks(data["meta"]))
        self.nodes[name] = node

    def _target(self, name: str) -> Callable[..., Any]:
        """Return the operator of a name, if the dispatcher knows it."""
        if name not in self._targets:
            namespace, _, rest = name.partition(".")
            operator_name, _, overload = rest.partition(".")
            known = f"{namespace}::{operator_name}" + (f".{overload}" if overload != "default" else "")
            if known not in self._operators:
                raise ArgumentError(f"unknown operator {name}: import the library that registers it (--import MODULE)")
            found = getattr(getattr(getattr(torch.ops, namespace), operator_name), overload)
            assert isinstance(found, OpOverload)
            self._targets[name] = found
        return self._targets[name]

    def _tensor(self, dtype: str, shape: list[int], stride: list[int], device: str) -> torch.Tensor:
        if not all(type(size) is int and size >= 0 for size in (*shape, *stride)):
            shape, stride = ([self.value(size) for size in sizes] for sizes in (shape, stride))
            for size in (*shape, *stride):
                if not isinstance(size, torch.SymInt) and (type(size) is not int or size < 0):
                    raise ArgumentError(f"a tensor with a size or stride of {size} cannot be made")
        if len(shape) != len(stride):
            raise ArgumentError(f"a tensor of shape {shape} and strides {stride} cannot be made")
        return fake_tensor(self.mode, shape, stride, named("dtype", dtype), self._device(device))

    def _device(self, name: str) -> torch.device:
        device = torch.device(name)
        return self.device if self.device is not None and self.device.type == device.type else device


def named(tag: str, name: Any) -> Any:
    """Return a dtype, layout or memory format by its name."""
    if name not in _NAMED[tag]:
        raise ArgumentError(f"torch has no {tag} {name!r}")
    return _NAMED[tag][name]


def identifier(name: Any) -> str:
    """Return a name that torch.fx may write into the source of a graph."""
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise ArgumentError(f"{str(name)[:60]!r} is no identifier")
    return name


def strings(values: Any) -> list[str]:
    """Return a list of strings, checked."""
    return [typed(value, str) for value in typed(values, list)]
