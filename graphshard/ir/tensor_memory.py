"""Layouts of tensors, which memory they share, and sums of their bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from graphshard.ir.graph import restride
from graphshard.torch_compat.torch_ops import memory_of


@dataclass(frozen=True)
class Affine:
    """A size `slope * n + start`, of the dynamic size n."""

    slope: int
    start: int

    def at(self, size: Any) -> Any:
        return self.slope * size + self.start if self.slope else self.start


@dataclass(frozen=True)
class TensorMeta:
    """All of a tensor but its values."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: Tensor, size: Callable[[Any], Any] = int) -> TensorMeta:
        shape, stride = tuple(map(size, tensor.shape)), tuple(map(size, tensor.stride()))
        return cls(shape, stride, tensor.dtype, tensor.device, tensor.requires_grad)

    def at(self, size: Any) -> TensorMeta:
        """Return the meta for a dynamic size; its own sizes are `Affine`."""
        shape, stride = (tuple(each.at(size) for each in sizes) for sizes in (self.shape, self.stride))
        return replace(self, shape=shape, stride=stride)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def example(self) -> Tensor:
        """Return a tensor with made-up values: zeros, or numbers between 0.5 and 1.5."""
        if not self.dtype.is_floating_point:
            return self.empty().zero_()
        return self.empty().copy_(torch.rand(self.shape, generator=torch.Generator().manual_seed(0)) + 0.5)


def within(part: Tensor, tensor: Tensor) -> bool:
    """Return whether a tensor is a view of another one."""
    if memory_of(part) != memory_of(tensor) or part.dtype != tensor.dtype:
        return False
    (first, last), (begin, end) = _extent(part), _extent(tensor)
    return begin <= first and last <= end


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first element in memory, and the one after the last."""
    begin = int(tensor.storage_offset())
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
    return begin, begin + (reach + 1 if tensor.numel() else 0)


def whole(tensor: Tensor) -> Tensor:
    """Return all memory of a tensor, as one dimension."""
    size = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    return tensor.as_strided((size,), (1,), 0)


def copied(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def changed(tensors: Sequence[Tensor], before: Sequence[Tensor]) -> list[int]:
    """Return the indices of tensors whose values have changed."""
    return [index for index, (now, then) in enumerate(zip(tensors, before)) if not torch.equal(now, then)]


def apart(made: Sequence[Tensor], others: Sequence[Tensor], metas: Sequence[TensorMeta]) -> Iterator[Tensor]:
    """Yield results with the strides of a graph; none shares memory with another one or with an input."""
    seen = set(map(memory_of, others))
    for tensor, meta in zip(made, metas, strict=True):
        laid = restride(tensor, meta.stride)
        yield copied(laid) if memory_of(laid) in seen else laid
        seen.add(memory_of(laid))


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_ROW = 1024


def bit_sums(tensor: Tensor) -> Tensor:
    """Return sums over a tensor's bits, as int64: by rows and columns of 1,024 elements.

    A change of one element changes two of them. Exchanged elements change them, too, unless they are the corners of a
    rectangle. Computing them reads the tensor twice.
    """
    flat = tensor.reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    bits = flat.view(_INTEGERS.get(flat.element_size(), torch.int64))
    table = bits[: bits.numel() // _ROW * _ROW].view(-1, _ROW)
    rest = bits[table.numel() :].to(torch.int64)
    return torch.cat([table.sum(0, dtype=torch.int64), table.sum(1, dtype=torch.int64), rest])
