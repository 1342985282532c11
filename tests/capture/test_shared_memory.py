"""Buffers and attributes that are views of each other, and buffers that backward gives away."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard.ir.errors import CaptureError, InputError


class _Cached(nn.Module):
    """A cache of keys and values, in one buffer with views of its halves."""

    def __init__(self, writes: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("kv", torch.zeros(2, 4))
        self.k, self.v = self.kv.unbind(0)
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            getattr(self, self.writes).add_(1)
        y: Tensor = self.linear(x) + self.kv.sum() + self.k.sum()
        return y


@pytest.mark.parametrize(("writes", "other"), [("k", "kv"), ("kv", "k")])
def test_a_view_of_what_forward_writes(mesh: DeviceMesh, writes: str, other: str) -> None:
    """It was read as it had been before the call, silently."""
    ours = graphshard.compile(_Cached(writes), mesh, backend="eager")
    what = (
        rf"_Cached\S*\.{writes} and \S+\.{other} share memory, and forward writes to {writes}: a program reads {other}"
    )
    with pytest.raises(CaptureError, match=what):
        ours(torch.ones(2, 4))
    assert not ours.kv.any()


def test_an_input_that_is_a_view_of_a_buffer(mesh: DeviceMesh) -> None:
    """It was read as it had been before the call, silently; a buffer itself is one tensor with the input."""
    plain = nn.BatchNorm1d(4)
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    assert ours.running_mean is not None
    what = (
        r"input 0 of the call and the buffer running_mean of \S*BatchNorm1d share memory, and forward writes to buffer"
    )
    with pytest.raises(InputError, match=what):
        ours(ours.running_mean.expand(3, 4))
    for model in (plain, ours):
        model.eval()
    assert plain.running_mean is not None
    assert torch.equal(ours(ours.running_mean.expand(3, 4)), plain(plain.running_mean.expand(3, 4)))


def test_views_that_forward_only_reads(mesh: DeviceMesh) -> None:
    plain = _Cached("")
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    for model in (plain, ours):
        model.kv.fill_(2)
    assert torch.equal(ours(torch.ones(2, 4)), plain(torch.ones(2, 4)))


class _Keeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.module.seen = grad.sum(0)
        return grad, None


class _Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Keeping.apply(self.linear(x), self)
        return y


def test_a_buffer_that_backward_replaces(mesh: DeviceMesh) -> None:
    """It stayed as it was, silently."""
    ours = graphshard.compile(_Kept(), mesh, backend="eager")
    with pytest.raises(CaptureError, match=r"when it is differentiated, .* changes seen, which would happen once"):
        ours(torch.ones(2, 4))
    assert torch.equal(ours.seen, torch.ones(4))
