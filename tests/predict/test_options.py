"""Every option of `compile` in a prediction: the predicted program is the one that `compile` builds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.export import Dim

import graphshard
from graphshard.cost.costs import Costs
from graphshard.cost.flops import flop_of
from graphshard.errors import ArgumentError, InfeasibleError, PassError
from graphshard.ir.program import Program
from graphshard.options.options import Options
from graphshard.passes import MakePlan, OffloadParameters, Reorder
from graphshard.pipeline.pipeline import Pipeline
from graphshard.predict.explanation import Explanation
from graphshard.predict.study import Study
from graphshard.schedule.fsdp2_order import PlanByUnit
from tests.predict.test_explain import BF16, RANKS, TOKENS, Net, meta_net
from tests.ranks import FakeWorld

H100 = replace(graphshard.profiling.load_profile("h100"), contention=0.0)
DYNAMIC = ({0: Dim("batch"), 1: Dim("seq", max=4096)},)


def predicted(shape: Any = (RANKS,), symbols: Any = None, inputs: Any = (TOKENS,), **options: Any) -> Explanation:
    """Explain the net in bfloat16 on H100."""
    study = Study(meta_net(), inputs, None, Options(mp_policy=BF16, **options), symbols=symbols)
    return study.explain(shape, H100, "isolated")


@pytest.fixture(scope="module")
def plain() -> Explanation:
    """Explain without options, for comparison."""
    return predicted()


# Options that change the program on a CPU mesh, for a model of this class.
SHAPING: dict[str, Callable[[nn.Module], Any]] = {
    "reshard_after_forward": lambda model: 2,
    "shard_placement_fn": lambda model: lambda param: Shard(param.dim() - 1),
    "mp_policy": lambda model: MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "offload_policy": lambda model: CPUOffloadPolicy(),
    "ignored_params": lambda model: [model.head.bias],
    "units": lambda model: ["layers.*.0", "layers.*.2", "head"],
    "reduce": lambda model: "exchange",
    "backend": lambda model: "eager",
    "activation": lambda model: "full",
    "memory_limit": lambda model: 4 * 10**6,
    "dynamic_shapes": lambda model: DYNAMIC,
    "passes": lambda model: Pipeline().disable("mixed-precision").replace("plan", MakePlan(PlanByUnit())),
}


def test_every_option_is_tried() -> None:
    """Except options that do not change the program."""
    shapeless = {"fullgraph", "hardware", "max_captures", "verify"}
    assert {field.name for field in fields(Options)} - SHAPING.keys() == shapeless


def small() -> Net:
    return Net(width=64, vocab=96)


@pytest.mark.parametrize("name", SHAPING)
@pytest.mark.slow
def test_the_program_equals_compile(fake_world: FakeWorld, name: str) -> None:
    """The same plan and the same regions."""
    with torch.device("meta"):
        model = small()
    found = graphshard.explain(
        model, (4,), example_inputs=(TOKENS,), hardware="cpu-gloo", **{name: SHAPING[name](model)}
    )
    fake_world(4)
    model = small()
    options = {"backend": "eager", "hardware": "cpu-gloo", name: SHAPING[name](model)}
    graphshard.compile(model, init_device_mesh("cpu", (4,)), **options)
    model(TOKENS)
    (program,) = graphshard.programs(model)
    assert program.plan is not None
    assert program.plan.hash == found.plan_hash
    assert program.regions.keys() == {region.key for region in found.regions}


def flop_run(found: Explanation) -> float:
    """Count the multiplications of a step, including recomputation."""
    regions = found._program.regions
    return sum(r.calls * sum(flop_of(regions[r.key].module.graph.nodes).values()) for r in found.regions)


@pytest.mark.slow
def test_activation(plain: Explanation) -> None:
    """Less is saved for backward, which recomputes it; the model's FLOP count stays the same."""
    half, full = predicted(activation=0.5), predicted(activation="full")
    sizes = [found.memory["saved for backward"] for found in (full, half, plain)]
    assert sizes[0] < 0.15 * sizes[2]
    assert sizes[0] < sizes[1] < 0.7 * sizes[2]
    assert plain.compute_s < half.compute_s < full.compute_s
    assert flop_run(plain) == plain.flop <= flop_run(half) < flop_run(full)
    assert full.flop == plain.flop
    assert full.mfu < plain.mfu
    saved = predicted(activation=[torch.ops.aten.addmm.default])
    assert saved.compute_s < full.compute_s
    assert saved.memory["saved for backward"] > full.memory["saved for backward"]


@pytest.mark.slow
def test_offload_policy(plain: Explanation) -> None:
    """Copies use a separate link, and state is on the host, as with the pass inserted manually."""
    away = predicted(offload_policy=CPUOffloadPolicy())
    assert 0 < away.busy["host"] < 1
    assert away.step_time_s > plain.step_time_s
    assert away.memory["optimizer state"] == 0 < plain.memory["optimizer state"]
    assert away.memory.get("shards", 0) < plain.memory["shards"]
    assert away.peak_memory_bytes < plain.peak_memory_bytes
    by_hand = predicted(passes=Pipeline().insert(OffloadParameters(), before="plan"))
    assert (away.step_time_s, away.memory) == (by_hand.step_time_s, by_hand.memory)


@pytest.mark.slow
def test_backend(plain: Explanation) -> None:
    """One kernel per operator: the same plan and communication, more kernels, and a matching bound."""
    eager = predicted(backend="eager")
    assert eager.plan_hash == plain.plan_hash
    assert eager.communication_s == pytest.approx(plain.communication_s)
    assert eager.compute_s > 1.1 * plain.compute_s
    unfused = Costs(H100, fused=False)
    regions = eager._program.regions
    assert [r.seconds for r in eager.regions] == [
        pytest.approx(float(unfused.region(regions[r.key]))) for r in eager.regions
    ]
    assert plain.lower_bound_s < eager.lower_bound_s <= eager.step_time_s
    region = eager.regions[0]
    study = Study(meta_net(), (TOKENS,), None, Options(mp_policy=BF16, backend="eager"))
    measured = study.explain((RANKS,), H100, "isolated", measured={region.key: 1.0})
    assert measured.compute_s == pytest.approx(eager.compute_s + region.calls * (1.0 - region.seconds))


def sizes_of(found: Explanation) -> list[tuple[int, int]]:
    return [size.source for size in found._program.sizes]


@pytest.mark.slow
def test_dynamic_shapes(plain: Explanation) -> None:
    """The program for all sizes, evaluated at the example's; declared, or marked on a meta input."""
    dynamic = predicted(dynamic_shapes=DYNAMIC)
    assert sizes_of(dynamic) == [(0, 0), (0, 1)] != sizes_of(plain)
    for number in ("step_time_s", "compute_s", "communication_s", "peak_memory_bytes", "flop"):
        assert getattr(dynamic, number) == pytest.approx(getattr(plain, number)), number
    marked = TOKENS.to("meta")
    torch._dynamo.mark_dynamic(marked, 1)
    assert sizes_of(predicted(inputs=(marked,))) == [(0, 1)]
    with pytest.raises(ArgumentError, match="dynamic_shapes has 2 entries, the call has 1 inputs"):
        predicted(dynamic_shapes=(*DYNAMIC, None))


@pytest.mark.slow
def test_gathers_in_a_smaller_group() -> None:
    """Forward gathers between nodes, backward in the node: faster than gathering twice, and saves memory."""
    again, kept = (predicted((64,), reshard_after_forward=reshard) for reshard in (True, False))
    found = predicted((64,), reshard_after_forward=8)
    gathers = {(step.phase, step.link) for step in found._timeline.steps if step.kind == "gather"}
    assert gathers == {("forward", "network"), ("backward", "node")}
    assert kept.communication_s < found.communication_s < again.communication_s
    assert sum(found.memory.values()) < sum(kept.memory.values())
    for other in (found, again, kept):
        assert other.lower_bound_s <= other.step_time_s
    study = Study(meta_net(), (TOKENS,), None, Options(reshard_after_forward=8))
    assert study.explain((8,), H100, "isolated").step_time_s > 0  # the whole axis
    with pytest.raises(ArgumentError, match=r"reshard_after_forward=8 must divide .* 12\. Give one of 1, 2"):
        study.explain((12,), H100, "isolated")


@pytest.mark.parametrize(
    "options",
    [
        {"activation": "full"},
        {"offload_policy": CPUOffloadPolicy()},
        {"backend": "eager"},
        {"dynamic_shapes": DYNAMIC},
        {"reshard_after_forward": 4},
        {"units": ["layers.*"], "memory_limit": 10**9},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.slow
def test_formulas_equal_numbers(options: dict[str, Any]) -> None:
    """At the explained sizes, and at others with the same number of tokens."""
    found = predicted(symbols={"batch": 0, "seq": 1}, **options)
    assert found.formulas is not None
    other = predicted(inputs=(torch.zeros(4, 64, dtype=torch.long),), **options)
    for values, expected in (({}, found), ({"batch": 4, "seq": 64}, other)):
        numbers = found.formulas.evaluate(**values)
        for name in ("step_time_s", "compute_s", "communication_s", "exposed_comm_s"):
            assert numbers[name] == pytest.approx(getattr(expected, name), rel=1e-9), name


class Wrong(Reorder):
    """Claims to change nothing, but removes a wait."""

    name = "wrong"

    def rewrite(self, program: Program) -> int:
        phase = program.phases["forward"]
        wait = next(
            node for node in phase.module.graph.nodes if str(node.target) == "_c10d_functional.wait_tensor.default"
        )
        wait.replace_all_uses_with(wait.all_input_nodes[0])
        phase.module.graph.erase_node(wait)
        return 1


def test_verify() -> None:
    """Verified at the same levels as in `compile`."""
    passes = Pipeline().insert(Wrong(), after="reorder")
    for level in ("ends", "each"):
        with pytest.raises(PassError, match="wrong" if level == "each" else "the last pass"):
            predicted(passes=passes, verify=level)
    assert predicted(verify="each").step_time_s == predicted(verify="off").step_time_s


@pytest.mark.slow
def test_an_infeasible_limit() -> None:
    with pytest.raises(InfeasibleError, match="The least possible is"):
        predicted(memory_limit=10)
