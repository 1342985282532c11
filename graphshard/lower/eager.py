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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from graphshard.ir.graph import aten, is_part, is_view, restride
from graphshard.ir.program import Region
from graphshard.ir.sizes import evaluate, expression, is_size, size_inputs, sizes_in
from graphshard.ir.subgraph import with_attributes
from graphshard.lower.regions import Boxed, reshape_views
from graphshard.torch_compat.fx_code import use_boxed_calls
from graphshard.torch_compat.torch_ops import foreach_copy_

_CASTS = {aten._to_copy.default, aten.clone.default}
# They never copy; `reshape` may.
_VIEWS = {aten.view.default, aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default}


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
        if isinstance(value, Tensor) and value.is_floating_point():
            with graph.inserting_before(node):
                buffers[index] = graph.call_function(_requiring_grad, (buffer,))
    node.update_arg(12, tuple(buffers))


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


@dataclass(frozen=True)
class _Copy:
    """A result, or part of one.

    Attributes:
        source: place of the input that is copied.
        result: place of the result that it is copied to.
        shape: of the copy; the input is viewed as this.
        stride, offset: of the part in the result's memory.
        together: whether the part has no gaps, so that it can be copied by one launch with others.
    """

    source: int
    result: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    together: bool

    def target(self, results: list[Tensor]) -> Tensor:
        return results[self.result].as_strided(self.shape, self.stride, self.offset)

    def value(self, inputs: list[Any]) -> Tensor:
        source: Tensor = inputs[self.source]
        return source if source.shape == self.shape else source.view(self.shape)


class Copies:
    """A compiled region that only copies."""

    def __init__(self, module: GraphModule, copies: tuple[_Copy, ...]) -> None:
        values = outputs_of(module)
        self._made = [(tuple(v.shape), tuple(v.stride()), v.dtype) for v in values]
        inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
        groups: dict[tuple[torch.dtype, torch.dtype], list[_Copy]] = {}
        for one in copies:
            if one.together:
                groups.setdefault((inputs[one.source].dtype, values[one.result].dtype), []).append(one)
        self._groups = list(groups.values())
        self._alone = [one for one in copies if not one.together]

    def __call__(self, inputs: list[Any]) -> list[Tensor]:
        device = inputs[0].device  # the region may have been captured for another one of the kind
        made = [torch.empty_strided(shape, stride, dtype=d, device=device) for shape, stride, d in self._made]
        with torch.no_grad():
            for group in self._groups:
                foreach_copy_([one.target(made) for one in group], [one.value(inputs) for one in group])
            for one in self._alone:
                one.target(made).copy_(one.value(inputs))
        inputs.clear()
        return made


def copies_of(module: GraphModule, kind: str = "cuda") -> Copies | None:
    """Compile a region that only copies several tensors on a kind of device; None if it does anything else."""
    inputs = {node: place for place, node in enumerate(module.graph.find_nodes(op="placeholder"))}
    if not all(_is_plain(node.meta["val"]) and node.meta["val"].device.type == kind for node in inputs):
        return None
    (output,) = module.graph.find_nodes(op="output")
    found: list[_Copy] = []
    for place, node in enumerate(output.args[0]):
        made = list(_parts(node, inputs, place)) if isinstance(node, Node) else []
        if not made or None in made:
            return None
        found += [one for one in made if one is not None]
    return Copies(module, tuple(found)) if len(found) > 1 else None


def _parts(node: Node, inputs: dict[Node, int], result: int) -> Iterator[_Copy | None]:
    """Yield the copies that make a result; None among them if it is made in another way."""
    value = node.meta["val"]
    if not _is_plain(value):
        yield None
        return
    if node.target is not aten.cat.default:
        source = _copied(node, inputs)
        yield None if source is None else _Copy(source, result, tuple(value.shape), value.stride(), 0, True)
        return
    dim = int(node.args[1]) % value.dim() if len(node.args) > 1 else 0  # type: ignore[arg-type]
    begin = 0
    for part in node.args[0]:  # type: ignore[union-attr]
        source = _copied(part, inputs)
        if source is None:
            yield None
            return
        shape = tuple(part.meta["val"].shape)  # type: ignore[union-attr]
        yield _Copy(source, result, shape, value.stride(), begin * value.stride(dim), dim == 0)
        begin += shape[dim]


def _copied(node: Any, inputs: dict[Node, int]) -> int | None:
    """Return the place of the input whose elements a node copies in order; None if it is anything else."""
    node = _through_views(node)
    options = set(node.kwargs) - {"memory_format"}
    if node.target not in _CASTS or not options <= {"dtype"} or not _is_plain(node.meta["val"]):
        return None
    return inputs.get(_through_views(node.args[0]))


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
