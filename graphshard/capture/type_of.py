"""`type(x)` in code of the user's: tensors and numbers of a trace are of other classes, and it must not be told.

    if type(x) is torch.Tensor: ...             answered as in eager mode
    if isinstance(x.item(), int): ...

The names `type` and `isinstance` mean these in the modules that define the model's classes, while forward is traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from graphshard.capture.outside import named
from graphshard.ir.tracing_internals import FakeTensor, FunctionalTensor

# What the numbers of a trace stand for.
_NUMBERS: dict[type, int | float] = {torch.SymInt: 0, torch.SymFloat: 0.0, torch.SymBool: False}


def _is_instance(value: Any, kinds: Any) -> bool:
    """Python's `isinstance` in all but what it says of numbers of a trace."""
    return isinstance(value, kinds) or isinstance(_NUMBERS.get(type(value), value), kinds)


class _SaysWhat(type):
    """What `type(...)`, `isinstance(..., type)` and `issubclass(..., type)` call."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        found = type(*args, **kwargs)
        if len(args) == 1 and found in (FunctionalTensor, FakeTensor):
            return nn.Parameter if isinstance(args[0], nn.Parameter) else torch.Tensor
        if len(args) == 1 and found in _NUMBERS:
            return type(_NUMBERS[found])
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
    """In the block `type` and `isinstance` say of tensors and numbers of a trace what they say in eager mode."""
    with named("type", _TypeOf, module), named("isinstance", _is_instance, module):
        yield
