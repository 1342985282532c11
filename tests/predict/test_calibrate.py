"""Calibration: fits of measured times, the profile file, the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import graphshard
from graphshard.cli.main import main
from graphshard.cost.costs import Costs
from graphshard.cost.profile import NodeLink
from graphshard.ir.mesh import Axis
from graphshard.predict import _calibrate
from graphshard.predict._calibrate import best_of, fit
from tests.predict.test_explain import TOKENS, meta_net


def test_fit():
    """Exact times give exact numbers; noise never gives a negative latency."""
    sizes = (10**3, 10**5, 10**7)
    latency, per_byte = fit(sizes, [5e-4 + size / 1e9 for size in sizes])
    assert latency == pytest.approx(5e-4)
    assert per_byte == pytest.approx(1e-9)
    latency, per_byte = fit(sizes, [1e-3, 9e-4, 8e-4])
    assert latency > 0
    assert per_byte > 0


@pytest.fixture
def quick(monkeypatch):
    """Call everything once, with a measured time of a millisecond."""

    def seconds_of(fn, device, budget=0.0):
        fn()
        return 1e-3

    monkeypatch.setattr(_calibrate, "seconds_of", seconds_of)
    monkeypatch.setattr(_calibrate, "_SQUARES", {"cpu": (64, 128)})


def test_command(quick, tmp_path, capsys, monkeypatch):
    """One rank measures compute and writes a profile for explain, including where and when it was measured."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")  # of whatever started this process
    path = tmp_path / "here.json"
    assert main(["calibrate", "--out", str(path), "--device", "cpu", "--ranks", "1"]) == 0
    profile = graphshard.profiling.load_profile(path)
    assert capsys.readouterr().out == f"{path}: profile here, hash {profile.hash[:12]}\n"
    assert profile.name == "here"
    assert profile.device == "cpu"
    assert profile.made["torch"] == torch.__version__
    assert profile.made["ranks"] == profile.ranks_per_node == 1
    assert profile.made["date"].startswith("20")
    assert profile.sources["memory_bandwidth"].startswith("measured, 1 ranks")
    assert profile.sources["inside.gather.bandwidth"] == "assumed: not measured, one rank"
    assert profile.sources["pack_below"] == "assumed: not measured, one rank"
    # 2 * 64**3 and 2 * 128**3 in a millisecond, minus half of it for the launch.
    assert profile.rate("float32").peak == pytest.approx((64**3 + 128**3) / 5e-4)
    found = graphshard.explain(meta_net(width=16, vocab=32), (2,), example_inputs=(TOKENS,), hardware=path)
    assert found.hardware == "here"
    assert found.profile_hash == profile.hash
    assert [p.name for p in tmp_path.iterdir()] == ["here.json"]


def test_wrong_commands(tmp_path, capsys):
    """One line, status 2, and no file."""
    path = tmp_path / "x.json"
    assert main(["calibrate", "--out", str(path), "--ranks", "-1"]) == 2
    assert "--ranks must be a positive int, got -1" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["calibrate", "--out", str(path), "--device", "cuda"]) == 2
        assert "torch.cuda.is_available() is False" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.slow
def test_calibrated_profile_changes_the_prediction(quick, tmp_path):
    """A different profile has a different hash and predicts different times."""
    path = tmp_path / "here.json"
    main(["calibrate", "--out", str(path), "--device", "cpu", "--ranks", "1"])
    data = json.loads(path.read_text())
    data["kernel_seconds"]["value"] *= 10
    other = Path(tmp_path / "other.json")
    other.write_text(json.dumps(data))
    grid = graphshard.explain_grid(
        meta_net(width=16, vocab=32), [(2,)], example_inputs=(TOKENS,), hardware=[path, other]
    )
    assert grid.rows[0].profile_hash != grid.rows[1].profile_hash
    assert grid.rows[1].compute_s > 5 * grid.rows[0].compute_s


def test_the_best_of_several_rounds():
    """Number by number, and link by link: a slow moment of a shared machine does not count."""
    fast = {"kernel_seconds": 1e-6, "vector": 1e10, "host_bandwidth": 1e9, "matmul.float32": 1e11}
    slow = {"kernel_seconds": 2e-6, "vector": 5e9, "host_bandwidth": 2e9, "matmul.float32": 2e11}
    best = {"kernel_seconds": 1e-6, "vector": 1e10, "host_bandwidth": 2e9, "matmul.float32": 2e11}
    assert best_of([fast, slow]) == best_of([slow, fast]) == best
    links, of_ranks = (NodeLink(1e9, 1e-3, 1e-4), NodeLink(5e8, 5e-3, 5e-5)), _calibrate._of_ranks
    once = {"inside.gather": links[0], "outside.isolated": of_ranks(1e9), "contention": 0.8, "pack_below": 8192}
    again = {"inside.gather": links[1], "outside.isolated": of_ranks(5e8), "contention": 0.7, "pack_below": 4096}
    assert best_of([once, again]) == best_of([again, once]) == {**once, "contention": 0.7, "pack_below": 4096}


@pytest.mark.parametrize(("packed", "found"), [([2, 2, 2], 1024), ([0.5, 1, 2], 4096), ([0.5, 0.5, 0.5], 4096)])
def test_packing_is_measured(fake_world, monkeypatch, packed, found):
    """Up to the size at which it takes longer than separate tensors, or else to the largest tested size."""
    fake_world(2)
    times = iter([t for each in packed for t in (1, each)])

    def seconds_together(call, device, repeats):
        call()
        return next(times)

    monkeypatch.setattr(_calibrate, "seconds_together", seconds_together)
    monkeypatch.setattr(_calibrate, "_SHARDS", (1024, 2048, 4096))
    assert _calibrate._pack_below("cpu", torch.distributed.group.WORLD) == found


def test_latency_by_ranks(fake_world, monkeypatch):
    """What each further rank and node adds is told from what a collective takes before its first byte."""
    fake_world(8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")

    def described(kind, num_bytes, num_tensors, device, group):
        return kind, num_bytes * num_tensors, group.size()

    def seconds_together(call, device, repeats):
        kind, num_bytes, ranks = call
        rounds, nodes = 2 if kind == "all_reduce" else 1, max(ranks // 4, 1)
        return 3e-4 + rounds * ((ranks - nodes) * 1e-5 + (nodes - 1) * 1e-4) + num_bytes / 1e9

    monkeypatch.setattr(_calibrate, "_call", described)
    monkeypatch.setattr(_calibrate, "seconds_together", seconds_together)
    monkeypatch.setattr(_calibrate, "slowest", lambda seconds, device: seconds)
    monkeypatch.setattr(_calibrate, "_threads_of_gather", lambda group: 0.25)
    monkeypatch.setattr(_calibrate, "_pack_below", lambda device, group: group.size())
    found = _calibrate.measure_links("cpu", lambda _: None)
    assert found["step.inside"] == pytest.approx(1e-5, rel=1e-3)
    assert found["step.outside"] == pytest.approx(1e-4, rel=1e-2)
    assert all(found[f"inside.{kind}"].latency == pytest.approx(3e-4, rel=1e-2) for kind in _calibrate.KINDS)
    assert found["pack_below"] == 8, "between nodes, too"


def test_contention_is_what_products_lose_beside_a_gather(fake_world, monkeypatch):
    """As a share of compute; a gather that takes nothing away is no contention."""
    fake_world(2)
    monkeypatch.setattr(_calibrate, "slowest", lambda seconds, device: seconds)
    for beside, lost in ((0.4, 0.75), (0.1, 0.0), (100.0, _calibrate.MOST_CONTENTION)):
        clock = iter([0.0, beside] * _calibrate._REPEATS)
        monkeypatch.setattr(_calibrate, "seconds_together", lambda call, device, repeats: 0.1)
        monkeypatch.setattr(_calibrate.time, "perf_counter", lambda clock=clock: next(clock))
        assert _calibrate._lost_beside_gather("cpu", torch.distributed.group.WORLD) == pytest.approx(lost)


def test_builtin_profile_of_a_cpu():
    """This project's machine: gloo's reduce-scatter costs more than its all-gather."""
    profile = graphshard.profiling.load_profile("cpu-gloo")
    assert profile.device == "cpu"
    assert all(
        source.startswith(("measured", "reported", "assumed", "as measured", "part of", "not modelled"))
        for source in profile.sources.values()
    )
    costs, axis = Costs(profile), Axis("shard", 2, "shard")
    assert costs.collective("reduce", 2**24, 1, axis) > costs.collective("gather", 2**24, 1, axis)
