"""Writes into non-contiguous tensors keep strides, although torch functions return others."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard

MASK = torch.arange(15).reshape(3, 5, 1) % 2 == 0
FIRST = torch.tensor([0])
WRITES: dict[str, Callable[[Tensor], object]] = {
    "baddbmm_": lambda y: y.baddbmm_(torch.ones(3, 5, 4), torch.ones(3, 4, 2)),
    "copy_": lambda y: y.select(-1, 0).copy_(y.detach().sum(-1)),
    "cumprod_": lambda y: y.cumprod_(2),
    "cumsum_": lambda y: y.cumsum_(1),
    "fill_": lambda y: y[:, 1].fill_(0.0),
    "index_add_": lambda y: y.index_add_(1, FIRST, torch.ones(3, 1, 2)),
    "index_copy_": lambda y: y.index_copy_(1, FIRST, torch.ones(3, 1, 2)),
    "masked_fill_": lambda y: y.masked_fill_(MASK, 0.25),
    "masked_fill_ of a tensor": lambda y: y.masked_fill_(MASK, torch.tensor(0.25)),
    "masked_fill_ of a view": lambda y: y.transpose(1, 2).masked_fill_(MASK.transpose(1, 2), 0.25),
    "masked_scatter_": lambda y: y.masked_scatter_(MASK, torch.ones(30)),
    "relu_": lambda y: y.relu_(),
    "renorm_": lambda y: y.renorm_(2, 0, 1.0),
    "scatter_": lambda y: y.scatter_(1, torch.zeros(3, 1, 2, dtype=torch.long), 0.3),
    "tril_": lambda y: y.tril_(),
}


class _Writes(nn.Module):
    """Returns one tensor for each write."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> list[Tensor]:
        results = []
        for write in WRITES.values():
            y = self.linear(x).transpose(1, 2).contiguous().transpose(1, 2).clone()
            write(y)
            results.append(y)
        return results


def test_strides_and_gradients_match_eager_mode(mesh: DeviceMesh) -> None:
    module = _Writes()
    plain, x = copy.deepcopy(module), torch.randn(3, 5, 2)
    model = graphshard.compile(module, mesh, backend="eager")
    for expected, found, name in zip(plain(x), model(x), WRITES, strict=True):
        assert found.stride() == expected.stride(), name
        assert torch.equal(found, expected), name
    torch.stack([y.square().sum() for y in plain(x)]).sum().backward()
    torch.stack([y.square().sum() for y in model(x)]).sum().backward()
    for expected_param, param in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(param.grad.full_tensor(), expected_param.grad)
