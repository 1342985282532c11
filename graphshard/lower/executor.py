"""What runs: a graph of region calls and collectives, and the lines that are read off it.

Every value is let go of at its last use. `lower/lines.py` shows lines; `program.forward.code` prints those that run.
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
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import PythonCode
from torch.fx.node import map_arg

from graphshard.ir.graph import WAIT, launch_of, module_of
from graphshard.lower.ahead import Gather, gathers_at_the_head
from graphshard.lower.arrivals import Arrived, Groups, Taken, with_arrivals
from graphshard.lower.lines import (
    Around,
    Arrive,
    Call,
    Line,
    Operator,
    Return,
    Start,
    Take,
    Variable,
    Wait,
    path_of,
    print_lines,
)
from graphshard.lower.replays import Boxed, Replays, with_replays
from graphshard.torch_compat.operators import OpOverload

_SCOPE: dict[str, Any] = {"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan}
_numbers = itertools.count()


class Executor(GraphModule):
    """A graph of region calls, collectives and operators that return at once, and the lines that run it.

    `code` is what runs. `forward` takes one list of inputs, which it empties. Lines and code are made when somebody
    asks for them: a prediction never does, and a program that is installed changes before it runs.
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

    def with_ranges(self) -> Boxed:
        """What `forward` does, with a range for the profiler around each region, start and wait."""
        return self._within(_ranged)

    def with_clock(self, clock: Callable[[int], AbstractContextManager[None]]) -> Boxed:
        """What `forward` does, with each region, start and wait inside `clock(number of the line)`."""
        return self._within(lambda number, _: f"clock({number})", clock=clock)

    def with_arrivals(
        self, taken: Sequence[Taken], arrived: Arrived, *, ranges: bool = False, replays: Replays | None = None
    ) -> tuple[Boxed, Groups, int]:
        """What `forward` does, but that gradients are handed over where they have arrived; None is returned for them.

        Args:
            taken: those to hand over.
            arrived: is called with the number of a group and its gradients, at most once for each group.
            ranges: whether there are ranges for the profiler.
            replays: who launches runs of regions, where there are none.

        Returns:
            The code, what each group consists of, places among the results, and the number of groups before the last
            collective is started.
        """
        lines, groups = with_arrivals(self.lines, taken)
        last = max((index for index, line in enumerate(lines) if isinstance(line, Start)), default=0)
        early = sum(isinstance(line, Arrive) for line in lines[:last])
        if replays is not None and not ranges:
            return self.with_replays(replays, lines, arrived=arrived), groups, early
        freed = tuple(_with_frees(lines))
        return self._within(_ranged if ranges else None, freed, arrived=arrived), groups, early

    def with_gathers(
        self, shards: Collection[int], begun: Sequence[Boxed], *, ranges: bool = False, replays: Replays | None = None
    ) -> tuple[Boxed, list[Gather]]:
        """What `forward` does, but that somebody else starts the gathers at its head.

        Args:
            shards: places among the inputs of what gathers read.
            begun: of each gather what is called to start it; it may be filled when the code is there.
            ranges: whether there are ranges for the profiler.
            replays: who launches runs of regions, where there are none.

        Returns:
            The code, and the gathers; there is one function in `begun` for each.
        """
        lines, gathers = gathers_at_the_head(self.lines, shards)
        if replays is not None and not ranges:
            return self.with_replays(replays, lines, begun=begun), gathers
        return self._within(_ranged if ranges else None, tuple(_with_frees(lines)), begun=begun), gathers

    def code_of(self, lines: Sequence[Line]) -> Boxed:
        """Other lines as a function that takes a list of inputs, which it empties; regions are those of this graph."""
        return self._within(None, tuple(_with_frees(lines)))

    def with_replays(self, replays: Replays, lines: Sequence[Line] | None = None, **known: Any) -> Boxed:
        """What `forward`, or other lines do, but that somebody else launches runs of regions.

        Args:
            replays: who does.
            known: what names in the code stand for besides values.
        """
        lines, runs = with_replays(self.lines if lines is None else lines, replays)
        made = [replays.replay(run, self._within(None, tuple(_with_frees(run.lines)))) for run in runs]
        return self._within(None, tuple(_with_frees(lines)), replays=made, **known)

    def _within(self, around: Around | None, lines: Sequence[Line] | None = None, **known: Any) -> Boxed:
        lines = self.lines if lines is None else lines
        return types.MethodType(_function(print_lines(lines, around), _scope(lines) | known), self)


def _at_first_call(executor: Executor, inputs: list[Any]) -> Any:
    """What stands in for the code until it is made; whoever holds it may call it later, too."""
    cls = type(executor)
    if cls.forward is _at_first_call:
        cls.forward = _function(executor.code, _scope(executor.lines))
    return cls.forward(executor, inputs)


def _ranged(_: int, line: Line) -> str:
    return f"torch.profiler.record_function({line.label!r})"


def lines_of(graph: Graph) -> tuple[Line, ...]:
    """Read the lines off a graph, with what each frees.

    Raises:
        ValueError: the results of a region are not picked up one by one.
    """
    names = _names(graph)
    started = {launch_of(node) for node in graph.nodes if node.target is WAIT}
    parts = {node: found for node in graph.nodes if (found := _parts(node))}
    inside = {part for found in parts.values() for part in found}
    lines: list[Line] = [Take(results=tuple(names[node] for node in graph.find_nodes(op="placeholder")))]
    for node in graph.nodes:
        if node.op != "placeholder" and node not in inside:
            lines.append(_line(node, parts.get(node, []), names, started))
    return tuple(_with_frees(lines))


def _line(node: Node, parts: Sequence[Node], names: dict[Node, Variable], started: set[Node]) -> Line:
    given: Any = map_arg((node.args, node.kwargs), names.__getitem__)
    args, kwargs = given
    results = tuple(names[part] for part in parts or [node])
    if node.op == "output":
        return Return(values=tuple(args[0]))
    if node.op == "call_module":
        if not parts:
            raise ValueError(f"the results of {node.name} are not picked up one by one")
        return Call(results=results, region=str(node.target), inputs=tuple(args[0]), where=module_of(node))
    call: dict[str, Any] = {"target": node.target, "args": args, "kwargs": kwargs, "several": bool(parts)}
    if node in started:
        return Start(results=results, **call, bucket=str(node.meta.get("bucket", "")))
    if node.target is WAIT:
        return Wait(results=results, **call, bucket=str(node.meta.get("bucket", "")))
    return Operator(results=results, **call)


def _parts(node: Node) -> list[Node]:
    """The nodes that pick the results of a node one by one, in order; [] where some are left out or others use it."""
    val = node.meta.get("val")
    if not isinstance(val, (tuple, list)) or any(user.target is not operator.getitem for user in node.users):
        return []
    picked = {user.args[1]: user for user in node.users}
    whole = len(picked) == len(node.users) and set(picked) == set(range(len(val)))
    return [picked[index] for index in range(len(val))] if whole else []


def _names(graph: Graph) -> dict[Node, Variable]:
    """A name for each value that is nothing else's in the code; a parameter may be called "inputs"."""
    modules = {path_of(node.target).partition(".")[0] for node in graph.nodes if node.op == "call_function"}
    taken = {"self", "inputs", "clock", "arrived", "begun", "replays", *_SCOPE, *modules}
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


def _scope(lines: Iterable[Line]) -> dict[str, Any]:
    """What names in the code of lines stand for, besides values."""
    scope = dict(_SCOPE)
    for line in lines:
        if isinstance(line, Operator) and not isinstance(line.target, OpOverload):
            module = sys.modules[line.target.__module__]
            assert scope.setdefault(path_of(line.target).partition(".")[0], module) is module
    return scope


def _function(code: str, scope: dict[str, Any]) -> Callable[..., Any]:
    """The function that code defines; while it lives, tracebacks show its lines."""
    file = f"<executor {next(_numbers)}>"
    made: dict[str, Callable[..., Any]] = {}
    exec(compile(code, file, "exec"), scope, made)
    forward = made["forward"]
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    weakref.finalize(forward, linecache.cache.pop, file, None).atexit = False
    return forward
