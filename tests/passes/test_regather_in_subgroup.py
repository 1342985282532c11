"""regather-in-subgroup: backward gathers among neighbors, from a part that forward keeps."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from graphshard.errors import PassError
from graphshard.ir.collective_regions import collectives
from graphshard.ir.graph import calls_of, fake
from graphshard.ir.mesh import Mesh
from graphshard.ir.operators import OWN_CHUNK
from graphshard.ir.printer import print_phase, print_program
from graphshard.ir.program import Program
from graphshard.passes import RegatherInSubgroup
from graphshard.pipeline.instrumentation import Observer
from graphshard.pipeline.pipeline import run_pass
from tests.helpers import Blocks, Scales, captured, through

MESH = Mesh.of_shape(4).with_regather(2)


def partitioned(model: nn.Module, *, grad: bool = True, mesh: Mesh = MESH) -> Program:
    """Partition for four ranks, of which pairs gather again."""
    program = captured(model, (torch.ones(3, 4),), world_size=4, grad=grad, reshard_after_forward=True)
    return through(replace(program, mesh=mesh), "partition")


def test_before_and_after() -> None:
    program = partitioned(Scales(2))
    run_pass(RegatherInSubgroup(), program)
    assert program.history[-1].rewrites == 2
    assert_expected_inline(
        print_phase(program.phases["forward"]),
        """\
  %0: f32[1] = param:layers.0.w
  %1: f32[1] = param:layers.1.w
  %2: f32[3, 4] = input:0
* %4: f32[4] = all_gather_into_tensor(%0, 4, shard)  # layers.0
  %5: f32[4] = wait_tensor(%4)  # layers.0
  %21: f32[2] = own_chunk(%5, 2, shard/2)  # layers.0
  %6: f32[3, 4] = mul.Tensor(%2, %5)  # layers.0
* %7: f32[4] = all_gather_into_tensor(%1, 4, shard)  # layers.1
  %8: f32[4] = wait_tensor(%7)  # layers.1
  %22: f32[2] = own_chunk(%8, 2, shard/2)  # layers.1
  %9: f32[3, 4] = mul.Tensor(%6, %8)  # layers.1
  return %9 as output:0
  return %0 as param:layers.0.w
  return %1 as param:layers.1.w
  return %2 as input:0
  return %21 as piece:layers.0.w
  return %22 as piece:layers.1.w
""",
    )
    assert_expected_inline(
        print_phase(program.phases["backward"]),
        """\
  %2: f32[3, 4] = input:0
  %3: f32[3, 4] = tangent:0
  %23: f32[2] = piece:layers.0.w
  %24: f32[2] = piece:layers.1.w
* %4: f32[4] = all_gather_into_tensor(%23, 2, shard/2)  # layers.0
  %5: f32[4] = wait_tensor(%4)  # layers.0
  %6: f32[3, 4] = mul.Tensor(%2, %5)  # layers.0
  %10: f32[3, 4] = mul.Tensor(%3, %6)  # layers.1
* %7: f32[4] = all_gather_into_tensor(%24, 2, shard/2)  # layers.1
  %8: f32[4] = wait_tensor(%7)  # layers.1
  %11: f32[3, 4] = mul.Tensor(%3, %8)  # layers.1
  %12: f32[1, 4] = sum.dim_IntList(%10, [0], True)  # layers.1
  %13: f32[4] = view(%12, [4])  # layers.1
* %14: f32[1] = reduce_scatter_tensor(%13, avg, 4, shard)
  %15: f32[1] = wait_tensor(%14)
  %16: f32[3, 4] = mul.Tensor(%11, %2)  # layers.0
  %17: f32[1, 4] = sum.dim_IntList(%16, [0], True)  # layers.0
  %18: f32[4] = view(%17, [4])  # layers.0
* %19: f32[1] = reduce_scatter_tensor(%18, avg, 4, shard)
  %20: f32[1] = wait_tensor(%19)
  return %20 as grad:layers.0.w
  return %15 as grad:layers.1.w
""",
    )


def test_kept_parts_belong_to_the_smaller_group() -> None:
    """Each rank of a pair keeps half of the parameter; backward no longer reads shards."""
    program = partitioned(Blocks(3))
    again = {c.params[0] for c in collectives(program.phases["backward"]) if c.kind == "gather"}
    run_pass(RegatherInSubgroup(), program)
    forward, backward = program.phases["forward"], program.phases["backward"]
    assert {slot.name for slot in forward.outputs if slot.kind == "piece"} == again
    assert len(calls_of(forward, OWN_CHUNK)) == len(again) == 2
    given = {slot.name: node for node, slot in backward.slot_of().items() if slot.kind == "piece"}
    assert {name: tuple(fake(node).shape) for name, node in given.items()} == dict.fromkeys(again, (2, 4))
    assert not [slot for slot in backward.inputs if slot.kind == "param"]
    for collective in collectives(backward):
        if collective.kind == "gather":
            assert collective.node.args[1:] == (2, "shard/2")
            assert tuple(fake(collective.node).shape) == (4, 4)


def test_the_rest_of_the_pipeline_runs_on_it() -> None:
    program = partitioned(Blocks(3))
    run_pass(RegatherInSubgroup(), program)
    through(program, "reorder")
    axes = {bucket.axis for bucket in program.plan.buckets if (bucket.kind, bucket.phase) == ("gather", "backward")}
    assert axes == {"shard/2"}


def test_inference_is_left_alone() -> None:
    program = partitioned(Blocks(2), grad=False)
    before = print_program(program)
    run_pass(RegatherInSubgroup(), program)
    assert (program.history[-1].rewrites, print_program(program)) == (0, before)


def test_another_backward_uses_the_same_parts() -> None:
    """It is built from the partitioned graph after forward ran: only its gathers change."""
    program = partitioned(Blocks(2))
    alone = replace(program, phases={"backward": program.phases["backward"].clone()}, history=[])
    run_pass(RegatherInSubgroup(), alone, Observer("off"))
    run_pass(RegatherInSubgroup(), program)
    one, other = (re.sub(r"%\d+", "%", print_phase(p.phases["backward"])) for p in (alone, program))
    assert one == other


def test_preconditions() -> None:
    with pytest.raises(PassError, match="the program has no smaller group of ranks; give reshard_after_forward an int"):
        run_pass(RegatherInSubgroup(), partitioned(Blocks(1), mesh=Mesh.of_shape(4)))
    joint = replace(captured(Blocks(1), (torch.ones(3, 4),), world_size=4), mesh=MESH)
    with pytest.raises(PassError, match="regather-in-subgroup: the program is not partitioned yet"):
        run_pass(RegatherInSubgroup(), joint)
