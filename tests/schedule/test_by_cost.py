"""The cost-based planner on captured programs: passes apply its plans, and rules, constraints and limits hold."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from graphshard.cost.costs import Costs
from graphshard.cost.profile import load_profile
from graphshard.errors import ArgumentError, InfeasibleError
from graphshard.ir.collective_regions import CollectiveRegions, collectives
from graphshard.ir.plan import Plan
from graphshard.ir.program import Phase, Program
from graphshard.passes import MakePlan
from graphshard.pipeline.pipeline import Pipeline, run_pass
from graphshard.schedule import Solver
from graphshard.schedule.build_problem import Constraints, Settings, build
from graphshard.schedule.fsdp2_order import PlanByUnit
from graphshard.schedule.planner import PlanByCost
from graphshard.schedule.simulator import simulate
from tests.helpers import Blocks, ParallelBiases, Tied, assert_gradients, captured, copied, through

COSTS = Costs(load_profile("h100"))
FREE = PlanByCost(COSTS, exact_reductions=False)
BATCHES = [(torch.randn(3, 16),), (torch.randn(3, 16),)]


@pytest.fixture(scope="module")
def partitioned() -> Program:
    """Partition four units with two parameters each."""
    return through(captured(Blocks(4, 16, bias=True), BATCHES[0]), "partition")


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("planner", [FREE, PlanByCost(COSTS), PlanByCost(COSTS, pack_below=0)])
def test_numerics(planner: PlanByCost, reshard: bool | None) -> None:
    """Programs verify after every pass, and gradients equal one process."""
    torch.manual_seed(0)
    model = Blocks(4, 16, bias=True)
    program = through(captured(model, BATCHES[0], reshard_after_forward=reshard), "reorder", planner=planner)
    assert_gradients(program, model, BATCHES)


@pytest.mark.parametrize(
    ("model", "batch"), [(Tied(), torch.randint(0, 6, (2, 5))), (ParallelBiases(), torch.randn(2, 4))]
)
def test_numerics_of_other_models(model: nn.Module, batch: torch.Tensor) -> None:
    """Tied weights, equal gradients."""
    program = through(captured(model, (batch,)), "reorder", planner=FREE)
    assert_gradients(program, model, [(batch,), (batch.flip(0),)])


def test_mixed_precision_uses_the_policys_dtypes() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    program = through(captured(Blocks(4, 16), BATCHES[0], mp_policy=policy), "reorder", planner=FREE)
    sizes = {b.kind: b.num_bytes / len(b.members) for b in program.plan.buckets}
    assert sizes == {"gather": 2 * 16 * 16, "reduce": 4 * 16 * 16}


def test_the_prediction_matches_the_simulator(partitioned: Program) -> None:
    plan = FREE(partitioned)
    prediction = plan.prediction
    assert prediction.lower_bound <= prediction.step_seconds
    assert prediction.gap == prediction.step_seconds / prediction.lower_bound - 1
    assert (prediction.profile, prediction.profile_hash) == ("h100", COSTS.profile.hash)
    assert (prediction.network, Plan.from_json(plan.to_json())) == ("isolated", plan)


def test_the_plan_is_the_same_every_time(partitioned: Program) -> None:
    again = through(captured(Blocks(4, 16, bias=True), BATCHES[0]), "partition")
    assert FREE(again).hash == FREE(partitioned).hash
    assert PlanByCost(Costs(load_profile("a100")), exact_reductions=False)(again).hash != FREE(again).hash


def test_a_memory_limit_holds_or_is_infeasible(partitioned: Program) -> None:
    free = FREE(partitioned).prediction.peak_bytes
    with pytest.raises(
        InfeasibleError, match=r"no schedule fits in a memory_limit of 1,000 bytes\. The least"
    ) as error:
        PlanByCost(COSTS, memory_limit=1000, exact_reductions=False)(partitioned)
    least = error.value.smallest
    assert least < free
    for limit in (least, (least + free) // 2):
        program = through(
            copied(partitioned),
            "reorder",
            planner=PlanByCost(COSTS, memory_limit=limit, exact_reductions=False),
        )
        assert program.plan.prediction.peak_bytes <= limit
    with pytest.raises(InfeasibleError):
        PlanByCost(COSTS, memory_limit=least - 1, exact_reductions=False)(partitioned)


def test_reductions_on_the_cpu_match_fsdp2(partitioned: Program) -> None:
    """The same members, packed in the same order, because sums on gloo depend on it."""
    ours, theirs = PlanByCost(COSTS)(partitioned), PlanByUnit()(partitioned)
    reductions = [sorted((b.packed, b.params) for b in p.buckets if b.kind == "reduce") for p in (ours, theirs)]
    assert reductions[0] == reductions[1]


def _starts(plan: Plan, phase: str) -> dict[str, int]:
    return {e.bucket: e.at for e in plan.events[phase] if e.action == "start"}


def _waits(plan: Plan, phase: str) -> dict[str, int]:
    return {e.bucket: e.at for e in plan.events[phase] if e.action == "wait"}


def test_units_are_respected(partitioned: Program) -> None:
    plan = PlanByCost(COSTS, constraints=Constraints(units=True), exact_reductions=False)(partitioned)
    for bucket in plan.buckets:
        assert len({partitioned.params[name].unit for name in bucket.members}) == 1
    assert len(plan.buckets) == len(PlanByUnit()(partitioned).buckets)


def test_prefetch_lists_are_respected(partitioned: Program) -> None:
    """Forward starts the last layer at the first; backward starts the second layer at the last one."""
    constraints = Constraints(
        forward_prefetch={"layers.0": ["layers.3"]}, backward_prefetch={"layers.3": ["layers.1", "layers.2"]}
    )
    plan = PlanByCost(COSTS, constraints=constraints, exact_reductions=False)(partitioned)
    starts, waits = _starts(plan, "forward"), _waits(plan, "forward")
    assert starts["gather layers.3 in forward"] == waits["gather layers.0 in forward"] == 0
    starts, waits = _starts(plan, "backward"), _waits(plan, "backward")
    assert starts["gather layers.1 in backward"] == waits["gather layers.3 in backward"]
    through(copied(partitioned), "reorder", planner=PlanByCost(COSTS, constraints=constraints, exact_reductions=False))


def test_wrong_arguments(partitioned: Program) -> None:
    with pytest.raises(ArgumentError, match=re.escape("prefetch names 'layers.9', which is no unit with parameters")):
        PlanByCost(COSTS, constraints=Constraints(forward_prefetch={"layers.0": ["layers.9"]}))(partitioned)
    with pytest.raises(ArgumentError, match="memory_limit must be a positive number of bytes, got 0"):
        PlanByCost(COSTS, memory_limit=0)


def test_inference_and_one_rank() -> None:
    inference = through(captured(Blocks(2), (torch.ones(3, 4),), grad=False), "reorder", planner=FREE)
    assert list(inference.plan.events) == ["forward"]
    alone = through(captured(Blocks(2), (torch.ones(3, 4),), world_size=1), "reorder", planner=FREE)
    assert alone.plan.buckets == ()


@pytest.mark.slow
def test_base_memory(partitioned: Program) -> None:
    """Hand-computed: one layer of 4x4 in float32 on two ranks, inputs 3x4; a shard and each state are 32 bytes."""
    program = through(captured(Blocks(1), (torch.ones(3, 4),), reshard_after_forward=True), "partition")
    forward, backward, optimizer = build(program, COSTS, Settings(exact_reductions=False)).problem.chains
    shard, state, value = 32, 64, 48
    assert [g.num_bytes for g in forward.gathers] == [64]
    # The matmul and its ReLU, and the final sum.
    assert forward.base == (shard + state + value + 2 * value,)
    assert backward.gathers == ()
    # Backward does not read the shard, which still exists. It has inputs, a boolean mask and a tangent, and makes two
    # values from them.
    assert backward.base == (shard + state + 3 * value + 12 + 4,)
    assert [(r.num_bytes, r.at) for r in backward.reductions] == [(64, len(backward.seconds))]
    assert optimizer.base == (shard + state + shard,)


class Logits(nn.Module):
    """A block, and a root whose matrices are sent alone; logits, and their gradients, are the largest tensors of a
    step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4096, 4096, bias=False)
        self.layers = nn.ModuleList([nn.Linear(4096, 4096, bias=False)])
        self.head = nn.Linear(4096, 16384, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[0](self.first(x)).relu()).log_softmax(-1).square().sum()


def test_a_gradient_takes_no_memory_before_it_is_computed() -> None:
    """The head's gradient is computed after the logits' gradients: the peak of the producing item excludes it."""
    with torch.device("meta"):
        model = Logits()
    program = through(captured(model, (torch.empty(8192, 4096),), reshard_after_forward=True), "partition")
    backward = build(program, COSTS, Settings()).problem.chains[1]
    head = backward.reductions[0]
    assert (head.at, head.num_bytes) == (1, 4 * 4096 * 16384)
    # Packed with the first matrix, it is not counted at the item of the logits.
    of_units = build(program, COSTS, Settings(Constraints(units=True))).problem.chains[1]
    assert of_units.reductions[-1].num_bytes > head.num_bytes
    assert max(backward.least_memory) == max(of_units.least_memory)


class Wide(nn.Module):
    """One unit of matrices large enough for separate collectives, with small ones between and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(3)), nn.LayerNorm(4096))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def test_large_parameters_are_sent_alone_with_small_ones_packed() -> None:
    """Buckets are cut where a transfer takes longer than a latency; each parameter has one transfer of each kind."""
    with torch.device("meta"):
        model = Wide()
    program = through(captured(model, (torch.empty(2, 4096),)), "partition")
    built = build(program, COSTS, Settings())
    for phase, kind in (("forward", "gather"), ("backward", "gather"), ("backward", "reduce")):
        atoms = built.maps[phase].atoms[kind]
        found = [[row.name for row in atom.rows] for atom in atoms]
        wanted = sorted(p for c in collectives(program.phases[phase]) if c.kind == kind for p in c.params)
        assert sorted(name for names in found for name in names) == wanted
        assert all(any(f".{i}.weight" in name for name in names for i in range(3)) for names in found)
        assert len(found) == (2 if (phase, kind) == ("backward", "gather") else 3)


def test_make_plan_accepts_it() -> None:
    program = captured(Blocks(2), (torch.ones(3, 4),))
    for step in Pipeline().replace("plan", MakePlan(FREE)):
        run_pass(step, program)
    assert program.plan.prediction is not None
    assert {c.node.meta["bucket"] for c in collectives(program.phases["forward"])} <= {
        b.name for b in program.plan.buckets
    }


def test_reports_a_stopped_search(partitioned: Program) -> None:
    """Without steps the plan is at least FSDP2's order with a bound; with some it is no longer."""
    plans = [PlanByCost(COSTS, exact_reductions=False, steps=steps)(partitioned) for steps in (0, 2_000_000)]
    stopped, whole = (plan.prediction for plan in plans)
    assert stopped.stopped
    assert not whole.stopped
    assert whole.step_seconds <= stopped.step_seconds
    assert stopped.lower_bound <= whole.step_seconds
    assert Plan.from_json(plans[0].to_json()) == plans[0]
    with pytest.raises(ArgumentError, match=r"steps must not be negative, got -1\. 0 searches nothing"):
        PlanByCost(COSTS, steps=-1)


def test_at_least_as_short_as_plans_by_unit(partitioned: Program) -> None:
    """The planner searches without and with whole units, and takes the shorter plan."""
    units = PlanByCost(COSTS, constraints=Constraints(units=True))(partitioned).prediction
    assert PlanByCost(COSTS)(partitioned).prediction.step_seconds <= units.step_seconds


def test_the_simulator_runs_a_program(partitioned: Program) -> None:
    problem = build(partitioned, COSTS, Settings()).problem
    solution = Solver()(problem)
    found = simulate(problem, solution.schedule)
    assert (found.step_seconds, found.peak) == (solution.step_seconds, solution.peak)


def test_the_packing_limit_comes_from_the_profile() -> None:
    """On CPUs this is the minimum."""
    program = through(captured(Blocks(2), (torch.ones(2, 4),)), "partition")
    profile = load_profile("h100")
    free = replace(profile.inside["gather"], tensor_seconds=0.0)
    costs = Costs(replace(profile, pack_below=100.0, inside={**profile.inside, "gather": free}))
    assert PlanByCost(costs)._settings(program).pack_below == 100
    assert PlanByCost(costs, pack_below=7)._settings(program).pack_below == 7


def test_a_plan_sorts_the_nodes_of_a_phase_once(monkeypatch: pytest.MonkeyPatch, partitioned: Program) -> None:
    """For any number of problems and solutions that it compares."""
    sort, sorted_phases = CollectiveRegions.of, []

    def counted(phase: Phase) -> CollectiveRegions:
        sorted_phases.append(phase)
        return sort(phase)

    monkeypatch.setattr(CollectiveRegions, "of", staticmethod(counted))
    for planner in (replace(FREE, worth=0.001), PlanByUnit()):
        sorted_phases.clear()
        planner(partitioned)
        assert sorted_phases == list(partitioned.phases.values())
