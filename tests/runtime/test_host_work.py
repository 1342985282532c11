"""What the host does in a step of a Llama is counted, not timed: `docs/evidence/performance.md` has the targets."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard import Pipeline
from graphshard.ir.program import Program
from graphshard.passes import MakePlan
from graphshard.runtime.step_overlap import Updates
from graphshard.schedule.fsdp2_order import PlanByUnit
from tests.distributed.twins import BF16, load_example
from tests.ranks import FakeWorld

BLOCKS = 3


def _step(shape: tuple[int, ...], planner: PlanByUnit) -> tuple[Program, int]:
    """Train two steps of Llama 8B's blocks, scaled down; return the program, and the updates' calls in the last step.

    Norms are packed, as at the real size, and matrices are not.
    """
    llama = load_example("llama")
    config = llama.LlamaConfig(layers=BLOCKS, dim=64, heads=4, kv_heads=2, hidden=128, seq=8, vocab=128)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    passes = Pipeline().replace("plan", MakePlan(planner))
    options: Any = {"units": [llama.Block], "backend": "eager", "hardware": "h100", "mp_policy": BF16}
    model = graphshard.compile(llama.Llama(config), mesh, passes=passes, **options)
    step = graphshard.compile_step(model, torch.optim.AdamW(model.parameters()))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    step(tokens, tokens)
    with mock.patch.object(Updates, "_update", autospec=True, side_effect=Updates._update) as update:
        step(tokens, tokens)
    (program,) = graphshard.programs(model)
    return program, update.call_count


def _lines_of(program: Program, phase: str) -> Counter[str]:
    """Count the lines of a phase by class."""
    return Counter(type(line).__name__ for line in program.phases[phase].module.lines)  # type: ignore[union-attr]


@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=["sharded", "HSDP"])
def test_lines_and_calls_of_a_step(fake_world: FakeWorld, shape: tuple[int, ...]) -> None:
    """One wait for each bucket, and one update for neighboring buckets, where the host would be slower than the device.

    With Llama 8B's 32 blocks that is 98 waits in a step; one for each parameter of a bucket would be 774.
    """
    fake_world(8)
    program, updates = _step(shape, PlanByUnit(pack_gathers_below=64, pack_reductions_below=64))
    assert program.plan is not None
    kinds = Counter(bucket.kind for bucket in program.plan.buckets)
    reductions = len(shape) * (BLOCKS + 1)
    assert kinds["reduce"] + kinds["all_reduce"] == reductions
    assert kinds["gather"] == 2 * (BLOCKS + 1) - 1
    found = _lines_of(program, "forward") + _lines_of(program, "backward")
    assert found["WaitLine"] == found["Start"] == kinds.total()
    # Of blocks before the last launch, of the last block, and of the root. All-reduces are waited for after it.
    assert updates == (3 if len(shape) == 1 else 2)
