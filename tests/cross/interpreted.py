"""Run the code of regions for GPUs on the CPU, with Triton's interpreter instead of cubins.

`python -m tests.cross.interpreted FILE DIRECTORY` prints, for each output of each region of a file that was compiled
without a GPU, how far kernels and operators are from the same region in float64. The process needs TRITON_INTERPRET=1
before it imports Triton. Attention kernels that the CPU lacks are computed by definition.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch._decomp import decomposition_table
from torch._inductor.runtime import triton_helpers  # called by kernels
from torch.fx.node import map_aggregate
from triton.runtime import interpreter

from graphshard.codec.program_format import decode_region
from graphshard.cross.gpu_kernels import GpuCode, GpuRegion, Kernel, Launch
from graphshard.ir.program import Region
from graphshard.store.artifact_file import read_artifact

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
aten = torch.ops.aten


@dataclass(frozen=True)
class Difference:
    """Deviation of an output from the region in float64, relative to its largest value.

    Attributes:
        region: its key.
        index: of the output.
        eps: of the coarsest dtype that the region computes in; 0 for an integer output.
        kernels: deviation of Triton's kernels, under the interpreter.
        operators: deviation of the region's operators in eager mode. For integers both are the fraction that differs.
    """

    region: str
    index: int
    eps: float
    kernels: float
    operators: float


class LibDevice:
    """CUDA functions that Triton has, too; the interpreter replaces Triton's while a kernel runs."""

    @staticmethod
    def tanh(x: Any) -> Any:
        return 1 - 2 / (1 + tl.exp(2 * x))

    def __getattr__(self, name: str) -> Any:
        return getattr(tl.math, name)


# --- faults of Triton 3.6's interpreter, which its compiler does not have -------------------------------------


def _in_order(handle: Any) -> Any:
    return interpreter.TensorHandle(np.ascontiguousarray(handle.data), handle.dtype)


def _atomic_rmw(builder: Any, op: Any, pointer: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
    """It reads memory as if broadcast values and masks were contiguous."""
    return _ATOMIC_RMW(builder, op, _in_order(pointer), _in_order(value), _in_order(mask), sem, scope)


def _patch_tensor(tensor: Any, scope: Any) -> None:
    """NumPy from 2.4 on does not convert one-element arrays to numbers, such as loop bounds."""
    _PATCH_TENSOR(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


_ATOMIC_RMW = interpreter.InterpreterBuilder.create_atomic_rmw
_PATCH_TENSOR = interpreter._patch_lang_tensor
interpreter.InterpreterBuilder.create_atomic_rmw = _atomic_rmw
interpreter._patch_lang_tensor = _patch_tensor


# --- kernels -------------------------------------------------------------------------------------------------


def interpreted(kernel: Kernel) -> Launch:
    """Return a launcher that interprets a kernel's source instead of its cubin."""
    first, _, source = kernel.source.partition("\n")
    constants, _ = json.JSONDecoder().raw_decode(first.removeprefix("# "))
    scope: dict[str, Any] = {"tl": tl, "tl_math": tl.math, "triton_helpers": triton_helpers, "libdevice": LibDevice()}
    path = Path(sys.argv[2]) / f"{kernel.name}.py"  # the interpreter reads sources from files
    path.write_text(source)
    exec(compile(source, str(path), "exec"), scope)
    for name in re.findall(r"^def (\w+)", source, re.MULTILINE):  # kernels call functions of their file
        scope[name] = interpreter.InterpretedFunction(scope[name])
    function = scope[kernel.name]
    (signature,) = re.findall(rf"def {kernel.name}\((.*?)\):", source, re.DOTALL)
    names = [name.partition(":")[0].strip() for name in signature.split(",")]

    def launch(args: list[Any], grid: list[int]) -> None:
        given = iter(args)
        values = {name: constants[name] if name in constants else next(given) for name in names}
        function[tuple(grid)](**values)

    return launch


def on_cpu(graph: torch.fx.Graph) -> torch.fx.Graph:
    """Move a graph's factory functions to the CPU, and replace attention operators."""
    for node in graph.nodes:
        move = lambda arg: CPU if isinstance(arg, torch.device) else arg  # noqa: E731
        node.args, node.kwargs = map_aggregate((node.args, node.kwargs), move)
        node.target = ATTENTION.get(node.target, node.target)
    return graph


def in_float64(graph: torch.fx.Graph) -> torch.fx.Graph:
    """Replace every floating-point dtype in the graph by float64."""
    for node in graph.nodes:
        widen = lambda arg: torch.float64 if isinstance(arg, torch.dtype) and arg.is_floating_point else arg  # noqa: E731
        node.args, node.kwargs = map_aggregate((node.args, node.kwargs), widen)
    return graph


# --- attention ---------------------------------------------------------------------------------------------


def _scores(query: Any, key: Any, bias: Any, causal: bool, scale: float | None) -> torch.Tensor:
    found = query @ key.transpose(-1, -2) * (scale if scale is not None else query.shape[-1] ** -0.5)
    if bias is not None:
        found = found + bias
    if causal:
        found = found.masked_fill(torch.ones(found.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return found


def _attention(query: Any, key: Any, value: Any, bias: Any, causal: bool, scale: float | None) -> list[torch.Tensor]:
    """Compute attention and the log-sum-exp of each query."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = _scores(query, key, bias, causal, scale)
    return [scores.softmax(-1) @ value, scores.logsumexp(-1)]


def _laid_out(operator: Any, args: Any, kwargs: Any, values: list[Any]) -> tuple[Any, ...]:
    """Return values with the sizes, strides and dtypes of the operator's meta kernel."""
    meta = lambda arg: arg.to("meta") if isinstance(arg, torch.Tensor) else arg  # noqa: E731
    expected = operator(*map_aggregate(args, meta), **map_aggregate(kwargs, meta))
    found = []
    for like, value in zip(expected, [*values, *[None] * (len(expected) - len(values))], strict=True):
        if isinstance(like, torch.Tensor):
            made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).fill_(0)
            if value is not None:  # log-sum-exps are padded
                made[tuple(slice(size) for size in value.shape)] = value.to(like.dtype)
            found.append(made)
        else:
            found.append(like)
    return tuple(found)


def _wide(*tensors: Any) -> list[Any]:
    return [None if t is None else t if t.dtype == torch.float64 else t.float() for t in tensors]


def _forward(operator: Any, bias_at: int | None, causal_at: int) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        bias = args[bias_at] if bias_at is not None and len(args) > bias_at else None
        causal = args[causal_at] if len(args) > causal_at else kwargs.get("is_causal", False)
        query, key, value, bias = _wide(*args[:3], bias)
        return _laid_out(operator, args, kwargs, _attention(query, key, value, bias, causal, kwargs.get("scale")))

    run.__name__ = f"cpu{operator.name().partition('::')[2].replace('.', '_')}"
    return run


def _backward(operator: Any, bias_at: int | None, causal_at: int) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        bias = args[bias_at] if bias_at is not None else None
        causal = args[causal_at] if len(args) > causal_at else kwargs.get("is_causal", False)
        grad, *inputs, bias = _wide(*args[:4], bias)
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in inputs]
            out, _ = _attention(*leaves, bias, causal, kwargs.get("scale"))
            return _laid_out(operator, args, kwargs, list(torch.autograd.grad(out, leaves, grad)))

    run.__name__ = f"cpu{operator.name().partition('::')[2].replace('.', '_')}"
    return run


# The position of each operator's bias, and whether it is causal.
ATTENTION = {
    operator: make(operator, bias_at, causal_at)
    for operator, make, bias_at, causal_at in (
        (aten._scaled_dot_product_flash_attention.default, _forward, None, 4),
        (aten._scaled_dot_product_flash_attention_backward.default, _backward, None, 11),
        (aten._scaled_dot_product_efficient_attention.default, _forward, 3, 6),
        (aten._scaled_dot_product_efficient_attention_backward.default, _backward, 4, 11),
    )
}


# --- regions -----------------------------------------------------------------------------------------------


def value_of(fake: torch.Tensor, *, positive: bool) -> torch.Tensor:
    """Create values for an input."""
    made = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
    if fake.dtype.is_floating_point:
        drawn = torch.randn(fake.shape) * 0.5
        return made.copy_(drawn.abs() + 0.1 if positive else drawn)
    return made.copy_(torch.randint(0, 2, fake.shape))


class OnCpu(torch.fx.Interpreter):
    """Decomposes operators that the CPU lacks, or lacks for a dtype."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return super().call_function(target, args, kwargs)
        except RuntimeError:  # includes NotImplementedError
            if target not in decomposition_table:
                raise
            return decomposition_table[target](*args, **kwargs)


def differences(path: Path) -> Iterator[Difference]:
    """Yield the differences of every output of every region with kernels."""
    torch.manual_seed(0)
    artifact = read_artifact(path)
    for key, row in artifact.manifest.regions.items():
        if row.code == "gpu":
            code = artifact.gpu_code(key, artifact.manifest.capabilities[0], CUDA)
            stored = artifact.archive.json(f"regions/{key}.json")
            region, wide = (decode_region(key, stored, CUDA) for _ in range(2))
            yield from _differences(code, region, wide)


def _differences(code: GpuCode, region: Region, wide: Region) -> Iterator[Difference]:
    run = GpuRegion(replace(code, graph=on_cpu(code.graph)), CPU, interpreted)
    (output,) = region.module.graph.find_nodes(op="output")
    fakes = [node.meta["val"] for node in output.args[0]]
    given = [node.meta["val"] for node in region.module.graph.find_nodes(op="placeholder")]
    on_cpu(region.module.graph)
    in_float64(on_cpu(wide.module.graph))
    for positive in (False, True):  # for example variances
        inputs = [value_of(fake, positive=positive) for fake in given]
        doubles = [value.double() if value.is_floating_point() else value.clone() for value in inputs]
        exact = OnCpu(wide.module).run(*doubles)
        if all(value.isfinite().all() for value in exact):
            break
    eps = max(map(_eps, [*given, *(node.meta.get("val") for node in region.module.graph.nodes)]))
    eager = OnCpu(region.module).run(*(value.clone() for value in inputs))
    for index, (kernels, operators, target, fake) in enumerate(zip(run(inputs), eager, exact, fakes, strict=True)):
        assert (kernels.shape, kernels.stride(), kernels.dtype) == (fake.shape, fake.stride(), fake.dtype), region.text
        exactly = not fake.dtype.is_floating_point
        yield Difference(region.key, index, 0.0 if exactly else eps, _error(kernels, target), _error(operators, target))


def _eps(value: Any) -> float:
    is_float = isinstance(value, torch.Tensor) and value.dtype.is_floating_point
    return torch.finfo(value.dtype).eps if is_float else 0.0


def _error(found: torch.Tensor, right: torch.Tensor) -> float:
    if not found.dtype.is_floating_point:
        return float((found != right).double().mean())
    return float((found.double() - right).abs().max() / right.abs().max().clamp(min=1e-30))


if __name__ == "__main__":
    print(json.dumps([asdict(found) for found in differences(Path(sys.argv[1]))]))
