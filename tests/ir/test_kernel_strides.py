"""Fake results have the strides of real ones, so a trace selects eager mode's operators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.fake_strides import Differing, run
from graphshard.torch_compat.fake_tensors import FakeTensorMode

IMAGE, TABLE = (2, 3, 4, 5), (3, 4)
CALLS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "batch_norm": (IMAGE, lambda x: F.batch_norm(x, torch.zeros(3), torch.ones(3), training=True)),
    "batch_norm of a sequence": ((2, 3, 4), lambda x: F.batch_norm(x, torch.zeros(3), torch.ones(3), training=True)),
    "batch_norm in evaluation": ((2, 3, 4), lambda x: F.batch_norm(x, torch.zeros(3), torch.ones(3))),
    "layer_norm": (IMAGE, lambda x: F.layer_norm(x, [5])),
    "log_softmax": (TABLE, lambda x: F.log_softmax(x, -1)),
    "binary_cross_entropy": (TABLE, lambda x: F.binary_cross_entropy(x, torch.ones(TABLE), reduction="none")),
    "mse_loss": (TABLE, lambda x: F.mse_loss(x, torch.zeros(TABLE))),
    "smooth_l1_loss": (TABLE, lambda x: F.smooth_l1_loss(x, torch.zeros(TABLE))),
    "huber_loss": (TABLE, lambda x: F.huber_loss(x, torch.zeros(TABLE))),
    "logsigmoid": (TABLE, F.logsigmoid),
    "hardswish": (TABLE, F.hardswish),
    "hardtanh": (TABLE, F.hardtanh),
    "logit": (TABLE, torch.logit),
    "power of a number": (TABLE, lambda x: 2.0**x),
    "xlogy": (IMAGE, lambda x: torch.xlogy(x, x.detach()[:1])),
    "logical_and": (IMAGE, lambda x: torch.logical_and(x[:, :1], x[:1])),
    "floor_divide": (TABLE, lambda x: torch.floor_divide(x.detach(), torch.tensor(2))),
    "reflection_pad": (IMAGE, lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect")),
    "replication_pad": ((*IMAGE, 2), lambda x: F.pad(x, (1,) * 6, mode="replicate")),
}


@pytest.mark.parametrize("name", CALLS)
def test_strides_of_kernels(name: str) -> None:
    shape, function = CALLS[name]
    x = torch.rand(shape).requires_grad_()
    differing, torchs = Differing(), Differing(FakeTensorMode)
    run(function, (x,), {}, differing)
    assert not differing.found
    run(function, (x,), {}, torchs)
    assert torchs.found, "torch's own rule is right by now: ours can go"


def test_half_precision_keeps_expanded_tensors() -> None:
    x = torch.rand(TABLE).to(torch.bfloat16)
    differing, torchs = Differing(), Differing(FakeTensorMode)
    for each in differing, torchs:
        run(lambda y: y[:1, :1].expand(TABLE) * y, (x,), {}, each)
    assert list(torchs.found) == ["aten.mul.Tensor"]
    assert not differing.found
