"""Sizes of a captured graph as expressions of a batch, a sequence length, or any other dim of the inputs.

    captured with (2, 128), (2, 64), (3, 128), (3, 64)      ->      %7: f32[batch*seq, 512]

A graph is captured at a few sizes; where the captures agree but for sizes, each size is the polynomial of the symbols,
linear in each, that goes through them. One more capture checks it. Nothing is asked of the model: it need not be
exportable with dynamic shapes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from graphshard.cost.multiplications import sizes
from graphshard.errors import ArgumentError
from graphshard.ir.mesh import Mesh
from graphshard.ir.params import ParamRow
from graphshard.ir.program import Program
from graphshard.ir.sizes import SYMBOLS
from graphshard.torch_compat.operators import pytree

# The number of ranks that parameters are sharded over, in every formula; experts may be sharded over fewer.
RANKS = sympy.Symbol("ranks", integer=True, positive=True)

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def symbolize(
    program: Program, inputs: Inputs, dims: Mapping[str, int], capture: Callable[[Inputs], Program]
) -> dict[str, int]:
    """Write symbolic sizes on the nodes of a captured program, in place.

    Args:
        program: captured from `inputs`.
        inputs: args and kwargs of the call.
        dims: by the name of a symbol the dim of the tensor inputs that it is the size of.
        capture: captures again, at other sizes.

    Returns:
        The value that each symbol has in the program.

    Raises:
        ArgumentError: no input has the dim, the captures differ in more than sizes, or sizes are no such polynomials.
    """
    here = {name: _size(inputs, name, dim) for name, dim in dims.items()}
    others = {name: _others(size) for name, size in here.items()}
    corners = list(itertools.product(*((here[name], others[name][0]) for name in dims)))
    check = tuple(others[name][1] for name in dims)
    symbols = [sympy.Symbol(name, integer=True, positive=True) for name in dims]

    def nodes_at(values: Sequence[int]) -> list[Node]:
        if list(values) == list(here.values()):
            return _nodes(program)
        return _nodes(capture(resized(inputs, dims, here, dict(zip(dims, values)))))

    captures = [nodes_at(values) for values in (*corners, check)]
    for values, nodes in zip((*corners, check), captures):
        _check_equal(captures[0], nodes, dict(zip(dims, values)))
    fitted = _Fit(symbols, corners, check)
    for node, *same in zip(*captures):
        shapes = [sizes(other) for other in (node, *same)]
        if any(shape != shapes[0] for shape in shapes):
            node.meta[SYMBOLS] = fitted.shape(shapes, node)
    return here


class _Fit:
    """Polynomials through sizes at the corners, kept: a graph has few different ones."""

    def __init__(self, symbols: list[sympy.Symbol], corners: list[tuple[int, ...]], check: tuple[int, ...]) -> None:
        self.terms = [sympy.Mul(*term) for n in range(len(symbols) + 1) for term in itertools.combinations(symbols, n)]
        points = [dict(zip(symbols, corner)) for corner in corners]
        self.inverse = sympy.Matrix([[term.subs(point) for term in self.terms] for point in points]).inv()
        self.check = dict(zip(symbols, check))
        self.known: dict[tuple[int, ...], sympy.Expr] = {}

    def shape(self, shapes: list[Any], node: Node) -> Any:
        """A shape, or a list of the shapes of parts."""
        if isinstance(shapes[0], list):
            return [None if parts[0] is None else self.shape(list(parts), node) for parts in zip(*shapes)]
        return tuple(self.size(values, node) for values in zip(*shapes))

    def size(self, values: tuple[int, ...], node: Node) -> Any:
        """One size, from its values at the corners and at the check."""
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


def symbolic(node: Node) -> Any:
    """The sizes of a node with symbols, as far as it has any."""
    return node.meta.get(SYMBOLS, sizes(node))


def num_shards_of(row: ParamRow, mesh: Mesh) -> sympy.Expr:
    """The ranks that a parameter is sharded over: as large a part of all as on this mesh."""
    return RANKS * sympy.Rational(row.on(mesh).shard.size, mesh.shard.size)


def mesh_of_ranks(mesh: Mesh) -> Mesh:
    """A mesh of any number of ranks; what lies inside of the axis that shards stays as large as it is."""
    found = mesh.resized("shard", RANKS)
    if mesh.experts is None:
        return found
    part = sympy.Rational(mesh.experts.shard.size, mesh.shard.size)
    return found.with_experts(mesh.experts.resized("shard", RANKS * part))


def spread_ranks(program: Program) -> None:
    """Give shards their size in the number of ranks, and what follows from them without another shape.

    To be called when the passes are done: what they inserted gets the sizes of what it was made from.
    """
    for phase in program.phases.values():
        slots = phase.slot_of()
        for node in phase.module.graph.nodes:
            if node in slots and slots[node].kind == "param" and program.params[slots[node].name].num_shards > 1:
                row = program.params[slots[node].name]
                shape = list(row.padded_shape)
                shape[row.dim] = sympy.ceiling(sympy.Integer(row.shape[row.dim]) / num_shards_of(row, program.mesh))
                node.meta[SYMBOLS] = tuple(shape)
            elif node.op == "call_function" and SYMBOLS not in node.meta:
                source = next((n for n in node.all_input_nodes if SYMBOLS in n.meta and sizes(n) == sizes(node)), None)
                if source is not None:
                    node.meta[SYMBOLS] = source.meta[SYMBOLS]


def _nodes(program: Program) -> list[Node]:
    (phase,) = program.phases.values()
    return list(phase.module.graph.nodes)


def _size(inputs: Inputs, name: str, dim: int) -> int:
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    size = next((leaf.shape[dim] for leaf in leaves if leaf.dim() > dim), None)
    if size is None:
        raise ArgumentError(f"symbols: no input has a dim {dim} for {name!r}.")
    return int(size)


def _others(size: int) -> tuple[int, int]:
    """Two more sizes: smaller ones where there is room, as models have limits."""
    return (size // 2, size // 4) if size >= 8 else (size + 1, size + 2)


def resized(inputs: Inputs, dims: Mapping[str, int], here: Mapping[str, int], new: Mapping[str, int]) -> Inputs:
    """Tensor inputs with other sizes where they have those of `here`."""

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        shape = list(tensor.shape)
        for name, dim in dims.items():
            if dim < len(shape) and tensor.shape[dim] == here[name]:
                shape[dim] = new[name]
        return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device, requires_grad=tensor.requires_grad)

    args, kwargs = pytree.tree_map_only(torch.Tensor, resize, inputs)
    return args, kwargs


def _check_equal(nodes: list[Node], others: list[Node], at: Mapping[str, int]) -> None:
    """The same operators in the same order on the same values."""
    order = {node: i for i, node in enumerate(nodes)}, {node: i for i, node in enumerate(others)}

    def look(node: Node, index: int) -> tuple[Any, ...]:
        return (
            node.op,
            node.target if node.op == "call_function" else "",
            [order[index][n] for n in node.all_input_nodes],
        )

    for a, b in itertools.zip_longest(nodes, others):
        if a is None or b is None or look(a, 0) != look(b, 1):
            what = f"{(a or b).name}" if a or b else ""
            sizes_tried = ", ".join(f"{name} {size}" for name, size in at.items())
            raise ArgumentError(
                f"symbols: the model computes something else at {sizes_tried}, from {what} on. Leave symbols out, or "
                "explain other sizes one by one."
            )
