"""Tensor subclasses as parameters: FSDP2's protocol for custom all-gathers."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from graphshard.errors import CaptureError
from graphshard.torch_compat.fake_tensors import FakeTensor, FunctionalTensor
from graphshard.torch_compat.torch_ops import make_wrapper_subclass

# Shape and dtype of a tensor that one rank sends.
PieceLayout = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Extension:
    """Tensors that a parameter with FSDP2's protocol (`fsdp_pre_all_gather`) gathers.

    Attributes:
        sent: layout of each gathered tensor, as one rank sends it.
        stored_bytes: bytes of all tensors in a padded shard.
    """

    sent: tuple[PieceLayout, ...]
    stored_bytes: int

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the gather: the tensors' common dtype, or uint8."""
        dtypes = {dtype for _, dtype in self.sent}
        return dtypes.pop() if len(dtypes) == 1 else torch.uint8

    @property
    def num_bytes(self) -> int:
        """Bytes that one rank sends."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.sent)


# Plain tensors, including stand-ins of tracing.
_PLAIN = (torch.Tensor, nn.Parameter, FakeTensor, FunctionalTensor)
PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def is_subclass(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's class overrides operators, so that its elements are not all of its state.

    A subclass of `nn.Parameter` that overrides no operators counts as a plain tensor.
    """
    cls = type(tensor)
    if cls in _PLAIN or nn.parameter.is_lazy(tensor):
        return False
    like_plain = (nn.Parameter.__torch_function__, torch.Tensor.__torch_dispatch__)
    return nn.Parameter not in cls.__mro__ or (cls.__torch_function__, cls.__torch_dispatch__) != like_plain


def overrides_operators(tensor: torch.Tensor) -> bool:
    """Return whether the class of a tensor says what operators on it do."""
    return type(tensor) not in _PLAIN and type(tensor).__torch_dispatch__ != torch.Tensor.__torch_dispatch__


def missing_methods(tensor: torch.Tensor) -> str:
    """Return which of the protocol's two methods a tensor lacks; "" for none."""
    return " and ".join(name for name in (PRE, POST) if not hasattr(tensor, name))


def shard_in(param: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a parameter, or the parameter itself before sharding."""
    return param._local_tensor if isinstance(param, DTensor) else param


def is_extended(param: torch.Tensor) -> bool:
    """Return whether a parameter follows the protocol, by its class or by methods set on its shard."""
    shard = shard_in(param)
    return PRE in shard.__dict__ or POST in shard.__dict__ or is_subclass(shard)


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors of a tensor: itself, or recursively the tensor attributes of a subclass."""
    if not is_subclass(tensor):
        return [tensor]
    values = _attributes(tensor).values()
    return [part for value in values if isinstance(value, torch.Tensor) for part in parts_of(value)]


def rebuilt(like: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a tensor like `like` with other parts, on the parts' device."""
    return _rebuilt(like, iter(parts))


def _rebuilt(like: torch.Tensor, parts: Iterator[torch.Tensor]) -> torch.Tensor:
    if not is_subclass(like):
        return next(parts)
    values = {
        name: _rebuilt(value, parts) if isinstance(value, torch.Tensor) else value
        for name, value in _attributes(like).items()
    }
    device = next((v.device for v in values.values() if isinstance(v, torch.Tensor)), like.device)
    made = make_wrapper_subclass(
        type(like), like.shape, strides=like.stride(), dtype=like.dtype, layout=like.layout, device=device
    )
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def _attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Return all attributes of a tensor, from slots and `__dict__`."""
    slots = [name for cls in type(tensor).__mro__ for name in cls.__dict__.get("__slots__", ())]
    return {**{name: getattr(tensor, name) for name in slots if hasattr(tensor, name)}, **tensor.__dict__}


def method_of(shard: torch.Tensor, name: str, standing_in: torch.Tensor) -> Any:
    """Return a protocol method of a shard, bound to the tensor that stands in for it; CaptureError if it is unbound."""
    own = shard.__dict__.get(name)
    if own is None:
        return getattr(standing_in, name)
    if not (isinstance(own, MethodType) and own.__self__ is shard):
        raise CaptureError(
            f"{name} was set on a shard and is not a method of it. Set function.__get__(param._local_tensor), so that "
            "it receives the shard as its first argument."
        )
    return MethodType(own.__func__, standing_in)


def identity_of(param: torch.Tensor) -> tuple[Any, ...] | None:
    """Return the state of a parameter that a captured program relies on, for comparison; None for a plain parameter.

    Class, methods and attributes; of tensor attributes, dtype and strides, which sharding does not change.
    """
    if not is_extended(param):
        return None
    shard = shard_in(param)
    # torch sets this attribute on a subclass that is a parameter.
    attributes = tuple((name, _told(value)) for name, value in _attributes(shard).items() if name != "_is_param")
    cls = type(shard)
    return cls, getattr(cls, PRE, None), getattr(cls, POST, None), attributes


def _told(value: Any) -> Hashable | Any:
    if not isinstance(value, torch.Tensor):
        return value
    if is_subclass(value):
        return type(value), tuple((name, _told(inner)) for name, inner in _attributes(value).items())
    return value.stride(), value.dtype


def piece_of(tensor: torch.Tensor, dim: int, num_shards: int, index: int) -> torch.Tensor:
    """Return a rank's piece of a tensor subclass, as a narrowed padded shard.

    It uses the operators that FSDP2 shards with, because subclasses implement these.
    """
    pieces = torch.chunk(tensor, num_shards, dim)
    padded = tensor.new_zeros(pieces[0].size())
    length = pieces[index].size(dim) if index < len(pieces) else 0
    if length:
        padded.narrow(dim, 0, length).copy_(pieces[index])
    return padded.narrow(dim, 0, length)


def padded_to(shard: torch.Tensor, shape: tuple[int, ...], dim: int) -> torch.Tensor:
    """Pad a shard with zeros to a shape; return the shard itself if it has the shape."""
    if tuple(shard.shape) == shape:
        return shard
    padded = shard.new_zeros(shape)
    if shard.numel():
        padded.narrow(dim, 0, shard.size(dim)).copy_(shard)
    if is_subclass(shard):
        carry_attributes(shard, padded)
    return padded


def carry_attributes(shard: torch.Tensor, made: torch.Tensor) -> None:
    """Copy attributes, including methods, from a shard to a tensor derived from it by operators."""
    known = _attributes(made)
    for name, value in _attributes(shard).items():
        if isinstance(value, MethodType) and value.__self__ is shard:
            value = MethodType(value.__func__, made)
        if not isinstance(known.get(name), torch.Tensor):
            object.__setattr__(made, name, value)
