"""The user's saved-tensor hooks act as with FSDP2: in a forward, in a checkpoint, around one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tests.distributed.nets import rows
from tests.distributed.twins import assert_same, grads_of, twins, world_mesh
from tests.ranks import Ranks


def _in_half(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16)


def _in_full(tensor: Tensor) -> Tensor:
    return tensor.float()


class _Net(nn.Module):
    """A layer within hooks, at a `place`."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)
        self.place = place

    def hooked(self, x: Tensor) -> Tensor:
        hooks = save_on_cpu() if self.place == "on the host" else saved_tensors_hooks(_in_half, _in_full)
        with hooks:
            return self.second(x.sin()).exp()

    def region(self, x: Tensor) -> Tensor:
        return self.norm(self.hooked(self.third(x).cos()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.place == "in a region":
            y = checkpoint(self.region, x, use_reentrant=False)
        elif self.place == "around a region":
            with saved_tensors_hooks(_in_half, _in_full):
                y = checkpoint(self.third, x, use_reentrant=False)
        else:
            y = self.hooked(x)
        return y.square().mean()


def _train(rank: int, world_size: int, place: str) -> float:
    torch.manual_seed(0)
    pair = twins(_Net(place), world_mesh())
    for step in range(2):
        for model in pair:
            model(rows(10 * step + rank)).backward()
        assert_same(*map(grads_of, pair), f"gradients of step {step}")
        assert_same(*(dict(model.named_buffers()) for model in pair), f"buffers of step {step}")
    grad: Any = grads_of(pair[0])["first.weight"]
    return float(grad.full_tensor().sum())


@pytest.mark.slow
def test_hooks_change_gradients_as_in_fsdp2(ranks: Ranks) -> None:
    assert ranks(2).run(_train, "in forward")[0] != ranks(2).run(_train, "on the host")[0]


@pytest.mark.parametrize("place", ["in a region", "around a region"])
@pytest.mark.quick_cases("in a region")
def test_hooks_around_a_checkpoint_match_fsdp2(ranks: Ranks, place: str) -> None:
    """Python runs the region again in backward, with the module state of forward."""
    ranks(2).run(_train, place)
