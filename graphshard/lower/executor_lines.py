"""Lines of an executor, and their printing as straight-line Python.

    * %2: f32[4, 4] = all_gather(%0, 2, shard)    g = all_gather(w, 2, 'shard');  w = None  # start gather layers.0
      %3: f32[4, 4] = wait_tensor(%2)             f = wait_tensor(g);  g = None  # wait gather layers.0
      %4: f32[3, 4] = region_0(%1, %3)            inputs = [x, f];  x = f = None
                                                  (y,) = self.region_0(inputs)  # layers.0

The references to a region's inputs are dropped before it runs, so that it can free them on the way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx.node import map_aggregate

from graphshard.errors import visible
from graphshard.torch_compat.torch_ops import OpOverload

# A function of one list of inputs, which it empties.
Boxed = Callable[[list[Any]], Any]

_WIDTH = 100


class Variable(str):
    """Name of a value among the arguments of a line; unlike text it prints without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, kw_only=True)
class Line:
    """A step of an executor.

    Attributes:
        frees: values that it is the last to read, and results that are not read.
    """

    results: tuple[Variable, ...] = ()
    frees: tuple[Variable, ...] = ()

    @property
    def reads(self) -> tuple[Variable, ...]:
        """Values it reads."""
        return ()

    @property
    def label(self) -> str:
        """Name of its profiler range; "" has none."""
        return ""

    @property
    def comment(self) -> str:
        """Comment at the end of its code."""
        return self.label

    def statements(self) -> list[str]:
        """Print it as Python; the last statement does the work."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Take(Line):
    """The arguments of the executor; their list is emptied."""

    def statements(self) -> list[str]:
        names = ", ".join(self.results)
        if len(names) > _WIDTH:
            names = "\n".join(["(", *(f"    {name}," for name in self.results), ")"])
        taken = [f"{names} = inputs"] if len(self.results) > 1 else [f"({name},) = inputs" for name in self.results]
        return ["\n".join(taken), f"inputs.clear(){_free(self.frees)}"]


@dataclass(frozen=True, kw_only=True)
class Compute(Line):
    """A call of a `Boxed` function.

    Attributes:
        where: the modules it computes, or the bucket it starts.
    """

    inputs: tuple[Variable, ...]
    where: str

    @property
    def reads(self) -> tuple[Variable, ...]:
        return self.inputs

    @property
    def function(self) -> str:
        """Code of the function."""
        raise NotImplementedError

    def statements(self) -> list[str]:
        given, call = f"[{', '.join(self.inputs)}]", f"{_unpack(self.results)} = {self.function}"
        before = [name for name in self.frees if name in self.inputs]
        after = [name for name in self.frees if name not in self.inputs]
        if not before:
            return [f"{call}({given}){_free(after)}"]
        return [f"inputs = {given}{_free(before)}", f"{call}(inputs){_free(after)}"]


@dataclass(frozen=True, kw_only=True)
class CallLine(Compute):
    """A region, by name."""

    region: str

    @property
    def label(self) -> str:
        return f"{self.region} {self.where}".strip()

    @property
    def comment(self) -> str:
        return self.where

    @property
    def function(self) -> str:
        return f"self.{self.region}"


@dataclass(frozen=True, kw_only=True)
class Replay(Compute):
    """Regions, and views between them, that are launched together; `number` is which run they are."""

    number: int

    @property
    def label(self) -> str:
        return f"replay {self.where}".strip()

    @property
    def function(self) -> str:
        return f"replays[{self.number}]"


@dataclass(frozen=True, kw_only=True)
class Begin(Compute):
    """A gather that may be under way already; `number` is which one it is."""

    number: int

    @property
    def label(self) -> str:
        return f"start {self.where}"

    @property
    def function(self) -> str:
        return f"begun[{self.number}]"


@dataclass(frozen=True, kw_only=True)
class Operator(Line):
    """A call of an operator: of a view, a size, a copy between host and device, half of an exchange.

    Attributes:
        several: whether it returns a list, of which the results are the items.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    several: bool

    @property
    def reads(self) -> tuple[Variable, ...]:
        found: dict[Variable, None] = {}
        map_aggregate((self.args, self.kwargs), lambda a: found.update({a: None}) if isinstance(a, Variable) else None)
        return tuple(found)

    def statements(self) -> list[str]:
        made = _unpack(self.results) if self.several else ", ".join(self.results)
        given = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        call = f"{path_of(self.target)}({', '.join(given)})"
        if self.target is operator.getitem:
            call = f"{given[0]}[{given[1]}]"
        return [f"{made} = {call}{_free(self.frees)}"]


@dataclass(frozen=True, kw_only=True)
class Start(Operator):
    """A collective of a bucket, which is under way when the call returns."""

    bucket: str

    @property
    def label(self) -> str:
        return f"start {self.bucket}"


@dataclass(frozen=True, kw_only=True)
class WaitLine(Operator):
    """The end of a collective of a bucket, or of one of its tensors."""

    bucket: str

    @property
    def label(self) -> str:
        return f"wait {self.bucket}"


@dataclass(frozen=True, kw_only=True)
class Arrive(Line):
    """Gradients that are handed over where they have arrived, instead of being returned.

    Attributes:
        number: of the group that they are.
        values: the gradients; their consumer has the only references.
        where: the bucket that they arrive in.
    """

    number: int
    values: tuple[Variable, ...]
    where: str

    @property
    def reads(self) -> tuple[Variable, ...]:
        return self.values

    @property
    def label(self) -> str:
        return f"update {self.where}".strip()

    def statements(self) -> list[str]:
        return [f"inputs = [{', '.join(self.values)}]{_free(self.frees)}", f"arrived({self.number}, inputs)"]


@dataclass(frozen=True, kw_only=True)
class Return(Line):
    """The end; `values` are `Variable`s, and constants such as None."""

    values: tuple[Any, ...]

    @property
    def reads(self) -> tuple[Variable, ...]:
        return tuple(value for value in self.values if isinstance(value, Variable))

    def statements(self) -> list[str]:
        return [f"return {self.values!r}"]


# Of a line and its number, the code of a context manager that it runs in.
Around = Callable[[int, Line], str]


def print_lines(lines: Iterable[Line], around: Around | None = None) -> str:
    """Print lines as a function `forward` that takes `self`, whose methods are the regions, and a list of inputs.

    Args:
        around: what each region, start and wait runs in.
    """
    rows: list[str] = []
    for number, line in enumerate(lines):
        rows += print_line(line, around(number, line) if around is not None and line.label else "")
    return "def forward(self, inputs):\n" + "".join(f"    {row}\n" for row in rows)


def print_line(line: Line, within: str = "") -> list[str]:
    """Print a line as rows of Python, whose work is done in a context manager if there is one."""
    *before, work = line.statements()
    if within:
        work = f"with {within}: {work}"
    if line.comment:
        work += f"  # {visible(line.comment, lines=False)}"  # which must not end before its row
    return "\n".join([*before, work]).split("\n")


def path_of(target: Any) -> str:
    """Return how code calls an operator, or a function of a module."""
    if isinstance(target, OpOverload):
        return f"torch.ops.{target}"
    return f"{target.__module__.rpartition('.')[2].lstrip('_')}.{target.__name__}"


def _unpack(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) > 1 else f"({names[0]},)"


def _free(names: Sequence[str]) -> str:
    return f";  {' = '.join(names)} = None" if names else ""
