"""offload-parameters: shards are copied to the device one gather ahead, and gradients back to the host."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.fx import Node

from graphshard.codec.program_format import program_from_json, program_to_json
from graphshard.errors import PassError
from graphshard.ir.graph import base_of, calls_of, fake, is_collective
from graphshard.ir.operators import ARRIVED, DOWNLOAD, UPLOAD
from graphshard.ir.printer import print_phase, print_program
from graphshard.ir.program import Program
from graphshard.options.resolve import with_offload
from graphshard.passes import OffloadParameters, ReshardAfterForward
from graphshard.pipeline.pipeline import Pipeline, run_pass
from tests.helpers import Blocks, Scale, captured, copied, step, target_name, through

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def _partitioned(depth: int = 3, world_size: int = 2) -> Program:
    return through(captured(Blocks(depth), (torch.ones(3, 4),), world_size=world_size), "partition")


def test_before_and_after() -> None:
    program = through(captured(Scale(4), (torch.ones(4),)), "partition")
    run_pass(OffloadParameters(always=True), program)
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


def test_shards_are_cast_before_they_are_copied() -> None:
    program = through(captured(Scale(4), (torch.ones(4),), mp_policy=BF16), "partition")
    run_pass(OffloadParameters(always=True, cast_on_host=True), program)
    assert_expected_inline(
        print_phase(program.phases["forward"]),
        """\
  %0: f32[2] = param:w
  %1: f32[4] = input:0
  %3: bf16[4] = _to_copy(%1, dtype=bf16)
  %13: bf16[2] = upload(%0, cpu, bf16)
  %14: bf16[2] = arrived(%13)
* %4: bf16[4] = all_gather_into_tensor(%14, 2, shard)
  %5: bf16[4] = wait_tensor(%4)
  %6: bf16[4] = mul.Tensor(%3, %5)
  return %6 as output:0
  return %3 as saved
""",
    )


def test_casts_only_what_becomes_smaller() -> None:
    """A shard in the compute dtype, one with another use, and one that is widened."""
    plain = _partitioned()
    run_pass(OffloadParameters(always=True, cast_on_host=True), plain)
    assert all(len(node.args) == 2 for phase in plain.phases.values() for node in calls_of(phase, UPLOAD))
    wide = MixedPrecisionPolicy(param_dtype=torch.float64)
    program = through(captured(Scale(4), (torch.ones(4),), mp_policy=wide), "partition")
    run_pass(OffloadParameters(always=True, cast_on_host=True), program)
    (upload,) = calls_of(program.phases["forward"], UPLOAD)
    assert (len(upload.args), fake(upload).dtype) == (2, torch.float32)


def test_nothing_to_do_on_a_cpu_mesh() -> None:
    program = _partitioned()
    before = print_program(program)
    run_pass(OffloadParameters(), program)
    assert (program.history[-1].rewrites, print_program(program)) == (0, before)
    assert not program.offloaded


def test_idempotent() -> None:
    program = _partitioned()
    run_pass(OffloadParameters(always=True), program)
    before = print_program(program)
    run_pass(OffloadParameters(always=True), program)
    assert (program.history[-1].rewrites, print_program(program)) == (0, before)


def test_comes_after_partition() -> None:
    with pytest.raises(PassError, match="offload-parameters: the program is not partitioned yet"):
        run_pass(OffloadParameters(), captured(Blocks(1), (torch.ones(3, 4),)))
    names = [p.name for p in with_offload(Pipeline())]
    assert names.index("partition") < names.index("offload-parameters") < names.index("plan")
    assert with_offload(with_offload(Pipeline())) == with_offload(Pipeline())


def test_uploads_run_one_gather_ahead() -> None:
    """They start right after the launch of the previous gather, and finish before their gather starts."""
    program = _partitioned()
    run_pass(OffloadParameters(always=True), program)
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


def test_uploads_run_one_unit_ahead_without_gathers() -> None:
    """On one rank: they start when the previous unit's parameters have arrived, because it waits for them."""
    program = through(captured(Blocks(3, bias=True), (torch.ones(3, 4),), world_size=1), "partition")
    before = [node.name for node in program.phases["forward"].module.graph.nodes]
    run_pass(OffloadParameters(always=True), program)
    through(program, "reorder")
    graph = program.phases["forward"].module.graph
    graph.lint()
    slots = program.phases["forward"].slot_of()
    order = []
    for node in graph.nodes:
        if node.target is UPLOAD:
            order.append(f"upload {slots[node.args[0]].name}")
        elif node.target is ARRIVED:
            order.append(f"arrived {slots[node.args[0].args[0]].name}")
        elif target_name(node) == "addmm":
            order.append("compute")
    names = [[f"layers.{i}.weight", f"layers.{i}.bias"] for i in range(3)]
    uploads, arrivals = ([[f"{what} {name}" for name in unit] for unit in names] for what in ("upload", "arrived"))
    assert order == [
        *(*uploads[0], *arrivals[0]),
        *(*uploads[1], "compute", *arrivals[1]),
        *(*uploads[2], "compute", *arrivals[2], "compute"),
    ]
    assert [node.name for node in graph.nodes if node.name in before] == before


@pytest.mark.parametrize("policy", [None, BF16], ids=["float32", "bfloat16"])
def test_backward_uploads_again_without_gathers(policy: MixedPrecisionPolicy | None) -> None:
    """On one rank, too, no parameter of a unit stays on the device between forward and backward."""
    model, batches = Blocks(3), [(torch.randn(3, 4),)]
    plain = through(captured(model, batches[0], world_size=1, mp_policy=policy), "mixed-precision")
    program = copied(plain)
    passes = {p.name: p for p in with_offload(Pipeline())}
    program.device = torch.device("cuda")  # the pass skips programs for CPUs
    run_pass(passes["reshard-after-forward"], program)
    program.device = torch.device("cpu")
    through(program, "partition")
    run_pass(OffloadParameters(always=True), program)
    through(program, "reorder")
    kept = [value for value in program.phases["forward"].results if isinstance(value, Node)]
    assert not any(node.target is ARRIVED for node in map(base_of, kept))
    assert all(fake(node).shape != (4, 4) for node in kept if node.op != "placeholder")
    assert len(calls_of(program.phases["backward"], UPLOAD)) == 2  # the first layer's weight has no further use
    ((ours,), (theirs,)) = (step(p, model, batches) for p in (program, through(plain, "reorder")))
    results = [slot for slot in theirs if slot.startswith(("output:", "grad:"))]
    assert len(results) == 4
    for slot in results:
        assert torch.equal(ours[slot], theirs[slot]), slot


def test_keeps_the_users_choice_of_resharding() -> None:
    """A pass inserted by the user stays."""
    chosen = Pipeline().replace("reshard-after-forward", ReshardAfterForward(offloaded=True))
    assert with_offload(chosen).disable("offload-parameters") == chosen
    without = Pipeline().disable("reshard-after-forward")
    assert with_offload(without).disable("offload-parameters") == without


@pytest.mark.parametrize("cast_on_host", [False, True])
@pytest.mark.parametrize("policy", [None, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_numerics(world_size: int, policy: MixedPrecisionPolicy | None, cast_on_host: bool) -> None:
    model, batches = Blocks(3), [(torch.randn(3, 4),) for _ in range(world_size)]
    program = through(captured(model, (torch.ones(3, 4),), world_size=world_size, mp_policy=policy), "partition")
    plain = through(copied(program), "reorder")
    run_pass(OffloadParameters(always=True, cast_on_host=cast_on_host), program)
    through(program, "reorder")
    results = step(program, model, batches)
    for ours, theirs in zip(results, step(plain, model, batches), strict=True):
        assert ours.keys() == theirs.keys()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_stages_are_stored() -> None:
    program = _partitioned()
    run_pass(OffloadParameters(always=True), program)
    stored = program_from_json(program_to_json(program))
    assert print_program(stored) == print_program(program)
    assert stored.offloaded
