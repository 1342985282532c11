"""Profiles with samples instead of numbers."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from graphshard.cost.costs import Costs
from graphshard.cost.flops import Gemm
from graphshard.cost.kernels import Work
from graphshard.cost.profile import (
    SAMPLES,
    builtin_profiles,
    load_profile,
    number_at,
    profile_of_gpu,
    sampled,
    with_numbers,
)
from graphshard.errors import ArgumentError
from graphshard.ir.mesh import Mesh

H100 = load_profile("h100")


@pytest.mark.parametrize("name", builtin_profiles())
def test_assumed_constants_have_ranges(name):
    """Assumed GPU constants have a range, except tiles, links within a node, and constants of little effect."""
    profile = load_profile(name)
    left_out = ("tiles.", "inside.", "protocols.", "host_bandwidth", "vector", "ranks_per_node", "units", "split")
    for path, source in profile.sources.items():
        if profile.device == "cuda" and "assumed" in source and not path.startswith(left_out):
            assert path in profile.ranges, path
        if path in profile.ranges:
            low, high = profile.ranges[path]
            assert low <= number_at(profile, path) <= high


@pytest.mark.parametrize(
    ("name", "gib", "profile"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "a100-pcie"),
        ("NVIDIA A100 80GB PCIe", 79.2, "a100-pcie"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100"),
        ("NVIDIA H100 PCIe", 79.2, "h100-pcie"),
        ("NVIDIA H100 NVL", 93.1, "h100-nvl"),
        ("NVIDIA GH200 480GB", 94.5, "gh200"),
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA H200 NVL", 139.8, None),
        ("NVIDIA B200", 178.4, "b200"),
        ("NVIDIA GB200", 184.0, "gb200"),
        ("NVIDIA GB300", 276.0, None),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("NVIDIA L40", 44.4, None),
        ("AMD Instinct MI300X", 191.5, "mi300x"),
        ("NVIDIA A10G", 22.0, None),
    ],
)
def test_profiles_of_gpus_by_the_names_of_drivers(name, gib, profile):
    """Whole words count, and a card with other links than its family's is another machine."""
    found = profile_of_gpu(name, int(gib * 2**30))
    assert (found and found.name) == profile
    if found is not None and found.name != "a100-pcie":
        assert 0.9 < gib * 2**30 / found.memory_capacity < 1.2


def test_a_file_may_say_what_differs_from_a_known_machine(tmp_path):
    """Numbers that it leaves out, and their sources and ranges, are the known machine's."""
    path = tmp_path / "ours.json"
    ours = {"schema": 3, "like": "h100", "name": "ours", "title": "our cluster"}
    path.write_text(json.dumps({**ours, "outside": {"isolated": {"reached": {"value": 0.8, "source": "nccl-tests"}}}}))
    found = load_profile(path)
    assert found.outside["isolated"] == dataclasses.replace(H100.outside["isolated"], reached=0.8)
    assert found.outside["no-rails"] == H100.outside["no-rails"]
    assert found.sources["outside.isolated.reached"] == "nccl-tests"
    assert "outside.isolated.reached" not in found.ranges
    assert found.ranges["sustained"] == H100.ranges["sustained"]
    path.write_text(json.dumps({**ours, "like": "h1000"}))
    with pytest.raises(ArgumentError, match=r"ours\.json: like must be one of a100, .*, got 'h1000'"):
        load_profile(path)


def test_the_value_is_the_median_of_samples():
    """Within the range, deterministic, with the value as the median."""
    drawn, again = sampled(H100), sampled(H100)
    low, high = H100.ranges["sustained"]
    assert drawn.sustained.shape == (SAMPLES,)
    assert low <= drawn.sustained.min() < drawn.sustained.max() <= high
    assert (drawn.sustained < H100.sustained).sum() == SAMPLES / 2
    assert (drawn.sustained == again.sustained).all()
    assert drawn.memory_capacity == H100.memory_capacity, "no range, no samples"
    forward = drawn.rates["bfloat16"].attention["flash"].forward
    assert abs(np.corrcoef(forward, drawn.sustained)[0, 1]) < 0.3, "drawn independently"


def test_costs_of_samples_are_samples_of_costs():
    """One evaluation equals separate evaluations of all samples."""
    drawn, gemm, mesh = sampled(H100, 5), Gemm(1, 4096, 4096, 4096), Mesh.of_shape((64,))
    works = [Work("matmul", gemm.flop, 0, 10**8, "bfloat16", (gemm,)), Work("pointwise", 0, 10**6, 10**8, "bfloat16")]
    together = Costs(drawn, mesh=mesh).kernels(works)
    gathered = Costs(drawn, mesh=mesh).collective("gather", 10**8, 3, mesh.shard)
    for index in range(5):
        alone = with_numbers(H100, {path: float(value_at(drawn, path)[index]) for path in H100.ranges})
        assert Costs(alone, mesh=mesh).kernels(works) == pytest.approx(together[index])
        assert Costs(alone, mesh=mesh).collective("gather", 10**8, 3, mesh.shard) == pytest.approx(gathered[index])


def value_at(profile, path):
    """Return an array at a path."""
    for name in path.split("."):
        if isinstance(profile, (dict, tuple)):
            profile = profile[int(name) if isinstance(profile, tuple) else name]
        else:
            profile = getattr(profile, name)
    return profile


def test_with_numbers_replaces_numbers():
    """By path; the rest stays."""
    changed = with_numbers(
        H100, {"sustained": 0.5, "rates.bfloat16.attention.flash.forward": 0.25, "tiles.1.fraction": 0.9}
    )
    assert (changed.sustained, changed.tiles[1].fraction) == (0.5, 0.9)
    assert changed.rate("bfloat16").attention["flash"].forward == 0.25
    assert changed.rate("float32") == H100.rate("float32")
    assert dataclasses.replace(with_numbers(H100, {}), name="x") == dataclasses.replace(H100, name="x")
