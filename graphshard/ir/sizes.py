"""Dynamic sizes of a program: one input for each symbol, from which every other size is computed.

    %0: i64[s0, s1] = input:0
    %1: s0 = size:s0
    %2: s1 = size:s1
    %3: s0*s1 = mul(%1, %2)
    %4: f32[s0*s1, 8] = view(%9, [%3, 8])

Sizes are Python numbers and free: like views they are recomputed in each phase and region, so only `size` inputs cross
boundaries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import sympy
import torch
from torch.fx import Graph, Node, Proxy
from torch.fx.node import map_aggregate
from torch.fx.proxy import GraphAppendingTracer

from graphshard.ir.program import Phase, Program, Size, Slot
from graphshard.torch_compat.symbolic_sizes import PythonReferenceAnalysis, sympy_interp

SymNumber: TypeAlias = torch.SymInt | torch.SymFloat | torch.SymBool
_SYM = (torch.SymInt, torch.SymFloat, torch.SymBool)

# Key in the `meta` of nodes: symbolic sizes, in addition to the captured numbers.
SYMBOLS = "symbolic_sizes"


def expression(size: Any) -> Any:
    """Return the sympy expression of a dynamic number; a plain number stays."""
    if not isinstance(size, _SYM):
        return size
    expr = size.node.expr
    if not expr.is_number:
        return expr
    if isinstance(expr, (bool, sympy.logic.boolalg.BooleanAtom)):
        return bool(expr)
    return int(expr) if expr.is_Integer else float(expr)


def evaluate(expr: Any, sizes: Mapping[sympy.Symbol, Any]) -> Any:
    """Evaluate an expression at given sizes, which are numbers, or proxies that record the computation."""
    return sympy_interp(PythonReferenceAnalysis, dict(sizes), expr) if isinstance(expr, sympy.Basic) else expr


def given_sizes(sizes: Sequence[Size], tensors: Sequence[torch.Tensor]) -> dict[str, int]:
    """Return the sizes of a call's inputs, by name."""
    found = ((size.name, tensors[size.source[0]], size.source[1]) for size in sizes)
    return {name: tensor.shape[dim] if dim >= 0 else cast(int, tensor.item()) for name, tensor, dim in found}


def is_size(node: Node) -> bool:
    """Return whether a node is a dynamic number, not a tensor."""
    return isinstance(node.meta.get("val"), _SYM)


def symbols_of(val: Any) -> set[sympy.Symbol]:
    """Return the symbols in the shapes and strides of a value, or of several."""
    return set().union(*(number.node.expr.free_symbols for number in numbers_in(val)))


def numbers_in(val: Any) -> list[SymNumber]:
    """Return the dynamic numbers in the shapes and strides of a value, or of several."""
    if isinstance(val, (tuple, list)):
        return [number for each in val for number in numbers_in(each)]
    numbers = (*val.shape, *val.stride()) if isinstance(val, torch.Tensor) else (val,)
    return [number for number in numbers if isinstance(number, _SYM)]


def with_sizes(expr: Any, like: torch.Tensor, tensor: torch.Tensor) -> Any:
    """Substitute the sizes of a tensor for the symbolic sizes of `like` in an expression."""
    pairs = [(expression(size), found) for size, found in zip(like.shape, tensor.shape, strict=True)]
    known = {said: sympy.Integer(found) for said, found in pairs if isinstance(said, sympy.Basic)}
    return expr.xreplace(known) if isinstance(expr, sympy.Basic) else expr


def sizes_in(like: torch.Tensor, tensor: torch.Tensor) -> dict[sympy.Symbol, int]:
    """Return the sizes of a tensor by symbol, for the dims of `like` that are single symbols."""
    pairs = ((expression(size), found) for size, found in zip(like.shape, tensor.shape, strict=True))
    return {symbol: found for symbol, found in pairs if isinstance(symbol, sympy.Symbol)}


def rename(value: Any, names: Mapping[sympy.Symbol, str]) -> str:
    """Return a number as text, with the program's names of symbols: "s0*s1"."""
    expr = expression(value)
    return str(renamed(expr, names) if isinstance(expr, sympy.Basic) else expr)


def renamed(expr: sympy.Basic, names: Mapping[sympy.Symbol, str]) -> sympy.Basic:
    """Return an expression with renamed symbols."""
    return expr.xreplace({symbol: sympy.Symbol(name, integer=True, positive=True) for symbol, name in names.items()})


def size_inputs(graph: Graph) -> dict[sympy.Symbol, Node]:
    """Return the `size` inputs of a graph by symbol."""
    return {node.meta["val"].node.expr: node for node in graph.find_nodes(op="placeholder") if is_size(node)}


def find_sizes(inputs: Mapping[int, torch.Tensor]) -> tuple[Size, ...]:
    """Return the distinct symbols in input shapes, named in order; dims that are expressions are skipped."""
    found: dict[sympy.Symbol, Size] = {}
    for index, fake in inputs.items():
        for dim, size in enumerate(fake.shape):
            symbol = expression(size)
            if isinstance(size, torch.SymInt) and isinstance(symbol, sympy.Symbol) and symbol not in found:
                found[symbol] = Size(f"s{len(found)}", (index, dim), size)
    return tuple(found.values())


class SizeBuilder:
    """Builder that computes sizes from the `size` inputs, each once, right after the inputs of a graph."""

    def __init__(self, graph: Graph, placeholders: Mapping[sympy.Symbol, Node]) -> None:
        self._graph = graph
        self._last = graph.find_nodes(op="placeholder")[-1]
        tracer = GraphAppendingTracer(graph)
        self._env = {symbol: Proxy(node, tracer) for symbol, node in placeholders.items()}
        self._made: dict[Any, Node] = dict(placeholders)

    def __call__(self, value: Any) -> Any:
        """Return the node or number for a dynamic number; other arguments stay."""
        expr = expression(value.meta["val"]) if isinstance(value, Node) and is_size(value) else expression(value)
        if not isinstance(expr, sympy.Basic):
            return expr
        if expr not in self._made and not self.knows(expr):
            return value
        if expr not in self._made:
            before = set(self._graph.nodes)
            with self._graph.inserting_before(self._last.next):  # in order
                self._made[expr] = evaluate(expr, self._env).node
            for node in [node for node in self._graph.nodes if node not in before]:
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
                node.meta["val"] = node.target(*args, **kwargs)
                self._last = node
        return self._made[expr]

    def knows(self, expr: Any) -> bool:
        """Return whether all symbols of an expression are `size` inputs; floats are numbers in tensors at first."""
        return not isinstance(expr, sympy.Basic) or expr.free_symbols <= self._env.keys()

    def keep(self, node: Node) -> bool:
        """Reuse a node if it is the first to compute this size, from known sizes; return whether it is."""
        expr = expression(node.meta["val"])
        known = node.op == "call_function" and expr not in self._made and isinstance(expr, sympy.Basic)
        if not known or not set(self._made.values()).issuperset(node.all_input_nodes):
            return False
        self._last.append(node)
        self._last = self._made[expr] = node
        return True


def lift_sizes(phase: Phase, sizes: tuple[Size, ...]) -> None:
    """Compute every dynamic number of a phase from its `size` inputs, in place; idempotent.

    They are not saved for backward, which has the same inputs. Numbers that depend on values, such as how many elements
    a mask selects, are saved.
    """
    if not sizes:
        return
    graph = phase.module.graph
    slots = phase.slot_of()
    given = {slot.name: node for node, slot in slots.items() if slot.kind == "size"}
    placeholders: dict[sympy.Symbol, Node] = {}
    for size in sizes:
        if size.name not in given:
            with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
                given[size.name] = node = graph.placeholder(f"size_{size.name}")
            node.meta["val"] = size.value
            slots[node] = Slot("size", size.name)
        placeholders[size.symbol] = given[size.name]
    build = SizeBuilder(graph, placeholders)
    old = []
    for node in list(graph.nodes):
        if node in given.values():
            continue
        node.args, node.kwargs = map_aggregate((node.args, node.kwargs), build)
        if is_size(node) and build.knows(expression(node.meta["val"])) and not build.keep(node):
            old.append(node)

    def is_kept(value: Any, slot: Slot) -> bool:
        if slot.kind == "saved" and (not isinstance(value, Node) or is_size(value)):
            return isinstance(value, Node) and not build.knows(expression(value.meta["val"]))
        return slot.kind != "size"

    kept = [each for each in zip(phase.results, phase.outputs, strict=True) if is_kept(*each)]
    phase.set_results([value for value, _ in kept])
    phase.outputs = tuple(slot for _, slot in kept)
    for node in reversed(old):
        graph.erase_node(node)
        slots.pop(node, None)
    phase.inputs = tuple(slots[node] for node in phase.placeholders)
    phase.module.recompile()


def conditions_of(program: Program) -> frozenset[str]:
    """Return the conditions on dynamic sizes under which a program was traced and compiled."""
    if not program.sizes:
        return frozenset()
    known = program.sizes[0].value.node.shape_env
    return frozenset(str(known.replace(guard.expr)) for guard in known.guards)
