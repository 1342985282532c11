"""Executor of a program's phase: a graph of region calls and collectives, and the lines that are read off it.

Every value is freed at its last use. `executor_lines.py` shows lines; `program.forward.code` prints the lines that run.
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
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import PythonCode
from torch.fx.node import map_arg

from graphshard.ir.graph import WAIT, launch_of, module_of
from graphshard.lower.executor_lines import (
    Around,
    Boxed,
    CallLine,
    Line,
    Operator,
    Return,
    Start,
    Take,
    Variable,
    WaitLine,
    path_of,
    print_lines,
)
from graphshard.torch_compat.torch_ops import OpOverload

_SCOPE: dict[str, Any] = {"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan}
# Names that code of rewritten lines also refers to (`line_rewrites.py`).
_OF_REWRITES = ("clock", "arrived", "begun", "replays")
_numbers = itertools.count()


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
        return types.MethodType(_function(print_lines(lines, around), _scope(lines) | known), self)


def profiler_range(_: int, line: Line) -> str:
    """Return the code of a line's range for torch's profiler."""
    return f"torch.profiler.record_function({line.label!r})"


def _at_first_call(executor: Executor, inputs: list[Any]) -> Any:
    """Make the code, and run it; references to this function stay valid."""
    cls = type(executor)
    if cls.forward is _at_first_call:
        cls.forward = _function(executor.code, _scope(executor.lines))
    return cls.forward(executor, inputs)


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
        return CallLine(results=results, region=str(node.target), inputs=tuple(args[0]), where=module_of(node))
    call: dict[str, Any] = {"target": node.target, "args": args, "kwargs": kwargs, "several": bool(parts)}
    if node in started:
        return Start(results=results, **call, bucket=str(node.meta.get("bucket", "")))
    if node.target is WAIT:
        return WaitLine(results=results, **call, bucket=str(node.meta.get("bucket", "")))
    return Operator(results=results, **call)


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
    modules = {path_of(node.target).partition(".")[0] for node in graph.nodes if node.op == "call_function"}
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


def _scope(lines: Iterable[Line]) -> dict[str, Any]:
    """Return the modules that the code of lines refers to."""
    scope = dict(_SCOPE)
    for line in lines:
        if isinstance(line, Operator) and not isinstance(line.target, OpOverload):
            module = sys.modules[line.target.__module__]
            assert scope.setdefault(path_of(line.target).partition(".")[0], module) is module
    return scope


def _function(code: str, scope: dict[str, Any]) -> Callable[..., Any]:
    """Compile code; while the function lives, tracebacks show its lines."""
    file = f"<executor {next(_numbers)}>"
    made: dict[str, Callable[..., Any]] = {}
    exec(compile(code, file, "exec"), scope, made)
    forward = made["forward"]
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    weakref.finalize(forward, linecache.cache.pop, file, None).atexit = False
    return forward
