"""offload: shards are copied to the device one gather ahead, gradients back to the host."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from graphshard.codec.stage import program_from_json, program_to_json
from graphshard.ir.errors import PassError
from graphshard.ir.graph import calls_of, is_collective
from graphshard.ir.operators import ARRIVED, DOWNLOAD, UPLOAD
from graphshard.ir.printer import print_phase, print_program
from graphshard.ir.program import Program
from graphshard.options.passes import with_offload
from graphshard.passes import Offload
from graphshard.pipeline.pipeline import Pipeline, run_pass
from tests.helpers import Blocks, Scale, captured, copied, step, through


def _partitioned(depth: int = 3, world_size: int = 2) -> Program:
    return through(captured(Blocks(depth), (torch.ones(3, 4),), world_size=world_size), "partition")


def test_before_and_after() -> None:
    program = through(captured(Scale(4), (torch.ones(4),)), "partition")
    run_pass(Offload(always=True), program)
    assert program.history[-1].rewrites == 2
    assert program.offloaded
    assert_expected_inline(
        print_phase(program.phases["forward"]),
        """\
  %0: f32[2] = param:w
  %1: f32[4] = input:0
  %9: f32[2] = upload(%0, cpu)
  %10: f32[2] = arrived(%9)
* %3: f32[4] = all_gather_into_tensor(%10, 2, shard)
  %4: f32[4] = wait_tensor(%3)
  %5: f32[4] = mul.Tensor(%1, %4)
  return %5 as output:0
  return %1 as input:0
""",
    )
    assert_expected_inline(
        print_phase(program.phases["backward"]),
        """\
  %1: f32[4] = input:0
  %2: f32[4] = tangent:0
  %6: f32[4] = mul.Tensor(%2, %1)
* %7: f32[2] = reduce_scatter_tensor(%6, avg, 2, shard)
  %8: f32[2] = wait_tensor(%7)
  %11: f32[2] = download(%8)
  return %11 as grad:w
""",
    )


def test_nothing_to_do_on_a_cpu_mesh() -> None:
    program = _partitioned()
    before = print_program(program)
    run_pass(Offload(), program)
    assert (program.history[-1].rewrites, print_program(program)) == (0, before)
    assert not program.offloaded


def test_idempotent() -> None:
    program = _partitioned()
    run_pass(Offload(always=True), program)
    before = print_program(program)
    run_pass(Offload(always=True), program)
    assert (program.history[-1].rewrites, print_program(program)) == (0, before)


def test_comes_after_partition() -> None:
    with pytest.raises(PassError, match="offload: the program is not partitioned yet"):
        run_pass(Offload(), captured(Blocks(1), (torch.ones(3, 4),)))
    names = [p.name for p in with_offload(Pipeline())]
    assert names.index("partition") < names.index("offload") < names.index("plan")
    assert with_offload(with_offload(Pipeline())) == with_offload(Pipeline())


def test_uploads_run_one_gather_ahead() -> None:
    """They start right behind the launch of the gather before theirs, and have arrived when their own starts."""
    program = _partitioned()
    run_pass(Offload(always=True), program)
    through(program, "reorder")
    for phase in program.phases.values():
        calls = [n for n in phase.module.graph.nodes if n.op == "call_function"]
        gathers = [i for i, n in enumerate(calls) if is_collective(n) and "gather" in n.meta["bucket"]]
        uploads = [i for i, n in enumerate(calls) if n.target is UPLOAD]
        arrivals = [i for i, n in enumerate(calls) if n.target is ARRIVED]
        assert len(uploads) == len(arrivals) == len(gathers) > 1
        assert uploads[0] < arrivals[0] < gathers[0]
        for ahead, gather, upload, arrival in zip(gathers, gathers[1:], uploads[1:], arrivals[1:], strict=False):
            assert upload == ahead + 1
            assert upload < arrival < gather
    assert len(calls_of(program.phases["backward"], DOWNLOAD)) == 3


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_numerics(world_size: int) -> None:
    model, batches = Blocks(3), [(torch.randn(3, 4),) for _ in range(world_size)]
    program = through(captured(model, (torch.ones(3, 4),), world_size=world_size), "partition")
    plain = through(copied(program), "reorder")
    run_pass(Offload(always=True), program)
    through(program, "reorder")
    results = step(program, model, batches)
    for ours, theirs in zip(results, step(plain, model, batches), strict=True):
        assert ours.keys() == theirs.keys()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_stages_are_stored() -> None:
    program = _partitioned()
    run_pass(Offload(always=True), program)
    stored = program_from_json(program_to_json(program))
    assert print_program(stored) == print_program(program)
    assert stored.offloaded
