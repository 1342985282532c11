"""Training parameters: microbatches, clipping, optimizers with and without fused kernels, tokens and price."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import numpy as np
import pytest
import torch

import graphshard
from graphshard.cost.costs import Costs
from graphshard.errors import ArgumentError
from graphshard.options.options import Options
from graphshard.predict.explanation import Explanation
from graphshard.predict.study import Study
from graphshard.predict.training_config import Training, TrainingArguments
from graphshard.utils.text import format_amount
from tests.predict.test_explain import BF16, RANKS, TOKENS, Net, meta_net

# One profile without ranges, so formulas use its numbers.
H100 = dataclasses.replace(graphshard.profiling.load_profile("h100"), contention=0.0)


@pytest.fixture(scope="module")
def study() -> Study:
    return Study(meta_net(), (TOKENS,), None, Options(mp_policy=BF16))


def predicted(study: Study, shape: tuple[int, ...] = (RANKS,), **training: Any) -> Explanation:
    """Explain from the same capture."""
    return study.changed(study.options, Training(**training)).explain(shape, H100, "isolated")


def test_microbatches_multiply_all_but_the_update(study: Study) -> None:
    one, eight = predicted(study), predicted(study, accumulate=8)
    assert eight.microbatches == 8
    assert eight.tokens == 8 * one.tokens
    adding = 7 * Costs(H100).addition(sum(row.shard_bytes(row.dtype) for row in one._program.params))
    expected = 8 * (one.step_time_s - one.optimizer_s) + adding + one.optimizer_s
    assert eight.step_time_s == pytest.approx(expected)
    assert eight.peak_memory_bytes > one.peak_memory_bytes
    assert eight.lower_bound_s <= eight.step_time_s
    everything = predicted(study, global_batch=8 * 2 * RANKS)
    assert everything.to_dict() == eight.to_dict()


def test_foreach_reads_and_writes_for_every_operation(study: Study) -> None:
    """20 times the parameters for Adam; a fused kernel has 7."""
    fused, foreach = predicted(study), predicted(study, foreach=True)
    assert foreach.optimizer_s == pytest.approx(20 / 7 * fused.optimizer_s)
    assert foreach.step_time_s - fused.step_time_s == pytest.approx(foreach.optimizer_s - fused.optimizer_s)
    assert foreach.lower_bound_s - fused.lower_bound_s == pytest.approx(foreach.optimizer_s - fused.optimizer_s)
    assert foreach.step_range_s[0] <= foreach.step_time_s <= foreach.step_range_s[1]


def test_the_peak_is_in_the_optimizer_if_temporaries_exceed_activations() -> None:
    """One token in a batch leaves little to save; foreach Adam holds the roots of its second moments."""
    study = Study(meta_net(), (torch.zeros(1, 1, dtype=torch.long),), None, Options(mp_policy=BF16))
    fused, foreach = predicted(study, (1,)), predicted(study, (1,), foreach=True)
    trained = sum(row.shard_bytes(row.dtype) for row in fused._program.params)
    assert foreach.memory["optimizer temporaries"] == trained
    # Shards, gradients, two states and the temporary.
    assert foreach.peak_memory_bytes == 5 * trained == sum(foreach.memory.values())
    assert foreach.peak_memory_bytes > fused.peak_memory_bytes
    assert "optimizer temporaries" not in predicted(study, (1,), foreach=True, optimizer_states=1).memory


def test_adams_temporary_matches_torch() -> None:
    """The peak during a step of Adam, above the memory before, equals the size of the parameters."""
    params = [torch.nn.Parameter(torch.ones(1024, 256)) for _ in range(4)]
    size = sum(param.nbytes for param in params)
    optimizer = torch.optim.AdamW(params, foreach=True)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiled:
        optimizer.step()
    changes = [event.nbytes() for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    most = max(np.cumsum(changes))
    assert size <= most <= 1.1 * size


def test_clipping_reads_gradients_twice_and_writes_them(study: Study) -> None:
    """The ranks also all-reduce a number."""
    plain, clipped = predicted(study), predicted(study, clip_norm=1.0)
    trained = sum(row.shard_bytes(row.dtype) for row in plain._program.params)
    costs = plain._costs
    expected = costs.clipping(trained) + costs.collective("all_reduce", 4, 1, plain._program.mesh.shard)
    assert clipped.optimizer_s - plain.optimizer_s == pytest.approx(expected)
    assert clipped.step_time_s - plain.step_time_s == pytest.approx(expected)
    alone = predicted(study, (1,), clip_norm=1.0).optimizer_s - predicted(study, (1,)).optimizer_s
    assert alone == pytest.approx(costs.clipping(sum(p.nbytes for p in study.model.parameters())))


@pytest.mark.slow
def test_formulas_have_the_update() -> None:
    study = Study(meta_net(width=64), (TOKENS,), None, Options(mp_policy=BF16), symbols={"batch": 0})
    study.training = Training(foreach=True, clip_norm=1.0)
    found = study.explain((RANKS,), H100, "isolated")
    assert found.formulas is not None
    at = found.formulas.evaluate(batch=TOKENS.shape[0], ranks=RANKS)
    assert at["optimizer_s"] == pytest.approx(found.optimizer_s)
    assert at["step_time_s"] == pytest.approx(found.step_time_s)


def test_tokens_and_price(study: Study) -> None:
    """Steps, days, GPU hours and money follow from the step."""
    found = predicted(study, tokens=2e12, price=2.5)
    cost = found.cost
    assert cost is not None
    assert cost.steps == 2e12 / (256 * RANKS)
    assert cost.days == pytest.approx(cost.steps * found.step_time_s / 86400)
    assert cost.gpu_hours == pytest.approx(cost.days * 24 * RANKS)
    assert cost.money == pytest.approx(2.5 * cost.gpu_hours)
    assert cost.range[0] < 1 < cost.range[1]
    assert cost.gpu_hours == pytest.approx(2e12 / found.tokens_per_second_per_gpu / 3600)
    assert "training       2e+12 tokens in 976,562,500 steps, " in str(found)
    assert f"{cost.gpu_hours:,.0f} GPU hours, {cost.money:,.0f} at 2.50 for each" in str(found)
    assert f"{found.tokens_per_second_per_gpu:,.0f} per GPU" in str(found)
    assert found.to_dict()["cost"]["money"] == cost.money
    unpriced = predicted(study, tokens=1e9)
    assert unpriced.cost is not None
    assert unpriced.cost.money is None
    assert predicted(study).cost is None
    assert "training " not in str(predicted(study))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"accumulate": 0}, "accumulate must be a positive number of microbatches such as 8, got 0."),
        ({"accumulate": 4, "global_batch": 64}, "both say how many microbatches a step has. Give one of them."),
        ({"tokens": -1}, "tokens must be a positive number such as 2e12, of the whole training, got -1."),
        ({"tokens": "2T"}, "tokens must be a positive number such as 2e12, of the whole training, got '2T'."),
        ({"tokens": 1e9, "price": 0}, "price must be a positive number such as 2.50, of one GPU for an hour, got 0."),
        ({"price": 2.5}, "price=2.5 is of a GPU hour, and tokens, which say how many hours there are, are not given."),
        ({"clip_norm": 0}, "clip_norm must be a positive number, got 0."),
        ({"foreach": 1}, "foreach must be True or False, got 1."),
        ({"acumulate": 8}, "unexpected keyword argument 'acumulate'. Did you mean 'accumulate'?"),
    ],
)
def test_wrong_arguments(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        graphshard.explain(Net(), (RANKS,), example_inputs=(TOKENS,), **given)
    assert message in str(caught.value)


def test_the_arguments_are_the_fields() -> None:
    assert TrainingArguments.__annotations__.keys() == {field.name for field in dataclasses.fields(Training)}
    for function in (graphshard.explain, graphshard.explain_grid):
        assert TrainingArguments.__annotations__.keys() <= inspect.signature(function).parameters.keys()


# Arguments of `compile` that `explain` does not have.
NOT_IN_EXPLAIN = {
    "dump": "nothing is compiled that could be written",
    "artifact": "nothing is compiled that a file could replace",
    "cuda_graphs": "how much of the launches they save was never measured",
    "cache": "nothing is compiled that could be kept",
    "dp_mesh_dims": "a shape says by order or names which axes shard, as a DeviceMesh does by names",
}


def test_explain_accepts_compiles_arguments() -> None:
    """All arguments that affect the prediction; the others have a reason."""
    compiled = inspect.signature(graphshard.compile).parameters.keys()
    explained = inspect.signature(graphshard.explain).parameters.keys()
    assert compiled - explained == NOT_IN_EXPLAIN.keys()
    stepped = inspect.signature(graphshard.compile_step).parameters.keys()
    assert stepped & explained == {"model", "clip_norm", "accumulate"}


def test_grids_accept_training_settings() -> None:
    grid = graphshard.explain_grid(
        meta_net(width=64),
        [(RANKS,)],
        example_inputs=(TOKENS,),
        tokens=1e9,
        price=2.0,
        settings={"one": {}, "four": {"accumulate": 4, "foreach": True}},
    )
    assert [row.microbatches for row in grid.rows] == [1, 4]
    assert all(row.cost and row.cost.tokens == 1e9 for row in grid.rows)
    header, first, second = str(grid).splitlines()
    assert header.split()[-6:] == ["days", "GPU", "hours", "money", "limited", "by"]
    for row, line in zip(grid.rows, (first, second)):
        assert row.cost is not None
        assert row.cost.money is not None
        assert line.split()[-4:-1] == [
            format_amount(number) for number in (row.cost.days, row.cost.gpu_hours, row.cost.money)
        ]
    assert "GPU hours" in grid.ranking(2)
