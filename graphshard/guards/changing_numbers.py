"""Python numbers that change between calls, which Dynamo would guard by value: one program serves them all.

From its second value on, a number is a symbol, wherever forward or a hook finds it, and tensors are indexed by symbols:

    def hook(module, args, out, step=step)     torch: each default of a function has a program
    layer, head = pair                         torch: so has each tuple that is reached through a module
    x[:, i, None]                              x.select(1, i)[:, None], as torch's `__getitem__` takes constants
    x[..., [i, j]] = 0                         x[..., tensor([i, j])] = 0
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node, Proxy

from graphshard.torch_compat.dynamo import ConstantVariable, dynamo_utils, variable_builder
from graphshard.torch_compat.torch_ops import replaced

_MASKS = (torch.bool, torch.uint8)


@contextlib.contextmanager
def numbers_change() -> Iterator[None]:
    """Let Dynamo trace numbers in defaults, globals and tuples of hooks in the block as it does others."""
    wrap = variable_builder.VariableBuilder.wrap_listlike

    def wrap_listlike(self: Any, value: Any) -> Any:
        if "_hooks" not in self.source.name:  # tuples of modules, such as strides, stay
            return wrap(self, value)
        with replaced(ConstantVariable, "is_literal", staticmethod(lambda *_: False)):
            return wrap(self, value)

    with contextlib.ExitStack() as stack:
        for place in (dynamo_utils, variable_builder):
            stack.enter_context(replaced(place, "is_int_specialization_case", lambda *_: False))
        stack.enter_context(replaced(variable_builder.VariableBuilder, "wrap_listlike", wrap_listlike))
        yield


def with_symbols(target: Any, args: Sequence[Any]) -> Any:
    """Return the function for a call in a graph of Dynamo: for an indexing with symbols, one that keeps them."""
    if target not in _WITH_SYMBOLS:
        return target
    numbers = [number for part in _listed(args[1]) for number in _listed(part)]
    values = list(map(_value, numbers))
    # A mask takes several dimensions, and a bool adds one.
    is_plain = all(type(value) is not bool and getattr(value, "dtype", None) not in _MASKS for value in values)
    are_symbols = any(isinstance(value, torch.SymInt) for value in values)
    return _WITH_SYMBOLS[target] if are_symbols and is_plain and isinstance(_value(args[0]), Tensor) else target


def getitem(x: Tensor, index: Any) -> Tensor:
    """Return `x[index]`."""
    view, rest = _select(x, index)
    is_whole = all(part is ... or (isinstance(part, slice) and part == slice(None)) for part in rest)
    return view if is_whole else view[rest]


def setitem(x: Tensor, index: Any, value: Any) -> None:
    """Assign to `x[index]`."""
    view, rest = _select(x, index)
    view[rest or ...] = value


_WITH_SYMBOLS: dict[Any, Callable[..., Any]] = {operator.getitem: getitem, operator.setitem: setitem}


def _select(x: Tensor, index: Any) -> tuple[Tensor, tuple[Any, ...]]:
    """Select the integers of an index; return the view and the index that is left."""
    parts = index if isinstance(index, tuple) else (index,)
    given = sum(part is not None and part is not ... for part in parts)
    view, rest, dim = x, list[Any](), 0
    for part in parts:
        if part is ...:
            dim += x.dim() - given
        if isinstance(part, (int, torch.SymInt)):
            view = view.select(dim, part)
            continue
        is_list = isinstance(part, (list, tuple))
        rest.append(_tensor_of(part, x) if is_list else part)
        dim += part is not None and part is not ...
    return view, tuple(rest)


def _tensor_of(numbers: Sequence[Any], x: Tensor) -> Tensor:
    return torch.stack([torch.scalar_tensor(number, dtype=torch.int64, device=x.device) for number in numbers])


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)


def _value(arg: Any) -> Any:
    """Return what a node or its proxy stands for."""
    node = arg.node if isinstance(arg, Proxy) else arg
    return node.meta.get("example_value") if isinstance(node, Node) else arg
