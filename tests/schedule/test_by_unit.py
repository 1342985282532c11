"""The default plan: one bucket per unit, prefetch one ahead."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from graphshard.ir.collective_regions import CollectiveRegions, collectives
from graphshard.ir.graph import base_of
from graphshard.ir.plan import Bucket, Plan
from graphshard.ir.program import Program
from graphshard.schedule.fsdp2_order import PlanByUnit
from tests.helpers import COALESCED, PACKED, Blocks, Scales, captured, through

BATCH = (torch.ones(3, 4),)


@pytest.fixture(scope="module")
def program() -> Program:
    """Partition four units with two parameters each."""
    return through(captured(Blocks(4, bias=True), BATCH), "partition")


def _text(plan: Plan, phase: str) -> str:
    return "".join(f"{event.at} {event.action} {event.bucket}\n" for event in plan.events[phase])


def test_order_of_starts_and_waits() -> None:
    """A layer forward is a matmul and a ReLU; backward reduces a layer's gradient while it computes the next."""
    plan = COALESCED(through(captured(Blocks(3), BATCH), "partition"))
    assert_expected_inline(
        _text(plan, "forward"),
        """\
0 start gather layers.0 in forward
0 wait gather layers.0 in forward
0 start gather layers.1 in forward
2 wait gather layers.1 in forward
2 start gather layers.2 in forward
4 wait gather layers.2 in forward
""",
    )
    assert_expected_inline(
        _text(plan, "backward"),
        """\
0 start gather layers.2 in backward
4 start reduce layers.2 in backward
4 wait gather layers.2 in backward
4 start gather layers.1 in backward
10 wait reduce layers.2 in backward
10 start reduce layers.1 in backward
10 wait gather layers.1 in backward
16 wait reduce layers.1 in backward
16 start reduce layers.0 in backward
16 wait reduce layers.0 in backward
""",
    )


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_next_gather_starts_after_a_wait(program: Program, phase: str) -> None:
    plan = COALESCED(program)
    gathers = [e for e in plan.events[phase] if plan.bucket(e.bucket).kind == "gather"]
    assert [e.action for e in gathers] == ["start", "wait"] * (len(gathers) // 2)
    assert gathers[0].at == 0
    for wait, start in zip(gathers[1::2], gathers[2::2]):
        assert (wait.at, start.action) == (start.at, "start")
    assert len(gathers) == 2 * (4 if phase == "forward" else 3)


def test_a_reduction_is_waited_for_when_the_next_starts(program: Program) -> None:
    plan = COALESCED(program)
    events = [e for e in plan.events["backward"] if plan.bucket(e.bucket).kind == "reduce"]
    assert [e.action for e in events] == ["start", "wait"] * 4
    assert [e.bucket for e in events[::2]] == [f"reduce layers.{i} in backward" for i in (3, 2, 1, 0)]
    assert [e.at for e in events[1:-1:2]] == [e.at for e in events[2::2]]
    assert events[-1].at == len(CollectiveRegions.of(program.phases["backward"]).compute)


def _last_use(program: Program, bucket: Bucket) -> int:
    """Return the position of the last compute that reads a gathered parameter of the bucket, or a view of one."""
    phase = program.phases[bucket.phase]
    gathers = [c for c in collectives(phase) if c.kind == "gather" and c.params[0] in bucket.members]
    gathered = {wait for c in gathers for wait in c.waits}
    compute = enumerate(CollectiveRegions.of(phase).compute)
    return max(i for i, node in compute if any(base_of(n) in gathered for n in node.all_input_nodes))


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_at_most_two_units_are_gathered_at_once(program: Program, phase: str) -> None:
    """A unit is gathered from its start to its last use; when a third starts, the first is finished."""
    plan = COALESCED(program)
    gathers = {b.name: _last_use(program, b) for b in plan.buckets if b.kind == "gather" and b.phase == phase}
    started: list[str] = []
    most = 0
    for event in plan.events[phase]:
        if event.bucket in gathers and event.action == "start":
            started.append(event.bucket)
            most = max(most, sum(gathers[name] >= event.at for name in started))
    assert most == 2


def test_parameters_of_a_bucket_are_in_registration_order(program: Program) -> None:
    plan = COALESCED(program)
    assert [b.params for b in plan.buckets if b.name == "reduce layers.1 in backward"] == [
        ("layers.1.weight", "layers.1.bias")
    ]
    assert len({b.name for b in plan.buckets}) == len(plan.buckets)


@pytest.mark.parametrize(
    ("limit", "packed", "params"),
    [
        (0, (), ("weight", "bias")),
        (9, (), ("weight", "bias")),  # a buffer of a single small tensor saves nothing
        (33, ("weight", "bias"), ()),
    ],
)
def test_small_tensors_are_packed(
    program: Program, limit: float, packed: tuple[str, ...], params: tuple[str, ...]
) -> None:
    """Shards of 32 and 8 bytes."""
    plan = PlanByUnit(pack_gathers_below=limit, pack_reductions_below=0)(program)
    gather = plan.bucket("gather layers.0 in forward")
    assert gather.packed == tuple(f"layers.0.{name}" for name in packed)
    assert gather.params == tuple(f"layers.0.{name}" for name in params)
    assert gather.num_bytes == 4 * (4 * 4 + 4)
    assert not any(b.packed for b in plan.buckets if b.kind == "reduce")


def test_defaults_by_device() -> None:
    """NCCL packs small tensors, gloo every reduction."""
    program = through(captured(nn.ModuleList([nn.Linear(256, 256)])[0], (torch.ones(1, 256),)), "partition")
    packed = {}
    for device in ("cuda", "cpu"):
        program.device = torch.device(device)
        packed[device] = {bucket.kind: bucket.packed for bucket in PlanByUnit()(program).buckets}
    assert packed["cuda"]["reduce"] == ()
    assert packed["cpu"]["reduce"] == ("weight", "bias")
    assert packed["cuda"]["gather"] == packed["cpu"]["gather"] == ()


class _TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.index = nn.Parameter(torch.arange(4), requires_grad=False)
        self.v = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.w * self.v)[self.index]


def test_dtypes_are_sent_separately() -> None:
    plan = PACKED(through(captured(_TwoDtypes(), (torch.ones(4),)), "partition"))
    assert [(b.name, b.members) for b in plan.buckets if b.phase == "forward"] == [
        ("gather (root) in forward", ("w", "v")),
        ("gather (root) in forward 2", ("index",)),
    ]


def test_padding_counts() -> None:
    """4 rows over 3 ranks are sent as 6."""
    program = through(captured(Scales(1), (torch.ones(4),), world_size=3), "partition")
    assert [b.num_bytes for b in COALESCED(program).buckets] == [24, 24]


def test_one_rank_has_an_empty_plan() -> None:
    program = through(captured(Blocks(2), BATCH, world_size=1), "partition")
    assert COALESCED(program) == Plan((), {"forward": (), "backward": ()})


def test_inference_has_no_backward() -> None:
    program = through(captured(Blocks(2), BATCH, grad=False), "partition")
    plan = COALESCED(program)
    assert list(plan.events) == ["forward"]
    assert [b.name for b in plan.buckets] == ["gather layers.0 in forward", "gather layers.1 in forward"]


def test_the_plan_is_the_same_every_time(program: Program) -> None:
    assert PACKED(program).hash == PACKED(program).hash
    again = through(captured(Blocks(4, bias=True), BATCH), "partition")
    assert PACKED(again) == PACKED(program)
