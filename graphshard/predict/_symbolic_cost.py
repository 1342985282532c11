"""The predicted step as formulas: in a batch, a sequence length or any other dim of the inputs, and in the ranks.

    captured with (2, 128), (2, 64), (3, 128), (3, 64)      ->      %7: f32[batch*seq, 512]

A graph is captured at a few sizes; where the captures agree apart from sizes, each size is the polynomial of the
symbols, linear in each, that goes through them. One more capture checks it. The schedule is the one of the sizes that
were explained. A formula is a straight line of definitions:

    region_3 = 3.0e-6 + Max(...)      gather_2 = Min(...)      compute_s = 2*region_0 + 8*region_3 + ...
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from graphshard.cost.costs import Costs, model_collective
from graphshard.cost.flops import sizes
from graphshard.errors import ArgumentError
from graphshard.ir.graph import base_of, is_alias
from graphshard.ir.mesh import Mesh
from graphshard.ir.param_table import ParamSpec
from graphshard.ir.program import Phase, Program, Region
from graphshard.ir.sizes import SYMBOLS
from graphshard.schedule.clock import HOST_LINKS, Launch, Sizes, TimedCall, TimedEvent, events_of, run
from graphshard.schedule.timeline import sent_bytes
from graphshard.torch_compat.torch_ops import pytree

if TYPE_CHECKING:
    from graphshard.predict.training_config import Training

# The number of ranks that parameters are sharded over, in every formula; experts may be sharded over fewer.
RANKS = sympy.Symbol("ranks", integer=True, positive=True)
# Significant digits of numbers in a printed formula; costs are not more precise.
_DIGITS = 4
# `crossover` tries values up to this power of two.
_MOST_CROSSOVER = 40

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Definitions = list[tuple[sympy.Symbol, sympy.Expr]]


def symbolize(
    program: Program, inputs: Inputs, dims: Mapping[str, int], capture: Callable[[Inputs], Program]
) -> dict[str, int]:
    """Write symbolic sizes on the nodes of a captured program, in place; return each symbol's value in it.

    `dims` has, by symbol name, the dim of the tensor inputs whose size it is.
    """
    here = {name: _size(inputs, name, dim) for name, dim in dims.items()}
    # Smaller sizes where there is room, as models have limits.
    others = {name: (n // 2, n // 4) if n >= 8 else (n + 1, n + 2) for name, n in here.items()}
    corners = list(itertools.product(*((here[name], others[name][0]) for name in dims)))
    check = tuple(others[name][1] for name in dims)
    symbols = [sympy.Symbol(name, integer=True, positive=True) for name in dims]

    def nodes_at(values: Sequence[int]) -> list[Node]:
        at = dict(zip(dims, values))
        found = program if at == here else capture(resized(inputs, dims, here, at))
        (phase,) = found.phases.values()
        return list(phase.module.graph.nodes)

    captures = [nodes_at(values) for values in (*corners, check)]
    for values, nodes in zip((*corners, check), captures):
        _check_equal(captures[0], nodes, dict(zip(dims, values)))
    fit = _PolynomialFit(symbols, corners, check)
    for node, *same in zip(*captures):
        shapes = [sizes(other) for other in (node, *same)]
        if any(shape != shapes[0] for shape in shapes):
            node.meta[SYMBOLS] = fit.shape(shapes, node)
    return here


def _size(inputs: Inputs, name: str, dim: int) -> int:
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    size = next((leaf.shape[dim] for leaf in leaves if leaf.dim() > dim), None)
    if size is None:
        raise ArgumentError(f"symbols: no input has a dim {dim} for {name!r}.")
    return int(size)


def resized(inputs: Inputs, dims: Mapping[str, int], here: Mapping[str, int], new: Mapping[str, int]) -> Inputs:
    """Return inputs with new sizes in the dims whose size is the one in `here`."""

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        shape = list(tensor.shape)
        for name, dim in dims.items():
            if dim < len(shape) and tensor.shape[dim] == here[name]:
                shape[dim] = new[name]
        return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device, requires_grad=tensor.requires_grad)

    args, kwargs = pytree.tree_map_only(torch.Tensor, resize, inputs)
    return args, kwargs


def _check_equal(nodes: list[Node], others: list[Node], at: Mapping[str, int]) -> None:
    """Check that two graphs have the same operators on the same values in the same order."""
    for a, b in itertools.zip_longest(_structure(nodes), _structure(others)):
        if a is None or b is None or a[1:] != b[1:]:
            name = (a or b)[0]
            sizes_tried = ", ".join(f"{name} {size}" for name, size in at.items())
            raise ArgumentError(
                f"symbols: the model computes something else at {sizes_tried}, from {name} on. Leave symbols out, or "
                "explain other sizes one by one."
            )


def _structure(nodes: list[Node]) -> list[tuple[Any, ...]]:
    order = {node: i for i, node in enumerate(nodes)}
    return [
        (n.name, n.op, n.target if n.op == "call_function" else "", [order[source] for source in n.all_input_nodes])
        for n in nodes
    ]


class _PolynomialFit:
    """Polynomials through sizes at the corners, remembered: a graph has few different ones."""

    def __init__(self, symbols: list[sympy.Symbol], corners: list[tuple[int, ...]], check: tuple[int, ...]) -> None:
        self.terms = [sympy.Mul(*term) for n in range(len(symbols) + 1) for term in itertools.combinations(symbols, n)]
        points = [dict(zip(symbols, corner)) for corner in corners]
        self.inverse = sympy.Matrix([[term.subs(point) for term in self.terms] for point in points]).inv()
        self.check = dict(zip(symbols, check))
        self.known: dict[tuple[int, ...], sympy.Expr] = {}

    def shape(self, shapes: list[Any], node: Node) -> Any:
        if isinstance(shapes[0], list):
            return [None if parts[0] is None else self.shape(list(parts), node) for parts in zip(*shapes)]
        return tuple(self.size(values, node) for values in zip(*shapes))

    def size(self, values: tuple[int, ...], node: Node) -> Any:
        """Fit one size to its values at the corners, and compare with the last, at the check."""
        if all(value == values[0] for value in values):
            return values[0]
        if values not in self.known:
            found = sympy.expand((self.inverse * sympy.Matrix(values[:-1])).dot(sympy.Matrix(self.terms)))
            if found.subs(self.check) != values[-1]:
                raise ArgumentError(
                    f"symbols: a size of {node.name} ({node.target}) is {list(values)} at the sizes tried, which no "
                    "polynomial that is linear in each symbol gives. Leave symbols out."
                )
            self.known[values] = found
        return self.known[values]


def spread_ranks(program: Program) -> None:
    """Give shards, and nodes of equal shape after all passes, their size in the number of ranks."""
    for phase in program.phases.values():
        slots = phase.slot_of()
        for node in phase.module.graph.nodes:
            if node in slots and slots[node].kind == "param" and program.params[slots[node].name].num_shards > 1:
                row = program.params[slots[node].name]
                shape = list(row.padded_shape)
                shape[row.dim] = sympy.ceiling(sympy.Integer(row.shape[row.dim]) / _num_shards(row, program.mesh))
                node.meta[SYMBOLS] = tuple(shape)
            elif node.op == "call_function" and SYMBOLS not in node.meta:
                source = next((n for n in node.all_input_nodes if SYMBOLS in n.meta and sizes(n) == sizes(node)), None)
                if source is not None:
                    node.meta[SYMBOLS] = source.meta[SYMBOLS]


def _num_shards(row: ParamSpec, mesh: Mesh) -> sympy.Expr:
    """Return the ranks that a parameter is sharded over: the same share of all as on this mesh."""
    return RANKS * sympy.Rational(row.on(mesh).shard.size, mesh.shard.size)


def _mesh_of_ranks(mesh: Mesh) -> Mesh:
    """Return the mesh with a symbol for the size of the shard axis; inner axes keep their sizes."""
    found = mesh.resized("shard", RANKS)
    if mesh.experts is None:
        return found
    part = sympy.Rational(mesh.experts.shard.size, mesh.shard.size)
    return found.with_experts(mesh.experts.resized("shard", RANKS * part))


def _symbolic(node: Node) -> Any:
    return node.meta.get(SYMBOLS, sizes(node))


@dataclass(frozen=True)
class Crossover:
    """The smallest value of a symbol at which communication takes no longer than compute.

    `formula` is the value in the other symbols, with the branches of every maximum that hold there.
    """

    symbol: str
    value: int
    formula: sympy.Expr


@dataclass(frozen=True)
class Formulas:
    """Seconds and bytes of a step.

    Attributes:
        at: values of the symbols that were explained.
        definitions: parts of the results, in an order in which they can be evaluated.
        results: step_time_s, compute_s, optimizer_s, communication_s, exposed_comm_s, communication_bytes (of full
            tensors), state_bytes (shards, gradients and optimizer state), saved_bytes (from forward to backward).
    """

    at: Mapping[str, int]
    definitions: Definitions
    results: Mapping[str, sympy.Expr]

    @cached_property
    def symbols(self) -> dict[str, sympy.Symbol]:
        """Symbols by name."""
        return {name: sympy.Symbol(name, integer=True, positive=True) for name in self.at}

    @cached_property
    def _function(self) -> Callable[..., list[float]]:
        expressions = list(self.results.values())
        straight = lambda _: (self.definitions, expressions)  # noqa: E731
        return sympy.lambdify(list(self.symbols.values()), expressions, "math", cse=straight)

    def evaluate(self, **values: int) -> dict[str, float]:
        """Return all results, with other values for some symbols."""
        for name, value in values.items():
            if name not in self.at:
                raise ArgumentError(f"there is no symbol {name!r}; there are {', '.join(self.at)}.")
            if value <= 0:
                raise ArgumentError(f"{name} must be positive, got {value}.")
        return dict(zip(self.results, self._function(*{**self.at, **values}.values())))

    def smooth(self, name: str, **values: int) -> sympy.Expr:
        """Return a result in symbols alone, as it holds around a point.

        Every maximum is replaced by the branch that it takes there, and nothing is rounded up. `values` are of symbols
        that differ from the explained ones.
        """
        point: dict[sympy.Symbol, float] = {self.symbols[n]: v for n, v in {**self.at, **values}.items()}
        known: dict[sympy.Symbol, tuple[sympy.Expr, float]] = {s: (s, float(v)) for s, v in point.items()}
        return sympy.expand(_branch(self.results[name], known, dict(self.definitions))[0]).evalf(_DIGITS)

    def crossover(self, symbol: str, **values: int) -> Crossover | None:
        """Find the smallest value of an input's symbol, up to 2**40, at which communication is hidden by compute.

        `values` are of other symbols that differ from the explained ones.
        """
        if symbol not in self.at or symbol == RANKS.name:
            inputs = ", ".join(name for name in self.at if name != RANKS.name)
            raise ArgumentError(f"communication is hidden by more work, not by {symbol!r}: vary one of {inputs}.")

        def is_hidden(value: int) -> bool:
            found = self.evaluate(**{**values, symbol: value})
            return found["communication_s"] <= found["compute_s"]

        high = next((1 << power for power in range(_MOST_CROSSOVER + 1) if is_hidden(1 << power)), None)
        if high is None:
            return None
        least = high // 2 + 1 + bisect_left(range(high // 2 + 1, high), True, key=is_hidden)
        return Crossover(symbol, least, self._solved(symbol, {**self.at, **values, symbol: least}))

    def _solved(self, symbol: str, at: Mapping[str, int]) -> sympy.Expr:
        """Solve communication = compute, with the branches that hold at a point; nan if it is not quadratic."""
        communication, compute = (self.smooth(name, **at) for name in ("communication_s", "compute_s"))
        equation = sympy.Poly(sympy.fraction(sympy.together(communication - compute))[0], self.symbols[symbol])
        if equation.degree() not in (1, 2):
            return sympy.nan
        point = {self.symbols[name]: value for name, value in at.items()}
        real = [root for root in sympy.roots(equation) if abs(sympy.im(complex(root.subs(point)))) < 1e-6]
        best = min(real, key=lambda root: abs(complex(root.subs(point)) - at[symbol]), default=sympy.nan)
        return best.evalf(_DIGITS)

    def __str__(self) -> str:
        return "\n".join(f"{name} = {value}" for name, value in (*self.definitions, *self.results.items()))


def _branch(
    expression: sympy.Expr, known: dict[sympy.Symbol, tuple[sympy.Expr, float]], definitions: dict[Any, sympy.Expr]
) -> tuple[sympy.Expr, float]:
    """Replace maxima and roundings by the argument they take at a point; return the expression and its value.

    `known` has the same for symbols; definitions are added as they are met.
    """
    if expression in known:
        return known[expression]
    if expression in definitions:
        known[expression] = _branch(definitions[expression], known, definitions)
        return known[expression]
    if not expression.args:
        return expression, float(expression)
    pairs = [_branch(argument, known, definitions) for argument in expression.args]
    values = [value for _, value in pairs]
    if isinstance(expression, (sympy.Max, sympy.Min)):
        choose = max if isinstance(expression, sympy.Max) else min
        return choose(pairs, key=lambda pair: pair[1])
    if isinstance(expression, (sympy.ceiling, sympy.floor)):
        return pairs[0][0], (math.ceil if isinstance(expression, sympy.ceiling) else math.floor)(values[0])
    return expression.func(*(smooth for smooth, _ in pairs)), _VALUES[expression.func](values)


_VALUES: dict[Any, Callable[[list[float]], float]] = {
    sympy.log: lambda values: math.log(values[0]),
    sympy.Add: math.fsum,
    sympy.Mul: math.prod,
    sympy.Pow: lambda values: values[0] ** values[1],
}


def formulas_of(program: Program, costs: Costs, at: Mapping[str, int], *, training: Training) -> Formulas:
    """Build the formulas of a lowered program whose nodes have symbolic sizes; `at` are the symbols' values."""
    definitions: Definitions = []

    def define(name: str, value: Any) -> Any:
        if not isinstance(value, sympy.Expr) or value.is_Atom:
            return value
        # Numbered, because names of buckets may become equal when they are made identifiers.
        symbol = sympy.Symbol(f"{re.sub(r'[^0-9a-zA-Z]+', '_', name).strip('_')}_{len(definitions)}", positive=True)
        definitions.append((symbol, value))
        return symbol

    mesh = _mesh_of_ranks(program.mesh)
    on_ranks = replace(costs, mesh=mesh)  # the number of ranks that wait for each other is a symbol, too
    regions = {
        name: define(name, on_ranks.region(_symbolic_region(program.regions[key])))
        for name, key in program.region_names.items()
    }
    model = functools.partial(model_collective, size_of=_num_bytes)
    priced = Costs(costs.profile, costs.network, mesh)
    named = Sizes(priced, mesh, regions, functools.partial(_sent, program), _num_bytes, model)
    events: list[TimedEvent] = [
        replace(event, seconds=define(f"seconds {event.name}", event.seconds)) if isinstance(event, Launch) else event
        for event in events_of(program, costs, named)
    ]
    times = run(events, costs.profile.contention, define)
    step = times.step(events)
    calls = [event.name for event in events if isinstance(event, TimedCall)]
    compute = sympy.Add(*(calls.count(name) * seconds for name, seconds in regions.items()), *times.slower)
    collectives = [event for event in events if isinstance(event, Launch) and event.link not in HOST_LINKS]
    shards = [(row, _shard_numel(row, program.mesh) * row.dtype.itemsize) for row in program.params]
    trained = sympy.Add(*(size for row, size in shards if row.trainable))
    optimizer = training.update_seconds(on_ranks, mesh, trained)
    results = {
        "step_time_s": step + optimizer,
        "compute_s": compute,
        "optimizer_s": optimizer,
        "communication_s": sympy.Add(*(event.seconds for event in collectives)),
        "exposed_comm_s": step - compute,
        "communication_bytes": sympy.Add(*(event.num_bytes for event in collectives)),
        "state_bytes": sympy.Add(
            *(size * (2 + training.optimizer_states if row.trainable else 1) for row, size in shards)
        ),
        "saved_bytes": sum((_saved(phase) for phase in program.phases.values()), sympy.Integer(0)),
    }
    everything = {**at, RANKS.name: program.mesh.shard.size}
    return Formulas(everything, definitions, {name: sympy.sympify(value) for name, value in results.items()})


def _num_bytes(node: Node) -> Any:
    return math.prod(_symbolic(node)) * node.meta["val"].dtype.itemsize


def _symbolic_region(region: Region) -> Region:
    """Copy a region with symbolic sizes on its nodes."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.output(graph.graph_copy(region.module.graph, copies))
    for node, copy in copies.items():
        copy.meta = {**node.meta, "sizes": _symbolic(node)}
    return Region(region.key, region.text, GraphModule(region.module, graph))


def _sent(program: Program, launch: Node) -> Any:
    """Return the bytes of a bucket's full tensors, including padding; an all-reduce sends shards."""
    assert program.plan is not None
    planned = program.plan.bucket(launch.meta["bucket"])
    rows = [program.params[name] for name in planned.members]
    parts, shards = _num_shards(rows[0], program.mesh), rows[0].on(program.mesh).shard.size
    if planned.kind == "all_reduce":
        parts, shards = 1, 1
    itemsizes = [(row, row.sent_dtype(planned.kind).itemsize) for row in rows]
    here = sent_bytes(launch) // shards
    if here != sum(math.prod(row.padded_shape) * itemsize for row, itemsize in itemsizes):
        # A pass sends elements of another size, and something with each shard: a scale, for instance.
        itemsize, rest = divmod(here, sum(math.prod(row.padded_shape) for row in rows))
        return parts * (itemsize * sympy.Add(*(_shard_numel(row, program.mesh) for row in rows)) + rest)
    return sympy.Add(*(parts * _shard_numel(row, program.mesh) * itemsize for row, itemsize in itemsizes))


def _shard_numel(row: ParamSpec, mesh: Mesh) -> Any:
    if row.num_shards == 1:
        return math.prod(row.shape)
    rest = math.prod(row.shape) // max(row.shape[row.dim], 1)
    return rest * sympy.ceiling(sympy.Integer(row.shape[row.dim]) / _num_shards(row, mesh))


def _saved(phase: Phase) -> Any:
    """Return the bytes of saved tensors, without parameters, inputs, and numbers of tokens."""
    pairs = zip(phase.results, phase.outputs)
    saved = (base_of(node, is_alias) for node, slot in pairs if slot.kind == "saved" and isinstance(node, Node))
    return sympy.Add(*(_num_bytes(node) for node in filter(_symbolic, dict.fromkeys(saved))))
