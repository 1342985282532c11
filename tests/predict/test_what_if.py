"""what_if: every answer equals explain for the changed step, and captures are shared."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graphshard
from graphshard.errors import ArgumentError
from graphshard.options.options import Options
from graphshard.options.resolve import with_activation
from graphshard.pipeline.pipeline import Pipeline
from graphshard.predict import _capture_target
from graphshard.predict.answers import Outcome
from graphshard.predict.study import Study
from graphshard.predict.training_config import Training
from graphshard.predict.what_if import ABOUT, Case, answer, changes_of
from tests.helpers import Blocks
from tests.predict.test_explain import BF16, TOKENS, meta_net

H100 = graphshard.profiling.load_profile("h100")
INPUTS: Any = ((TOKENS,), {})
PAID = Training(tokens=1e9, price=2.5, foreach=True)
CASE = Case(INPUTS, (16,), H100, "isolated", Options(mp_policy=BF16), PAID)


def study_of(case: Case) -> Study:
    return Study(meta_net(width=64), case.inputs[0], None, case.options, case.training)


@pytest.fixture(scope="module")
def asked() -> tuple[graphshard.WhatIf, int]:
    """Return all answers, and the number of captures."""
    with mock.patch.object(_capture_target, "capture_example", wraps=_capture_target.capture_example) as captures:
        found = answer(study_of(CASE), CASE, list(ABOUT), (4, 64))
    return found, captures.call_count


@pytest.mark.slow
def test_every_answer_equals_explain(asked: tuple[graphshard.WhatIf, int]) -> None:
    """Equal to explain from scratch, also for other numbers of ranks and for the base."""
    found, _ = asked
    expected = {name: case for _, name, case in changes_of(CASE, list(ABOUT))}
    assert {each.change for each in found.changes} == expected.keys()
    assert not found.left_out
    for each in found.changes:
        case = expected[each.change]
        fresh = study_of(case).explain(case.mesh, case.profile, case.network)
        assert each.outcome == Outcome.of(fresh, case.batch), each.change
        gain = fresh.tokens_per_second_per_gpu / found.base.tokens_per_second_per_gpu - 1
        assert each.gain == pytest.approx(gain)
    assert [row.ranks for row in found.scaling] == [4, 16, 64]
    for row in found.scaling:
        fresh = study_of(CASE).explain((row.ranks,), H100, "isolated")
        assert row.outcome == Outcome.of(fresh, 2)
        assert row.efficiency == pytest.approx(fresh.tokens_per_second_per_gpu / found.base.tokens_per_second_per_gpu)
    assert found.scaling[1].efficiency == 1
    assert found.here == Outcome.of(found.base, 2)


def test_a_graph_is_captured_once(asked: tuple[graphshard.WhatIf, int]) -> None:
    """Two more batches, the largest one, and two other precisions need new captures; nothing else does."""
    found, captures = asked
    assert len(found.changes) >= 14
    assert [fit.what for fit in found.fits][:2] == ["the largest batch", 'the largest batch with activation="full"']
    batches = {fit.outcome.batch for fit in found.fits[:2] if fit.outcome} - {1, 2, 4}
    assert captures == 1 + 2 + len(batches) + 2


def test_order(asked: tuple[graphshard.WhatIf, int]) -> None:
    """Changes that fit by gain, then the others."""
    found, _ = asked
    keys = [(not each.outcome.fits, -each.gain) for each in found.changes]
    assert keys == sorted(keys)
    tiny = replace(H100, memory_capacity=float(found.base.peak_memory_bytes))
    case = replace(CASE, profile=tiny)
    again = answer(study_of(case), case, ["batch", "activation", "accumulate"], ())
    fits = [each.outcome.fits for each in again.changes]
    assert fits == sorted(fits, reverse=True)
    assert not fits[-1]
    assert "batch 4 per rank" in [each.change for each in again.changes if not each.outcome.fits]
    plain, full = (fit.outcome for fit in again.fits[:2])
    assert plain is not None
    assert full is not None
    assert plain.fits
    assert full.fits
    assert plain.batch in (2, 3)
    assert full.batch is not None
    assert full.batch > plain.batch


def test_reasons_add_up_to_the_gain(asked: tuple[graphshard.WhatIf, int]) -> None:
    """Shares of the time per token: 1 / (1 + gain) - 1 in total, except reasons too small to list."""
    found, _ = asked
    for each in found.changes:
        told = each.reason.partition(";")[0]
        shares = [float(part.rpartition(" ")[2].rstrip("%")) / 100 for part in told.split(", ") if "%" in part]
        if "nothing changes" not in told:
            assert sum(shares) == pytest.approx(1 / (1 + each.gain) - 1, abs=0.004), each
    b200 = next(each for each in found.changes if each.change == "hardware b200")
    assert f"the same money per token at {2.5 * (1 + b200.gain):,.2f} for a GPU hour" in b200.reason
    assert b200.outcome.cost is not None
    assert b200.outcome.cost.money is None


def test_texts(asked: tuple[graphshard.WhatIf, int], tmp_path: Path) -> None:
    """Tables, JSON, and two pages."""
    found, _ = asked
    text = str(found)
    assert str(found.base) in text
    for heading in ("what if", "what fits", "scaling"):
        assert heading in text.splitlines()
    assert all(each.change in text for each in found.changes)
    data = json.loads(found.to_json())
    assert data["base"]["step_time_s"] == found.base.step_time_s
    assert len(data["changes"]) == len(found.changes)
    assert data["scaling"][0]["outcome"]["mesh"] == {"shard": 4}
    found.save_html(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert 'href="plan.timeline.html#timeline"' in page
    assert "activation=&#34;full&#34;" in page
    assert f"{found.base.tokens_per_second_per_gpu:,.0f}" in page
    assert 'id="timeline"' in (tmp_path / "plan.timeline.html").read_text()


def names(case: Case, *about: str) -> list[str]:
    return [name for _, name, _ in changes_of(case, about)]


def test_changes_that_make_sense() -> None:
    """They depend on the base."""
    assert names(CASE, "batch") == ["batch 4 per rank", "batch 1 per rank"]
    assert names(CASE.changed(batch=1), "batch") == ["batch 2 per rank"]
    assert names(CASE, "mesh", "network") == ["mesh replicate 2, shard 8", "network in-training", "network no-rails"]
    assert names(replace(CASE, mesh=(8,)), "mesh", "network") == []
    assert names(replace(CASE, mesh=(2, 8)), "mesh", "reshard") == ["mesh shard 16", "reshard_after_forward=False"]
    tensor = replace(CASE, mesh={"dp": 4, "tp": 4})
    assert names(tensor, "mesh") == ["mesh dp 2, tp 8", "mesh dp 8, tp 2"]
    assert names(replace(CASE, mesh={"dp": 1, "tp": 1}), "mesh") == []
    assert names(CASE, "reshard") == ["reshard_after_forward=False", "reshard_after_forward=8"]
    assert names(CASE.changed(reshard_after_forward=False), "reshard") == ["reshard_after_forward=True"]
    assert names(CASE.changed(activation="full"), "activation") == ["activation=None"]
    assert names(CASE.changed(offload_policy=CPUOffloadPolicy()), "offload") == ["nothing on the host"]
    assert names(CASE, "precision") == ["gradients reduced in bfloat16"]
    assert names(CASE.changed(mp_policy=None), "precision") == ["parameters in bfloat16"]
    assert names(CASE.changed(mp_policy=MixedPrecisionPolicy(torch.bfloat16)), "precision") == []
    assert names(CASE, "reduce") == ['reduce="exchange" in bfloat16']
    assert names(CASE.changed(reduce="auto"), "reduce") == ["reduce=None"]
    half = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    assert names(CASE.changed(mp_policy=half), "reduce") == ['reduce="exchange"']
    assert names(CASE, "backend") == []
    assert names(CASE.changed(backend="eager"), "backend") == ['backend="inductor"']
    assert names(CASE, "optimizer") == ["a fused optimizer"]
    assert names(CASE.changed(foreach=False), "optimizer") == []
    assert names(CASE.changed(accumulate=2), "accumulate") == ["accumulate 8 microbatches", "accumulate nothing"]
    assert names(CASE.changed(global_batch=64), "accumulate") == []
    assert [name.split()[1] for name in names(CASE, "hardware")] == [
        *("a100", "b200", "gb200", "gh200", "h200", "l40s", "mi300x")
    ]


def test_only_requested_changes_are_made() -> None:
    """In the requested order; another kind's options need not fit these, such as a policy in both places."""
    case = CASE.changed(passes=with_activation(Pipeline(), "full"))
    assert names(case, "network", "batch") == [*names(case, "network"), "batch 4 per rank", "batch 1 per rank"]
    with pytest.raises(ArgumentError, match="passes has 'activation-checkpointing' already"):
        names(case, "activation")


def test_forgotten_programs_are_freed() -> None:
    """In all studies that share them; the programs of other meshes stay."""
    study = Study(Blocks(2), (torch.ones(3, 4),), None)
    other = study.changed(study.options, study.training, "other")

    def program(of: Study, ranks: int) -> weakref.ref[torch.nn.Module]:
        return weakref.ref(of.explain((ranks,), H100, "isolated")._program.phases["forward"].module)

    kept, forgotten = program(study, 16), program(other, 8)
    assert forgotten() is not None
    other.forget((8,))
    gc.collect()
    assert forgotten() is None
    assert kept() is not None


@pytest.mark.parametrize(
    ("mesh", "ranks", "expected"),
    [
        ((16,), 64, (64,)),
        (16, 8, (8,)),
        ({"shard": 16}, 4, {"shard": 4}),
        ((2, 8), 64, (8, 8)),
        ((2, 8), 4, (1, 4)),
        ((2, 8), 12, None),
        ({"dp": 16, "tp": 8}, 64, {"dp": 8, "tp": 8}),
        ({"dp": 16, "tp": 8}, 4, None),
        ({"replicate": 2, "shard": 8, "tp": 2}, 64, {"replicate": 4, "shard": 8, "tp": 2}),
        ({"tp": 8}, 64, None),
    ],
)
def test_meshes_of_other_sizes(mesh: Any, ranks: int, expected: Any) -> None:
    """The outermost data axis grows; inner ones shrink when it cannot. Model-parallel axes stay."""
    case = replace(CASE, mesh=mesh).with_ranks(ranks)
    assert (case and case.mesh) == expected


def test_impossible_changes_are_left_out() -> None:
    """The error gives the reason, and the other questions are answered."""
    case = replace(CASE, training=Training(global_batch=64))
    found = answer(study_of(case), case, ["batch"], (16, 4096))
    assert [each.change for each in found.changes] == ["batch 4 per rank", "batch 1 per rank"]
    assert [each.outcome.microbatches for each in found.changes] == [1, 4]
    (ranks,) = found.left_out
    assert ranks.startswith("4096 ranks: mesh shard 4096 is larger than the batch")
    assert "* left out: 4096 ranks: " in str(found)
    assert found.fits[0].outcome is not None
    assert "0.5 times the tokens" not in str(found)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"changes": ["bacth"]}, "changes has 'bacth', which is no kind of change. Did you mean 'batch'?"),
        ({"changes": ["x"]}, "which is no kind of change. There are batch, mesh, reshard"),
        ({"changes": "batch"}, 'changes must be a list such as ["batch", "hardware"], got \'batch\'.'),
        ({"changes": [3]}, "changes has 3, which is no kind of change."),
        ({"ranks": 64}, "ranks must be a list of at most 100 numbers of ranks such as [64, 1024], got 64."),
        ({"ranks": [0]}, "ranks must be a positive number of ranks, or several, such as [64, 1024], got 0."),
        ({"tokens": -1}, "tokens must be a positive number such as 2e12, of the whole training, got -1."),
        ({"tokens": 1e9, "price": "2.50"}, "price must be a positive number such as 2.50, of one GPU for an hour"),
        ({"accumulate": 0}, "accumulate must be a positive number of microbatches such as 8, got 0."),
        ({"netwrok": "isolated"}, "what_if() got an unexpected keyword argument 'netwrok'. Did you mean 'network'?"),
    ],
)
def test_wrong_arguments(given: dict[str, Any], message: str) -> None:
    """Named before anything is captured."""
    with (
        mock.patch.object(_capture_target, "capture_example", side_effect=AssertionError),
        pytest.raises(ArgumentError) as caught,
    ):
        graphshard.what_if(meta_net(width=64), (16,), example_inputs=(TOKENS,), **given)
    assert message in str(caught.value)


@pytest.mark.slow
def test_the_function_is_the_same(asked: tuple[graphshard.WhatIf, int]) -> None:
    """With arguments instead of a case; progress is reported."""
    told: list[str] = []
    found = graphshard.what_if(
        meta_net(width=64),
        (16,),
        example_inputs=(TOKENS,),
        mp_policy=BF16,
        tokens=1e9,
        price=2.5,
        foreach=True,
        changes=["accumulate", "network"],
        ranks=(),
        show=told.append,
    )
    by_name = {each.change: each for each in asked[0].changes}
    assert found.changes
    assert all(each == by_name[each.change] for each in found.changes)
    assert found.scaling == ()
    assert "network in-training, 16 ranks, h100: predict" in told


def test_inputs_without_a_batch() -> None:
    """Inputs of only numbers have no batch to enlarge."""

    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.expand(4, 8)
            for layer in self.layers:
                y = layer(y)
            return y.sum()

    with torch.device("meta"):
        model = Counter()
    found = graphshard.what_if(model, (8,), example_inputs=(torch.tensor(1.0),), changes=["batch"], ranks=())
    assert found.changes == ()
    batch, mesh = found.fits
    assert batch.outcome is None
    assert "The largest batch: the inputs have no tensor with a batch." in str(found)
    assert mesh.outcome is not None
    assert mesh.outcome.mesh == {"shard": 1}


class Pair(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = torch.nn.Embedding(32, 16), torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.embed(tokens))).sum()


def over_tp(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def test_a_parallelized_model_is_rebuilt_for_each_mesh() -> None:
    """It is rebuilt for each mesh; the tensor axis stays when data axes shrink. Inputs may have names."""
    given: Any = {"example_kwargs": {"tokens": torch.zeros(2, 8, dtype=torch.long)}, "parallelize": over_tp}
    with torch.device("meta"):
        model = Pair()
    found = graphshard.what_if(model, {"dp": 16, "tp": 2}, changes=["mesh", "activation"], ranks=(8, 3), **given)
    assert {each.change for each in found.changes} == {"mesh dp 8, tp 4", "mesh dp 32, tp 1"}
    for each in found.changes:
        fresh = graphshard.explain(model, each.outcome.mesh, **given)
        assert each.outcome == Outcome.of(fresh, 2)
    assert [row.outcome.mesh for row in found.scaling] == [{"dp": 4, "tp": 2}, {"dp": 16, "tp": 2}]
    activation, ranks = found.left_out
    assert activation.startswith(
        "activation=\"full\": activation='full' is about the units of Pair, and none were found"
    )
    assert ranks == "3 ranks: there is no such mesh with the given inner axes"
    assert found.fits[-1].outcome is not None
    assert found.fits[-1].outcome.mesh == {"dp": 1, "tp": 2}
