"""Rewrites of an executor's lines."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.fx import Graph

from graphshard.ir.graph import aten
from graphshard.lower.executor import (
    Arrive,
    Begin,
    CallLine,
    Line,
    Operator,
    Replay,
    Return,
    Start,
    Take,
    Variable,
    WaitLine,
    profiler_range,
)
from graphshard.lower.line_rewrites import Groups, Run, Taken, hand_over_gradients, take_out_gathers, take_out_runs
from graphshard.lower.regions import RegionCall, executor


def _v(*names: str) -> tuple[Variable, ...]:
    return tuple(map(Variable, names))


def _start(result: str, read: str, bucket: str) -> Line:
    return Start(results=_v(result), target=torch.relu, args=_v(read), kwargs={}, several=False, bucket=bucket)


def _wait(result: str, read: str, bucket: str) -> Line:
    return WaitLine(results=_v(result), target=torch.relu, args=_v(read), kwargs={}, several=False, bucket=bucket)


def _view(result: str, read: str) -> Line:
    return Operator(results=_v(result), target=torch.relu, args=_v(read), kwargs={}, several=False)


def _call(result: str, read: str, where: str = "layers.0") -> Line:
    return CallLine(results=_v(result), region="region_0", inputs=_v(read), where=where)


def _order(lines: list[Line]) -> list[str]:
    """Return the first result of each line, and for `Arrive` the gradients."""
    return [f"-> {' '.join(line.inputs)}" if isinstance(line, Arrive) else "".join(line.results[:1]) for line in lines]


def test_views_of_a_bucket_are_handed_over_together() -> None:
    lines = [
        Take(results=_v("w", "x")),
        _start("r", "x", "reduce 1"),
        _wait("s", "r", "reduce 1"),
        _view("a", "s"),
        _view("b", "s"),
        _call("y", "x"),
        Return(values=_v("a", "b", "y")),
    ]
    found, groups = hand_over_gradients(lines, [Taken(0, (0,)), Taken(1, ())])
    assert _order(found) == ["w", "r", "s", "a", "b", "-> a b", "y", ""]
    assert groups == [(0, 1)]
    end = found[-1]
    assert isinstance(end, Return)
    assert end.values == (None, None, "y")


def test_waits_until_the_shard_is_gathered_again() -> None:
    """A gather reads the shard, or a packed copy, until its wait."""
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
    assert _order(hand_over_gradients(lines, [Taken(0, (0,))])[0])[6:9] == ["f", "-> s", "y"]
    assert _order(hand_over_gradients(lines, [Taken(0, ())])[0])[4:7] == ["s", "-> s", "z"]


def test_ungathered_parameters_are_updated_at_the_end() -> None:
    """A region may return a value that shares its memory."""
    lines = [
        Take(results=_v("w", "x")),
        _wait("s", "x", "reduce 1"),
        _call("y", "w"),
        _call("z", "y"),
        _call("u", "x"),
        Return(values=_v("s", "u")),
    ]
    assert _order(hand_over_gradients(lines, [Taken(0, (0,), gathered=False)])[0])[3:5] == ["z", "-> s"]
    assert _order(hand_over_gradients(lines, [Taken(0, (0,))])[0])[2:4] == ["y", "-> s"]


def test_after_the_launch_of_the_next_packed_reduction() -> None:
    """A reduction is then in flight while parameters are updated."""
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
    found, groups = hand_over_gradients(lines, [Taken(0, ()), Taken(1, ())])
    assert _order(found) == ["x", "s", "packed", "r", "-> s", "t", "-> t", ""]
    assert groups == [(0,), (1,)]


def test_buckets_before_the_last_launch_are_joined() -> None:
    """The others' updates would hold up the end of the step."""
    buckets = ["3", "2", "1"]
    lines = [Take(results=_v("x")), *(_start(f"r{each}", "x", f"reduce {each}") for each in buckets[:1])]
    for before, each in itertools.pairwise([*buckets, ""]):
        lines += [_wait(f"s{before}", f"r{before}", f"reduce {before}"), _call(f"y{before}", "x")]
        lines += [_start(f"r{each}", f"y{before}", f"reduce {each}")] if each else []
    lines.append(Return(values=_v("s3", "s2", "s1")))
    given: list[Groups] = []
    taken = [Taken(place, ()) for place in range(3)]

    def join(groups: Groups) -> list[int]:
        given.append(groups)
        return [len(groups)] if groups else []

    found, groups = hand_over_gradients(lines, taken, join)
    assert given == [[(0,), (1,)], []]
    assert groups == [(0, 1), (2,)]
    assert _order(found) == ["x", "r3", "s3", "y3", "r2", "s2", "-> s3 s2", "y2", "r1", "s1", "-> s1", "y1", ""]


def test_gradients_returned_twice_stay() -> None:
    """Two parameters may have one tensor as their gradient, which must not be written."""
    lines = [
        Take(
            results=_v(
                "x",
            )
        ),
        _call("s", "x"),
        Return(values=(*_v("s", "s"), None)),
    ]
    found, groups = hand_over_gradients(lines, [Taken(0, ()), Taken(1, ()), Taken(2, ())])
    assert found == lines
    assert groups == []


@pytest.mark.parametrize("ranges", [False, True])
def test_the_code_hands_over_gradients_instead_of_returning_them(*, ranges: bool) -> None:
    """The executor drops its reference."""
    graph = Graph()
    x = graph.placeholder("x")
    parts = graph.call_function(aten.relu.default, (x,)), graph.call_function(aten.neg.default, (x,))
    graph.output((*parts, None))
    got: list[tuple[int, list[torch.Tensor]]] = []
    run = executor(graph, {})
    lines, groups = hand_over_gradients(run.lines, [Taken(1, ())])
    code = run.function(lines, profiler_range if ranges else None, arrived=lambda *given: got.append(given))
    results = code([torch.tensor([1.0, -1.0])])
    assert groups == [(1,)]
    assert [value is None for value in results] == [False, True, True]
    assert [(number, [value.tolist() for value in values]) for number, values in got] == [(0, [[-1.0, 1.0]])]
    assert run.forward([torch.tensor([2.0])])[1].tolist() == [-2.0]


# --- gathers at the start ---------------------------------------------------------------------------------------


def _begun_or_made(lines: list[Line]) -> list[str]:
    return [f"begin {line.where}" if isinstance(line, Begin) else "".join(line.results[:1]) for line in lines]


def test_extracts_gathers_at_the_start() -> None:
    """With the operators on their shards; lines after the first wait stay."""
    lines = [
        Take(results=_v("w", "v", "u", "x")),
        _call("c", "w"),
        _start("g", "c", "gather embed"),
        _view("a", "v"),
        _start("h", "a", "gather 0"),
        _call("m", "x"),
        _wait("f", "g", "gather embed"),
        _start("k", "u", "gather 1"),
        Return(values=_v("f", "h", "m", "k")),
    ]
    found, gathers = take_out_gathers(lines, [0, 1, 2])
    assert _begun_or_made(found) == ["w", "begin gather embed", "begin gather 0", "m", "f", "k", ""]
    assert [(one.sources, one.num_results) for one in gathers] == [((0,), 1), ((1,), 1)]
    assert [_begun_or_made(list(one.start)) for one in gathers] == [["w", "c", "g", ""], ["v", "a", "h", ""]]
    assert [_begun_or_made(list(one.sent)) for one in gathers] == [["w", "c", ""], ["v", "a", ""]]
    assert gathers[0].start[-1].reads == _v("g", "c")


def test_gathers_whose_values_are_read_elsewhere_stay() -> None:
    """A cast with another use, and a collective whose input is not a shard."""
    lines = [
        Take(results=_v("w", "x")),
        _call("c", "w"),
        _start("g", "c", "gather embed"),
        _start("h", "x", "exchange"),
        _wait("f", "g", "gather embed"),
        Return(values=_v("f", "c", "h")),
    ]
    assert take_out_gathers(lines, [0]) == (lines, [])


# --- runs of regions -------------------------------------------------------------------------------------------


def _region_call(result: str, *read: str, region: str = "region_0") -> Line:
    return CallLine(results=_v(result), region=region, inputs=_v(*read), where="layers.0")


def _op(result: str, target: Any, *args: Any) -> Line:
    return Operator(results=_v(result), target=target, args=args, kwargs={}, several=False)


def _gather(result: str, read: str) -> Line:
    return _start(result, read, "gather 0")


def _gathered(result: str, read: str) -> Line:
    return _wait(result, read, "gather 0")


def _every(call: CallLine) -> bool:
    return True


def _all(lines: Sequence[Line], kept: Any, own: Any) -> list[range]:
    return [range(len(lines))]


def test_runs_end_at_collectives() -> None:
    """Views at the ends of a run stay outside; values used only within the run stay inside."""
    lines = [
        Take(results=_v("w", "x")),
        _gather("g", "w"),
        _op("a", aten.view.default, Variable("x"), [4]),
        _region_call("b", "a", "x"),
        _op("c", aten.t.default, Variable("b")),
        _region_call("d", "c"),
        _op("e", aten.t.default, Variable("d")),
        _gathered("f", "g"),
        _region_call("y", "f", "e", "b"),
        Return(values=_v("y")),
    ]
    found, runs = take_out_runs(lines, _every, _all)
    assert [type(line).__name__ for line in found] == [
        *("Take", "Start", "Operator", "Replay", "Operator", "WaitLine", "Replay", "Return")
    ]
    first, second = runs
    replay = found[3]
    assert isinstance(replay, Replay)
    assert (replay.inputs, replay.results) == (("a", "x"), ("b", "d"))
    assert first == Run(
        (Take(results=_v("a", "x")), *lines[3:6], Return(values=_v("b", "d"))), "layers.0", (False, True)
    )
    assert second.lasting == (False, False, False)


def test_operators_between_regions_end_a_run() -> None:
    """Copies to the host, sums and in-place writes, and excluded regions."""
    for target, args in ((aten.add.Tensor, (Variable("a"), 1)), (aten.add_.Tensor, (Variable("a"), 1))):
        lines = [
            Take(results=_v("x")),
            _region_call("a", "x"),
            _op("b", target, *args),
            _region_call("y", "b"),
            Return(values=_v("y")),
        ]
        assert len(take_out_runs(lines, _every, _all)[1]) == 2
    lines = [
        Take(results=_v("x")),
        _region_call("a", "x", region="region_1"),
        _region_call("y", "a"),
        Return(values=_v("y")),
    ]
    found, runs = take_out_runs(lines, lambda call: call.region == "region_0", _all)
    assert [type(line).__name__ for line in found] == ["Take", "CallLine", "Replay", "Return"]
    assert len(runs) == 1
    assert take_out_runs(lines, lambda call: False, _all) == (lines, [])


def test_some_of_the_regions() -> None:
    """The launcher selects the regions of a run, and learns which results are used later."""
    lines = [
        Take(results=_v("x")),
        _region_call("a", "x"),
        _region_call("b", "a"),
        _op("c", aten.t.default, Variable("b")),
        _region_call("d", "c"),
        _region_call("e", "d"),
        _gather("g", "e"),
        Return(values=_v("g", "b")),
    ]
    asked = []

    def some(body: Sequence[Line], kept: Any, own: Any) -> list[range]:
        asked.append((list(body), set(kept), set(own)))
        return [range(1), range(3, 5)]

    found, runs = take_out_runs(lines, _every, some)
    assert asked == [(lines[1:6], {"e", "g", "b"}, {"x"})]
    assert [type(line).__name__ for line in found] == [
        *("Take", "Replay", "CallLine", "Operator", "Replay", "Start", "Return")
    ]
    assert [run.lines[1:-1] for run in runs] == [(lines[1],), (lines[4], lines[5])]
    assert [line.results for line in found if isinstance(line, Replay)] == [("a",), ("e",)]
    assert take_out_runs(lines, _every, lambda *_: []) == (lines, [])


def test_code_with_runs() -> None:
    """Two consecutive regions are one run, and inputs are released before it."""
    graph = Graph()
    x = graph.placeholder("replays")  # also the name in the code
    for _ in range(2):
        call = graph.call_module("region_0", ([x],))
        call.meta["val"] = (torch.zeros(2),)
        x = graph.call_function(operator.getitem, (call, 0))
        x.meta["val"] = torch.zeros(2)
    graph.output((x,))
    made = executor(graph, {"region_0": RegionCall(lambda inputs: (inputs.pop() * 2,))})
    lines, (run,) = take_out_runs(made.lines, _every, _all)
    code = made.function(run.lines)
    given = [torch.ones(2)]
    replays = [lambda inputs: [value + 10 for value in code(inputs)]]
    (result,) = made.function(lines, replays=replays)(given)
    assert result.tolist() == [14, 14]
    assert given == []
    (result,) = made([torch.ones(2)])
    assert result.tolist() == [4, 4]
