"""Sizes that depend on values, and that torch finds out where they are used; they are checked after each call.

    counts = torch.bincount(labels, minlength=4)     as long as the largest label says
    scores * counts                                  of shape [3, 4]: the trace takes for granted that there are 4

In eager mode other sizes fail there, or are broadcast where there is one. `x.narrow(0, start, 2)` fails where `start`
lies outside; the slice that is traced in its place would be shorter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import sympy
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphshard.capture.guards import source_of
from graphshard.capture.known_values import Assume
from graphshard.capture.lines import user_place
from graphshard.capture.untraceable import Untraceable
from graphshard.ir.sizes import numbers_in, symbols_of
from graphshard.ir.tracing_internals import arguments_of, is_traced
from graphshard.ir.unbacked_internals import is_unknown

aten = torch.ops.aten
_KNOWN_BY_ITS_ARGUMENTS = (torch.narrow, torch.Tensor.narrow)


class _Unknown(NamedTuple):
    """What an operator made, of sizes that were not known then: these symbols."""

    func: Any
    arguments: dict[str, Any]
    made: Any
    symbols: set[sympy.Symbol]
    place: tuple[str, int] | None


class FoundSizes(TorchDispatchMode):
    """Remembers what operators make whose size depends on values, as long as the forward runs.

    Attributes:
        checked: what runs now is checked in another way.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._unknown: list[_Unknown] = []
        self.checked = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for made in pytree.tree_leaves(result) if not self.checked else ():
            if any(map(is_unknown, numbers_in(made))):
                new = symbols_of(made) - symbols_of(pytree.arg_tree_leaves(*args, **kwargs))
                if new and not isinstance(made, torch.SymFloat):
                    self._unknown.append(_Unknown(func, arguments_of(func, args, kwargs), made, new, user_place()))
        return result

    def check(self, assume: Callable[..., None]) -> None:
        """Let sizes be checked after each call that have been found out since.

        Raises:
            Untraceable: nothing says what the size will be.
        """
        unknown, self._unknown = self._unknown, []
        for each in unknown:
            if not each.symbols <= symbols_of(each.made):
                assume(_is_as_found(each), True, _line(each.place), of_size=True)


class CheckedSizes(TorchFunctionMode):
    """Lets `narrow` be checked where its start or length depends on values, and `one_hot` find how many classes are."""

    def __init__(self, found: FoundSizes, assume: Assume) -> None:
        super().__init__()
        self._found, self._assume = found, assume

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.narrow, Tensor.narrow):
            return self._narrow(func, *args, **kwargs)
        if func is F.one_hot:
            return self._one_hot(*args, **kwargs)
        return func(*args, **kwargs)

    def _one_hot(self, input: Tensor, num_classes: int = -1) -> Tensor:
        """Without a number of classes it is one more than the largest, which tracing does not take for a size."""
        if num_classes != -1 or not is_traced(input) or input.numel() == 0:
            return F.one_hot(input, num_classes)
        self._assume(input.min() >= 0, True, _line(user_place()))
        largest = input.max().item()
        torch._check(largest >= 0)
        classes = torch.arange(largest + 1, device=input.device)
        return (input.unsqueeze(-1) == classes).to(torch.int64)

    def _narrow(self, func: Any, input: Tensor, dim: int, start: Any, length: Any) -> Any:
        if not isinstance(start, Tensor) and not is_unknown(start) and not is_unknown(length):
            return func(input, dim, start, length)
        with torch.no_grad():
            first, size = _number(start), input.shape[dim]
            first = torch.where(first < 0, first + size, first)
            self._assume((first >= 0) & (first + length <= size), True, _line(user_place()))
        self._found.checked = True
        try:
            return func(input, dim, start, length)
        finally:
            self._found.checked = False


def _is_as_found(each: _Unknown) -> Tensor:
    """Whether a size is in a run what it was found to be in the trace."""
    given: Any = each.arguments.get("self")
    with torch.no_grad():
        if isinstance(each.made, (torch.SymInt, torch.SymBool)) and isinstance(given, Tensor):
            found: Any = each.made
            return torch.eq(given.reshape(()), found)
        if each.func is aten.slice.Tensor:
            dim = each.arguments.get("dim", 0)
            return torch.eq(_length(each.arguments, given.shape[dim]), each.made.shape[dim])
        if torch.Tag.dynamic_output_shape in each.func.tags:
            return torch.eq(torch.ones_like(each.made, dtype=torch.int64).sum(), each.made.numel())
    raise Untraceable("shape", f"operator {each.func}", each.place)


def _length(arguments: dict[str, Any], size: Any) -> Tensor:
    """How long a slice of a dim of this size is."""
    step = arguments.get("step", 1)
    ends = []
    for name, otherwise in (("start", 0), ("end", size)):
        end = arguments.get(name)
        place = _number(otherwise if end is None else end)
        ends.append(torch.where(place < 0, place + size, place).clamp(0, size))
    return ((ends[1] - ends[0]).clamp(min=0) + step - 1) // step


def _number(value: Any) -> Tensor:
    return value.reshape(()) if isinstance(value, Tensor) else torch.full((), value, dtype=torch.int64)


def _line(place: tuple[str, int] | None) -> str:
    return "" if place is None else source_of(*place)
