"""Branches on values of inputs: the trace takes one way, and the program is for calls that go this way.

    if mask.all():      trace     answer = True or False, which the values of the traced call say
                        graph     torch._assert_async(mask.all() or its negation)
                        guard     the same condition, computed from the inputs before each call

Dynamo cannot go either way at such a branch. A function whose branch is known (`eager_answers.py`) asks `decide` for
the answer. The first trace takes the likely way. The conditions that it leaves in the graph are computed for the inputs
of the call, and where the call goes another way, it is traced again with the answers that were found.

The assertion stays in the program, which may run without the guard, as one that was exported does.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

_BEGIN = "values of inputs decide in forward, and not as in the call that was captured: "


@dataclass
class _Open:
    """The answers of the trace that is open.

    Attributes:
        answers: that are known, in the order of the questions; None leaves all branches to Dynamo.
        given: in this run of forward; Dynamo may begin a trace again.
    """

    answers: Sequence[bool] | None
    given: list[bool]


_open = _Open(None, [])


@dataclass(frozen=True)
class ValueBranches:
    """Conditions on values of inputs that a trace has taken for true.

    Attributes:
        conditions: from the values of `sources` to a vector of booleans.
        sources: expressions that read the inputs, such as L['args'][0].
        answers: of the trace.
    """

    conditions: GraphModule
    sources: tuple[str, ...]
    answers: tuple[bool, ...]

    def answers_for(self, scope: Mapping[str, Any], names: Mapping[str, Any]) -> tuple[bool, ...]:
        """Return the answers for a call; those after the first that differs may be of other questions.

        Args:
            scope: module, args and kwargs of the call.
            names: globals.
        """
        values = [eval(code, {"L": scope, "G": names}) for code in self._codes]
        with torch.no_grad():
            holds = self.conditions(*values).tolist()
        return tuple(answer == held for answer, held in zip(self.answers, holds, strict=True))

    @functools.cached_property
    def _codes(self) -> list[types.CodeType]:
        return [compile(source, "guard", "eval") for source in self.sources]


@contextlib.contextmanager
def answering(answers: Sequence[bool] | None) -> Iterator[list[bool]]:
    """Answer as given while the block is open; yield the answers of the last run, complete when it ends."""
    before = _open.answers, _open.given
    _open.answers, _open.given = answers, []
    for function in (begin_answers, _next_answer):
        torch.compiler.assume_constant_result(function)
    try:
        yield _open.given
    finally:
        _open.answers, _open.given = before


def begin_answers() -> bool:
    """Begin a run of forward; part of the traced function."""
    _open.given.clear()
    return True


def decide(condition: torch.Tensor, likely: bool, what: str) -> bool:
    """Return whether a condition holds, for a branch of a function that Dynamo traces.

    Args:
        likely: the answer, if the trace does not know it.
        what: what decides, and what to do about it, as the end of a message.
    """
    answer = _next_answer(likely)
    if answer is None:
        return bool(condition)
    torch._assert_async(condition if answer else ~condition, _BEGIN + what)
    return answer


def _next_answer(likely: bool) -> bool | None:
    """Return the answer to the next question. Dynamo runs this during the trace, whose result is a constant of it."""
    if _open.answers is None:
        return None
    index = len(_open.given)
    _open.given.append(_open.answers[index] if index < len(_open.answers) else likely)
    return _open.given[-1]


def branches_of(graph: GraphModule, sources: Sequence[str], values: Sequence[Any], answers: Sequence[bool]) -> Any:
    """Return the `ValueBranches` of a trace; None if it has none, False if they are not about inputs alone.

    Args:
        sources: of the graph's inputs, in order.
        values: of the graph's inputs.
        answers: of the trace.
    """
    asked = [node for node in graph.graph.nodes if _is_asked(node)]
    if not asked:
        return None
    inputs = dict(zip(graph.graph.find_nodes(op="placeholder"), zip(sources, values, strict=True), strict=True))
    needed: dict[Node, None] = {}
    left = [node.args[0] for node in asked]
    while left:
        node = left.pop()
        if node in needed:
            continue
        if isinstance(inputs.get(node, ("", None))[1], nn.Parameter) or not _is_pure(node):
            return False
        needed[node] = None
        left += node.all_input_nodes
    made, copies, read = Graph(), dict[Node, Node](), list[str]()
    for node in graph.graph.nodes:
        if node in needed:
            copies[node] = made.node_copy(node, copies.__getitem__)
            if node in inputs:
                read.append(inputs[node][0])
    parts = [made.call_method("reshape", (copies[node.args[0]], ())) for node in asked]
    made.output(made.call_function(torch.stack, (parts,)))
    return ValueBranches(GraphModule(graph, made), tuple(read), tuple(answers))


def _is_asked(node: Node) -> bool:
    return node.target is torch._assert_async and str(node.args[-1]).startswith(_BEGIN)


def _is_pure(node: Node) -> bool:
    """Return whether a node of the torch-level graph computes a value and changes nothing."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op in ("placeholder", "get_attr") or (
        node.op in ("call_function", "call_method") and (name.startswith("__") or not name.endswith("_"))
    )
