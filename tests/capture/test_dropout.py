"""Dropout draws the random numbers of eager mode, and none where it draws none; also between layers of an nn.RNN."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard

KINDS = {"RNN": nn.RNN, "GRU": nn.GRU, "LSTM": nn.LSTM}
OPTIONS: dict[str, dict[str, Any]] = {
    "two layers": {},
    "batch first": {"batch_first": True},
    "both directions": {"bidirectional": True},
    "three layers, no bias": {"num_layers": 3, "bias": False},
    "all dropped": {"dropout": 1.0},
}


def _seen(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Results, gradients, results without dropout, and what is drawn next."""
    torch.manual_seed(1)
    results = torch.utils._pytree.tree_leaves(model(x))
    sum(result.square().sum() for result in results).backward()
    model.eval()
    results += torch.utils._pytree.tree_leaves(model(x))
    grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]  # type: ignore[union-attr]
    return [*results, *grads, torch.rand(3)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.filterwarnings("ignore:dropout option adds dropout")
def test_dropout_between_layers(mesh: DeviceMesh, kind: str, name: str) -> None:
    """torch's function in Python for these layers leaves it out, silently."""
    torch.manual_seed(0)
    plain = KINDS[kind](4, 4, **{"num_layers": 2, "dropout": 0.5, **OPTIONS[name]})
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    x = torch.randn(3, 2, 4)
    for mine, expected in zip(_seen(ours, x), _seen(plain, x), strict=True):
        if kind == "LSTM":  # eager mode runs oneDNN's kernel
            torch.testing.assert_close(mine, expected)
        else:
            assert torch.equal(mine, expected)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_any_probability(mesh: DeviceMesh, p: float) -> None:
    """With 1 eager mode draws nothing; a program did, and could not be differentiated on a CPU."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Dropout(p), nn.Linear(4, 4))
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    x = torch.randn(3, 4)
    for mine, expected in zip(_seen(ours, x), _seen(plain, x), strict=True):
        assert torch.equal(mine, expected)
