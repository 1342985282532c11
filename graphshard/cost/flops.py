"""FLOPs of operators: matrix products, convolutions and attention.

torch's counter knows the same operators, but it counts causal attention in full, the weight gradient of grouped
convolutions too high, and not the CPU's attention. It counts what is not listed here.

Operators with graphs run the calls of their graphs:

    map_impl(graph_3f0c, [f32[16, 8]], ...)     16 times the calls of graph_3f0c
    cond(pred, graph_3f0c, graph_81aa, ...)     the branch with more calls
    while_loop(graph_3f0c, graph_81aa, ...)     once, as the number of iterations is not known

`flex_attention` is one kernel, for its calls are fused into it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from graphshard.cost.scalars import Scalar
from graphshard.ir.graph import aten
from graphshard.ir.subgraph import Subgraph, calls_in, is_higher_order, subgraphs_in
from graphshard.torch_compat.symbolic_sizes import hint
from graphshard.torch_compat.torch_ops import OpOverload, pytree

Shape = tuple[Scalar, ...]
_HIGHER_ORDER = torch.ops.higher_order
_ATTENTIONS = (_HIGHER_ORDER.flex_attention, _HIGHER_ORDER.flex_attention_backward)


@dataclass(frozen=True)
class Gemm:
    """`batch` products of (rows, inner) by (inner, columns)."""

    batch: Scalar
    rows: Scalar
    columns: Scalar
    inner: Scalar

    @property
    def flop(self) -> Scalar:
        """Return the FLOPs; a multiply-add is two."""
        return 2 * self.batch * self.rows * self.columns * self.inner


@dataclass(frozen=True)
class Attention:
    """One fused attention; `dim` is of a head, and `queries` are of a sequence.

    Attributes:
        kernel: "flash", "cudnn", "efficient" or "plain", by which profiles have speeds.
        backward: its gradients, which are five products for every pair instead of two.
        causal: half of the pairs are left out.
    """

    kernel: str
    backward: bool
    dim: Scalar
    queries: Scalar
    causal: bool
    flop: Scalar


def sizes(node: Node) -> Any:
    """Return the shape of a value, or a list of the shapes of its parts; symbolic where the capture is."""
    if "sizes" in node.meta:
        return node.meta["sizes"]
    val = node.meta.get("val")
    if isinstance(val, (tuple, list)):
        return [_hinted(v) if isinstance(v, torch.Tensor) else None for v in val]
    return _hinted(val) if isinstance(val, torch.Tensor) else None


def _hinted(val: torch.Tensor) -> Shape:
    """Return a shape, with the sizes of the example inputs for the dynamic ones."""
    return tuple(map(hint, val.shape))


def _known(val: Any) -> Any:
    """Return a value with the sizes of the example inputs."""
    return torch.empty(_hinted(val), dtype=val.dtype, device="meta") if isinstance(val, torch.Tensor) else hint(val)


def runs_graphs(node: Node) -> bool:
    """Return whether a node runs the calls of its graphs one after the other."""
    return node.target not in _ATTENTIONS and is_higher_order(node)


def runs_of(node: Node) -> tuple[list[Subgraph], int]:
    """Return the graphs that a node runs, and how often each."""
    graphs = list(subgraphs_in(node))
    if node.target is _HIGHER_ORDER.cond:
        return [max(graphs, key=lambda graph: len(graph.graph.nodes))], 1
    looped: Any = None
    if node.target is _HIGHER_ORDER.scan:
        looped = node.args[2]
    elif node.target is _HIGHER_ORDER.map_impl:
        looped = node.args[1]
    return graphs, int(hint(looped[0].meta["val"].shape[0])) if looped else 1


def _calls_run(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield calls, with the calls of graphs instead of the operators that run them."""
    for node in nodes:
        if node.op == "call_function" and runs_graphs(node):
            graphs, times = runs_of(node)
            calls = [call for graph in graphs for call in _calls_run(calls_in(graph.graph))]
            for _ in range(times):
                yield from calls
        else:
            yield node


def flop_of(nodes: Iterable[Node]) -> dict[str, Scalar]:
    """Return the FLOPs of products, convolutions and attention among some nodes, by dtype."""
    found: dict[str, Scalar] = {}
    for node in _calls_run(nodes):
        if node.op == "call_function" and (flop := multiplies(node)[1]):
            dtype = dtype_of(node.all_input_nodes[0])
            found[dtype] = found.get(dtype, 0) + flop
    return found


def dtype_of(node: Node) -> str:
    """Return the name of a value's dtype, such as "bfloat16"; of the first of several values."""
    val = node.meta.get("val")  # an assertion has none
    tensor = next((v for v in val if isinstance(v, torch.Tensor)), None) if isinstance(val, (tuple, list)) else val
    return str(getattr(tensor, "dtype", torch.float32)).removeprefix("torch.")


def is_multiplication(node: Node) -> bool:
    """Return whether a node is a matrix product, convolution or attention."""
    packet = _packet(node)
    return packet in _COUNTS or packet in flop_registry


def _packet(node: Node) -> Any:
    return node.target if node.target in _ATTENTIONS else getattr(node.target, "overloadpacket", None)


def multiplies(node: Node) -> tuple[Any, Scalar, tuple[Gemm, ...] | Attention]:
    """Return kind ("" for none), FLOPs, and products or attention of an operator, as far as sizes are known."""
    packet = _packet(node)
    count = _COUNTS.get(packet)
    if count is not None:
        found = count(_arguments(node), sizes(node))
        if isinstance(found, tuple):
            return "matmul", sum((gemm.flop for gemm in found), 0), found
        # The CPU's kernel stands for the flash attention of a GPU in studies.
        kernel = next((kernel for kernel in ("cudnn", "efficient") if kernel in str(packet)), "flash")
        return "attention", found.flop, replace(found, kernel=kernel)
    if packet in flop_registry:
        # A symbol, such as the longest sequence of `varlen_attn`, would be guarded where counts are compared.
        given = torch.fx.map_arg((node.args, node.kwargs, node), lambda n: pytree.tree_map(_known, n.meta["val"]))
        return "attention", flop_registry[packet](*given[0], **given[1], out_val=given[2]), ()
    return "", 0, ()


def _arguments(node: Node) -> dict[str, Any]:
    """Return arguments by name, with shapes instead of tensors."""
    if node.target in _ATTENTIONS:
        tensors: Any = node.args[:3]
        return dict(zip(("query", "key", "value"), map(sizes, tensors)))
    assert isinstance(node.target, OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    given = {**dict(zip(names, node.args)), **node.kwargs}
    return {name: torch.fx.map_arg(value, sizes) for name, value in given.items()}


# Names of the operands in the schemas of mm and bmm, addmm, baddbmm.
_OPERANDS = (("self", "mat2"), ("mat1", "mat2"), ("batch1", "batch2"))


def _product(values: dict[str, Any], _: Any) -> tuple[Gemm, ...]:
    left, right = next(names for names in reversed(_OPERANDS) if names[0] in values)
    (*batch, rows, inner), columns = values[left], values[right][-1]
    return (Gemm(batch[0] if batch else 1, rows, columns, inner),)


def _convolution_backward(values: dict[str, Any], _: Any) -> tuple[Gemm, ...]:
    """Gradients of input and weight multiply as often as the forward each."""
    forward = _conv(values["input"], values["weight"], values["grad_output"], values)
    return (forward,) * sum(values["output_mask"][:2])


def _conv(image: Shape, weight: Shape, out: Shape, values: dict[str, Any]) -> Gemm:
    groups = values.get("groups", 1)
    places = (image if values.get("transposed") else out)[2:]
    return Gemm(groups, image[0] * math.prod(places), weight[0] // groups, math.prod(weight[1:]))


def _attention(values: dict[str, Any], _: Any, *, backward: bool = False) -> Attention:
    """Count two products for every pair of a query and a key, five for gradients; half of the pairs if causal."""
    batch, heads, queries, dim = values["query"]
    keys, dim_v = values["key"][2], values["value"][3]
    flop = 2 * batch * heads * queries * keys * (3 * dim + 2 * dim_v if backward else dim + dim_v)
    causal = bool(values.get("is_causal"))
    return Attention("", backward, dim, queries, causal, flop / 2 if causal else flop)


_attention_backward = functools.partial(_attention, backward=True)
_SDPA = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
_COUNTS: dict[Any, Callable[[dict[str, Any], Any], Any]] = {
    **dict.fromkeys((aten.mm, aten.addmm, aten.bmm, aten.baddbmm), _product),
    aten.convolution: lambda values, out: (_conv(values["input"], values["weight"], out, values),),
    aten.convolution_backward: _convolution_backward,
    **{getattr(aten, f"_scaled_dot_product_{name}"): _attention for name in _SDPA},
    **{getattr(aten, f"_scaled_dot_product_{name}_backward"): _attention_backward for name in _SDPA},
    **dict(zip(_ATTENTIONS, (_attention, _attention_backward))),
}
