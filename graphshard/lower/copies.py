"""Regions that only copy, on a GPU: casts of shards or gradients, and packing small ones, in as few launches as can be.

    %1: bf16[128, 1024] = _to_copy(%wq)                 _foreach_copy_([%1, %2, %5[:128], %5[128:]], [...])
    %2: bf16[128, 1024] = _to_copy(%wk)
    %3: bf16[128] = _to_copy(%norm1)
    %4: bf16[128] = _to_copy(%norm2)
    %5: bf16[256] = cat([%3, %4])

That is what stands in front of every all-gather and reduce-scatter. Inductor makes a kernel of each, and starting nine
of them takes the host longer than a GPU takes to run them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from graphshard.ir.graph import aten
from graphshard.torch_compat.operators import foreach_copy_

_CASTS = {aten._to_copy.default, aten.clone.default}
# They never copy; `reshape` may.
_VIEWS = {aten.view.default, aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default}


@dataclass(frozen=True)
class _Copy:
    """A result, or part of one.

    Attributes:
        source: the input that is copied, by its place.
        result: where it is copied to, by its place among the results.
        shape: as which the input is read, and which it has there.
        stride, offset: of the part in the result's memory.
        together: whether the part has no gaps, so that it can be copied by one launch with others.
    """

    source: int
    result: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    together: bool

    def there(self, results: list[Tensor]) -> Tensor:
        """Where it is copied to."""
        return results[self.result].as_strided(self.shape, self.stride, self.offset)

    def here(self, inputs: list[Any]) -> Tensor:
        """What is copied."""
        source: Tensor = inputs[self.source]
        return source if source.shape == self.shape else source.view(self.shape)


class Copies:
    """What calls such a region."""

    def __init__(self, module: GraphModule, copies: tuple[_Copy, ...]) -> None:
        values = _results(module)
        self._made = [(tuple(v.shape), tuple(v.stride()), v.dtype) for v in values]
        inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
        groups: dict[tuple[torch.dtype, torch.dtype], list[_Copy]] = {}
        for copy in copies:
            if copy.together:
                groups.setdefault((inputs[copy.source].dtype, values[copy.result].dtype), []).append(copy)
        self._groups = list(groups.values())
        self._alone = [copy for copy in copies if not copy.together]

    def __call__(self, inputs: list[Any]) -> list[Tensor]:
        device = inputs[0].device  # the region may have been captured for another one of the kind
        made = [torch.empty_strided(shape, stride, dtype=d, device=device) for shape, stride, d in self._made]
        with torch.no_grad():
            for group in self._groups:
                foreach_copy_([copy.there(made) for copy in group], [copy.here(inputs) for copy in group])
            for copy in self._alone:
                copy.there(made).copy_(copy.here(inputs))
        inputs.clear()
        return made


def copies_of(module: GraphModule, kind: str = "cuda") -> Copies | None:
    """What calls a region that only copies several tensors on a kind of device; None if it does something else."""
    inputs = {node: place for place, node in enumerate(module.graph.find_nodes(op="placeholder"))}
    if not all(_is_plain(node.meta["val"]) and node.meta["val"].device.type == kind for node in inputs):
        return None
    (output,) = module.graph.find_nodes(op="output")
    found: list[_Copy] = []
    for place, node in enumerate(output.args[0]):
        made = list(_parts(node, inputs, place)) if isinstance(node, Node) else []
        if not made or None in made:
            return None
        found += [copy for copy in made if copy is not None]
    return Copies(module, tuple(found)) if len(found) > 1 else None


def _results(module: GraphModule) -> list[Tensor]:
    (output,) = module.graph.find_nodes(op="output")
    return [node.meta["val"] for node in output.args[0]]


def _parts(node: Node, inputs: dict[Node, int], result: int) -> Iterator[_Copy | None]:
    """The copies that make a result; None among them if it is made otherwise."""
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
    """The place of the input whose elements a node has in their order, copied; None if it is something else."""
    node = _behind_views(node)
    what = set(node.kwargs) - {"memory_format"}
    if node.target not in _CASTS or not what <= {"dtype"} or not _is_plain(node.meta["val"]):
        return None
    return inputs.get(_behind_views(node.args[0]))


def _behind_views(node: Any) -> Any:
    """What a node is a view of, if it has all of its elements in their order."""
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
    """Whether a value is a tensor of known sizes without gaps, its elements in order."""
    if not isinstance(value, Tensor) or not all(type(size) is int for size in value.shape):
        return False
    return value.is_contiguous()
