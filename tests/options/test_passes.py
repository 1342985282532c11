"""The planner of compile and explain: profile, order, memory limits."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.codec.converter import decode_pass, encode_pass
from graphshard.cost.costs import Costs
from graphshard.cost.profile import load_profile
from graphshard.errors import ArgumentError, InfeasibleError
from graphshard.ir.mesh import Mesh
from graphshard.ir.program import Program
from graphshard.options.options import Options
from graphshard.options.resolve import profile_here, with_planner
from graphshard.passes import MakePlan
from graphshard.pipeline.pipeline import Pipeline
from graphshard.schedule.build_problem import Constraints
from graphshard.schedule.fsdp2_order import PlanByUnit
from graphshard.schedule.planner import PlanByCost
from graphshard.schedule.rank_consistent_planner import AgreedPlanner, communication, outline, within
from tests.helpers import Blocks, captured, copied, through
from tests.ranks import FakeWorld

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
COSTS = Costs(load_profile("cpu-gloo"), mesh=Mesh.of_shape(2))
BATCH = (torch.randn(3, 16),)


@pytest.fixture(scope="module")
def partitioned() -> Program:
    """Partition four units with two parameters each."""
    return through(captured(Blocks(4, 16, bias=True), BATCH), "partition")


def test_the_profile_of_the_device(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The argument, the environment, or the device's name; an unknown GPU has no profile and is logged."""
    monkeypatch.delenv("GRAPHSHARD_HARDWARE", raising=False)
    assert profile_here(CPU, None).name == "cpu-gloo"
    assert profile_here(CPU, "h100").name == "h100"
    monkeypatch.setenv("GRAPHSHARD_HARDWARE", "b200")
    assert profile_here(CPU, None).name == "b200"
    assert profile_here(GPU, None).name == "b200", "no such device is here"


def gpu_is(monkeypatch: pytest.MonkeyPatch, name: str, gib: float = 79.1) -> None:
    """Let torch report a GPU."""
    found = SimpleNamespace(name=name, total_memory=int(gib * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_the_profile_of_a_gpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """By its name; a node has as many ranks as the launcher says; other memory and unknown GPUs are logged."""
    monkeypatch.delenv("GRAPHSHARD_HARDWARE", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with caplog.at_level(logging.WARNING, "graphshard"):
        gpu_is(monkeypatch, "NVIDIA A100-SXM4-80GB")
        assert profile_here(GPU, None) == load_profile("a100")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        assert profile_here(GPU, None).ranks_per_node == 4
        assert profile_here(GPU, "a100").ranks_per_node == 8, "as given"
        gpu_is(monkeypatch, "NVIDIA GB200", 184)
        assert profile_here(GPU, None).ranks_per_node == 72, "a node of 4 in a domain of 72"
        assert not caplog.text
        gpu_is(monkeypatch, "NVIDIA GH200 144G HBM3e", 140)
        assert profile_here(GPU, None).name == "gh200"
        assert (
            "the profile gh200 is of GPUs with 89.4 GiB of memory, and NVIDIA GH200 144G HBM3e has 140 GiB"
            in caplog.text
        )
        caplog.clear()
        assert profile_here(GPU, "a100-40gb").name == "a100-40gb"
        assert "the profile a100-40gb is of GPUs with 37.3 GiB of memory, and NVIDIA GH200" in caplog.text
        gpu_is(monkeypatch, "NVIDIA GeForce RTX 4090")
        assert profile_here(GPU, None) is None
    assert "no hardware profile of NVIDIA GeForce RTX 4090: collectives are planned unit by unit" in caplog.text


def test_small_gains_keep_the_order_of_fsdp2(partitioned: Program) -> None:
    """A different plan costs compilation time; there is always a prediction."""
    (step,) = (s for s in with_planner(Pipeline(), COSTS, Options()) if s.name == "plan")
    ours, theirs = step.planner(partitioned), PlanByUnit()(partitioned)
    assert ours.events == theirs.events
    assert [b.members for b in ours.buckets] == [b.members for b in theirs.buckets]
    assert ours.prediction.lower_bound <= ours.prediction.step_seconds


def test_uses_plans_with_sufficient_gain(partitioned: Program) -> None:
    """The higher the required gain, the closer the plan is to FSDP2's, and never with more memory."""
    plans = [PlanByCost(COSTS, worth=worth)(partitioned) for worth in (1e9, 0.02)]
    assert plans[1].prediction.step_seconds < 0.98 * plans[0].prediction.step_seconds
    assert plans[1].prediction.peak_bytes <= plans[0].prediction.peak_bytes


def test_joint_memory_decisions_minimize_the_step() -> None:
    """If gains must pay for compilation, a fixed policy may give a shorter step."""
    for keep in (False, True):
        options = Options(memory_limit=1 << 30, activation="auto" if keep else None)
        pipeline = with_planner(Pipeline(), COSTS, options)
        (planner,) = (step.planner for step in pipeline if isinstance(step, MakePlan))
        assert isinstance(planner, PlanByCost)
        assert (planner.worth + planner.worth_seconds == 0) == keep


def test_a_memory_limit_takes_precedence(partitioned: Program) -> None:
    """If FSDP2's order does not fit, the best fitting plan is used; otherwise the error names the least limit."""
    free = PlanByCost(COSTS, worth=1e9)(partitioned).prediction
    with pytest.raises(InfeasibleError, match="The least possible is") as error:
        PlanByCost(COSTS, 1, worth=1e9)(partitioned)
    assert error.value.smallest < free.peak_bytes
    tight = PlanByCost(COSTS, error.value.smallest, worth=1e9)(partitioned).prediction
    assert tight.peak_bytes == error.value.smallest


def test_keeps_the_planner_of_the_pass() -> None:
    pipeline = Pipeline().replace("plan", MakePlan(PlanByUnit()))
    assert with_planner(pipeline, COSTS, Options()) is pipeline
    with pytest.raises(ArgumentError, match="memory_limit=5 cannot be kept, as passes has a planner"):
        with_planner(pipeline, COSTS, Options(memory_limit=5))
    with pytest.raises(ArgumentError, match="no hardware profile of this device is known: measure one"):
        with_planner(Pipeline(), None, Options(memory_limit=5))


def test_named_units_are_constraints() -> None:
    pipeline = with_planner(Pipeline(), COSTS, Options(memory_limit=9, units=["layers.*"]))
    planners = [s.planner for s in pipeline if s.name == "plan"]
    assert [(p.constraints, p.memory_limit) for p in planners] == [(Constraints(units=True), 9)]


def test_a_planner_in_a_file() -> None:
    """A dumped stage has all inputs of planning, including the profile's numbers."""
    constraints = Constraints(units=True, forward_prefetch={"a": ["b"]})
    step = MakePlan(PlanByCost(replace(COSTS, measured={"r": 1.0}), 1 << 30, constraints, worth=0.1))
    agreed = MakePlan(AgreedPlanner(step.planner, lambda program, make: make()))
    for stored in (step, agreed):
        assert decode_pass(encode_pass(stored)).step == step


def test_the_plan_of_a_size_serves_other_sizes(partitioned: Program) -> None:
    """A rank may capture a new batch size alone; with a memory limit it plans again."""
    other = through(captured(Blocks(4, 16, bias=True), (torch.randn(2, 16),)), "partition")
    assert communication(other) == communication(partitioned)
    assert outline(other) == outline(partitioned)
    assert communication(partitioned) != communication(through(captured(Blocks(2, 16), BATCH), "partition"))


def test_the_plan_of_a_size_is_adapted_to_other_computations(partitioned: Program) -> None:
    """A branch on a size: the rank asks no other rank, and its collectives keep their order where possible."""

    class Longer(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = x.sin()
            return super().forward(x).cos()

    longer = through(captured(Longer(4, 16, bias=True), BATCH), "partition")
    assert outline(longer) != outline(partitioned)
    asked: list[Program] = []

    def alone(program: Program, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        asked.append(program)
        return json.loads(json.dumps(make()))

    for given, other in ((partitioned, longer), (longer, partitioned)):
        asked.clear()
        planner = AgreedPlanner(PlanByCost(COSTS), alone)
        known, fitted = planner(given), planner(other)
        assert asked == [given]
        assert known.buckets == fitted.buckets
        for name, events in fitted.events.items():
            assert [(e.action, e.bucket) for e in events] == [(e.action, e.bucket) for e in known.events[name]]
        assert fitted.events != known.events
        through(replace(copied(other), plan=fitted), "reorder")  # raises if it cannot be applied


def test_compile_passes_arguments_to_the_planner(fake_world: FakeWorld) -> None:
    """Arguments of compile reach the planner; an infeasible limit leaves the model unchanged."""
    fake_world(2)
    mesh = init_device_mesh("cpu", (2,))
    model = Blocks(2, 16)
    with pytest.raises(ArgumentError, match="memory_limit must be a positive whole number of bytes"):
        graphshard.compile(model, mesh, memory_limit=0)
    with pytest.raises(InfeasibleError, match=r"memory_limit of 10 bytes\. The least possible is"):
        graphshard.compile(model, mesh, backend="eager", example_inputs=BATCH, memory_limit=10)
    assert type(model) is Blocks
    assert isinstance(model.get_parameter(next(iter(dict(model.named_parameters())))), nn.Parameter)
    graphshard.compile(model, mesh, backend="eager", example_inputs=BATCH, memory_limit=10**6, hardware="a100")
    (program,) = graphshard.programs(model)
    assert program.plan.prediction.profile == "a100"
    assert program.plan.prediction.peak_bytes <= 10**6


@pytest.mark.parametrize("ahead", [True, False])
def test_planning_can_be_interrupted(fake_world: FakeWorld, monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    """Ctrl-C during planning: compile leaves the model unchanged, and may be called again."""
    fake_world(2)
    mesh, model = init_device_mesh("cpu", (2,)), Blocks(2, 16)

    def compile_and_call() -> None:
        if ahead or type(model) is Blocks:
            inputs = {"example_inputs": BATCH} if ahead else {}
            graphshard.compile(model, mesh, backend="eager", memory_limit=10**6, hardware="a100", **inputs)
        model(*BATCH)

    with monkeypatch.context() as patched:
        patched.setattr("graphshard.schedule._solver.simulate", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            compile_and_call()
    assert (type(model) is Blocks) == ahead
    compile_and_call()
    (program,) = graphshard.programs(model)
    assert program.plan.prediction.peak_bytes <= 10**6


def test_ranks_use_the_plan_of_the_first(partitioned: Program) -> None:
    """The first rank's plan is used if it fits; if programs differ, each rank plans, and the check names it."""
    made: list[dict] = []

    def first(program, make):
        made.append(make())
        return made[-1]

    def another(program, make):
        return made[0]

    cheap, dear = PlanByCost(COSTS), PlanByCost(Costs(load_profile("h100")), exact_reductions=False)
    plan = AgreedPlanner(cheap, first)(partitioned)
    assert AgreedPlanner(dear, another)(partitioned) == plan
    different = through(captured(Blocks(2, 16), BATCH), "partition")
    assert AgreedPlanner(dear, another)(different) == dear(different)


def test_the_first_rank_plans_with_less_until_all_fit() -> None:
    """Another rank needs 40 bytes more; the error names the least limit, which suffices."""

    def find(limit: int) -> int:
        if limit < 50:
            raise InfeasibleError(f"no schedule fits in a memory_limit of {limit} bytes", 50)
        return limit // 10 * 10

    def peak(found: int) -> int:
        return found + 40

    assert within(105, find, peak) == 60
    assert within(90, find, peak) == 50
    for limit in (89, 60, 10):
        with pytest.raises(
            InfeasibleError, match=f"memory_limit of {limit} bytes.*least possible is 90 bytes: pie"
        ) as error:
            within(limit, find, peak)
        assert error.value.smallest == 90
    with pytest.raises(InfeasibleError, match="memory_limit of 10 bytes") as error:
        within(10, find, lambda found: found - 5)
    assert error.value.smallest == 50
