"""Checkpoints that let random numbers be others when they run again, and autocast that casts a parameter each time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.traceback import get_current_meta
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard.capture.checkpoints import trace_checkpoints
from graphshard.ir.errors import CaptureError


class _Drawing(nn.Module):
    def __init__(self, p: float, **options: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.p, self.options = p, options

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, self.linear(x), **self.options)
        return y

    def inner(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), self.p)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_region_that_draws_anew(mesh: DeviceMesh, use_reentrant: bool) -> None:
    """Backward went on with the numbers of forward, silently."""
    options = {"use_reentrant": use_reentrant, "preserve_rng_state": False}
    ours = graphshard.compile(_Drawing(0.5, **options), mesh, backend="eager")
    with pytest.raises(CaptureError, match=r"\d+\n    return F.dropout.*\n.*Leave preserve_rng_state out"):
        ours(torch.ones(2, 4))
    with torch.no_grad():  # nothing runs again
        ours(torch.ones(2, 4))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(("p", "preserve"), [(0.0, False), (0.5, True)])
def test_a_region_that_draws_nothing_or_the_same(
    mesh: DeviceMesh, use_reentrant: bool, p: float, preserve: bool
) -> None:
    plain = _Drawing(p, use_reentrant=use_reentrant, preserve_rng_state=preserve)
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    for model in (plain, ours):
        torch.manual_seed(0)
        model(torch.ones(2, 4)).square().sum().backward()
    assert torch.equal(ours.linear.weight.grad.full_tensor(), plain.linear.weight.grad)


def _fails_in_a_region(kept: list[Any]) -> None:
    name = "_checkpoint_without_reentrant_generator"
    with trace_checkpoints(nn.Linear(4, 4)):
        begin = getattr(torch_checkpoint, f"{name}_impl", None) or getattr(torch_checkpoint, name)
        kept.append(begin(F.relu))
        next(kept[0])
        assert "custom" in get_current_meta()
        raise ZeroDivisionError


def test_an_error_ends_its_region() -> None:
    """Torch 2.11 did not end it: the next captures took their nodes for parts of it."""
    kept: list[Any] = []
    with pytest.raises(ZeroDivisionError):
        _fails_in_a_region(kept)
    assert "custom" not in get_current_meta()
    kept[0].close()


class _Attending(_Drawing):
    def inner(self, x: Tensor) -> Tensor:
        x = self.linear(x)[None, None]
        return F.scaled_dot_product_attention(x, x, x)[0, 0]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_attention_without_dropout_draws_nothing(mesh: DeviceMesh, use_reentrant: bool) -> None:
    """Its operator is one that may draw; it was an error, as the operator is called without dropout's rate."""
    plain = _Attending(0.0, use_reentrant=use_reentrant, preserve_rng_state=False)
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    for model in (plain, ours):
        model(torch.arange(8.0).view(2, 4)).square().sum().backward()
    assert torch.equal(ours.linear.weight.grad.full_tensor(), plain.linear.weight.grad)


class _Twice(nn.Module):
    def __init__(self, cache: bool | None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.cache = cache

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            y: Tensor = self.linear(self.linear(x))
            return y
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=self.cache):
            y = self.linear(self.linear(x))
        return y


def _gradient(model: nn.Module, **options: Any) -> Tensor:
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, **options):
        y = model(torch.arange(8.0).view(2, 4) / 7)
    (y * torch.arange(1, 9.0).view(2, 4)).sum().backward()
    grad = model.get_parameter("linear.weight").grad
    return _whole(grad)


def _whole(grad: Any) -> Tensor:
    whole: Tensor = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return whole.clone()


def test_casts_around_a_call(mesh: DeviceMesh) -> None:
    """Gradients of all uses were added up in the low precision, as where a cast is kept."""
    plain = _Twice(None)
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    found = []
    for cache_enabled in (True, False, True):
        found.append(_gradient(plain, cache_enabled=cache_enabled))
        assert torch.equal(_gradient(ours, cache_enabled=cache_enabled), found[-1])
    assert not torch.equal(found[0], found[1])
    assert [program.reason for program in graphshard.programs(ours)][1:] == ["autocast has another cache_enabled"]


@pytest.mark.parametrize("cache", [True, False])
def test_casts_in_forward(mesh: DeviceMesh, cache: bool) -> None:
    plain = _Twice(cache)
    ours = graphshard.compile(copy.deepcopy(plain), mesh, backend="eager")
    assert torch.equal(_gradient(ours, enabled=False), _gradient(plain, enabled=False))
