"""Profiles of schemas 1 and 2 are read, with what they do not say left out of the model."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from graphshard.cost.costs import Costs
from graphshard.cost.kernels import Work
from graphshard.cost.multiplications import Attention, Gemm
from graphshard.cost.profile import Profile, load_profile
from graphshard.cost.profile_checks import KINDS
from graphshard.ir.mesh import Axis


def of_schema_2(name):
    """A built-in profile as it would have been written with schema 2."""
    profile = load_profile(name)
    data = json.loads(profile.to_json())
    data["protocols"] = [
        {key: value for key, value in protocol.items() if key not in ("algorithm", "posted")}
        for protocol in data["protocols"]
        if protocol["algorithm"] == "ring"
    ]
    for link in data["inside"].values():
        del link["switched"]
    data["outside"] = {
        name: {"value": network.of_rank, "range": [1e6, 1e12], "source": "measured"}
        for name, network in profile.outside.items()
    }
    return {**data, "schema": 2}


def of_schema_1(name):
    """A built-in profile as it would have been written with schema 1."""
    data = of_schema_2(name)
    for new in ("split_seconds", "tile_seconds", "sustained", "head_power", "host_seconds", "straggler"):
        del data[new]
    data["rates"] = {
        k: {**rate, "attention": rate["attention"]["flash"]["forward"]} for k, rate in data["rates"].items()
    }

    def without_ranges(value):
        if isinstance(value, dict):
            return {key: without_ranges(item) for key, item in value.items() if key != "range"}
        return [without_ranges(item) for item in value] if isinstance(value, list) else value

    return {**without_ranges(data), "schema": 1}


def test_schema_1(tmp_path):
    """One speed of attention for both directions, full speed, no waiting: what schema 1 meant."""
    path = tmp_path / "old.json"
    path.write_text(json.dumps(of_schema_1("h100")))
    old, new = load_profile(path), load_profile("h100")
    rate = old.rate("bfloat16")
    assert rate.attention["flash"].forward == rate.attention["flash"].backward
    assert (old.sustained, old.straggler, old.tile_seconds, old.ranges) == (1.0, 0.0, 0.0, {})
    assert old.memory_bandwidth == new.memory_bandwidth
    assert "older schema" in old.sources["sustained"]
    assert Profile.from_json(old.to_json()) == old, "written again, it is of the present schema"
    large = Gemm(1, 8192, 8192, 8192)
    seconds = Costs(old).kernel(Work("matmul", large.flop, 0, 0, "bfloat16", (large,)))
    assert large.flop / seconds > 0.9 * rate.peak * rate.matmul
    shape = Attention("cudnn", True, 64, 8192, False, 10**13)
    seconds = Costs(old).kernel(Work("attention", shape.flop, 0, 0, "bfloat16", (), shape))
    assert seconds - old.kernel_seconds == 10**13 / (rate.peak * rate.attention["flash"].backward)


@pytest.mark.parametrize("name", ["h100", "cpu-gloo"])
def test_schema_2(name):
    """A number for each network is what a rank reaches, and all is done by rings."""
    old, new = Profile.from_json(json.dumps(of_schema_2(name))), load_profile(name)
    assert old.outside.keys() == new.outside.keys()
    for network, found in old.outside.items():
        assert found.of_rank == new.outside[network].of_rank
        assert old.ranges[f"outside.{network}.bandwidth"] == (1e6, 1e12)
    rings = [dataclasses.replace(ring, posted=0.0) for ring in new.protocols if ring.algorithm == "ring"]
    inside = {kind: dataclasses.replace(link, switched=0.0) for kind, link in new.inside.items()}
    same = Costs(dataclasses.replace(new, protocols=tuple(rings), inside=inside))
    for kind, ranks in itertools.product(KINDS, (2, 8, 64)):
        axis = Axis("shard", ranks, "shard")
        assert Costs(old).collective(kind, 10**8, 2, axis) == same.collective(kind, 10**8, 2, axis)
    assert Profile.from_json(old.to_json()) == old, "written again, it is of the present schema"


def test_schema_1_of_calibrate():
    """Of a CPU nothing changes: its rates are of whole products."""
    old = Profile.from_json(json.dumps(of_schema_1("cpu-gloo")))
    assert old.hash == load_profile("cpu-gloo").hash
