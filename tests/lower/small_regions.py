"""Small regions that Inductor fuses into separate kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from graphshard.ir.program import Region
from graphshard.lower.eager import outputs_of
from graphshard.lower.regions import Boxed, extract
from graphshard.torch_compat.fake_tensors import fake_mode_of

INPUT = torch.linspace(-1, 1, 512).reshape(8, 64)


def regions_from(first: int, number: int) -> dict[str, Region]:
    """Return regions that differ in a number, unique per test, because a process caches kernels by source."""
    return {f"region_{n}": region_of(functools.partial(compute, first + n)) for n in range(number)}


def compute(number: int, x: torch.Tensor) -> torch.Tensor:
    """Compute a region's result."""
    return (x * (1 + 1 / number)).exp().mean(1).sin()


def region_of(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor] = (INPUT,), tracing_mode: str = "fake"
) -> Region:
    """Return a function's region for its inputs; the function returns a tensor or a list of tensors."""
    graph = make_fx(function, tracing_mode=tracing_mode)(*inputs).graph
    calls = [node for node in graph.nodes if node.op == "call_function"]
    (output,) = graph.find_nodes(op="output")
    results = output.args[0] if isinstance(output.args[0], list) else [output.args[0]]
    region = extract(calls, graph.find_nodes(op="placeholder"), results).as_region()
    assert fake_mode_of(outputs_of(region.module)[0]).shape_env is not None
    return region


def values(compiled: dict[str, Boxed]) -> list[torch.Tensor]:
    """Compute the regions in the order of their names."""
    return [compiled[name]([INPUT])[0] for name in sorted(compiled)]


def compile_inductor(region: Region, name: str) -> Boxed:
    """One region by Inductor, in this process."""
    from graphshard.lower._batch_compile import Batch  # which some processes must not import
    from graphshard.lower.inductor import generate

    with Batch(1) as batch:
        finish = generate(region, name, batch)
        batch.submit()
        return finish()
