"""The activation policy of units is chosen together with the plan, under one memory limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphshard
from graphshard.cost.costs import Costs
from graphshard.cost.profile import load_profile
from graphshard.errors import ArgumentError, InfeasibleError, PassError
from graphshard.ir.plan import Prediction
from graphshard.ir.program import Program
from graphshard.passes import ActivationCheckpointing, KeepGathered, MakePlan
from graphshard.pipeline.instrumentation import Observer
from graphshard.pipeline.memory_policy import PolicySearch
from graphshard.pipeline.pipeline import Pipeline, run_pass, run_pipeline
from graphshard.schedule.build_problem import Constraints
from graphshard.schedule.planner import PlanByCost
from tests.helpers import assert_gradients, captured, copied


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class _Net(nn.Module):
    """Blocks with different recomputation choices and costs."""

    def __init__(self, depth: int = 2, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.layers = nn.ModuleList(_Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        return self.head(x).square().mean()


TOKENS = torch.zeros(8, 64, dtype=torch.int64)
COSTS = Costs(load_profile("cpu-gloo"))
# FSDP2's order, unless it does not fit: plans without a search.
PLANNER = PlanByCost(COSTS, constraints=Constraints(keep=True), worth=1e9, steps=1_000)


def _passes(share: float | str, planner: PlanByCost) -> tuple[graphshard.Pass, ...]:
    pipeline = Pipeline().replace("plan", MakePlan(planner)).insert(KeepGathered(), after="plan")
    return (ActivationCheckpointing(share), *pipeline)  # type: ignore[arg-type]


def _predicted(program: Program, share: float | str, limit: int | None) -> Prediction:
    made = copied(program)
    run_pipeline(_passes(share, replace(PLANNER, memory_limit=limit)), made, Observer("off", most=0))
    return _prediction(made)


def _joint(depth: int = 2) -> Program:
    return captured(_Net(depth), (TOKENS,), reshard_after_forward=True)


@pytest.fixture(scope="module")
def joint() -> Program:
    return _joint()


def _borders(joint: Program, limit: int) -> PolicySearch:
    """Create a search that has not started."""
    between = tuple(Pipeline())[:7]
    assert between[-1].name == "coalesce-model-collectives"

    def run(steps: tuple[graphshard.Pass, ...], program: Program) -> None:
        for step in steps:
            run_pass(step, program, Observer("off", most=0))

    return PolicySearch(joint, between, replace(PLANNER, memory_limit=limit), run)


@pytest.mark.slow
def test_no_other_choice_is_better(joint: Program) -> None:
    """Compared with every border, compiled explicitly: the least limit, the best step, and the bound."""
    shares = _borders(joint, 1).shares
    assert len(shares) == 5 <= _borders(joint, 1).exact
    least = []
    for share in shares:
        with pytest.raises(InfeasibleError) as refused:
            _predicted(joint, share, 1)
        least.append(refused.value.smallest)
    assert least == sorted(least)
    assert least[0] == least[1] < least[-1], "what the last unit saves is there at once in any case"
    with pytest.raises(
        InfeasibleError, match=r"That is with activation=0; no choice of activation=\"auto\" takes"
    ) as e:
        _predicted(joint, "auto", 1)
    assert e.value.smallest == min(least)
    chosen = set()
    for limit in (least[0], least[2], 2 * least[-1]):
        every = {}
        for share in shares:
            try:
                every[share] = _predicted(joint, share, limit)
            except InfeasibleError:
                continue
        found = _predicted(joint, "auto", limit)
        assert found.peak_bytes <= limit
        assert found.step_seconds == min(other.step_seconds for other in every.values())
        assert found.lower_bound <= found.step_seconds
        chosen.add(found.step_seconds)
    assert len(chosen) > 2, "the limit decides"


def test_offloads_saved_values_if_that_is_fastest() -> None:
    """On a GPU with a near host, in less memory than all values take; with a far host they are recomputed."""
    joint = captured(_Net(), (torch.zeros(64, 64, dtype=torch.int64),), reshard_after_forward=True)
    found = {}
    for where, bandwidth in (("near", 1e15), ("far", 1e6)):
        gpu = replace(load_profile("h100"), host_bandwidth=bandwidth, kernel_seconds=0.0)
        planner = replace(PLANNER, costs=Costs(gpu), memory_limit=1 << 40)
        everything, program = (copied(joint) for _ in range(2))
        run_pipeline(_passes(1.0, planner), everything, Observer("off", most=0))
        limit = int(0.8 * _prediction(everything).peak_bytes)
        run_pipeline(_passes("auto", replace(planner, memory_limit=limit)), program, Observer("each"))
        assert _prediction(program).peak_bytes <= limit
        assert _prediction(program).lower_bound <= _prediction(program).step_seconds
        found[where] = program
    assert found["near"].on_host
    assert not found["far"].on_host
    assert _prediction(found["near"]).step_seconds < _prediction(found["far"]).step_seconds


def _prediction(program: Program) -> Prediction:
    assert program.plan is not None
    assert program.plan.prediction is not None
    return program.plan.prediction


@pytest.mark.slow
def test_the_search_of_many_borders_is_near_the_best() -> None:
    joint = _joint(depth=7)
    search = _borders(joint, 1)
    last = len(search.shares) - 1
    assert last > search.exact
    needs = [search.least(index)[0] for index in (0, last)]
    limit = sum(needs) // 2
    search.planner = replace(PLANNER, memory_limit=limit)
    share, bound = search.best()
    assert len(search._planned) < last
    found = search.planned(search.shares.index(share))
    best = min(search.planned(i).step_seconds for i in range(last + 1) if search.least(i)[0] <= limit)
    assert bound <= best <= found.step_seconds <= best * 1.01


def test_numerics(joint: Program) -> None:
    """Gradients equal one process, and the text names the chosen share."""
    torch.manual_seed(0)
    model = _Net()
    program = captured(model, (TOKENS,), reshard_after_forward=True)
    with pytest.raises(InfeasibleError) as refused:
        _predicted(joint, "auto", 1)
    limit = int(1.1 * refused.value.smallest)
    run_pipeline(_passes("auto", replace(PLANNER, memory_limit=limit)), program, Observer("each"))
    assert_gradients(program, model, [(TOKENS,), (TOKENS + 3,)])
    assert program.bound is not None


def test_a_forward_without_backward_saves_nothing() -> None:
    program = captured(_Net(1), (TOKENS,), grad=False)
    run_pipeline(_passes("auto", replace(PLANNER, memory_limit=1 << 40)), program, Observer())
    assert program.bound is None


def test_wrong_uses(joint: Program) -> None:
    with pytest.raises(ArgumentError, match=r"decided under a limit of memory, by costs\. Give memory_limit="):
        run_pipeline(_passes("auto", PLANNER), copied(joint), Observer())
    with pytest.raises(PassError, match='"auto" is decided together with the passes that follow; run the pipeline'):
        run_pass(ActivationCheckpointing("auto"), copied(joint))
