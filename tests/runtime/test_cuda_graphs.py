"""CUDA graphs of runs: their number, their memory, and fallbacks."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import Graph, GraphModule

import graphshard
from graphshard.cost.costs import Costs
from graphshard.cost.profile import load_profile
from graphshard.errors import ArgumentError
from graphshard.ir.graph import aten, emit
from graphshard.ir.program import Program, Region
from graphshard.lower.executor import CallLine, Operator, Return, Take, Variable
from graphshard.lower.line_rewrites import Run
from graphshard.runtime.cuda_graphs import MOST_GRAPHS, GraphedRun, ModelGraphs, can_be_captured
from tests.graphs import Graphs, on_cpu
from tests.helpers import Blocks
from tests.ranks import FakeWorld

CPU = torch.device("cpu")


def _run(*lasting: bool) -> Run:
    names = tuple(Variable(f"x{index}") for index in range(len(lasting)))
    return Run((Take(results=names), Return(values=names)), "layers.0", lasting)


def _replayed(code: Any, *lasting: bool, graphs: Graphs | None = None) -> tuple[GraphedRun, Graphs, ModelGraphs]:
    graphs = graphs or Graphs()
    arena = ModelGraphs(graphs, torch.device("cpu"), None)
    return GraphedRun(arena, _run(*lasting), code), graphs, arena


def _doubled(inputs: list[Any]) -> list[Any]:
    return [inputs.pop() * 2]


def test_the_third_call_is_captured() -> None:
    replayed, graphs, _ = _replayed(_doubled, False)
    results = [replayed([torch.full((3,), float(i))])[0] for i in range(5)]
    assert [value.tolist() for value in results] == [[2.0 * i] * 3 for i in range(5)]  # separate results
    assert (graphs.captured, graphs.launched) == (1, 3)


def test_one_graph_per_shape_and_number_up_to_a_limit() -> None:
    def scaled(inputs: list[Any]) -> list[Any]:
        x, factor = inputs
        return [x * factor, factor]

    replayed, graphs, _ = _replayed(scaled, False, False)

    def three(size: int, factor: int) -> None:
        for value in range(3):
            result, number = replayed([torch.full((size,), float(value)), factor])
            assert result.tolist() == [float(value * factor)] * size
            assert number == factor

    for size in range(1, MOST_GRAPHS + 2):
        three(size, 2)
    three(1, 3)
    assert (replayed.graphs, graphs.captured) == (MOST_GRAPHS, MOST_GRAPHS + 2)
    three(MOST_GRAPHS + 1, 2)
    assert graphs.captured == MOST_GRAPHS + 2  # an existing graph
    three(1, 2)
    assert graphs.captured == MOST_GRAPHS + 3  # the least recently used one was evicted


def test_lasting_inputs_are_read_in_place() -> None:
    def multiplied(inputs: list[Any]) -> list[Any]:
        return [inputs[0] * inputs[1]]

    replayed, graphs, arena = _replayed(multiplied, True, False)
    weight = torch.ones(1000)
    for value in range(6):
        weight.fill_(value)  # like an optimizer
        assert replayed([weight, torch.ones(1000)])[0].tolist() == [value] * 1000
    assert graphs.captured == 1
    weight = weight.clone()  # at another address
    for value in range(6):
        weight.fill_(value)
        assert replayed([weight, torch.ones(1000)])[0].tolist() == [value] * 1000
    assert graphs.captured == 2
    assert arena.largest == 2 * 4096  # the other input and the result


def test_lasting_inputs_that_move_are_copied() -> None:
    """The short shard of the last rank is padded into a new buffer in each step."""
    replayed, graphs, _ = _replayed(_doubled, True)
    kept = []
    for value in range(6):
        kept.append(torch.full((4,), float(value)))
        assert replayed([kept[-1]])[0].tolist() == [2.0 * value] * 4
    assert (graphs.captured, graphs.launched) == (1, 4)


def test_an_input_that_moves_repeatedly_is_copied() -> None:
    replayed, graphs, _ = _replayed(_doubled, True)
    kept = [torch.empty(4) for _ in range(12)]
    for number in range(60):
        value = kept[number // 5].fill_(number)  # the same memory for five calls
        assert replayed([value])[0].tolist() == [2.0 * number] * 4
    assert graphs.captured == 3  # then no more
    assert graphs.launched > 45


def test_all_runs_share_memory() -> None:
    graphs = Graphs()
    arena = ModelGraphs(graphs, torch.device("cpu"), None)
    runs = [GraphedRun(arena, _run(False), _doubled) for _ in range(4)]
    sizes = (1000, 3000, 2000, 10)
    kept = []
    for value in range(5):
        for run, size in zip(runs, sizes):
            kept.append((run([torch.full((size,), float(value))])[0], 2.0 * value))
    assert arena.largest == 2 * 12288  # two of 3000 floats, rounded up to 512 bytes
    assert arena._memory is not None
    assert arena._memory.numel() == arena.largest
    assert all(tensor.eq(value).all() for tensor, value in kept)


def test_odd_layouts() -> None:
    def both(inputs: list[Any]) -> list[Any]:
        x, y = inputs
        return [x.t(), torch.empty_strided((2, 3), (8, 2)).copy_(y), y[0, 0] > 0, x[:0].long()]

    replayed, _, _ = _replayed(both, False, False)
    for value in range(5):
        given = [torch.arange(6.0).reshape(2, 3).t() + value, (torch.arange(6.0) - value).reshape(2, 3)]
        expected = both(list(given))
        for found, want in zip(replayed(given), expected, strict=True):
            assert torch.equal(found, want)
            assert (found.dtype, found.stride()) == (want.dtype, want.stride())


def _warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("code", "given", "why"),
    [
        (lambda inputs: [inputs[0] * inputs[0].sum().item()], torch.ones(3), "operation not permitted when stream is"),
        (lambda inputs: [inputs[0].expand(4, 3)], torch.ones(3), "it makes a tensor that is expanded"),
        (_doubled, torch.ones(3).expand(4, 3), "it is given a tensor that is expanded"),
    ],
    ids=["a number of the device", "makes expanded", "given expanded"],
)
def test_falls_back_without_a_graph(caplog: pytest.LogCaptureFixture, code: Any, given: torch.Tensor, why: str) -> None:
    replayed, graphs, _ = _replayed(code, False)
    for _ in range(5):
        assert torch.equal(replayed([given])[0], code([given])[0])
    assert graphs.launched == 0
    (message,) = _warned(caplog)
    assert message.startswith(f"cuda_graphs: layers.0 runs without one: {why}")


def test_a_capture_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    replayed, graphs, _ = _replayed(_doubled, False, graphs=Graphs(fails="CUDA error: out of luck\nmore of it"))
    for value in range(5):
        assert replayed([torch.full((3,), float(value))])[0].tolist() == [2.0 * value] * 3
    assert graphs.captured == 0
    assert _warned(caplog) == ["cuda_graphs: layers.0 runs without one: CUDA error: out of luck"]


def test_no_replay_on_another_stream() -> None:
    replayed, graphs, _ = _replayed(_doubled, False)
    for _ in range(4):
        replayed([torch.ones(2)])
    launched = graphs.launched
    for current in ("the user's", None):  # None: the user captures the current stream
        graphs.current = current
        assert replayed([torch.ones(2)])[0].tolist() == [2, 2]
    assert graphs.launched == launched


# --- options ---------------------------------------------------------------------------------------------------


# Until every run has a graph: the address of an input may change by chance, until it is copied.
STEPS = 16


def _replaying(fake_world: FakeWorld, choice: Any, width: int = 8, **options: Any) -> ModelGraphs:
    fake_world(2)
    with on_cpu():
        model = graphshard.compile(
            Blocks(2, width), init_device_mesh("cpu", (2,)), backend="eager", cuda_graphs=choice, **options
        )
        given = torch.ones(4, width)  # a graph reads it in place
        for _ in range(STEPS):
            model(given).backward()
    replaying = model._graphshard.replaying
    assert isinstance(replaying, ModelGraphs)
    return replaying


def test_a_model(fake_world: FakeWorld) -> None:
    replaying = _replaying(fake_world, True)
    assert len(replaying.runs) > 3
    assert all(run.graphs == 1 for run in replaying.runs)


def test_by_cost(fake_world: FakeWorld) -> None:
    """Fewer regions than without costs; `tests/cost/test_replays.py` checks which."""
    small = _replaying(fake_world, "auto", hardware="h100")
    everything = _replaying(fake_world, True)
    assert len(small.runs) < len(everything.runs)


def _region(depth: int, size: int, other_size: int) -> Region:
    """Build a chain of operators, with an input that the last one also reads."""
    graph = Graph()
    x, other = (graph.placeholder(name) for name in ("x", "other"))
    x.meta["val"], other.meta["val"] = torch.empty(size, device="meta"), torch.empty(other_size, device="meta")
    for _ in range(depth):
        x = emit(graph, torch.ops.aten.relu.default, x, like=x)
    total = emit(graph, torch.ops.aten.sum.default, other, like=other)
    graph.output((emit(graph, torch.ops.aten.add.Tensor, x, total, like=x),))
    return Region("key", "", GraphModule(torch.nn.Module(), graph))


@pytest.mark.parametrize(
    ("kept", "own", "expected"),
    [
        ({"d"}, {"v", "w"}, [range(3)]),
        ({"d"}, {"v"}, [range(1)]),  # another graph would copy w
        ({"d"}, set(), []),
        ({"b", "d"}, {"v", "w"}, [range(3)]),  # the base of a view leaves the run, which costs no more than it saves
    ],
)
def test_adjacent_regions_by_cost(kept: set[str], own: set[str], expected: list[range]) -> None:
    """Two regions and a view between them are one run if that pays; parameters are read in place."""
    costs = Costs(load_profile("h100"), fused=False)
    large = int(6 * costs.profile.host_seconds["eager"] * costs.profile.memory_bandwidth / 4)
    region = _region(20, 100, large)
    a, b, d, v, w, x = map(Variable, "abdvwx")
    lines = [
        CallLine(results=(a,), region="region_0", inputs=(x, v), where=""),
        Operator(results=(b,), target=torch.ops.aten.view.default, args=(a, [100]), kwargs={}, several=False),
        CallLine(results=(d,), region="region_0", inputs=(b, w), where=""),
    ]
    replaying = ModelGraphs(Graphs(), torch.device("cpu"), costs)
    program = SimpleNamespace(region_names={"region_0": "key"}, regions={"key": region}, device=torch.device("cpu"))
    assert (
        replaying.choose(cast(Program, program), lines, set(map(Variable, kept)), set(map(Variable, own))) == expected
    )


def test_arguments(fake_world: FakeWorld) -> None:
    fake_world(2)
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ArgumentError, match=r"cuda_graphs must be True, False or 'auto', got 'always'\."):
        graphshard.compile(Blocks(1), mesh, cuda_graphs="always")
    with pytest.raises(
        ArgumentError, match=r"cuda_graphs=True: there are none on cpu\. Leave it out, or use a CUDA mesh\."
    ):
        graphshard.compile(Blocks(1), mesh, cuda_graphs=True)


def _one_operator(target: Any, *args: Any, val: Any, device: str = "cpu") -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(3, device=device)
    node = graph.call_function(target, (x, *args))
    node.meta["val"] = val
    graph.output((node,))
    return GraphModule(torch.nn.Module(), graph)


def test_capturable_regions() -> None:
    zeros = torch.zeros(3)
    assert can_be_captured(_one_operator(aten.relu.default, val=zeros), CPU)
    assert can_be_captured(_one_operator(aten.bernoulli.p, 0.5, val=zeros), CPU)
    assert not can_be_captured(_one_operator(aten.nonzero.default, val=zeros), CPU)
    assert not can_be_captured(_one_operator(aten._local_scalar_dense.default, val=1.0), CPU)
    assert not can_be_captured(_one_operator(torch._prims.rng_prims.run_and_save_rng_state, val=zeros), CPU)
    assert not can_be_captured(_one_operator(aten.relu.default, val=zeros), torch.device("cuda"))
    assert not can_be_captured(_one_operator(aten.relu.default, val=zeros, device="meta"), CPU)
