"""`compile_step` with all features at once: checkpoints, replicas, exported programs, microbatches, a scaler."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import graphshard
from tests.distributed.test_compile_step import ADAMW, _assert_same_state, _loss
from tests.distributed.twins import BF16, FP32, fsdp2, local
from tests.ranks import Ranks

ACCUMULATE, CLIP_NORM, NAMES = 2, 1e-4, ("replicate", "shard")


class _Net(nn.Module):
    """Checkpointed blocks with dropout, between a stem and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 7)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Dropout(0.3)) for _ in range(2))
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return self.head(x).square()


def _input(rank: int, number: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * number + rank))


def _train(rank: int, world_size: int, path: Path | None, policy: MixedPrecisionPolicy, scaled: bool) -> list[bool]:
    torch.manual_seed(0)
    model = _Net()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    twin = fsdp2(copy.deepcopy(model), mesh, mp_policy=policy)
    if path is None:
        graphshard.compile(model, mesh, mp_policy=policy, backend="eager")
    else:
        model = graphshard.load(path, model, mesh)
    pair = model, twin
    optims = [ADAMW(one.parameters(), lr=0.02) for one in pair]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in pair]
    step = graphshard.compile_step(
        *(model, optims[0], _loss),
        clip_norm=CLIP_NORM if scaled else None,
        accumulate=ACCUMULATE,
        scaler=scalers[0] if scaled else None,
        gather_ahead=True,
    )
    updated = []
    for number in range(4):
        calls = [_input(rank, ACCUMULATE * number + index) for index in range(ACCUMULATE)]
        if scaled and number == 2 and rank == 1:
            calls[1][0, 0] = float("inf")
        torch.manual_seed(number)
        losses = step(*((call,) for call in calls))
        updated.append(step.updated_in_backward)
        torch.manual_seed(number)
        expected = []
        for index, call in enumerate(calls):
            twin.set_requires_gradient_sync(index == ACCUMULATE - 1)
            expected.append(_loss(twin, call))
            (scalers[1].scale(expected[-1]) if scaled else expected[-1]).backward()
        if scaled:
            scalers[1].unscale_(optims[1])
            norm = nn.utils.clip_grad_norm_(twin.parameters(), CLIP_NORM).full_tensor()
            assert torch.equal(local(step.grad_norm), norm) or norm.isnan()
            scalers[1].step(optims[1])
            scalers[1].update()
        else:
            optims[1].step()
        optims[1].zero_grad()
        assert torch.equal(losses, torch.stack([loss.detach() for loss in expected])) or losses.isnan().any()
        _assert_same_state(pair, optims, f"step {number}")
        assert scalers[0].get_scale() == scalers[1].get_scale()
    return updated


@pytest.mark.parametrize(("policy", "scaled"), [(FP32, True), (BF16, False)], ids=["scaled", "bf16"])
@pytest.mark.parametrize("loaded", [False, True], ids=["compiled", "loaded"])
@pytest.mark.quick_cases("compiled-bf16")
def test_all_at_once(ranks: Ranks, tmp_path: Path, loaded: bool, scaled: bool, policy: MixedPrecisionPolicy) -> None:
    """Bitwise equal to FSDP2's; with a scaler and clipping updates follow backward, otherwise they run inside."""
    path = None
    if loaded:
        shape = dict(zip(NAMES, (2, 2)))
        path = graphshard.export(
            *(_Net(), shape, tmp_path / "net.gshard"),
            example_inputs=(_input(0, 0),),
            mp_policy=policy,
            backend="eager",
            accumulate=True,
        )
    assert ranks(4).run(_train, path, policy, scaled) == [[not scaled] * 4] * 4
