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
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from graphshard.capture.guards import expected_truth, line_of
from graphshard.capture.lines import asking, package_of
from graphshard.capture.untraceable import Untraceable
from graphshard.ir.torch_internals import without_dispatch_modes
from graphshard.ir.tracing_internals import interceptable_reads, is_traced, memory_of, written_by
from graphshard.ir.unbacked_internals import conditions_on_sizes, is_unknown

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


# Told a tensor, the truth value that it must have, and the line that asks.
Assume = Callable[[Tensor, bool, str], None]


@contextlib.contextmanager
def known_values(assume: Assume) -> Iterator[None]:
    """Let code that is traced read the values of tensors that depend on no input.

    Args:
        assume: called where another value decides whether an exception is raised: it is taken not to be.

    Raises, in the block:
        Untraceable: where it decides by another value.
    """
    makers = _Makers()
    readers = _Readers(makers, assume)
    with interceptable_reads(readers.read), conditions_on_sizes(readers.decide, readers.check), makers, readers:
        yield


@dataclass(frozen=True)
class _Maker:
    """The operator that made a tensor, and which of its results the tensor is."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int


# Makes random numbers from 0 to 1, of which 1 is none; what is certain about comparing them with a number.
_DRAWS = {torch.ops.aten.rand.default, torch.ops.aten.rand.generator}
_CERTAIN: dict[Any, Callable[[Any], bool | None]] = {
    torch.ops.aten.lt.Scalar: lambda bound: False if bound <= 0 else True if bound >= 1 else None,
    torch.ops.aten.ge.Scalar: lambda bound: True if bound <= 0 else False if bound >= 1 else None,
}


class _Makers(TorchDispatchMode):
    """Remembers how tensors were made that depend on no input, as long as nothing writes to their memory."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._makers: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._drawn: WeakIdKeyDictionary = WeakIdKeyDictionary()  # random numbers from 0 to 1, and what is made of them

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(func, OpOverload):
            if func._schema.is_mutable:
                self._forget(func, args, kwargs)
            else:
                self._remember(func, args, kwargs, result)
        return result

    def is_drawn(self, tensor: Tensor) -> bool:
        """Whether a tensor is made of random numbers alone."""
        return tensor in self._drawn

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
        drawn = [g for g in given if isinstance(g, Tensor) and self.is_drawn(g)]
        if func in _DRAWS or (drawn and len(drawn) == sum(isinstance(g, Tensor) for g in given)):
            self._drawn.update(dict.fromkeys(filter(_is_tensor, pytree.tree_leaves(result)), func in _DRAWS))
        if func in _CERTAIN and drawn and self._drawn[drawn[0]] and not isinstance(args[1], Tensor):
            truth = _CERTAIN[func](args[1])
            if truth is not None:
                self._makers[result] = _Maker(torch.full, (result.shape, truth), {}, 0)
            return
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

    def __init__(self, makers: _Makers, assume: Assume) -> None:
        super().__init__()
        self._makers, self._assume = makers, assume

    def decide(self, condition: torch.SymBool) -> bool | None:
        """The truth of a condition on numbers that depend on values, if it only guards an exception."""
        frame = asking()
        expected = None if package_of(frame) == "torch" else expected_truth(frame)
        if expected is not None:
            self._assume(as_tensor(condition), expected, line_of(frame))
        return expected

    def check(self, condition: torch.SymBool) -> None:
        """What `torch._check` takes for granted is checked after the call; operators check for themselves."""
        frame = asking("torch")
        if package_of(frame) != "torch":
            self._assume(as_tensor(condition), True, line_of(frame))

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return self.read(func, *args, **(kwargs or {}))

    def read(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a function returns; any that reads no values is called."""
        if func is Tensor.unbind and is_unknown(args[0].shape[0]):
            raise Untraceable("loop", "unbind")
        if func in _READERS:
            tensors = [arg for arg in args if isinstance(arg, Tensor)]
            if all(map(self._makers.knows, tensors)):
                with without_dispatch_modes():
                    values = [self._makers.value(arg) if isinstance(arg, Tensor) else arg for arg in args]
                    return func(*values, **kwargs)
            if any(map(is_traced, tensors)):
                frame = asking()
                expected = _guarded(func, frame)
                if expected is not None:
                    self._assume(tensors[0], expected, line_of(_outside_torch(frame)))
                    return expected
                if func is Tensor.tolist:
                    return _as_list(tensors[0])
                if func in _DECIDERS:
                    drawn = all(map(self._makers.is_drawn, tensors))
                    raise Untraceable("random" if drawn else "value", func.__name__)
        return func(*args, **kwargs)


def _as_list(tensor: Tensor) -> Any:
    """What `tolist` makes of a traced tensor: numbers that are computed with, one by one."""
    if tensor.dim() == 0:
        return tensor.item()
    return [_as_list(part) for part in tensor.unbind()]


def _guarded(func: Any, frame: FrameType) -> bool | None:
    """The truth value that keeps the code that asks from raising an exception; None if it does not just that."""
    if func is Tensor.item:
        return True if frame.f_code is torch._check_tensor_all_with.__code__ else None
    return expected_truth(frame) if func is Tensor.__bool__ else None


def as_tensor(condition: torch.SymBool) -> Tensor:
    """A condition on sizes that depend on values, as a tensor."""
    value: Any = condition
    return torch.full((), value, dtype=torch.bool)


def _outside_torch(frame: FrameType) -> FrameType:
    while frame.f_back and package_of(frame) in ("torch", "graphshard"):
        frame = frame.f_back
    return frame


def _is_tensor(made: Any) -> bool:
    return isinstance(made, Tensor)


def _is_exact(made: Any) -> bool:
    return not isinstance(made, Tensor) or not (made.is_floating_point() or made.is_complex())
