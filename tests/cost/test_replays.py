"""Which regions are launched as one CUDA graph: separately, together, or not at all."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch.fx import Graph, GraphModule

from graphshard.cost.costs import LAUNCHES, MOST_REGIONS, Costs, Piece, piece_of, runs_that_pay
from graphshard.cost.profile import load_profile
from graphshard.ir.graph import emit
from graphshard.ir.program import Region

COSTS = Costs(load_profile("h100"), fused=False)
HOST = COSTS.profile.host_seconds["eager"]
BANDWIDTH = COSTS.profile.memory_bandwidth


def _region(depth: int, size: int) -> Region:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(size, device="meta")
    for _ in range(depth):
        x = emit(graph, torch.ops.aten.relu.default, x, like=x)
    graph.output((x,))
    return Region("key", "", GraphModule(torch.nn.Module(), graph))


def _alone(depth: int, size: int, costs: Costs = COSTS) -> bool:
    return bool(runs_that_pay(costs, [piece_of(costs, _region(depth, size), ["x"], ["y"])], {"y"}))


def test_a_single_region() -> None:
    """Small regions of many operators pay, large regions and regions of few operators do not."""
    assert _alone(20, 100)
    assert not _alone(LAUNCHES, 100)  # the same number of launches
    assert not _alone(20, 10_000_000)  # kernels take longer than launches
    free = replace(COSTS, profile=replace(COSTS.profile, host_seconds={"eager": 0.0, "compiled": 0.0}))
    assert not _alone(20, 100, free)


def _chain(*pieces: tuple[int, int]) -> list[Piece]:
    """Build a chain in which each piece reads the previous result, from launches and result bytes."""
    sizes = [size for _, size in pieces]
    return [
        Piece(launches, 1e-6 * launches, {f"v{i}": size}, {f"v{i + 1}": made})
        for i, ((launches, made), size) in enumerate(zip(pieces, [1000, *sizes]))
    ]


def test_regions_that_pay_together() -> None:
    pieces = _chain(*[(LAUNCHES - 2, 1000)] * 4)
    assert runs_that_pay(COSTS, pieces[:1], {"v1"}) == []
    assert runs_that_pay(COSTS, pieces, {"v4"}) == [range(4)]


def test_values_within_a_run_are_not_copied() -> None:
    """A large value between two regions, without and with a later reader."""
    large = int(40 * HOST * BANDWIDTH)
    pieces = _chain((20, large), (20, 1000))
    assert runs_that_pay(COSTS, pieces, {"v2"}) == [range(2)]
    assert runs_that_pay(COSTS, pieces, {"v1", "v2"}) == []


def test_a_region_that_does_not_pay_ends_a_run() -> None:
    """Its large inputs would have to be copied."""
    pieces = _chain((20, 1000), (20, 1000), (2, 1000), (20, 1000), (20, 1000))
    weights = {"v2": 1000, "w": int(100 * HOST * BANDWIDTH)}
    pieces[2] = replace(pieces[2], given=weights)
    assert runs_that_pay(COSTS, pieces, {"v5"}) == [range(2), range(3, 5)]
    pieces[2] = replace(pieces[2], given={**weights, "w": 0})  # a graph reads it in place
    assert runs_that_pay(COSTS, pieces, {"v5"}) == [range(5)]


def test_inputs_read_in_place() -> None:
    region = _region(3, 100)
    assert piece_of(COSTS, region, ["x"], ["y"]).given == {"x": 400}
    assert piece_of(COSTS, region, ["x"], ["y"], {"x"}).given == {"x": 0}
    assert piece_of(COSTS, region, ["x"], ["y"], {"x"}).made == {"y": 400}


def test_runs_have_a_limit() -> None:
    pieces = _chain(*[(20, 1000)] * (2 * MOST_REGIONS + 10))
    found = runs_that_pay(COSTS, pieces, {f"v{len(pieces)}"})
    assert list(itertools.chain(*found)) == list(range(len(pieces)))
    assert len(found) == 3
    assert max(map(len, found)) <= MOST_REGIONS


def _saving(pieces: Sequence[Piece], run: range, kept: set[str]) -> float:
    """Compute the saving of a run by definition."""
    inside, later = pieces[run.start : run.stop], pieces[run.stop :]
    made = {name: size for piece in inside for name, size in piece.made.items()}
    given = {name: size for piece in inside for name, size in piece.given.items() if name not in made}
    read = kept | {name for piece in later for name in piece.given}
    copied = sum(given.values()) + 2 * sum(size for name, size in made.items() if name in read)
    launches, busy = sum(piece.launches for piece in inside), sum(piece.busy for piece in inside)
    return max(launches * HOST, busy) - max(LAUNCHES * HOST, busy + 2 * copied / BANDWIDTH)


def _all_ways(begin: int, end: int) -> Iterator[list[range]]:
    if begin == end:
        yield []
        return
    for rest in _all_ways(begin + 1, end):
        yield rest
    for until in range(begin + 1, end + 1):
        for rest in _all_ways(until, end):
            yield [range(begin, until), *rest]


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_saves_more(seed: int) -> None:
    draw = random.Random(seed)
    unit = HOST * BANDWIDTH
    sizes = {f"v{i}": int(unit * draw.choice([0.01, 0.3, 3, 20])) for i in range(9)}
    pieces = []
    for i in range(6):
        given = {f"v{j}": sizes[f"v{j}"] for j in {i, *draw.sample(range(i + 1), k=min(i, 2))}}
        pieces.append(
            Piece(draw.randrange(1, 12), HOST * draw.uniform(0, 12), given, {f"v{i + 1}": sizes[f"v{i + 1}"]})
        )
    kept = {"v6", f"v{draw.randrange(1, 6)}"}
    best = max(sum(_saving(pieces, run, kept) for run in runs) for runs in _all_ways(0, 6))
    found = runs_that_pay(COSTS, pieces, kept)
    assert sum(_saving(pieces, run, kept) for run in found) == pytest.approx(best)
    assert all(_saving(pieces, run, kept) > 0 for run in found)
