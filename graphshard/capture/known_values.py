"""Values that traced code reads, where they depend on no input.

A trace knows shapes, not values, so `bool(tensor)` fails in it. Some values are the same at every call:

    positions = torch.arange(x.shape[1])                     transformers, of sequences that may be packed
    if (positions.diff() != 1).any(): ...

Such a value is computed when it is read, by the operators that made it. Only integers and truth values are: they are
exact on any device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from graphshard.capture.untraceable import Untraceable
from graphshard.ir.torch_internals import interceptable_reads, is_traced, memory_of, without_tracing, written_by

# Code decides by them; numbers that are only computed with can be traced.
_DECIDERS = {
    Tensor.__bool__,
    Tensor.__contains__,
    Tensor.__index__,
    Tensor.equal,
    Tensor.is_nonzero,
    torch.equal,
    torch.is_nonzero,
}
_READERS = {*_DECIDERS, Tensor.__float__, Tensor.__int__, Tensor.item, Tensor.tolist}


@contextlib.contextmanager
def known_values() -> Iterator[None]:
    """Let code that is traced read the values of tensors that depend on no input.

    Raises, in the block:
        Untraceable: where it decides by another value.
    """
    makers = _Makers()
    with interceptable_reads(), makers, _Readers(makers):
        yield


@dataclass(frozen=True)
class _Maker:
    """The operator that made a tensor, and which of its results the tensor is."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int


class _Makers(TorchDispatchMode):
    """Remembers how tensors were made that depend on no input, as long as nothing writes to their memory."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._makers: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(func, OpOverload):
            if func._schema.is_mutable:
                self._forget(func, args, kwargs)
            else:
                self._remember(func, args, kwargs, result)
        return result

    def knows(self, tensor: Tensor) -> bool:
        return tensor in self._makers

    def value(self, tensor: Tensor) -> Tensor:
        """What a traced tensor will be, computed on the CPU."""
        if not is_traced(tensor):
            return tensor
        maker: _Maker = self._makers[tensor]
        args, kwargs = pytree.tree_map_only(Tensor, self.value, (maker.args, maker.kwargs))
        args, kwargs = pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
        value = pytree.tree_leaves(maker.run(*args, **kwargs))[maker.index]
        assert isinstance(value, Tensor)
        return value

    def _remember(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        given = pytree.arg_tree_leaves(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags or any(isinstance(g, torch.SymInt) for g in given):
            return
        made = pytree.tree_leaves(result)
        if func is torch.ops.aten.lift_fresh.default:  # a tensor made of numbers in the code
            self._makers[result] = _Maker(func, args, kwargs, 0)
            return
        if not all(map(_is_exact, made)) or not all(self.knows(g) for g in given if isinstance(g, Tensor)):
            return
        for index, tensor in enumerate(made):
            if isinstance(tensor, Tensor):
                self._makers[tensor] = _Maker(func, args, kwargs, index)

    def _forget(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        written = set(map(memory_of, written_by(func, args, kwargs)))
        for tensor in list(self._makers):
            if memory_of(tensor) in written:
                del self._makers[tensor]


class _Readers(TorchFunctionMode):
    """Answers functions that read values."""

    def __init__(self, makers: _Makers) -> None:
        super().__init__()
        self._makers = makers

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in _READERS:
            tensors = [arg for arg in args if isinstance(arg, Tensor)]
            if all(map(self._makers.knows, tensors)):
                with without_tracing():
                    values = [self._makers.value(arg) if isinstance(arg, Tensor) else arg for arg in args]
                    return func(*values, **(kwargs or {}))
            if func in _DECIDERS and any(map(is_traced, tensors)):
                raise Untraceable("value", func.__name__)
        return func(*args, **(kwargs or {}))


def _is_exact(made: Any) -> bool:
    return not isinstance(made, Tensor) or not (made.is_floating_point() or made.is_complex())
