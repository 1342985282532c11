"""Executor of a program's phase: a graph of region calls and collectives, and the lines of Python that run it.

    * %2: f32[4, 4] = all_gather(%0, 2, shard)    g = all_gather(w, 2, 'shard');  w = None  # start gather layers.0
      %3: f32[4, 4] = wait_tensor(%2)             f = wait_tensor(g);  g = None  # wait gather layers.0
      %4: f32[3, 4] = region_0(%1, %3)            inputs = [x, f];  x = f = None
                                                  (y,) = self.region_0(inputs)  # layers.0

Every value is freed at its last use. References to a region's inputs are dropped before it runs, so that it can free
them on the way. `program.forward.code` prints the lines that run.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import math
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import PythonCode
from torch.fx.node import map_aggregate, map_arg

from graphshard.errors import visible
from graphshard.ir.graph import WAIT, launch_of, module_of
from graphshard.torch_compat.torch_ops import OpOverload

# A function of one list of inputs, which it empties.
Boxed = Callable[[list[Any]], Any]

_WIDTH = 100
_SCOPE: dict[str, Any] = {"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan}
# Names that code of rewritten lines also refers to (`line_rewrites.py`).
_OF_REWRITES = ("clock", "arrived", "begun", "replays")
_numbers = itertools.count()


# --- lines -------------------------------------------------------------------------------------------------------


class Variable(str):
    """Name of a value among the arguments of a line; unlike text it prints without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, kw_only=True)
class Line:
    """A step of an executor; it frees values that it is the last to read, and results that are not read."""

    results: tuple[Variable, ...] = ()
    frees: tuple[Variable, ...] = ()
    label_format: ClassVar[str] = ""

    @property
    def reads(self) -> tuple[Variable, ...]:
        """Values it reads."""
        return ()

    @property
    def label(self) -> str:
        """Name of its profiler range; "" has none."""
        return self.label_format.format(self).strip()

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
    """A call of a `Boxed` function; its formats take the line and its inputs. `where` has modules, or a bucket."""

    inputs: tuple[Variable, ...]
    where: str
    call_format: ClassVar[str]

    @property
    def reads(self) -> tuple[Variable, ...]:
        return self.inputs

    def statements(self) -> list[str]:
        given, made = f"[{', '.join(self.inputs)}]", f"{_unpack(self.results)} = " if self.results else ""
        before = [name for name in self.frees if name in self.inputs]
        after = _free([name for name in self.frees if name not in self.inputs])
        if not before:
            return [f"{made}{self.call_format.format(self, given)}{after}"]
        return [f"inputs = {given}{_free(before)}", f"{made}{self.call_format.format(self, 'inputs')}{after}"]


@dataclass(frozen=True, kw_only=True)
class CallLine(Compute):
    """A region, by name."""

    region: str
    call_format = "self.{0.region}({1})"
    label_format = "{0.region} {0.where}"

    @property
    def comment(self) -> str:
        return self.where


@dataclass(frozen=True, kw_only=True)
class Replay(Compute):
    """Regions, and views between them, that are launched together; `number` is which run they are."""

    number: int
    call_format = "replays[{0.number}]({1})"
    label_format = "replay {0.where}"


@dataclass(frozen=True, kw_only=True)
class Begin(Compute):
    """A gather that may be under way already; `number` is which one it is."""

    number: int
    call_format = "begun[{0.number}]({1})"
    label_format = "start {0.where}"


@dataclass(frozen=True, kw_only=True)
class Arrive(Compute):
    """A group of gradients that are handed over where they have arrived; their consumer has the only references."""

    number: int
    call_format = "arrived({0.number}, {1})"
    label_format = "update {0.where}"


@dataclass(frozen=True, kw_only=True)
class Operator(Line):
    """A call of an operator on few values, such as a view or a size; `several` results are the items of a list."""

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
        call = f"{_path_of(self.target)}({', '.join(given)})"
        if self.target is operator.getitem:
            call = f"{given[0]}[{given[1]}]"
        return [f"{made} = {call}{_free(self.frees)}"]


@dataclass(frozen=True, kw_only=True)
class Start(Operator):
    """A collective of a bucket, which is under way when the call returns."""

    bucket: str
    label_format = "start {0.bucket}"


@dataclass(frozen=True, kw_only=True)
class WaitLine(Operator):
    """The end of a collective of a bucket, or of one of its tensors.

    For several tensors of one launch, the first has the work of all.
    """

    bucket: str
    label_format = "wait {0.bucket}"

    def statements(self) -> list[str]:
        others = "".join(f", {name}" for name in self.args[1:])
        return [f"{', '.join(self.results)} = {_path_of(self.target)}({self.args[0]}){others}{_free(self.frees)}"]


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
    """Print lines as a function of the executor and a list of inputs; regions, starts and waits run in `around`."""
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


def _path_of(target: Any) -> str:
    """Return how code calls an operator, or a function of a module."""
    if isinstance(target, OpOverload):
        return f"torch.ops.{target}"
    return f"{target.__module__.rpartition('.')[2].lstrip('_')}.{target.__name__}"


def _unpack(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) > 1 else f"({names[0]},)"


def _free(names: Sequence[str]) -> str:
    return f";  {' = '.join(names)} = None" if names else ""


def lines_of(graph: Graph) -> tuple[Line, ...]:
    """Read the lines off a graph; raise ValueError if the results of a region are not picked up one by one."""
    names = _names(graph)
    started = {launch_of(node) for node in graph.nodes if node.target is WAIT}
    parts = {node: found for node in graph.nodes if (found := _parts(node))}
    waits = _waits(graph)
    inside = {part for found in parts.values() for part in found}.union(*(found[1:] for found in waits.values()))

    def read(node: Node) -> Line:
        given: Any = map_arg((node.args, node.kwargs), names.__getitem__)
        args, kwargs = given
        results = tuple(names[part] for part in parts.get(node, [node]))
        if node.op == "output":
            return Return(values=tuple(args[0]))
        if node.op == "call_module":
            if node not in parts:
                raise ValueError(f"the results of {node.name} are not picked up one by one")
            return CallLine(results=results, region=str(node.target), inputs=tuple(args[0]), where=module_of(node))
        call: dict[str, Any] = {"target": node.target, "args": args, "kwargs": kwargs, "several": node in parts}
        if node in waits:
            together = waits[node]
            call["args"] = tuple(names[each.all_input_nodes[0]] for each in together)
            results = tuple(map(names.__getitem__, together))
        if node in started or node in waits:
            kind = Start if node in started else WaitLine
            return kind(results=results, **call, bucket=str(node.meta.get("bucket", "")))
        return Operator(results=results, **call)

    taken = Take(results=tuple(names[node] for node in graph.find_nodes(op="placeholder")))
    rest = [node for node in graph.nodes if node.op != "placeholder" and node not in inside]
    return tuple(_with_frees([taken, *map(read, rest)]))


def _waits(graph: Graph) -> dict[Node, list[Node]]:
    """Return by first wait the waits of each launch; one by one for functional launches, whose works are separate."""
    found: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node.target is WAIT:
            launch = launch_of(node)
            found.setdefault(node if isinstance(launch.target, OpOverload) else launch, []).append(node)
    return {waits[0]: waits for waits in found.values()}


def _parts(node: Node) -> list[Node]:
    """Return the nodes that pick the results of a node one by one; [] where some are left out or others use it."""
    val = node.meta.get("val")
    if not isinstance(val, (tuple, list)) or any(user.target is not operator.getitem for user in node.users):
        return []
    picked = {user.args[1]: user for user in node.users}
    all_picked = len(picked) == len(node.users) and set(picked) == set(range(len(val)))
    return [picked[index] for index in range(len(val))] if all_picked else []


def _names(graph: Graph) -> dict[Node, Variable]:
    """Give each value a name that is unique in the code; a parameter may be called "inputs"."""
    modules = {_path_of(node.target).partition(".")[0] for node in graph.nodes if node.op == "call_function"}
    taken = {"self", "inputs", *_OF_REWRITES, *_SCOPE, *modules}
    found: dict[Node, Variable] = {}
    for node in graph.nodes:
        name = node.name
        while name in taken:
            name += "_"
        taken.add(name)
        found[node] = Variable(name)
    return found


def _with_frees(lines: Sequence[Line]) -> Iterable[Line]:
    used: set[Variable] = set()
    found = []
    for line in reversed(lines):
        last = tuple(name for name in dict.fromkeys((*line.reads, *line.results)) if name not in used)
        used.update(last)
        found.append(line if isinstance(line, Return) else replace(line, frees=last))
    return reversed(found)


# --- the module --------------------------------------------------------------------------------------------------


class Executor(GraphModule):
    """A graph of region calls, collectives and operators that return at once, and the lines that run it.

    `code` is what runs. `forward` takes one list of inputs, which it empties. Lines and code are made when they are
    asked for: a prediction never does, and a program that is installed changes before it runs.
    """

    def recompile(self) -> PythonCode:
        """Forget lines and code: the graph has changed."""
        for made in ("lines", "code"):
            self.__dict__.pop(made, None)
        type(self).forward = _at_first_call
        return PythonCode("", {}, None)

    @functools.cached_property
    def lines(self) -> tuple[Line, ...]:
        """What runs, in order."""
        return lines_of(self.graph)

    @functools.cached_property
    def code(self) -> str:
        """The lines as Python."""
        return print_lines(self.lines)

    def function(self, lines: Sequence[Line] | None = None, around: Around | None = None, **known: Any) -> Boxed:
        """Compile lines, by default the executor's, to a function that calls the regions of this graph.

        Args:
            around: context managers that lines run in, such as `profiler_range`.
            known: other names in the code.
        """
        lines = self.lines if lines is None else tuple(_with_frees(lines))
        return types.MethodType(_function(print_lines(lines, around), lines, known), self)


def profiler_range(_: int, line: Line) -> str:
    """Return the code of a line's range for torch's profiler."""
    return f"torch.profiler.record_function({line.label!r})"


def _at_first_call(executor: Executor, inputs: list[Any]) -> Any:
    """Make the code, and run it; references to this function stay valid."""
    cls = type(executor)
    if cls.forward is _at_first_call:
        cls.forward = _function(executor.code, executor.lines, {})
    return cls.forward(executor, inputs)


def _function(code: str, lines: Iterable[Line], known: dict[str, Any]) -> Callable[..., Any]:
    """Compile the code of lines; while the function lives, tracebacks show its lines."""
    scope = dict(_SCOPE)
    for line in lines:
        if isinstance(line, Operator) and not isinstance(line.target, OpOverload):
            module = sys.modules[line.target.__module__]
            assert scope.setdefault(_path_of(line.target).partition(".")[0], module) is module
    file = f"<executor {next(_numbers)}>"
    made: dict[str, Callable[..., Any]] = {}
    exec(compile(code, file, "exec"), scope | known, made)
    forward = made["forward"]
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    weakref.finalize(forward, linecache.cache.pop, file, None).atexit = False
    return forward
