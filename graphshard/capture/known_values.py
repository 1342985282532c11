"""Values that traced code reads, where no parameter takes part in them.

A trace knows shapes, not values, so `bool(tensor)` fails in it. Some values are the same at every call:

    positions = torch.arange(x.shape[1])                     transformers, of sequences that may be packed
    if (positions.diff() != 1).any(): ...

Such a value is computed when it is read, by the operators that made it (`origins.py`). Only integers and truth values
are: they are exact on any device. Others, and values of inputs and buffers, are conditions of the program
(`deciding.py`), where it cannot be traced without.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphshard.capture.deciding import DECIDERS, READERS, Deciding, called
from graphshard.capture.guards import expected_truth, line_of, only_prints
from graphshard.capture.lines import asking, outside_torch, package_of
from graphshard.capture.origins import Origins, is_origin, values_of
from graphshard.capture.untraceable import Untraceable, is_users
from graphshard.ir.tracing_internals import interceptable_reads, is_traced
from graphshard.ir.unbacked_internals import (
    conditions_on_sizes,
    is_unknown,
    numbers_as_text,
    numbers_not_cancelled,
    without_any_modes,
)

# Told a tensor, the truth value that it must have, and the line that asks.
Assume = Callable[[Tensor, bool, str], None]


@contextlib.contextmanager
def known_values(assume: Assume, deciding: Deciding) -> Iterator[None]:
    """Let code that is traced read the values of tensors that depend on no parameter.

    Args:
        assume: called where another value decides whether an exception is raised: it is taken not to be.
        deciding: asked for values of inputs and buffers.

    Raises, in the block:
        Untraceable: where it decides by another value.
    """
    origins = Origins(deciding.given)
    readers = _Readers(origins, assume, deciding)
    with contextlib.ExitStack() as stack:
        stack.enter_context(interceptable_reads(readers.read))
        stack.enter_context(conditions_on_sizes(readers.decide, readers.check))
        stack.enter_context(numbers_not_cancelled(readers.cancelled))
        stack.enter_context(numbers_as_text(readers.has_no_text))
        for mode in (origins, _Operators(origins, deciding), readers):
            stack.enter_context(mode)
        yield


class _Readers(TorchFunctionMode):
    """Answers functions that read values."""

    def __init__(self, origins: Origins, assume: Assume, deciding: Deciding) -> None:
        super().__init__()
        self._origins, self._assume, self._deciding = origins, assume, deciding

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

    def cancelled(self, number: torch.SymBool | torch.SymFloat) -> bool | None:
        """The truth of what algebra takes for a constant, such as whether a number is nan, if it guards an exception.

        Returns:
            None, if torch asks, and not the user.

        Raises:
            Untraceable: it does not just that; a run that may ask for numbers knows it.
        """
        if not is_users(asking().f_code.co_filename):
            return None
        expected = self.decide(number) if isinstance(number, torch.SymBool) else None
        if expected is None:
            self._deciding.may_ask(Tensor.item)
            raise Untraceable("value", "item")
        return expected

    def has_no_text(self, number: torch.SymInt | torch.SymFloat | torch.SymBool) -> bool:
        """Whether the text of a number is asked for that is not known; torch may ask for the name of the symbol.

        Raises:
            Untraceable: it is not only printed, and inputs and buffers determine it; a run that may ask knows it.
        """
        frame = asking()
        if not is_users(frame.f_code.co_filename):
            return False
        if self._deciding.knows(number) and not only_prints(frame) and not self._deciding.may_ask(None):
            raise Untraceable("text", str(number.node))
        return True

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return self.read(func, *args, **(kwargs or {}))

    def read(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a function returns; any that reads no values is called."""
        if func is Tensor.unbind and is_unknown(args[0].shape[0]):
            raise Untraceable("loop", "unbind")
        if func in (torch.squeeze, Tensor.squeeze):
            return func(*self._without_ones(*args, **kwargs))
        if func in READERS:
            tensors = [arg for arg in args if isinstance(arg, Tensor)]
            known, value = self.known(func, args)
            if known:
                return value
            if any(map(is_traced, tensors)):
                frame = asking()
                expected = _guarded(func, frame)
                if expected is not None:
                    self._assume(tensors[0], expected, line_of(outside_torch(frame)))
                    return expected
                known, value = self.decided(func, args)
                if known:
                    return value
                if func is Tensor.tolist:
                    return _as_list(tensors[0])
                if func in DECIDERS:
                    drawn = all(map(self._origins.is_drawn, tensors))
                    raise Untraceable("random" if drawn else "value", func.__name__)
        return func(*args, **kwargs)

    def _without_ones(self, tensor: Tensor, dim: int | Sequence[int] | None = None) -> tuple[Any, ...]:
        """A tensor that is squeezed, and along which dims, without those whose size depends on values and is 1.

        Torch takes such a size for another than 1.
        """
        if not any(map(self._deciding.knows, tensor.shape)):
            return (tensor,) if dim is None else (tensor, dim)
        left = {d % tensor.dim() for d in _dims(tensor, dim)}
        for d in sorted(left, reverse=True):
            if self._deciding.knows(tensor.shape[d]) and self._deciding.is_one(tensor.shape[d]):
                tensor = tensor.select(d, 0)
                left = {other - (other > d) for other in left - {d}}
        return tensor, sorted(left)

    def known(self, func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
        """Whether a function reads what is the same at every call, and what it returns then."""
        made = self._made(args)
        if made is None or not all(origin.fixed for origin in made if is_origin(origin)):
            return False, None
        with without_any_modes():
            values = values_of([origin for origin in made if is_origin(origin)], on_host=True)
            return True, called(func, made, values)

    def decided(self, func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
        """Whether a function reads what inputs and buffers determine, and may, and what it returns then."""
        made = self._made(args)
        if made is None:
            return False, None
        is_truth = func in (Tensor.item, Tensor.tolist) and args[0].dtype is torch.bool
        if not self._deciding.may_ask(Tensor.__bool__ if is_truth else func):
            if is_truth:  # `flag.item() is True` would ask nobody
                raise Untraceable("value", "item")
            return False, None
        return True, self._deciding.ask(func, made, line_of(outside_torch(asking())))

    def _made(self, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Arguments with how they were made in the place of tensors; None if that is not known of one."""
        made = tuple(self._origins.of(arg) if isinstance(arg, Tensor) else arg for arg in args)
        return None if any(m is None and isinstance(arg, Tensor) for m, arg in zip(made, args)) else made


_SQUEEZES = {torch.ops.aten.squeeze.default, torch.ops.aten.squeeze.dim, torch.ops.aten.squeeze.dims}


class _Operators(TorchDispatchMode):
    """Notes numbers and sizes that depend on known values, also of functions that torch has written in C++."""

    supports_higher_order_operators = True

    def __init__(self, origins: Origins, deciding: Deciding) -> None:
        super().__init__()
        self._origins, self._deciding = origins, deciding

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SQUEEZES:
            self._check_squeezed(*args)
        reads, sizes = func is torch.ops.aten._local_scalar_dense.default, _has_unknown_sizes(func)
        step = self._origins.step(func, args, kwargs) if reads or sizes else None
        if step is None:
            return func(*args, **kwargs)
        values = None
        if sizes and self._deciding.may_ask(func):
            values = self._deciding.made(step, line_of(outside_torch(asking())))
        if values is not None:
            device = next(leaf.device for leaf in pytree.arg_tree_leaves(*args) if isinstance(leaf, Tensor))
            made = [torch.tensor(v.tolist(), dtype=v.dtype, device=device).reshape(v.shape) for v in values]
            return made[0] if len(made) == 1 else tuple(made)
        result = func(*args, **kwargs)
        if reads:
            (tensor,) = step.of
            self._deciding.note(result, tensor)
        for index, tensor in enumerate(pytree.tree_leaves(result) if sizes else ()):
            for dim, size in enumerate(tensor.shape):
                self._deciding.note(size, replace(step, index=index), dim)
        return result

    def _check_squeezed(self, tensor: Tensor, dims: int | Sequence[int] | None = None) -> None:
        """Raise Untraceable if a squeeze takes out a dim whose size depends on values: torch takes it for another."""
        sizes: list[Any] = [tensor.shape[dim] for dim in _dims(tensor, dims)]
        if any(self._deciding.is_one(size) for size in sizes if self._deciding.knows(size)):
            raise Untraceable("value", "squeeze")


def _dims(tensor: Tensor, chosen: int | Sequence[int] | None) -> Sequence[int]:
    """The dims that a squeeze looks at."""
    return range(tensor.dim()) if chosen is None else [chosen] if isinstance(chosen, int) else chosen


def _has_unknown_sizes(func: Any) -> bool:
    return isinstance(func, OpOverload) and torch.Tag.dynamic_output_shape in func.tags


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
