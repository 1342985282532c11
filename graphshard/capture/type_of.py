"""`type(x)` of a tensor in code of the user's: a traced tensor is of another class, and it must not be told.

    if type(x) is torch.Tensor: ...             answered as in eager mode

The name `type` means this one in the modules that define the model's classes, while forward is traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from graphshard.capture.outside import named
from graphshard.ir.tracing_internals import FakeTensor, FunctionalTensor


class _SaysWhat(type):
    """What `type(...)`, `isinstance(..., type)` and `issubclass(..., type)` call."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        found = type(*args, **kwargs)
        if len(args) == 1 and found in (FunctionalTensor, FakeTensor):
            return nn.Parameter if isinstance(args[0], nn.Parameter) else torch.Tensor
        return cls if found in (type, _SaysWhat) else found

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, type)

    def __eq__(cls, other: object) -> bool:
        return other is type or other is cls

    def __hash__(cls) -> int:
        return hash(type)


class _TypeOf(type, metaclass=_SaysWhat):
    """Python's `type` in all but what it says of traced tensors."""


@contextlib.contextmanager
def types_as_in_eager_mode(module: nn.Module) -> Iterator[None]:
    """In the block `type` says of traced tensors what it says of those that they stand for."""
    with named("type", _TypeOf, module):
        yield
