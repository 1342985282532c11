"""Regions that Inductor fuses, each in a kernel of its own."""

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
    """Regions that differ in a number, which no other test has: kernels of a process are kept by their source."""
    return {f"region_{n}": region_of(functools.partial(compute, first + n)) for n in range(number)}


def compute(number: int, x: torch.Tensor) -> torch.Tensor:
    """What a region does."""
    return (x * (1 + 1 / number)).exp().mean(1).sin()


def region_of(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor] = (INPUT,), tracing_mode: str = "fake"
) -> Region:
    """The region of all that a function does with its inputs; it returns a tensor or a list of them."""
    graph = make_fx(function, tracing_mode=tracing_mode)(*inputs).graph
    calls = [node for node in graph.nodes if node.op == "call_function"]
    (output,) = graph.find_nodes(op="output")
    results = output.args[0] if isinstance(output.args[0], list) else [output.args[0]]
    region = extract(calls, graph.find_nodes(op="placeholder"), results).as_region()
    assert fake_mode_of(outputs_of(region.module)[0]).shape_env is not None
    return region


def values(compiled: dict[str, Boxed]) -> list[torch.Tensor]:
    """What regions compute, in the order of their names."""
    return [compiled[name]([INPUT])[0] for name in sorted(compiled)]
