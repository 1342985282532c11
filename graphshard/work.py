"""What a run of operators does: kernels with their FLOPs, bytes and elementwise operations.

    norm, cast, mm, silu, mul, mm     ->     pointwise(norm, cast)  matmul  pointwise(silu, mul)  matmul

Elementwise operators and reductions that Inductor will fuse are one kernel, which reads what it needs from outside
once and writes what is used outside once. Sizes are ints, or sympy expressions where the capture is symbolic
(`meta["sizes"]`); everything here is arithmetic that works for both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sympy
import torch
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from graphshard.graph import aten, base_of, is_part, is_view

# A number, or an expression of symbols.
Scalar = Any
Shape = tuple[Scalar, ...]


@dataclass(frozen=True)
class Gemm:
    """`batch` multiplications of (rows, inner) by (inner, columns)."""

    batch: Scalar
    rows: Scalar
    columns: Scalar
    inner: Scalar

    @property
    def flop(self) -> Scalar:
        """A multiply-add is two."""
        return 2 * self.batch * self.rows * self.columns * self.inner


@dataclass(frozen=True)
class Work:
    """One kernel.

    Attributes:
        kind: what limits it besides memory.
        flop: of multiplications, convolutions and attention.
        operations: elementwise operations.
        num_bytes: read and written.
        dtype: name of the dtype it multiplies in, such as "bfloat16".
        gemms: the multiplications of a matmul, if it is one of known sizes.
    """

    kind: Literal["matmul", "attention", "pointwise"]
    flop: Scalar
    operations: Scalar
    num_bytes: Scalar
    dtype: str
    gemms: tuple[Gemm, ...] = ()


def sizes(node: Node) -> Any:
    """Shape of a value, or a list of the shapes of its parts; symbolic where the capture is."""
    if "sizes" in node.meta:
        return node.meta["sizes"]
    val = node.meta.get("val")
    if isinstance(val, (tuple, list)):
        return [tuple(v.shape) if isinstance(v, torch.Tensor) else None for v in val]
    return tuple(val.shape) if isinstance(val, torch.Tensor) else None


def num_bytes(node: Node) -> Scalar:
    """Bytes of a value, of all tensors if there are several."""
    val, shape = node.meta.get("val"), sizes(node)
    if isinstance(val, torch.Tensor):
        return math.prod(shape) * val.dtype.itemsize
    if isinstance(val, (tuple, list)):
        return sum(math.prod(s) * v.dtype.itemsize for s, v in zip(shape, val) if isinstance(v, torch.Tensor))
    return 0


def work_of(nodes: Sequence[Node]) -> list[Work]:
    """The kernels of a run of compute nodes, in the order of their first operator."""
    kernels = [node for node in nodes if node.op == "call_function" and not is_view(node) and not is_part(node)]
    return [
        _alone(group[0]) if _stands_alone(group[0]) else _fused(group)
        for group in _fuse(kernels)
        if not _is_free(group)
    ]


def flop_of(nodes: Iterable[Node]) -> Scalar:
    """FLOPs of the multiplications, convolutions and attention among some nodes."""
    return sum((_multiplies(node)[1] for node in nodes if node.op == "call_function"), 0)


def _is_free(group: list[Node]) -> bool:
    """Nothing is read or written: a constant that its user makes in passing."""
    return len(group) == 1 and not group[0].all_input_nodes and not _stands_alone(group[0])


def _fuse(kernels: list[Node]) -> list[list[Node]]:
    """Group operators that one kernel runs.

    Operators that hang together are fused unless one that stands alone runs between them: the level of an operator
    counts those that must have run before it, and only operators of one level are fused.
    """
    level: dict[Node, int] = {}
    group_of: dict[Node, list[Node]] = {}
    groups: list[list[Node]] = []
    for node in kernels:
        sources = [s for s in map(_kernel, node.all_input_nodes) if s in level]
        alone = _stands_alone(node)
        level[node] = max((level[s] + (_stands_alone(s) and not alone) for s in sources), default=0)
        group_of[node] = group = [node]
        groups.append(group)
        if alone:
            continue
        for source in sources:
            other = group_of[source]
            if other is not group and level[source] == level[node] and not _stands_alone(source):
                for member in group:
                    group_of[member] = other
                other += group
                group.clear()
                group = other
    return [group for group in groups if group]


def _kernel(node: Node) -> Node:
    """The operator that computes a value, behind views and selections of parts."""
    while node.op == "call_function" and (is_view(node) or is_part(node)):
        node = node.all_input_nodes[0]
    return node


def _alone(node: Node) -> Work:
    """A kernel of one operator."""
    moved = num_bytes(node) + sum(_read(source) for source in node.all_input_nodes)
    kind, flop, gemms = _multiplies(node)
    if kind:
        return Work(kind, flop, 0, moved, _dtype(node.all_input_nodes[0]), gemms)
    return Work("pointwise", 0, _numel(node), moved, _dtype(node))


def _fused(group: list[Node]) -> Work:
    members = set(group)
    reads = {}
    for node in group:
        for position, source in enumerate(node.all_input_nodes):
            kernel = _kernel(source)
            if kernel not in members:
                picks = node.target in _PICK and position == 0
                reads[base_of(source)] = num_bytes(node) if picks else _read(source)
    written = [num_bytes(node) for node in group if _leaves(node, members)]
    operations = sum(max((_numel(n) for n in (node, *node.all_input_nodes)), key=_order) for node in group)
    return Work("pointwise", 0, operations, sum(reads.values()) + sum(written), _dtype(group[-1]))


def _leaves(node: Node, members: set[Node]) -> bool:
    """Whether a value is used outside its kernel, directly or through views."""
    for user in node.users:
        if is_view(user) or is_part(user):
            if _leaves(user, members):
                return True
        elif user not in members:
            return True
    return not node.users


def _read(source: Node) -> Scalar:
    """Bytes read of an input: no more than there are behind an expanded view, no more than a slice shows."""
    base = base_of(source)
    return min((num_bytes(source), num_bytes(base)), key=_order)


def _order(value: Scalar) -> float:
    """To compare sizes that may be symbolic: by their value at large sizes."""
    if isinstance(value, sympy.Expr):
        return float(value.subs(dict.fromkeys(value.free_symbols, 4096)))
    return float(value)


def _numel(node: Node) -> Scalar:
    shape = sizes(node)
    if isinstance(shape, list):
        return max((math.prod(s) for s in shape if s is not None), key=_order, default=0)
    return math.prod(shape) if shape is not None else 0


def _dtype(node: Node) -> str:
    val = node.meta["val"]
    tensor = next((v for v in val if isinstance(v, torch.Tensor)), None) if isinstance(val, (tuple, list)) else val
    return str(getattr(tensor, "dtype", torch.float32)).removeprefix("torch.")


# Read only as many elements of their first input as they return.
_PICK = frozenset({aten.embedding.default, aten.gather.default, aten.index.Tensor, aten.index_select.default})

# Besides multiplications, what Inductor does not fuse with its neighbours.
_UNFUSED = frozenset(
    {
        *(aten.embedding_dense_backward.default, aten.index_put.default, aten.scatter_add.default),
        *(aten.scatter.src, aten.sort.default, aten.sort.stable, aten.topk.default, aten.cumsum.default),
        *(aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default),
    }
)


def _stands_alone(node: Node) -> bool:
    return node.target in _UNFUSED or _packet(node) in _COUNTS or _packet(node) in flop_registry


def _packet(node: Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def _multiplies(node: Node) -> tuple[Any, Scalar, tuple[Gemm, ...]]:
    """Kind ("" for none), FLOPs and multiplications of an operator."""
    packet = _packet(node)
    count = _COUNTS.get(packet)
    if count is not None:
        values = _arguments(node)
        found = count(values, sizes(node))
        if isinstance(found, tuple):
            return "matmul", sum((gemm.flop for gemm in found), 0), found
        return "attention", found, ()
    if packet in flop_registry and node.op == "call_function":
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        return "attention", flop_registry[packet](*args, **kwargs, out_val=node.meta["val"]), ()
    return "", 0, ()


def _arguments(node: Node) -> dict[str, Any]:
    """Arguments by name, with shapes in the place of tensors."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    given = {**dict(zip(names, node.args)), **node.kwargs}
    return {name: torch.fx.map_arg(value, sizes) for name, value in given.items()}


def _mm(values: dict[str, Any], _: Any) -> tuple[Gemm, ...]:
    a, b = values["self"], values["mat2"]
    return (Gemm(1, a[0], b[1], a[1]),)


def _addmm(values: dict[str, Any], _: Any) -> tuple[Gemm, ...]:
    a, b = values["mat1"], values["mat2"]
    return (Gemm(1, a[0], b[1], a[1]),)


def _bmm(values: dict[str, Any], _: Any) -> tuple[Gemm, ...]:
    a, b = (values["batch1"], values["batch2"]) if "batch1" in values else (values["self"], values["mat2"])
    return (Gemm(a[0], a[1], b[2], a[2]),)


def _convolution(values: dict[str, Any], out: Shape) -> tuple[Gemm, ...]:
    return (_conv(values["input"], values["weight"], out, values),)


def _convolution_backward(values: dict[str, Any], _: Any) -> tuple[Gemm, ...]:
    """Gradients of the input and of the weight multiply as often as the forward does."""
    forward = _conv(values["input"], values["weight"], values["grad_output"], values)
    return (forward,) * sum(values["output_mask"][:2])


def _conv(image: Shape, weight: Shape, out: Shape, values: dict[str, Any]) -> Gemm:
    groups = values.get("groups", 1)
    places = (image if values.get("transposed") else out)[2:]
    return Gemm(groups, image[0] * math.prod(places), weight[0] // groups, math.prod(weight[1:]))


def _attention(values: dict[str, Any], _: Any) -> Scalar:
    """Two multiplications for every pair of a query and a key; half of the pairs if causal."""
    batch, heads, queries, dim = values["query"]
    keys, dim_v = values["key"][2], values["value"][3]
    return _causal(values, 2 * batch * heads * queries * keys * (dim + dim_v))


def _attention_backward(values: dict[str, Any], _: Any) -> Scalar:
    """Five multiplications: the scores again, and the gradients of scores, query, key and value."""
    batch, heads, queries, dim = values["query"]
    keys, dim_v = values["key"][2], values["value"][3]
    return _causal(values, 2 * batch * heads * queries * keys * (3 * dim + 2 * dim_v))


def _causal(values: dict[str, Any], flop: Scalar) -> Scalar:
    return flop / 2 if values.get("is_causal") else flop


_COUNTS: dict[Any, Callable[[dict[str, Any], Any], Any]] = {
    aten.mm: _mm,
    aten.addmm: _addmm,
    aten.bmm: _bmm,
    aten.baddbmm: _bmm,
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
    **{
        getattr(aten, f"_scaled_dot_product_{name}_attention{where}"): _attention
        for name, where in (("flash", ""), ("efficient", ""), ("cudnn", ""), ("flash", "_for_cpu"))
    },
    **{
        getattr(aten, f"_scaled_dot_product_{name}_attention{where}_backward"): _attention_backward
        for name, where in (("flash", ""), ("efficient", ""), ("cudnn", ""), ("flash", "_for_cpu"))
    },
}
