"""Numbers that forward changes, such as a counter of calls, followed while it is traced.

    self.step += 1                   add(step, 1), computed anew after each call
    if self.step < 100: ...          the trace holds while lt(step, 100) is what it was
    x * self.step                    the trace holds while the step is what it was

A `FollowedNumber` stands in for such a number. It is no subclass of int, because torch and Python read those without
asking; what they cannot ask is answered with the number itself, and becomes a condition of the trace.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch.utils import _pytree as pytree

from graphshard.capture.lines import user_line
from graphshard.ir.state import NUMBER_OPERATORS, Computed, Condition, Expression


class FollowedNumber:
    """An expression of numbers, with its value in this trace; `conditions` collects what the trace depends on."""

    __slots__ = ("_conditions", "_expression", "_value")
    __hash__: Any

    def __init__(self, expression: Expression, value: Any, conditions: list[Condition]) -> None:
        self._expression, self._value, self._conditions = expression, value, conditions

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._value)

    def __getattr__(self, name: str) -> Any:
        return getattr(fixed(self), name)

    def __bool__(self) -> bool:
        if isinstance(self._value, bool):
            return bool(fixed(self))
        return bool(fixed(FollowedNumber(Computed("ne", (self._expression, 0)), self._value != 0, self._conditions)))

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, _: Any) -> Any:
        return self

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], _: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(fixed, (args, kwargs or {}))
        return func(*args, **kwargs)


def fixed(value: Any) -> Any:
    """The number itself of one that is followed, on which the trace depends from now on; other values as they are."""
    if type(value) is not FollowedNumber:
        return value
    condition = Condition(value._expression, value._value, user_line())
    if all((c.expression, c.value) != (condition.expression, condition.value) for c in value._conditions):
        value._conditions.append(condition)
    return value._value


def expression_of(value: Any) -> Expression:
    """What a number was computed of."""
    return value._expression if type(value) is FollowedNumber else value


def is_followed(value: Any) -> bool:
    """Whether a value stands for a number."""
    return type(value) is FollowedNumber


def _computed(name: str, *, reflected: bool = False) -> Callable[..., Any]:
    compute = NUMBER_OPERATORS[name]

    def operation(self: FollowedNumber, *others: Any) -> Any:
        if any(type(other) not in (int, float, bool, FollowedNumber) for other in others):
            return NotImplemented
        operands = (*others, self) if reflected else (self, *others)
        value = compute(*(o._value if type(o) is FollowedNumber else o for o in operands))
        return FollowedNumber(Computed(name, tuple(map(expression_of, operands))), value, self._conditions)

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
