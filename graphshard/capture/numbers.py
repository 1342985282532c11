"""Numbers that forward changes, such as a counter of calls, followed while it is traced.

    self.step += 1                   add(step, 1), computed anew after each call
    if self.step < 100: ...          the trace holds while lt(step, 100) is what it was
    x * (self.step / 100)            truediv(step, 100) is an input of the program, computed before each call
    range(self.step)                 the trace holds while the step is what it was

A `FollowedNumber` stands in for such a number. It is no subclass of int, because torch and Python read those without
asking; what they cannot ask is answered with the number itself, and becomes a condition of the trace. An input is a
tensor of the number's precision, and what is read of it takes part in operators as a number does in eager mode: bits
are the same. Where an operator, or its derivative, must know the number, the trace holds for that number alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphshard.capture.lines import user_line
from graphshard.ir.state import NUMBER_OPERATORS, Computed, Condition, Expression


class Numbers:
    """What a trace depends on of numbers that are followed.

    Args:
        inputs: numbers that the trace reads of its inputs.
        may_be_inputs: whether others may become inputs.

    Attributes:
        conditions: while which the trace holds.
        unknown: numbers that operators were given, and that are no inputs yet.
    """

    def __init__(self, inputs: Mapping[Expression, Any], *, may_be_inputs: bool) -> None:
        self._inputs, self._may_be_inputs = inputs, may_be_inputs
        self.conditions: list[Condition] = []
        self.unknown: dict[Expression, int | float] = {}

    def fixed(self, expression: Expression, value: Any) -> Any:
        """The number itself, on which the trace depends from now on."""
        condition = Condition(expression, value, user_line())
        if all((c.expression, c.value) != (condition.expression, condition.value) for c in self.conditions):
            self.conditions.append(condition)
        return value

    def given(self, expression: Expression, value: Any) -> Any:
        """What an operator is given."""
        if expression in self._inputs:
            return self._inputs[expression]
        if type(value) is bool or not self._may_be_inputs:
            return self.fixed(expression, value)
        self.unknown[expression] = value
        return value


class FollowedNumber:
    """An expression of numbers, with its value in this trace; `numbers` collects what the trace depends on."""

    __slots__ = ("_expression", "_numbers", "_value")
    __hash__: Any

    def __init__(self, expression: Expression, value: Any, numbers: Numbers) -> None:
        self._expression, self._value, self._numbers = expression, value, numbers

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._value)

    def __getattr__(self, name: str) -> Any:
        return getattr(fixed(self), name)

    def __bool__(self) -> bool:
        if isinstance(self._value, bool):
            return bool(fixed(self))
        return bool(fixed(FollowedNumber(Computed("ne", (self._expression, 0)), self._value != 0, self._numbers)))

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, _: Any) -> Any:
        return self

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], _: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(_given, (args, kwargs or {}))
        return func(*args, **kwargs)


def fixed(value: Any) -> Any:
    """The number itself of one that is followed, on which the trace depends from now on; other values as they are."""
    return value._numbers.fixed(value._expression, value._value) if type(value) is FollowedNumber else value


def _given(value: Any) -> Any:
    return value._numbers.given(value._expression, value._value) if type(value) is FollowedNumber else value


def expression_of(value: Any) -> Expression:
    """What a number was computed of."""
    return value._expression if type(value) is FollowedNumber else value


def is_followed(value: Any) -> bool:
    """Whether a value stands for a number."""
    return type(value) is FollowedNumber


def _computed(name: str, *, reflected: bool = False) -> Callable[..., Any]:
    compute = NUMBER_OPERATORS[name]

    def operation(self: FollowedNumber, *others: Any) -> Any:
        if any(isinstance(other, (torch.SymInt, torch.SymFloat, torch.SymBool)) for other in others):
            return compute(*map(fixed, (*others, self) if reflected else (self, *others)))  # of what a tensor holds
        if any(type(other) not in (int, float, bool, FollowedNumber) for other in others):
            return NotImplemented
        operands = (*others, self) if reflected else (self, *others)
        value = compute(*(o._value if type(o) is FollowedNumber else o for o in operands))
        return FollowedNumber(Computed(name, tuple(map(expression_of, operands))), value, self._numbers)

    return operation


def _asked(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: function(fixed(self), *map(fixed, args))


def _give_operators() -> None:
    """What the interpreter looks up in the class, and so is not found by `__getattr__`."""
    for name in NUMBER_OPERATORS:
        setattr(FollowedNumber, f"__{name}__", _computed(name))
        if name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow"):
            setattr(FollowedNumber, f"__r{name}__", _computed(name, reflected=True))
    for function in (int, float, hash, repr, str, format, round, divmod, complex):
        setattr(FollowedNumber, f"__{function.__name__}__", _asked(function))
    for name in ("index", "and_", "or_", "xor", "lshift", "rshift", "invert"):
        setattr(FollowedNumber, f"__{name.strip('_')}__", _asked(getattr(operator, name)))


_give_operators()
