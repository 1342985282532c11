"""Regions run operator by operator, without a compiler; and what a region holds and returns."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graphshard.ir.graph import is_part, is_view, restride
from graphshard.ir.program import Region
from graphshard.ir.sizes import evaluate, expression, is_size, size_inputs, sizes_in
from graphshard.ir.subgraph import with_attributes
from graphshard.lower.copies import copies_of
from graphshard.lower.regions import Boxed, reshape_views
from graphshard.torch_compat.fx_code import use_boxed_calls


def compile_eager(region: Region) -> Boxed:
    """Run the region's ATen operators one by one, freeing each value at its last use."""
    module = with_attributes(region.module)
    graph = copy.deepcopy(module.graph)
    reshape_views(graph)
    use_boxed_calls(graph)
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.flex_attention_backward):
        _mark_buffers(node)
    forward: Boxed = GraphModule(module, graph).forward
    return forward


def _mark_buffers(node: Node) -> None:
    """Let tensors that score_mod reads require gradients: the operator computes gradients of no others."""
    given: Any = node.args[12]
    buffers, graph = list(given), node.graph
    for index, buffer in enumerate(buffers):
        value = buffer.meta["val"] if isinstance(buffer, Node) else None
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            with graph.inserting_before(node):
                buffers[index] = graph.call_function(_requiring_grad, (buffer,))
    node.update_arg(12, tuple(buffers))


def _requiring_grad(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.detach().requires_grad_()


def compile_operators(region: Region) -> Boxed:
    """As `compile_eager`, with results of the strides that compiled regions rely on; some operators return others."""
    if (copies := copies_of(region.module)) is not None:
        return copies
    fn, module = compile_eager(region), region.module
    placeholders = module.graph.find_nodes(op="placeholder")
    sizes = {symbol: placeholders.index(node) for symbol, node in size_inputs(module.graph).items()}
    expected = [(fake, tuple(map(expression, fake.stride()))) for fake in outputs_of(module)]
    strides = [stride for _, stride in expected]

    def call(inputs: list[Any]) -> list[torch.Tensor]:
        return list(map(restride, fn(inputs), strides))

    def call_of_any_size(inputs: list[Any]) -> list[torch.Tensor]:
        env = {symbol: inputs[index] for symbol, index in sizes.items()}
        results = []
        for value, (fake, stride) in zip(fn(inputs), expected, strict=True):
            known = env | sizes_in(fake, value)
            results.append(restride(value, tuple(evaluate(size, known) for size in stride)))
        return results

    return call if all(type(size) is int for stride in strides for size in stride) else call_of_any_size


def num_kernels(module: GraphModule) -> int:
    """Operators of a region that compute or copy."""
    calls = (node for node in module.graph.nodes if node.op == "call_function" and not is_size(node))
    return sum(not is_view(node) and not is_part(node) for node in calls)


def runs_as_it_is(module: GraphModule) -> bool:
    """Whether Inductor has nothing to do: one operator, or copies that start together."""
    return num_kernels(module) == 1 or copies_of(module) is not None


def outputs_of(module: GraphModule) -> list[Any]:
    """The fake values a region returns."""
    (output,) = module.graph.find_nodes(op="output")
    return [node.meta["val"] for node in output.args[0]]
