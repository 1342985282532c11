"""Calibration on real ranks measures collectives, and all ranks agree on the result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import graphshard
from graphshard.cost.profile import KINDS
from graphshard.predict import _calibrate
from tests.ranks import Ranks


def _links(rank: int, world_size: int) -> dict[str, Any]:
    _calibrate._SIZES["cpu"] = (2**12, 2**20)
    _calibrate._SHARDS = (2**10, 2**12)
    _calibrate._REPEATS = 2
    return _calibrate.measure_links("cpu", lambda _: None)


def test_links(ranks: Ranks) -> None:
    """Every kind has a positive bandwidth and latency, equal on all ranks, because the slowest rank counts."""
    first, second = ranks(2).run(_links)
    assert first == second
    names = {*(f"inside.{kind}" for kind in KINDS), *("step.inside", "step.outside", "contention", "pack_below")}
    names.add("outside.isolated")
    assert first.keys() == names
    links = [first[f"inside.{kind}"] for kind in KINDS]
    assert all(link.bandwidth > 0 and link.latency > 0 for link in links)
    assert first["outside.isolated"].of_rank == first["inside.gather"].bandwidth
    assert first["pack_below"] in (2**10, 2**12)
    assert 0 < first["contention"] < 1  # gloo's threads work while the main thread waits
    assert first["step.inside"] == first["step.outside"] == 0, "two ranks cannot tell steps from the rest"


def _profile(rank: int, world_size: int) -> str:
    _calibrate._SIZES["cpu"] = (2**12, 2**20)
    _calibrate._SHARDS = (2**10, 2**12)
    _calibrate._REPEATS = 2

    def seconds_of(fn: object, device: str, budget: float = 0.0) -> float:
        return 1e-3 * (rank + 1)

    _calibrate.seconds_of = seconds_of  # type: ignore[assignment]
    try:
        profile = _calibrate.calibrate("cpu", "two")
    finally:
        from graphshard.predict._calibrate import seconds_of as real

        _calibrate.seconds_of = real
    return profile.to_json()


def test_profile_is_of_the_slowest_rank(ranks: Ranks) -> None:
    """Both ranks make the same profile, with the times of rank 1."""
    texts = ranks(2).run(_profile)
    one, two = map(graphshard.profiling.Profile.from_json, texts)
    assert one.hash == two.hash
    assert one.kernel_seconds == pytest.approx(2e-3)
    assert one.ranks_per_node == 2
    assert one.made["ranks"] == 2
    assert one.memory_bandwidth == pytest.approx(2 * 2**25 * 4 / 2e-3)


def _measured(rank: int, world_size: int) -> float:
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor)
    return _calibrate.slowest(float(rank), "cpu")


def test_slowest(ranks: Ranks) -> None:
    """Every rank gets the largest value of all ranks."""
    assert ranks(2).run(_measured) == [1.0, 1.0]
