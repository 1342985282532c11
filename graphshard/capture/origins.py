"""How tensors of a trace were made, as far as inputs, buffers and numbers in the code determine them.

A trace knows shapes, not values. What operators have made of what is known can be computed when it is needed, with the
values of the call for which forward is traced, or at a later call.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import sympy
import torch
from sympy.core.relational import Relational
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils.weak import WeakIdKeyDictionary

from graphshard.ir.program import Slot
from graphshard.ir.tracing_internals import is_written, memory_of, written_by

aten = torch.ops.aten
# Operators of other libraries may do more than compute, and those of collectives wait for other ranks.
_NAMESPACES = ("aten", "prims")


@dataclass(frozen=True, eq=False)
class Given:
    """A tensor that forward is given, with its value at the call for which it is traced."""

    slot: Slot
    tensor: Tensor
    fixed: bool = False
    of: tuple[OfTensor, ...] = ()


@dataclass(frozen=True, eq=False)
class Step:
    """A result of an operator.

    Attributes:
        args, kwargs: with origins in the place of tensors.
        index: which of the results it is.
        fixed: it is the same at every call, and on any device.
        written: a copy among the arguments, which the operator writes to; it is the result then.
    """

    run: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    index: int = 0
    fixed: bool = False
    written: OfTensor | None = None

    @cached_property
    def of(self) -> tuple[OfTensor, ...]:
        """What it is made of."""
        return tuple(leaf for leaf in pytree.arg_tree_leaves(*self.args, **self.kwargs) if is_origin(leaf))


@dataclass(frozen=True, eq=False)
class Number:
    """A size of a tensor along a dim, or the one number that is in it."""

    tensor: OfTensor
    dim: int | None = None

    @property
    def of(self) -> tuple[Origin, ...]:
        """What it is read of."""
        return (self.tensor,)

    def read(self, tensor: Tensor) -> int | float:
        """The number, of a tensor with values."""
        return tensor.shape[self.dim] if self.dim is not None else tensor.item()


@dataclass(frozen=True, eq=False)
class Formula:
    """What is computed of numbers: a number, or a truth value.

    Attributes:
        numbers: by the symbols of the expression.
    """

    expression: sympy.Basic
    numbers: Mapping[sympy.Symbol, Number]

    @property
    def of(self) -> tuple[Origin, ...]:
        """The numbers."""
        return tuple(self.numbers.values())

    @property
    def is_exact(self) -> bool:
        """Whether Python finds the same, in whatever order it computes: not of what is rounded, or may be nan."""
        parts = self.expression.args if isinstance(self.expression, Relational) else (self.expression,)
        if all(part.is_Symbol or part.is_Number for part in parts):
            return True
        return all(
            part.is_integer for part in sympy.preorder_traversal(self.expression) if isinstance(part, sympy.Expr)
        )

    def compute(self, numbers: Mapping[sympy.Symbol, Any]) -> Any:
        """It, of Python's numbers, or of what stands for them."""
        return sympy_interp(_Operators, dict(numbers), self.expression)


class _Operators(PythonReferenceAnalysis):
    """Makes operators of Python's of a formula."""

    @staticmethod
    def not_(value: Any) -> Any:
        """The other truth value; what torch has for it is a method."""
        return operator.eq(value, False)

    @staticmethod
    def abs(value: Any) -> Any:
        """Of an integer; Python's function takes nothing that stands for one."""
        return value * ((value > 0) * 2 - 1)

    @staticmethod
    def int_truediv(value: Any, other: Any) -> Any:
        """The quotient of integers; what torch has for it is a formula again."""
        return value / other


OfTensor = Given | Step
Origin = OfTensor | Number | Formula


def is_origin(leaf: Any) -> bool:
    """Whether something stands for a tensor among the arguments of a step."""
    return isinstance(leaf, (Given, Step))


def in_order(origins: Iterable[Origin]) -> list[Origin]:
    """These and all that they are made of, each behind what it is made of."""
    found: dict[Origin, None] = {}
    waiting = list(origins)
    while waiting:
        missing = [origin for origin in waiting[-1].of if origin not in found]
        if missing:
            waiting += missing
        else:
            found[waiting.pop()] = None
    return list(found)


@torch.no_grad()
def values_of(origins: list[Origin], *, on_host: bool) -> list[Any]:
    """Their values, computed where the inputs are, or on the host: tensors, numbers and truth values."""
    known: dict[Origin, Any] = {}
    for origin in in_order(origins):
        if isinstance(origin, Given):
            known[origin] = origin.tensor.detach()
            continue
        if isinstance(origin, Number):
            known[origin] = origin.read(known[origin.tensor])
            continue
        if isinstance(origin, Formula):
            known[origin] = origin.compute({symbol: known[number] for symbol, number in origin.numbers.items()})
            continue
        args, kwargs = pytree.tree_map_only((Given, Step), known.__getitem__, (origin.args, dict(origin.kwargs)))
        if on_host:
            args, kwargs = pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
        made = pytree.tree_leaves(origin.run(*args, **kwargs))
        known[origin] = made[origin.index] if origin.written is None else known[origin.written]
    return [known[origin] for origin in origins]


# Makes random numbers from 0 to 1, of which 1 is none; what is certain about comparing them with a number.
_DRAWS = {aten.rand.default, aten.rand.generator}


def _truth(func: OpOverload, bound: Any) -> bool | None:
    if func not in (aten.lt.Scalar, aten.ge.Scalar) or 0 < bound < 1:
        return None
    return (func is aten.lt.Scalar) == (bound >= 1)


class Origins(TorchDispatchMode):
    """Remembers how tensors were made, also where operators write to them.

    Args:
        given: tensors that are traced, and what they are.
    """

    supports_higher_order_operators = True

    def __init__(self, given: Iterable[tuple[Tensor, Given]]) -> None:
        super().__init__()
        self._origins: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._drawn: WeakIdKeyDictionary = WeakIdKeyDictionary()  # random numbers from 0 to 1, and what is made of them
        for tensor, origin in given:
            self._origins[tensor] = origin

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        if not func._schema.is_mutable:
            result = func(*args, **kwargs)
            self._remember(func, args, kwargs, result)
            return result
        written = written_by(func, args, kwargs)
        before = self.of(written[0]) if len(written) == 1 else None
        step = self.step(func, args, kwargs) if before is not None else None
        result = func(*args, **kwargs)
        self._forget(written)
        if step is not None and before is not None:
            self._origins[written[0]] = _writing(step, before, fixed=step.fixed and _is_exact(written[0]))
        return result

    def is_drawn(self, tensor: Tensor) -> bool:
        """Whether a tensor is made of random numbers alone."""
        return tensor in self._drawn

    def of(self, tensor: Tensor) -> OfTensor | None:
        """How a tensor was made; None if a parameter, a random number or something unknown took part."""
        origin: OfTensor | None = self._origins.get(tensor)
        # Batch norm writes to its statistics without saying so.
        return None if isinstance(origin, Given) and is_written(tensor) else origin

    def _remember(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        given = [leaf for leaf in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(leaf, Tensor)]
        drawn = [tensor for tensor in given if self.is_drawn(tensor)]
        if func in _DRAWS or (drawn and len(drawn) == len(given)):
            numbers = (leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))
            self._drawn.update(dict.fromkeys(numbers, func in _DRAWS))
        if drawn and self._drawn[drawn[0]] and len(args) > 1 and isinstance(args[1], (int, float)):
            truth = _truth(func, args[1])
            if truth is not None:
                full = (list(result.shape), truth)
                self._origins[result] = Step(aten.full.default, full, {"dtype": torch.bool}, fixed=True)
            return
        if func is aten.lift_fresh.default:  # a tensor made of numbers in the code
            self._origins[result] = Step(func, args, kwargs, fixed=True)
            return
        step = None if any(self.of(tensor) is None for tensor in given) else self.step(func, args, kwargs)
        if step is None:
            return
        made = pytree.tree_leaves(result)
        fixed = step.fixed and all(map(_is_exact, made))
        for index, tensor in enumerate(made):
            if isinstance(tensor, Tensor):
                self._origins[tensor] = replace(step, index=index, fixed=fixed)

    def step(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step | None:
        """What an operator makes of these; None if that is unknown."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        leaves = [self.of(leaf) or leaf if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        unknown = any(isinstance(leaf, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)) for leaf in leaves)
        if unknown or func.namespace not in _NAMESPACES or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        return Step(func, args, kwargs, fixed=all(leaf.fixed for leaf in leaves if is_origin(leaf)))

    def _forget(self, written: Iterable[Tensor]) -> None:
        memory = set(map(memory_of, written))
        for tensor in list(self._origins):
            if memory_of(tensor) in memory:
                del self._origins[tensor]


def _writing(step: Step, before: OfTensor, *, fixed: bool) -> Step:
    """A step that writes to a copy of what was there before."""
    copy = Step(aten.clone.default, (before,), {}, fixed=before.fixed)
    args, kwargs = pytree.tree_map_only(
        (Given, Step), lambda origin: copy if origin is before else origin, (step.args, dict(step.kwargs))
    )
    return Step(step.run, args, kwargs, fixed=fixed, written=copy)


def _is_exact(made: Any) -> bool:
    """Whether it holds integers and truth values alone, which are the same on any device."""
    return not isinstance(made, Tensor) or not (made.is_floating_point() or made.is_complex())
