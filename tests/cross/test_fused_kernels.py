"""Kernels of regions from Inductor's scheduler for a missing GPU, and predictions from them."""

from __future__ import annotations

import logging
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._triton import has_triton

import graphshard
from graphshard.cost.costs import Costs
from graphshard.cost.kernels import Work, work_of
from graphshard.cross.driver import stand_in
from graphshard.ir.gpus import CAPABILITIES, capability_of, properties_of
from graphshard.options.options import Options
from graphshard.predict.study import Study, schedule_regions

pytest.importorskip("cffi")
pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU"),
]

H100 = graphshard.profiling.load_profile("h100")
TOKENS = torch.zeros(6, 64, dtype=torch.int64)


class Block(nn.Module):
    """A norm and a gated layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Net(nn.Module):
    """Equal blocks, and a loss."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(64, 32), nn.Sequential(*(Block() for _ in range(blocks)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.embed(tokens))
        return F.cross_entropy(F.linear(x, self.embed.weight).float().flatten(0, 1), tokens.flatten())


def study_of(model: nn.Module, **options: object) -> Study:
    """Create a study of a program for a GPU."""
    return Study(model, (TOKENS,), None, Options(**options), device="cuda")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def study() -> Study:
    """Explain once."""
    found = study_of(Net())
    found.explain((8,), H100, "isolated")
    return found


@pytest.mark.slow
def test_kernels_have_the_schedulers_bytes(study: Study) -> None:
    """Fused values are read and written once; matmuls are library kernels."""
    found = study.explain((8,), H100, "isolated")
    assert found._program is not None
    assert found._costs is not None
    scheduled = found._costs.scheduled
    assert scheduled, "no region was scheduled"
    products = 0
    for key, works in scheduled.items():
        nodes = list(found._program.regions[key].module.graph.nodes)
        by_rules = work_of(nodes)
        gemms = [gemm for work in works for gemm in work.gemms]
        assert sorted(map(str, gemms)) == sorted(str(gemm) for work in by_rules for gemm in work.gemms)
        products += len(gemms)
        given = sum(n.meta["val"].nbytes for n in nodes if n.op == "placeholder" and n.users)
        assert sum(int(work.num_bytes) for work in works) > 0.5 * given
        assert sum(int(work.num_bytes) for work in works) <= 1.5 * sum(int(work.num_bytes) for work in by_rules) + given
    assert products > 4


def test_regions_use_the_times_of_their_kernels(study: Study) -> None:
    """In the table of regions, in the step, and in its range; but not with rules, in eager mode, or on a CPU."""
    found = study.explain((8,), H100, "isolated")
    assert found._costs is not None
    costs = found._costs
    rows = {row.key: row for row in found.regions}
    for key, works in costs.scheduled.items():
        assert rows[key].seconds == pytest.approx(float(costs.kernels(works)), rel=0.3)  # includes contention
    eager = study_of(Net(), backend="eager").explain((8,), H100, "isolated")
    cpu = Study(Net(), (TOKENS,), None, Options()).explain((8,), H100, "isolated")
    for other in (eager, cpu):
        assert other._costs is not None
        assert not other._costs.scheduled
    slow = {
        key: tuple(Work("pointwise", 0, 0, 10**12, "float32") for _ in works) for key, works in costs.scheduled.items()
    }
    with mock.patch("graphshard.predict.study.schedule_regions", return_value=slow):
        slower = study.explain((8,), H100, "isolated")
    assert slower.step_range_s[0] > 100 * found.step_time_s


def test_resets_inductors_caches(study: Study) -> None:
    """Inductor caches whether Triton has a GPU, and earlier CPU compilation has set the cache."""
    assert not torch.cuda.is_available()
    assert not has_triton()
    fresh = study_of(Net()).explain((8,), H100, "isolated")
    assert fresh._costs is not None
    assert fresh._costs.scheduled
    assert not has_triton()


@pytest.mark.slow
def test_equal_regions_are_scheduled_once(study: Study) -> None:
    """Once per study for each kind of GPU; an A100 is another kind. Depth does not add regions."""
    deep = study_of(Net(4))
    regions = len(set(deep.explain((8,), H100, "isolated")._program.regions))  # type: ignore[union-attr]
    assert len(deep._kernels) == regions
    deep.explain((8,), graphshard.profiling.load_profile("h200"), "in-training")
    assert {capability for _, capability in deep._kernels} == {(9, 0)}
    known = dict(study._kernels)
    found = study.explain((8,), graphshard.profiling.load_profile("a100"), "isolated")
    assert {key for key, _ in study._kernels} >= set(found._program.regions)  # type: ignore[union-attr]
    assert {capability for _, capability in study._kernels.keys() - known.keys()} == {(8, 0)}


def test_falls_back_to_rules(study: Study, caplog: pytest.LogCaptureFixture) -> None:
    """The log names region and reason."""

    found = study.explain((8,), H100, "isolated")
    assert found._program is not None
    with (
        caplog.at_level(logging.WARNING, "graphshard"),
        mock.patch("graphshard.cross.compile_for_gpus.decompose", side_effect=RuntimeError("no such operator")),
        stand_in((9, 0)),
    ):
        assert schedule_regions(found._program.regions, H100, {}, lambda _: None) == {}
    assert "is predicted by rules: Inductor: RuntimeError: no such operator" in caplog.text
    by_rules = {key: Costs(H100).region(region) for key, region in found._program.regions.items()}
    assert all(seconds > 0 for seconds in by_rules.values())


def test_gpus_by_their_multiprocessors() -> None:
    """As in the profiles."""
    assert [capability_of(properties_of(each)["multi_processor_count"]) for each in CAPABILITIES] == list(CAPABILITIES)
    assert capability_of(int(graphshard.profiling.load_profile("gb200").units)) == (10, 0)
    assert capability_of(7) is None
