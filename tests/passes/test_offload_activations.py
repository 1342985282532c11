"""offload-activations: saved tensors go to the host at the end of a unit, and return one unit ahead."""

from __future__ import annotations

import re

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from graphshard.codec.program_format import program_from_json, program_to_json
from graphshard.errors import PassError
from graphshard.ir.collective_regions import saved_values
from graphshard.ir.graph import calls_of, fake
from graphshard.ir.operators import ARRIVED, DOWNLOAD, RELOAD
from graphshard.ir.printer import print_phase, print_program
from graphshard.ir.program import Phase, Program
from graphshard.passes import OffloadActivations
from graphshard.pipeline.pipeline import run_pass
from tests.helpers import Blocks, captured, copied, result, step, target_name, through

BATCH = (torch.ones(3, 4),)


def _partitioned(model: nn.Module | None = None, world_size: int = 2) -> Program:
    return through(captured(model or Blocks(3), BATCH, world_size=world_size), "partition")


def _offloaded(program: Program, share: float = 1.0) -> Program:
    run_pass(OffloadActivations(share, least=1), program)
    return program


def _order(phase: Phase) -> list[str]:
    """Return the copies and matmuls of a phase, in order."""
    names = {DOWNLOAD: "download", RELOAD: "reload", ARRIVED: "arrived"}
    found = []
    for node in phase.module.graph.nodes:
        if node.target in names:
            found.append(names[node.target])
        elif target_name(node) == "mm" and (not found or found[-1] != "mm"):
            found.append("mm")
    return found


def test_before_and_after() -> None:
    program = _offloaded(_partitioned(Blocks(2)))
    assert_expected_inline(
        print_phase(program.phases["forward"]),
        """\
  %0: f32[2, 4] = param:layers.0.weight
  %1: f32[2, 4] = param:layers.1.weight
  %2: f32[3, 4] = input:0
* %4: f32[4, 4] = all_gather_into_tensor(%0, 2, shard)  # layers.0
  %5: f32[4, 4] = wait_tensor(%4)  # layers.0
  %6: f32[4, 4] = t(%5)  # layers.0
  %7: f32[3, 4] = mm(%2, %6)  # layers.0
  %8: f32[3, 4] = relu(%7)
* %10: f32[4, 4] = all_gather_into_tensor(%1, 2, shard)  # layers.1
  %11: f32[4, 4] = wait_tensor(%10)  # layers.1
  %12: f32[4, 4] = t(%11)  # layers.1
  %36: f32[3, 4] = download(%8)
  %13: f32[3, 4] = mm(%8, %12)  # layers.1
  %14: f32[3, 4] = relu(%13)
  %15: f32[3, 4] = detach(%14)
  %16: f32[] = sum(%14)
  %18: f32[3, 4] = detach(%15)
  %37: f32[3, 4] = download(%18)
  return %16 as output:0
  return %1 as param:layers.1.weight
  return %2 as input:0
  return %36 as saved
  return %37 as saved
""",
    )
    lines = print_phase(program.phases["backward"]).splitlines(keepends=True)
    assert_expected_inline(
        "".join(lines[:13]),  # up to the last copy and its user
        """\
  %1: f32[2, 4] = param:layers.1.weight
  %2: f32[3, 4] = input:0
  %8: f32[3, 4] = saved
  %18: f32[3, 4] = saved
  %3: f32[] = tangent:0
  %38: f32[3, 4] = reload(%18, cpu)
  %17: f32[3, 4] = expand(%3, [3, 4])
  %39: f32[3, 4] = arrived(%38)
  %40: f32[3, 4] = reload(%8, cpu)
  %19: f32[3, 4] = threshold_backward(%17, %39, 0)
  %20: f32[4, 3] = t(%19)  # layers.1
  %41: f32[3, 4] = arrived(%40)
  %21: f32[4, 4] = mm(%20, %41)  # layers.1
""",
    )
    assert_expected_inline(
        "".join(lines[13:]),
        """\
  %22: f32[4, 4] = t(%21)  # layers.1
* %10: f32[4, 4] = all_gather_into_tensor(%1, 2, shard)  # layers.1
  %11: f32[4, 4] = wait_tensor(%10)  # layers.1
  %12: f32[4, 4] = t(%11)  # layers.1
  %23: f32[4, 4] = t(%12)  # layers.1
  %24: f32[3, 4] = mm(%19, %23)  # layers.1
  %25: f32[4, 4] = t(%22)  # layers.1
* %26: f32[2, 4] = reduce_scatter_tensor(%25, avg, 2, shard)
  %27: f32[2, 4] = wait_tensor(%26)
  %9: f32[3, 4] = detach(%41)
  %28: f32[3, 4] = detach(%9)
  %29: f32[3, 4] = threshold_backward(%24, %28, 0)
  %30: f32[4, 3] = t(%29)  # layers.0
  %31: f32[4, 4] = mm(%30, %2)  # layers.0
  %32: f32[4, 4] = t(%31)  # layers.0
  %33: f32[4, 4] = t(%32)  # layers.0
* %34: f32[2, 4] = reduce_scatter_tensor(%33, avg, 2, shard)
  %35: f32[2, 4] = wait_tensor(%34)
  return %35 as grad:layers.0.weight
  return %27 as grad:layers.1.weight
""",
    )


def test_copies_run_a_unit_ahead() -> None:
    """A unit's values are copied at its end, and return while backward computes the following unit."""
    program = through(_offloaded(_partitioned(Blocks(4))), "reorder")
    away = ["mm", "download"]
    assert _order(program.phases["forward"]) == 4 * away
    back, ahead = ["reload", "arrived"], ["reload", "mm", "arrived"]
    assert _order(program.phases["backward"]) == [*back, *back, *ahead, *ahead, "mm"]
    for phase in program.phases.values():
        phase.module.graph.lint()


def test_copies_follow_the_order_of_computation() -> None:
    whole = _offloaded(_partitioned(Blocks(4)))
    names = [slot.name for slot in whole.phases["forward"].outputs if slot.name in whole.on_host]
    assert len(names) > 2
    half = _offloaded(_partitioned(Blocks(4)), 0.5)
    assert half.on_host == set(names[: len(names) // 2])
    assert not _offloaded(_partitioned(), 0.0).on_host


class _Returned(nn.Module):
    """Saves values that are also outputs, inputs, or parts of other saved values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layers[0](x).relu()
        z = self.layers[1](y)
        left, right = z.chunk(2, dim=1)
        return (left * right.sin()).sum(), y


def test_values_with_other_references_stay() -> None:
    program = _partitioned(_Returned())
    forward = program.phases["forward"]
    shown = result(forward, "output:1")
    assert shown in saved_values(forward)
    _offloaded(program)
    assert result(forward, "output:1") is shown
    sent = [node.all_input_nodes[0] for node in calls_of(forward, DOWNLOAD)]
    assert shown not in sent
    assert sent
    assert all(fake(node).device.type == "cpu" for node in calls_of(forward, DOWNLOAD))


def test_small_values_stay() -> None:
    program = _partitioned()
    before = print_program(program)
    run_pass(OffloadActivations(), program)
    assert (program.history[-1].rewrites, print_program(program)) == (0, before)


def test_idempotent() -> None:
    program = _offloaded(_partitioned())
    before = print_program(program)
    assert program.history[-1].rewrites > 0
    _offloaded(program)
    assert (program.history[-1].rewrites, print_program(program)) == (0, before)


def test_another_backward_reloads_the_same_values() -> None:
    """It is built from the partitioner's backward, which has no copies."""
    program = _partitioned()
    backward = program.phases["backward"].clone()
    _offloaded(program)
    other = copied(program)
    other.phases = {"backward": backward}
    _offloaded(other, 0.1)
    ours, theirs = (print_phase(phase) for phase in (backward, program.phases["backward"]))
    assert "reload" in ours
    assert re.sub("%[0-9]+", "", ours) == re.sub("%[0-9]+", "", theirs)


def test_rejects_wrong_positions() -> None:
    with pytest.raises(PassError, match="insert this pass after 'partition' and before 'plan'"):
        run_pass(OffloadActivations(), captured(Blocks(1), BATCH))
    with pytest.raises(PassError, match="insert this pass after 'partition' and before 'plan'"):
        run_pass(OffloadActivations(), through(_partitioned(), "plan"))
    with pytest.raises(PassError, match="share must be a number from 0 to 1, got 2"):
        run_pass(OffloadActivations(2), _partitioned())


@pytest.mark.parametrize("share", [0.4, 1.0])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.quick_cases("1-0.4", "1-1.0", "2-0.4")
def test_numerics(world_size: int, share: float) -> None:
    model, batches = Blocks(3, bias=True), [(torch.randn(3, 4),) for _ in range(world_size)]
    program = _partitioned(model, world_size)
    plain = through(copied(program), "reorder")
    through(_offloaded(program, share), "reorder")
    assert program.on_host
    for ours, theirs in zip(step(program, model, batches), step(plain, model, batches), strict=True):
        assert ours.keys() == theirs.keys()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_stages_are_stored() -> None:
    program = _offloaded(_partitioned())
    stored = program_from_json(program_to_json(program))
    assert print_program(stored) == print_program(program)
    assert stored.on_host == program.on_host
