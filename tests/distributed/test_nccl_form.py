"""Programs in their CUDA form, on ranks that are threads, match FSDP2 on the same groups bit for bit.

Gloo programs use different collectives (`runtime/collective_launches.py`). Here collectives are launched as planned,
and a coalesced bucket has one launch and one wait. Programs are exported once, and each thread loads them.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from tests.distributed.twins import BF16, FP32, assert_same, example_llama, fsdp2, grads_of, params_of
from tests.threads import on_threads

POLICIES = {"fp32": FP32, "bf16": BF16, "bf16 reductions": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}

# Settings before a microbatch.
Setting = Callable[[Any, bool], None]


def _no_sync(model: Any, last: bool) -> None:
    model.set_requires_gradient_sync(last)


def _no_all_reduce(model: Any, last: bool) -> None:
    model.set_requires_all_reduce(last)


def _train(
    shape: tuple[int, ...],
    policy: MixedPrecisionPolicy,
    directory: Path,
    settings: list[Setting],
    steps: int = 2,
) -> Counter[str]:
    """Train on threads and compare with FSDP2, with microbatches if there are settings; return launches by name."""
    torch.manual_seed(0)
    model, batch = example_llama()
    world_size = torch.Size(shape).numel()
    file = graphshard.export(
        model,
        shape,
        directory / "model.gshard",
        example_kwargs=batch(),
        accumulate=bool(settings),
        device="cpu",
        backend="eager",
        mp_policy=policy,
        hardware="h100",
    )
    microbatches = 3 if settings else 1
    batches = [[[batch() for _ in range(world_size)] for _ in range(microbatches)] for _ in range(steps)]
    copies: list[list[nn.Module]] = [[copy.deepcopy(model) for _ in range(2)] for _ in range(world_size)]
    launched: Counter[str] = Counter()

    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        ours, theirs = copies[rank]
        pair = graphshard.load(file, ours, mesh), fsdp2(theirs, mesh, mp_policy=policy)
        optims = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in pair]
        for step in range(steps):
            for number in range(microbatches):
                losses: list[dict[str, Tensor]] = []
                for each in pair:
                    for setting in settings:
                        setting(each, number == microbatches - 1)
                    loss = each(**batches[step][number][rank])
                    loss.backward()
                    losses.append({"loss": loss.detach()})
                assert_same(*losses, f"microbatch {number} of step {step}")
                assert_same(*map(grads_of, pair), f"gradients after microbatch {number} of step {step}")
            for optim in optims:
                optim.step()
                optim.zero_grad()
        assert_same(*map(params_of, pair), "after training")
        if rank == 0:
            (program,) = graphshard.programs(pair[0])
            for phase in program.phases.values():
                targets = (node.target for node in phase.module.graph.nodes if node.op == "call_function")
                launched.update(getattr(target, "_opname", target.__name__) for target in targets)

    on_threads(world_size, run)
    return launched


def _assert_functional(launched: Counter[str]) -> None:
    assert launched["wait_tensor"] > 0
    assert sum(count for name, count in launched.items() if name.startswith("all_gather_into_tensor")) > 0
    assert sum(count for name, count in launched.items() if name.startswith("reduce_scatter_tensor")) > 0
    assert not any("all_to_all" in name or name == "all_gather" for name in launched)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.slow
def test_plain(policy: MixedPrecisionPolicy, tmp_path: Path) -> None:
    _assert_functional(_train((2,), policy, tmp_path, []))


# BF16 alone is a slow case: the other two policies cover it.
@pytest.mark.parametrize(
    "policy", [FP32, pytest.param(BF16, marks=pytest.mark.slow), POLICIES["bf16 reductions"]], ids=POLICIES
)
@pytest.mark.quick_cases("bf16 reductions")
def test_hsdp(policy: MixedPrecisionPolicy, tmp_path: Path) -> None:
    launched = _train((2, 2), policy, tmp_path, [])
    _assert_functional(launched)
    assert sum(count for name, count in launched.items() if name.startswith("all_reduce")) > 0


@pytest.mark.slow
def test_microbatches(tmp_path: Path) -> None:
    _assert_functional(_train((2,), BF16, tmp_path, [_no_sync]))


@pytest.mark.slow
def test_microbatches_over_replicas(tmp_path: Path) -> None:
    _assert_functional(_train((2, 2), FP32, tmp_path, [_no_all_reduce]))
