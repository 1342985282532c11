"""What a forward reads and writes on its modules besides parameters and buffers, as values without code.

self.scale                     Read    the program holds while the attribute is what it was
self.freqs, a tensor           an input of the program behind those of the call
if self.step < 100:            Condition    the program holds while the comparison has this result
x * self.step                  an input of the program: the number, as a tensor without dimensions
self.step += 1                 Write   after each call, of the number that was there before
self.aux = loss                Write   after each call, of an output of the program behind those of the result
"""

from __future__ import annotations

import enum
import inspect
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch
from torch.utils import _pytree as pytree

StepKind: TypeAlias = Literal[
    "attribute",
    "class",
    "type",
    "names",
    "item",
    "value",
    "cell",
    "global",
    "default",
    "context",
    "environment",
    "setting",
    "imported",
    "tensor",
    "descriptor",
]
Path: TypeAlias = tuple[tuple[StepKind, Any], ...]


class Missing(enum.Enum):
    """What is where there is no such attribute, and what has not been seen."""

    MISSING = "missing"
    UNSEEN = "unseen"


MISSING, UNSEEN = Missing


@dataclass(frozen=True)
class Place:
    """Where something is: a module by name, and the way from it.

    Attributes:
        module: name in the module that is captured; "" is that module.
        path: steps by an "attribute", by a "class" attribute, to the class itself ("type"), to a "descriptor" that it
            has, to the "names" of all attributes, by the key of an "item", by the number of a "value" of a dict, by
            the name of a variable that a function closes over ("cell"), of a "global", or of an argument with a
            "default", to what a ContextVar has in this "context", and to what somebody has set on a "tensor"; or the
            name of a variable of the "environment", of a "setting" of torch, or of an "imported" module of Python's,
            which no module of the model has.
    """

    module: str
    path: Path = ()

    def then(self, kind: StepKind, key: Any) -> Place:
        """One step further."""
        return Place(self.module, (*self.path, (kind, key)))

    def starts_with(self, other: Place) -> bool:
        """Whether it is reached through another place, or is that place."""
        return self.module == other.module and self.path[: len(other.path)] == other.path

    @property
    def is_setting(self) -> bool:
        """Whether it is a setting of torch, which a file keeps as it was at its export."""
        return self.path[:1] != () and self.path[0][0] == "setting"

    def of(self, label: str) -> str:
        """As text that begins with the name of the module that is captured."""
        of_process = self.path[:1] and self.path[0][0] in ("environment", "setting", "imported")
        return str(self) if of_process else f"{label}.{self}"

    def __str__(self) -> str:
        text = self.module
        for kind, key in self.path:
            if kind == "environment":
                return f"os.environ[{key!r}]" if key else "os.environ"
            if kind == "context":
                text += ".get()"
            else:
                text += f"[{_shown(key)}]" if kind == "item" else f".{key}" if text else str(key)
        return text


def _shown(key: Any) -> str:
    return type(key()).__name__ if isinstance(key, weakref.ref) else repr(key)


@dataclass(frozen=True)
class Read:
    """What was at a place while a program was captured.

    Attributes:
        text: what it was, the same in every process where it is the same.
        free: ways from there to what only the type matters of, because it is followed.
        witness: of the very object, see `capture/witness.py`; UNSEEN if the program comes from a file.
    """

    place: Place
    text: str
    free: tuple[Path, ...] = ()
    witness: Any = field(default=Missing.UNSEEN, compare=False, repr=False)


# --- numbers -----------------------------------------------------------------------------------------------------

# What may be computed of numbers without fixing them, by name.
NUMBER_OPERATORS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        name: getattr(operator, name)
        for name in (
            *("add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "neg", "pos", "abs"),
            *("eq", "ne", "lt", "le", "gt", "ge"),
        )
    }
)


@dataclass(frozen=True)
class Number:
    """The number at a place before the call."""

    place: Place

    def __str__(self) -> str:
        return str(self.place)


@dataclass(frozen=True)
class Computed:
    """An operation of NUMBER_OPERATORS on numbers."""

    operation: str
    operands: tuple[Expression, ...]

    def __str__(self) -> str:
        return f"{self.operation}({', '.join(map(str, self.operands))})"


Expression: TypeAlias = Number | Computed | int | float


@dataclass(frozen=True)
class Condition:
    """The program holds while an expression has this value.

    Attributes:
        line: where forward asked for it, as "file:line".
    """

    expression: Expression
    value: Any
    line: str = ""


def evaluate(expression: Expression, number_at: Callable[[Place], Any]) -> Any:
    """The value of an expression."""
    if isinstance(expression, Number):
        return number_at(expression.place)
    if isinstance(expression, Computed):
        operands = (evaluate(operand, number_at) for operand in expression.operands)
        return NUMBER_OPERATORS[expression.operation](*operands)
    return expression


def places_in(expression: Expression) -> Iterator[Place]:
    """Where the numbers are that an expression is computed of."""
    if isinstance(expression, Number):
        yield expression.place
    elif isinstance(expression, Computed):
        for operand in expression.operands:
            yield from places_in(operand)


def computations_in(expression: Expression) -> Iterator[Computed]:
    """The operations of an expression."""
    if isinstance(expression, Computed):
        yield expression
        for operand in expression.operands:
            yield from computations_in(operand)


def arity(operation: str) -> int:
    """How many numbers an operation of NUMBER_OPERATORS takes."""
    return len(inspect.signature(NUMBER_OPERATORS[operation]).parameters)


def number_as_tensor(value: float) -> torch.Tensor:
    """A number as a tensor of its precision, on the host."""
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64, device="cpu")


# --- writes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Constant:
    """The same value after every call."""

    value: Any


@dataclass(frozen=True)
class Result:
    """A tensor that the program makes, by its number among the leaves of the result and what follows them."""

    index: int


@dataclass(frozen=True)
class Given:
    """A tensor that the program was given, by its number among the inputs."""

    index: int


@dataclass(frozen=True)
class Old:
    """The object that was at a place before the call."""

    place: Place


@dataclass(frozen=True)
class Counted:
    """A number computed of those that were there before the call."""

    expression: Expression


@dataclass(frozen=True)
class Made:
    """A container that forward made."""

    structure: pytree.TreeSpec
    leaves: tuple[Term, ...]


Term: TypeAlias = Constant | Result | Given | Old | Counted | Made
WriteKind: TypeAlias = Literal["set", "delete", "register", "extend", "replace"]


@dataclass(frozen=True)
class Write:
    """What a call leaves at a place.

    Attributes:
        kind: "set" an attribute or item, "delete" it, "register" a buffer that is not there, "extend" the list there,
            or "replace" what is in it.
        terms: the one value of "set"; a buffer, and whether it is persistent; or the items.
    """

    place: Place
    kind: WriteKind
    terms: tuple[Term, ...] = ()


@dataclass(frozen=True)
class ModuleState:
    """All that a program reads and writes on modules besides parameters and buffers.

    Attributes:
        reads: what must be as it was.
        conditions: on numbers that may change.
        inputs: places of each tensor that the program is given behind those of the call; it is at all of them.
        numbers: that the program is given behind those, as tensors without dimensions.
        writes: after each call.
        hooks: of submodules, by the module's name and the attribute that holds them; other modules have none.
        modules: names of the submodules and of their classes.
        required: tensors of the call, by number, that require a gradient from it on.
        same: tensors of the call, by number, that are the very ones at places of the module.
    """

    reads: tuple[Read, ...] = ()
    conditions: tuple[Condition, ...] = ()
    inputs: tuple[tuple[Place, ...], ...] = ()
    numbers: tuple[Expression, ...] = ()
    writes: tuple[Write, ...] = ()
    hooks: tuple[Read, ...] = ()
    modules: tuple[tuple[str, str], ...] = ()
    required: tuple[int, ...] = ()
    same: tuple[tuple[int, Place], ...] = ()
