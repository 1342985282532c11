"""reorder: moves starts and waits of collectives to their planned positions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from graphshard.errors import PassError
from graphshard.ir.collective_regions import CollectiveRegions, collectives
from graphshard.ir.graph import WAIT, launch_of
from graphshard.ir.plan import Event, Plan
from graphshard.ir.printer import print_phase, print_program
from graphshard.ir.program import Phase, Program
from graphshard.passes import Reorder
from graphshard.pipeline.pipeline import run_pass
from graphshard.schedule.fsdp2_order import PlanByUnit
from tests.helpers import COALESCED, PACKED, Blocks, Scales, assert_gradients, captured, copied, step, through

PLANNERS = pytest.mark.parametrize("planner", [COALESCED, PACKED], ids=["coalesced", "packed"])
WORLD_SIZES = pytest.mark.parametrize("world_size", [2, 3])


@functools.cache
def _partitioned(model: type[nn.Module], depth: int, world_size: int) -> Program:
    module = Scales(depth) if model is Scales else Blocks(depth, bias=True)
    args = (torch.ones(4),) if model is Scales else (torch.ones(3, 4),)
    return through(captured(module, args, world_size=world_size), "partition")


def _scales() -> Program:
    """Build two units with one operator each, bucketed."""
    return through(copied(_partitioned(Scales, 2, 2)), "bucket")


def _blocks(planner: PlanByUnit = COALESCED, world_size: int = 2) -> Program:
    """Build three units with two parameters each, bucketed."""
    return through(copied(_partitioned(Blocks, 3, world_size)), "bucket", planner=planner)


def test_before_and_after() -> None:
    """The second gather starts when the first has arrived, and overlaps the multiplication."""
    program = _scales()
    assert_expected_inline(
        print_phase(program.phases["forward"]),
        """\
  %0: f32[2] = param:layers.0.w
  %1: f32[2] = param:layers.1.w
  %2: f32[4] = input:0
* %4: f32[4] = all_gather_into_tensor(%0, 2, shard)  # layers.0 [gather layers.0 in forward]
  %5: f32[4] = wait_tensor(%4)  # layers.0 [gather layers.0 in forward]
  %6: f32[4] = mul.Tensor(%2, %5)  # layers.0
* %7: f32[4] = all_gather_into_tensor(%1, 2, shard)  # layers.1 [gather layers.1 in forward]
  %8: f32[4] = wait_tensor(%7)  # layers.1 [gather layers.1 in forward]
  %9: f32[4] = mul.Tensor(%6, %8)  # layers.1
  return %9 as output:0
  return %0 as param:layers.0.w
  return %1 as param:layers.1.w
  return %2 as input:0
""",
    )
    run_pass(Reorder(), program)
    assert_expected_inline(
        print_phase(program.phases["forward"]),
        """\
  %0: f32[2] = param:layers.0.w
  %1: f32[2] = param:layers.1.w
  %2: f32[4] = input:0
* %4: f32[4] = all_gather_into_tensor(%0, 2, shard)  # layers.0 [gather layers.0 in forward]
  %5: f32[4] = wait_tensor(%4)  # layers.0 [gather layers.0 in forward]
* %7: f32[4] = all_gather_into_tensor(%1, 2, shard)  # layers.1 [gather layers.1 in forward]
  %6: f32[4] = mul.Tensor(%2, %5)  # layers.0
  %8: f32[4] = wait_tensor(%7)  # layers.1 [gather layers.1 in forward]
  %9: f32[4] = mul.Tensor(%6, %8)  # layers.1
  return %9 as output:0
  return %0 as param:layers.0.w
  return %1 as param:layers.1.w
  return %2 as input:0
""",
    )


def _events(phase: Phase, name: str, plan: Plan) -> tuple[Event, ...]:
    """Return starts and waits in the order of the graph; several waits for one bucket are one event."""
    buckets = {(b.kind, p): b.name for b in plan.buckets if b.phase == name for p in b.members}
    bucket_of = {c.node: buckets[c.kind, c.params[0]] for c in collectives(phase)}
    compute = set(CollectiveRegions.of(phase).compute)
    events: dict[Event, None] = {}
    position = 0
    for node in phase.module.graph.nodes:
        if node in compute:
            position += 1
        elif node in bucket_of:
            events[Event("start", bucket_of[node], position)] = None
        elif node.target is WAIT:
            events[Event("wait", bucket_of[launch_of(node)], position)] = None
    return tuple(events)


@PLANNERS
def test_the_graph_follows_the_plan(planner: PlanByUnit) -> None:
    program = through(_blocks(planner), "reorder")
    assert program.plan is not None
    for name, phase in program.phases.items():
        assert _events(phase, name, program.plan) == program.plan.events[name]


@PLANNERS
def test_the_compute_keeps_its_order(planner: PlanByUnit) -> None:
    program = _blocks(planner, world_size=3)
    compute = {name: CollectiveRegions.of(phase).compute for name, phase in program.phases.items()}
    nodes = {name: set(phase.module.graph.nodes) for name, phase in program.phases.items()}
    run_pass(Reorder(), program)
    assert program.history[-1].rewrites > 0
    for name, phase in program.phases.items():
        assert set(phase.module.graph.nodes) == nodes[name]
        assert CollectiveRegions.of(phase).compute == compute[name]


def test_a_second_run_changes_nothing() -> None:
    program = through(_blocks(), "reorder")
    before = print_program(program)
    run_pass(Reorder(), program)
    assert (program.history[-1].rewrites, print_program(program)) == (0, before)


@pytest.mark.parametrize("grad", [True, False])
def test_without_collectives_the_graph_is_left_alone(grad: bool) -> None:
    program = through(captured(Blocks(2), (torch.ones(3, 4),), world_size=1, grad=grad), "bucket")
    before = print_program(program)
    run_pass(Reorder(), program)
    assert (program.history[-1].rewrites, print_program(program)) == (0, before)


def test_a_plan_is_needed() -> None:
    program = copied(_partitioned(Scales, 2, 2))
    with pytest.raises(PassError, match="reorder: the program has no plan; run a planner first"):
        run_pass(Reorder(), program)


Change = Callable[[list[Event]], list[Event]]
BAD_PLANS: dict[str, tuple[Change, str]] = {
    "waits before it starts": (
        lambda events: [events[1], events[0], *events[2:]],
        "the plan runs wait_tensor.* in forward before its input all_gather_into_tensor",
    ),
    "starts twice": (lambda events: [events[0], *events], "the plan starts or waits twice for all_gather.* in forward"),
    "waits twice": (
        lambda events: [*events, events[-1]],
        "the plan starts or waits twice for wait_tensor.* in forward",
    ),
    "never starts": (lambda events: events[1:], "the plan runs wait_tensor.* in forward before its input all_gather"),
    "never waits": (lambda events: events[:-1], "the plan runs mul.* in forward before its input wait_tensor"),
    "does nothing": (lambda events: [], "the plan runs mul.* in forward before its input wait_tensor"),
    "waits too late": (
        lambda events: [*events[:-1], replace(events[-1], at=100)],
        "the plan runs mul.* in forward before its input wait_tensor",
    ),
}


def _change(program: Program, phase_name: str, change: Change) -> None:
    assert program.plan is not None
    events = {**program.plan.events, phase_name: tuple(change(list(program.plan.events[phase_name])))}
    program.plan = replace(program.plan, events=events)


@pytest.mark.parametrize(("change", "message"), BAD_PLANS.values(), ids=BAD_PLANS.keys())
def test_rejects_impossible_plans(change: Change, message: str) -> None:
    program = _scales()
    before = print_program(program)
    _change(program, "forward", change)
    with pytest.raises(PassError, match=f"reorder: {message}"):
        run_pass(Reorder(), program)
    assert print_program(program) == before


def test_rejects_a_reduction_before_its_gradient() -> None:
    program = _scales()
    _change(program, "backward", lambda events: [replace(e, at=0) for e in events])
    with pytest.raises(PassError, match=r"reorder: the plan runs reduce_scatter_tensor.* in backward before its input"):
        run_pass(Reorder(), program)


def test_rejects_a_reduction_without_a_wait() -> None:
    program = _scales()
    _change(program, "backward", lambda events: events[:-1])
    with pytest.raises(PassError, match=r"reorder: the plan has no place for \['wait_tensor.*'\] in backward"):
        run_pass(Reorder(), program)


def test_late_events_come_at_the_end() -> None:
    program = _scales()
    _change(program, "backward", lambda events: [*events[:-1], replace(events[-1], at=10**6)])
    run_pass(Reorder(), program)
    *_, last = (n for n in program.phases["backward"].module.graph.nodes if n.op == "call_function")
    assert last.target is WAIT


@WORLD_SIZES
@PLANNERS
def test_values_do_not_depend_on_the_order(planner: PlanByUnit, world_size: int) -> None:
    torch.manual_seed(0)
    model, batches = Blocks(3, bias=True), [(torch.randn(3, 4),) for _ in range(world_size)]
    program = _blocks(planner, world_size)
    expected = step(program, model, batches)
    run_pass(Reorder(), program)
    for found, wanted in zip(step(program, model, batches), expected, strict=True):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted if not name.startswith("param:"))
    assert_gradients(program, model, batches)
