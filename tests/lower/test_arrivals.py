"""Gradients that are handed over in the lines of an executor."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph

from graphshard.ir.graph import aten
from graphshard.lower.arrivals import Taken, with_arrivals
from graphshard.lower.lines import Arrive, Call, Line, Operator, Return, Start, Take, Variable, Wait
from graphshard.lower.regions import executor


def _v(*names: str) -> tuple[Variable, ...]:
    return tuple(map(Variable, names))


def _start(result: str, read: str, bucket: str) -> Line:
    return Start(results=_v(result), target=torch.relu, args=_v(read), kwargs={}, several=False, bucket=bucket)


def _wait(result: str, read: str, bucket: str) -> Line:
    return Wait(results=_v(result), target=torch.relu, args=_v(read), kwargs={}, several=False, bucket=bucket)


def _view(result: str, read: str) -> Line:
    return Operator(results=_v(result), target=torch.relu, args=_v(read), kwargs={}, several=False)


def _call(result: str, read: str, where: str = "layers.0") -> Line:
    return Call(results=_v(result), region="region_0", inputs=_v(read), where=where)


def _order(lines: list[Line]) -> list[str]:
    """The first result of each line; of gradients that are handed over which."""
    return [f"-> {' '.join(line.values)}" if isinstance(line, Arrive) else "".join(line.results[:1]) for line in lines]


def test_views_of_a_bucket_are_handed_over_together() -> None:
    """They stand at the end, where they are first read."""
    lines = [
        Take(results=_v("w", "x")),
        _start("r", "x", "reduce 1"),
        _wait("s", "r", "reduce 1"),
        _call("y", "x"),
        _view("a", "s"),
        _view("b", "s"),
        Return(values=_v("a", "b", "y")),
    ]
    found, groups = with_arrivals(lines, [Taken(0, (0,)), Taken(1, ())])
    assert _order(found) == ["w", "r", "s", "a", "b", "-> a b", "y", ""]
    assert groups == [(0, 1)]
    end = found[-1]
    assert isinstance(end, Return)
    assert end.values == (None, None, "y")


def test_not_before_the_shard_has_been_gathered_again() -> None:
    """A gather reads the shard, or what was packed of it, until it has been waited for."""
    lines = [
        Take(results=_v("w", "x")),
        _call("packed", "w"),
        _start("g", "w", "gather 0"),
        _start("r", "x", "reduce 1"),
        _wait("s", "r", "reduce 1"),
        _call("z", "x"),
        _wait("f", "g", "gather 0"),
        _call("y", "f"),
        Return(values=_v("s", "y", "z", "packed")),
    ]
    assert _order(with_arrivals(lines, [Taken(0, (0,))])[0])[6:9] == ["f", "-> s", "y"]
    assert _order(with_arrivals(lines, [Taken(0, ())])[0])[4:7] == ["s", "-> s", "z"]


def test_what_is_not_gathered_stays_as_it_is_to_the_end() -> None:
    """A region may return what shares its memory."""
    lines = [
        Take(results=_v("w", "x")),
        _wait("s", "x", "reduce 1"),
        _call("y", "w"),
        _call("z", "y"),
        _call("u", "x"),
        Return(values=_v("s", "u")),
    ]
    assert _order(with_arrivals(lines, [Taken(0, (0,), gathered=False)])[0])[3:5] == ["z", "-> s"]
    assert _order(with_arrivals(lines, [Taken(0, (0,))])[0])[2:4] == ["y", "-> s"]


def test_behind_the_launch_of_what_is_packed_next() -> None:
    """So that a reduction is under way while parameters are updated."""
    lines = [
        Take(
            results=_v(
                "x",
            )
        ),
        _wait("s", "x", "reduce 2"),
        _call("packed", "x", where=""),
        _start("r", "packed", "reduce 1"),
        _wait("t", "r", "reduce 1"),
        Return(values=_v("s", "t")),
    ]
    found, groups = with_arrivals(lines, [Taken(0, ()), Taken(1, ())])
    assert _order(found) == ["x", "s", "packed", "r", "-> s", "t", "-> t", ""]
    assert groups == [(0,), (1,)]


def test_what_is_returned_twice_stays() -> None:
    """Two parameters may have one tensor for a gradient, which is not to be written to."""
    lines = [
        Take(
            results=_v(
                "x",
            )
        ),
        _call("s", "x"),
        Return(values=(*_v("s", "s"), None)),
    ]
    found, groups = with_arrivals(lines, [Taken(0, ()), Taken(1, ()), Taken(2, ())])
    assert found == lines
    assert groups == []


@pytest.mark.parametrize("ranges", [False, True])
def test_the_code_hands_over_what_it_does_not_return(*, ranges: bool) -> None:
    """And holds it no longer."""
    graph = Graph()
    x = graph.placeholder("x")
    parts = graph.call_function(aten.relu.default, (x,)), graph.call_function(aten.neg.default, (x,))
    graph.output((*parts, None))
    got: list[tuple[int, list[torch.Tensor]]] = []
    run = executor(graph, {})
    code, groups, _ = run.with_arrivals([Taken(1, ())], lambda *given: got.append(given), ranges=ranges)
    results = code([torch.tensor([1.0, -1.0])])
    assert groups == [(1,)]
    assert [value is None for value in results] == [False, True, True]
    assert [(number, [value.tolist() for value in values]) for number, values in got] == [(0, [[-1.0, 1.0]])]
    assert run.forward([torch.tensor([2.0])])[1].tolist() == [-2.0]
