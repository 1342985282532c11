"""How many multiplications an operator makes: matrix products, convolutions and attention.

torch's own counter knows the same operators; it counts causal attention in full, grouped convolutions too high in
backward, and not the CPU's attention. What is not counted here is left to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from graphshard.cost.higher_order import ATTENTIONS, calls_run
from graphshard.ir.graph import aten
from graphshard.torch_compat.operators import OpOverload
from graphshard.torch_compat.symbolic_sizes import hint

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
class Attention:
    """One fused attention.

    Attributes:
        kernel: "flash", "cudnn", "efficient" or "plain", which profiles have speeds of.
        backward: its gradients, which are five products for every pair and not two.
        dim: of a head.
        queries: of a sequence.
        causal: half of the pairs are left out.
        flop: a multiply-add is two.
    """

    kernel: str
    backward: bool
    dim: Scalar
    queries: Scalar
    causal: bool
    flop: Scalar


def sizes(node: Node) -> Any:
    """Shape of a value, or a list of the shapes of its parts; symbolic where the capture is."""
    if "sizes" in node.meta:
        return node.meta["sizes"]
    val = node.meta.get("val")
    if isinstance(val, (tuple, list)):
        return [_hinted(v) if isinstance(v, torch.Tensor) else None for v in val]
    return _hinted(val) if isinstance(val, torch.Tensor) else None


def _hinted(val: torch.Tensor) -> Shape:
    """A shape, with the sizes of the example inputs for the dynamic ones."""
    return tuple(map(hint, val.shape))


def flop_of(nodes: Iterable[Node]) -> dict[str, Scalar]:
    """FLOPs of the multiplications, convolutions and attention among some nodes, by dtype."""
    found: dict[str, Scalar] = {}
    for node in calls_run(nodes):
        if node.op == "call_function" and (flop := multiplies(node)[1]):
            dtype = dtype_of(node.all_input_nodes[0])
            found[dtype] = found.get(dtype, 0) + flop
    return found


def dtype_of(node: Node) -> str:
    """Name of a value's dtype, such as "bfloat16"; that of the first part if there are several."""
    val = node.meta.get("val")  # an assertion has none
    tensor = next((v for v in val if isinstance(v, torch.Tensor)), None) if isinstance(val, (tuple, list)) else val
    return str(getattr(tensor, "dtype", torch.float32)).removeprefix("torch.")


def is_multiplication(node: Node) -> bool:
    """A matrix product, convolution or attention."""
    packet = _packet(node)
    return packet in _COUNTS or packet in flop_registry


def _packet(node: Node) -> Any:
    return node.target if node.target in ATTENTIONS else getattr(node.target, "overloadpacket", None)


def multiplies(node: Node) -> tuple[Any, Scalar, tuple[Gemm, ...] | Attention]:
    """Kind ("" for none), FLOPs, and multiplications or attention of an operator, where their sizes are known."""
    packet = _packet(node)
    count = _COUNTS.get(packet)
    if count is not None:
        found = count(_arguments(node), sizes(node))
        if isinstance(found, tuple):
            return "matmul", sum((gemm.flop for gemm in found), 0), found
        found = replace(found, kernel=_kernel_of(str(packet)))
        return "attention", found.flop, found
    if packet in flop_registry:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        return "attention", flop_registry[packet](*args, **kwargs, out_val=node.meta["val"]), ()
    return "", 0, ()


def _kernel_of(operator: str) -> str:
    """Which kernel an operator of attention is; the CPU's stands for the flash attention of a GPU in studies."""
    return next((kernel for kernel in ("cudnn", "efficient") if kernel in operator), "flash")


def _arguments(node: Node) -> dict[str, Any]:
    """Arguments by name, with shapes in the place of tensors."""
    if node.target in ATTENTIONS:
        tensors: Any = node.args[:3]
        return dict(zip(("query", "key", "value"), map(sizes, tensors)))
    assert isinstance(node.target, OpOverload)
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


def _attention(values: dict[str, Any], _: Any) -> Attention:
    """Two multiplications for every pair of a query and a key; half of the pairs if causal."""
    return _attends(values, backward=False)


def _attention_backward(values: dict[str, Any], _: Any) -> Attention:
    """Five multiplications: the scores again, and the gradients of scores, query, key and value."""
    return _attends(values, backward=True)


def _attends(values: dict[str, Any], *, backward: bool) -> Attention:
    batch, heads, queries, dim = values["query"]
    keys, dim_v = values["key"][2], values["value"][3]
    flop = 2 * batch * heads * queries * keys * (3 * dim + 2 * dim_v if backward else dim + dim_v)
    causal = bool(values.get("is_causal"))
    return Attention("", backward, dim, queries, causal, flop / 2 if causal else flop)


_COUNTS: dict[Any, Callable[[dict[str, Any], Any], Any]] = {
    ATTENTIONS[0]: _attention,
    ATTENTIONS[1]: _attention_backward,
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
