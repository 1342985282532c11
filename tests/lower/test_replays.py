"""Runs of regions in the lines of an executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from graphshard.ir.graph import aten
from graphshard.lower.lines import Call, Line, Operator, Replay, Return, Start, Take, Variable, Wait
from graphshard.lower.regions import RegionCall, executor
from graphshard.lower.replays import Run, can_be_replayed, with_replays

CPU = torch.device("cpu")


def _v(*names: str) -> tuple[Variable, ...]:
    return tuple(map(Variable, names))


def _call(result: str, *read: str, region: str = "region_0") -> Line:
    return Call(results=_v(result), region=region, inputs=_v(*read), where="layers.0")


def _operator(result: str, target: Any, *args: Any) -> Line:
    return Operator(results=_v(result), target=target, args=args, kwargs={}, several=False)


def _start(result: str, read: str) -> Line:
    return Start(results=_v(result), target=torch.relu, args=_v(read), kwargs={}, several=False, bucket="gather 0")


def _wait(result: str, read: str) -> Line:
    return Wait(results=_v(result), target=torch.relu, args=_v(read), kwargs={}, several=False, bucket="gather 0")


@dataclass
class _Replays:
    """Takes all that is wanted, or some places of it; adds to what runs make."""

    wants: Callable[[Call], bool] = lambda call: True
    places: list[range] | None = None
    asked: list[Any] = field(default_factory=list)

    def runs(self, lines: Sequence[Line], kept: Any, own: Any) -> list[range]:
        self.asked.append((list(lines), set(kept), set(own)))
        return [range(len(lines))] if self.places is None else self.places

    def replay(self, run: Run, code: Any) -> Any:
        return lambda inputs: [value + 10 for value in code(inputs)]


def test_runs_end_at_collectives() -> None:
    """Views at the ends of a run stay outside; what only the run reads does not leave it."""
    lines = [
        Take(results=_v("w", "x")),
        _start("g", "w"),
        _operator("a", aten.view.default, Variable("x"), [4]),
        _call("b", "a", "x"),
        _operator("c", aten.t.default, Variable("b")),
        _call("d", "c"),
        _operator("e", aten.t.default, Variable("d")),
        _wait("f", "g"),
        _call("y", "f", "e", "b"),
        Return(values=_v("y")),
    ]
    found, runs = with_replays(lines, _Replays())
    assert [type(line).__name__ for line in found] == [
        *("Take", "Start", "Operator", "Replay", "Operator", "Wait", "Replay", "Return")
    ]
    first, second = runs
    replay = found[3]
    assert isinstance(replay, Replay)
    assert (replay.inputs, replay.results) == (("a", "x"), ("b", "d"))
    assert first == Run(
        (Take(results=_v("a", "x")), *lines[3:6], Return(values=_v("b", "d"))), "layers.0", (False, True)
    )
    assert second.lasting == (False, False, False)


def test_what_computes_between_regions_ends_a_run() -> None:
    """Copies to the host, sums and what writes in place; and regions that are not wanted."""
    for target, args in ((aten.add.Tensor, (Variable("a"), 1)), (aten.add_.Tensor, (Variable("a"), 1))):
        lines = [
            Take(results=_v("x")),
            _call("a", "x"),
            _operator("b", target, *args),
            _call("y", "b"),
            Return(values=_v("y")),
        ]
        assert len(with_replays(lines, _Replays())[1]) == 2
    lines = [Take(results=_v("x")), _call("a", "x", region="region_1"), _call("y", "a"), Return(values=_v("y"))]
    found, runs = with_replays(lines, _Replays(lambda call: call.region == "region_0"))
    assert [type(line).__name__ for line in found] == ["Take", "Call", "Replay", "Return"]
    assert len(runs) == 1
    assert with_replays(lines, _Replays(lambda call: False)) == (lines, [])


def test_some_of_the_regions() -> None:
    """Who launches runs says which regions of a stretch are one, and is told what is read behind it."""
    lines = [
        Take(results=_v("x")),
        _call("a", "x"),
        _call("b", "a"),
        _operator("c", aten.t.default, Variable("b")),
        _call("d", "c"),
        _call("e", "d"),
        _start("g", "e"),
        Return(values=_v("g", "b")),
    ]
    replays = _Replays(places=[range(1), range(3, 5)])
    found, runs = with_replays(lines, replays)
    assert replays.asked == [(lines[1:6], {"e", "g", "b"}, {"x"})]
    assert [type(line).__name__ for line in found] == [
        *("Take", "Replay", "Call", "Operator", "Replay", "Start", "Return")
    ]
    assert [run.lines[1:-1] for run in runs] == [(lines[1],), (lines[4], lines[5])]
    assert [line.results for line in found if isinstance(line, Replay)] == [("a",), ("e",)]
    replays.places = []
    assert with_replays(lines, replays) == (lines, [])


def test_code() -> None:
    """Two regions one after the other are one run, and inputs are let go of before it."""
    graph = Graph()
    x = graph.placeholder("replays")  # what the code calls them, too
    for _ in range(2):
        call = graph.call_module("region_0", ([x],))
        call.meta["val"] = (torch.zeros(2),)
        x = graph.call_function(__import__("operator").getitem, (call, 0))
        x.meta["val"] = torch.zeros(2)
    graph.output((x,))
    made = executor(graph, {"region_0": RegionCall(lambda inputs: (inputs.pop() * 2,))})
    replays = _Replays()
    given = [torch.ones(2)]
    (result,) = made.with_replays(replays)(given)
    assert result.tolist() == [14, 14]
    assert given == []
    assert len(replays.asked) == 1
    (result,) = made([torch.ones(2)])
    assert result.tolist() == [4, 4]


def _region(target: Any, *args: Any, val: Any, device: str = "cpu") -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(3, device=device)
    node = graph.call_function(target, (x, *args))
    node.meta["val"] = val
    graph.output((node,))
    return GraphModule(torch.nn.Module(), graph)


def test_what_can_be_replayed() -> None:
    zeros = torch.zeros(3)
    assert can_be_replayed(_region(aten.relu.default, val=zeros), CPU)
    assert can_be_replayed(_region(aten.bernoulli.p, 0.5, val=zeros), CPU)
    assert not can_be_replayed(_region(aten.nonzero.default, val=zeros), CPU)
    assert not can_be_replayed(_region(aten._local_scalar_dense.default, val=1.0), CPU)
    assert not can_be_replayed(_region(torch._prims.rng_prims.run_and_save_rng_state, val=zeros), CPU)
    assert not can_be_replayed(_region(aten.relu.default, val=zeros), torch.device("cuda"))
    assert not can_be_replayed(_region(aten.relu.default, val=zeros, device="meta"), CPU)
