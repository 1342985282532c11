"""What forward asks of tensors that a program does not know, and sets on them: each call is given others.

    x.grad, x._version              of an input: an error that names the line
    x.is_leaf, x.grad_fn            the same, of one that requires a gradient; others are leaves
    x.storage_offset()              the same, also of views of inputs
    x.mask                          the same, where x has such an attribute; so with parameters and buffers
    hasattr(self.scale, "tag")      if it has none: the program holds while that is so
    x.mask = ..., x.data = ...      the same
    id(x)                           the same; of a parameter or buffer it is answered
    isinstance(x, nn.Parameter)     yes of an input that is one

Shapes, strides, dtypes, and whether they require a gradient are in the signature of a call.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from graphshard.capture.lines import asking
from graphshard.capture.outside import named
from graphshard.capture.untraceable import Untraceable, is_users
from graphshard.ir.state import Place
from graphshard.ir.torch_internals import replaced
from graphshard.ir.tracing_internals import FunctionalTensor, memory_of


def _getters(*names: str) -> frozenset[Any]:
    return frozenset(vars(torch._C.TensorBase)[name].__get__ for name in names)


_ASKING: frozenset[Any] = _getters("grad", "_version", "output_nr", "retains_grad", "_base") | {
    *(Tensor.storage_offset, Tensor.storage, Tensor.untyped_storage, Tensor._typed_storage),
    *(Tensor.is_shared, Tensor.is_pinned, Tensor._is_view, Tensor.retain_grad),
}
# The same where a gradient is required.
_OF_GRAPHS = _getters("is_leaf", "grad_fn")
# What `torch._dynamo.mark_dynamic` and its like set.
_MARKS = ("_dynamo_", "_has_dynamo_", "_specialize_on", "_graphshard_")


@contextlib.contextmanager
def asked(
    inputs: Iterable[tuple[Tensor, Tensor]], held: Iterable[tuple[Tensor, Tensor, Place]], absent: set[Place]
) -> Iterator[None]:
    """In the block, questions of the user's code that have another answer at another call are errors.

    Args:
        inputs: of a call, as they are traced and as they are.
        held: tensors of modules, in the same way, and where they are.
        absent: takes where attributes of these would be that are asked for and not there.

    Raises, in the block:
        Untraceable: names what is asked.
    """
    attributes: dict[int, tuple[str, ...]] = {}
    memory = set()
    for traced, given in inputs:
        attributes[memory_of(traced)] = attributes_of(given)
        memory.add(memory_of(traced))
        if isinstance(given, nn.Parameter):
            traced._is_param = True  # for isinstance
    places: dict[int, Place] = {}
    for traced, given, place in held:
        attributes[memory_of(traced)] = attributes_of(given)
        places[memory_of(traced)] = place

    def set_on(tensor: Tensor) -> tuple[str, ...] | None:
        with torch._C.DisableTorchFunction():
            return attributes.get(memory_of(tensor))

    def not_there(tensor: Tensor, name: str) -> Any:
        if name in (set_on(tensor) or ()):
            raise Untraceable("of tensors", f"the attribute {name}")
        if is_users(sys._getframe(1).f_code.co_filename):
            with torch._C.DisableTorchFunction():
                place = places.get(memory_of(tensor))
            if place is not None:
                absent.add(place.then("tensor", name))
        raise AttributeError(f"'Tensor' object has no attribute '{name}'")

    def set_attribute(tensor: Tensor, name: str, value: Any) -> None:
        asks = is_users(sys._getframe(1).f_code.co_filename)
        if asks and name != "requires_grad" and set_on(tensor) is not None:
            raise Untraceable("of tensors", f"{name} is set")
        object.__setattr__(tensor, name, value)

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(FunctionalTensor, "__getattr__", not_there))
        stack.enter_context(replaced(FunctionalTensor, "__setattr__", set_attribute))
        stack.enter_context(_Asked(memory))
        yield


@contextlib.contextmanager
def no_ids(module: nn.Module, inputs: Iterable[Tensor], held: Iterable[tuple[Tensor, Tensor, Place]]) -> Iterator[None]:
    """In the block, code of the model's classes that asks for the `id` of an input is an error.

    Args:
        module: the model.
        inputs: of a call, as they are traced.
        held: tensors of modules, as they are traced and as they are, and where.

    Raises, in the block:
        Untraceable: it is asked for.
    """
    refused, known = set(map(id, inputs)), {id(traced): id(tensor) for traced, tensor, _ in held}

    def id_of(value: Any, /) -> int:
        if id(value) in known:
            return known[id(value)]
        if id(value) in refused:
            raise Untraceable("of tensors", "id")
        return id(value)

    with named("id", id_of, module):
        yield


def attributes_of(tensor: Tensor) -> tuple[str, ...]:
    """What somebody has set on a tensor, by name; marks of dynamic sizes are torch's, others ours."""
    held = vars(tensor)
    return tuple(sorted(name for name in held if not name.startswith(_MARKS))) if held else ()


class _Asked(TorchFunctionMode):
    def __init__(self, memory: Collection[int]) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        # Some methods torch has written in Python.
        if self._is_refused(func, args) and is_users(asking("torch._tensor", "torch.overrides").f_code.co_filename):
            raise Untraceable("of tensors", resolve_name(func) or func.__name__)
        return func(*args, **(kwargs or {}))

    def _is_refused(self, func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        asks = func in _ASKING or (func in _OF_GRAPHS and args[0].requires_grad)
        return asks and memory_of(args[0]) in self._memory
