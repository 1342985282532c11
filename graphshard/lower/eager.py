"""Regions without a compiler: operators run one by one, and copies that start together.

A region on a GPU that only copies casts shards or gradients, or packs small ones, before an all-gather or a
reduce-scatter. Inductor makes a kernel of each copy, and the host takes longer to start nine of them than a GPU to run
them. So they are launched together:

    %1: bf16[128, 1024] = _to_copy(%wq)                 _foreach_copy_([%1, %2, %5[:128], %5[128:]], [...])
    %2: bf16[128, 1024] = _to_copy(%wk)
    %3: bf16[128] = _to_copy(%norm1)
    %4: bf16[128] = _to_copy(%norm2)
    %5: bf16[256] = cat([%3, %4])
"""

from __future__ import annotations

import copy
import traceback
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from graphshard.ir.graph import aten, is_part, is_view, place_of, restride
from graphshard.ir.program import Region
from graphshard.ir.sizes import evaluate, expression, is_size, size_inputs, sizes_in
from graphshard.ir.subgraph import with_attributes
from graphshard.lower.regions import Boxed, reshape_views
from graphshard.torch_compat.torch_ops import foreach_copy_, use_boxed_calls

_CASTS = {aten._to_copy.default, aten.clone.default}
# They never copy; `reshape` may.
_VIEWS = {aten.view.default, aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default}


def compile_eager(region: Region) -> Boxed:
    """Run the region's ATen operators one by one, freeing each value at its last use."""
    module = with_attributes(region.module)
    graph = copy.deepcopy(module.graph)
    reshape_views(graph)
    use_boxed_calls(graph)
    # Tensors that score_mod reads must require gradients: the operator computes gradients of no others. The graph of
    # score_mod's gradients returns None for a tensor without one, such as a buffer.
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.flex_attention_backward):
        buffers: Any = list(cast(Any, node.args[12]))
        gradients: Any = getattr(module, str(cast(Node, node.args[8]).target)).graph.output_node().args[0]
        for index, gradient in enumerate(gradients[len(gradients) - len(buffers) :]):
            if gradient is not None:
                with graph.inserting_before(node):
                    buffers[index] = graph.call_function(_requiring_grad, (buffers[index],))
        node.update_arg(12, tuple(buffers))
    made = GraphModule(module, graph)
    forward: Boxed = made.forward

    def call(inputs: list[Any]) -> Any:
        try:
            return forward(inputs)
        except Exception as error:
            _say_where(error, made)
            raise

    return call


def _say_where(error: Exception, module: GraphModule) -> None:
    """Add the line of forward to an operator's message, such as one about dtypes, which a trace does not check."""
    lines = module.code.splitlines()
    numbers = [no for frame, no in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "forward"]
    result = lines[numbers[0] - 1].partition(" = ")[0].strip() if numbers and numbers[0] <= len(lines) else ""
    place = next((place_of(node) for node in module.graph.nodes if node.name == result), "")
    if place and error.args:
        error.args = (f"{error.args[0]}{place}", *error.args[1:])


def _requiring_grad(buffer: Tensor) -> Tensor:
    return buffer.detach().requires_grad_()


def compile_operators(region: Region) -> Boxed:
    """As `compile_eager`, with results in the strides that compiled regions rely on; some operators return others."""
    if (copies := copies_of(region.module)) is not None:
        return copies
    fn, module = compile_eager(region), region.module
    placeholders = module.graph.find_nodes(op="placeholder")
    sizes = {symbol: placeholders.index(node) for symbol, node in size_inputs(module.graph).items()}
    expected = [(fake, tuple(map(expression, fake.stride()))) for fake in outputs_of(module)]
    strides = [stride for _, stride in expected]

    def call(inputs: list[Any]) -> list[Tensor]:
        return list(map(restride, fn(inputs), strides))

    def call_of_any_size(inputs: list[Any]) -> list[Tensor]:
        env = {symbol: inputs[index] for symbol, index in sizes.items()}
        results = []
        for value, (fake, stride) in zip(fn(inputs), expected, strict=True):
            known = env | sizes_in(fake, value)
            results.append(restride(value, tuple(evaluate(size, known) for size in stride)))
        return results

    return call if all(type(size) is int for stride in strides for size in stride) else call_of_any_size


def num_kernels(module: GraphModule) -> int:
    """Count operators of a region that compute or copy."""
    calls = (node for node in module.graph.nodes if node.op == "call_function" and not is_size(node))
    return sum(not is_view(node) and not is_part(node) for node in calls)


def runs_as_it_is(module: GraphModule) -> bool:
    """Return whether there is nothing to compile: the region is one operator, or copies that start together."""
    return num_kernels(module) == 1 or copies_of(module) is not None


def outputs_of(module: GraphModule) -> list[Any]:
    """Return the fake values of a region's outputs."""
    (output,) = module.graph.find_nodes(op="output")
    return [node.meta["val"] for node in output.args[0]]


class _Copy(NamedTuple):
    """A copy of an input to a result, or to a part of one with other strides and an offset."""

    source: int
    result: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def pair(self, results: list[Tensor], inputs: list[Any]) -> tuple[Tensor, Tensor]:
        source: Tensor = inputs[self.source]
        target = results[self.result].as_strided(self.shape, self.stride, self.offset)
        return target, source if source.shape == self.shape else source.view(self.shape)


def copies_of(module: GraphModule, kind: str = "cuda") -> Boxed | None:
    """Compile a region that only copies several tensors on a kind of device; None if it does anything else."""
    inputs = {node: place for place, node in enumerate(module.graph.find_nodes(op="placeholder"))}
    if not all(_is_plain(node.meta["val"]) and node.meta["val"].device.type == kind for node in inputs):
        return None
    (output,) = module.graph.find_nodes(op="output")
    alone: list[_Copy] = []  # parts with gaps
    groups: dict[tuple[torch.dtype, torch.dtype], list[_Copy]] = {}
    for result, node in enumerate(output.args[0]):
        if not isinstance(node, Node) or not _is_plain(value := node.meta["val"]):
            return None
        is_packed = node.target is aten.cat.default
        dim = int(cast(Any, node.args[1])) % value.dim() if is_packed and len(node.args) > 1 else 0
        begin = 0
        for part in cast(Any, node.args[0]) if is_packed else [node]:
            if (source := _copied(part)) not in inputs:
                return None
            shape = tuple(part.meta["val"].shape)
            dtypes = source.meta["val"].dtype, value.dtype
            offset = begin * value.stride(dim) if is_packed else 0
            one = _Copy(inputs[source], result, shape, value.stride(), offset)
            (alone if dim else groups.setdefault(dtypes, [])).append(one)
            begin += shape[dim] if is_packed else 0
    if len(alone) + sum(map(len, groups.values())) < 2:
        return None
    made_as = [(tuple(v.shape), tuple(v.stride()), v.dtype) for v in outputs_of(module)]

    def call(given: list[Any]) -> list[Tensor]:
        device = given[0].device  # the region may have been captured for another one of the kind
        made = [torch.empty_strided(shape, stride, dtype=d, device=device) for shape, stride, d in made_as]
        with torch.no_grad():
            for group in groups.values():
                targets, sources = zip(*(one.pair(made, given) for one in group))
                foreach_copy_(list(targets), list(sources))
            for one in alone:
                target, source = one.pair(made, given)
                target.copy_(source)
        given.clear()
        return made

    return call


def _copied(node: Any) -> Any:
    """Return the node whose elements a node copies in order; None if it does anything else."""
    node = _through_views(node)
    options = set(node.kwargs) - {"memory_format"}
    if node.target not in _CASTS or not options <= {"dtype"} or not _is_plain(node.meta["val"]):
        return None
    return _through_views(node.args[0])


def _through_views(node: Any) -> Any:
    """Return what a node is a view of, if it has all of its elements in their order."""
    found = node
    while found.target in _VIEWS and _is_plain(found.meta["val"]):
        base = found.args[0]
        while base.target in _VIEWS and not _is_plain(base.meta["val"]):
            base = base.args[0]  # such as the first of two transpositions
        if not _is_plain(base.meta["val"]):
            break
        found = base
    return found


def _is_plain(value: Any) -> bool:
    """Return whether a value is a tensor of known sizes without gaps, its elements in order."""
    if not isinstance(value, Tensor) or not all(type(size) is int for size in value.shape):
        return False
    return value.is_contiguous()
