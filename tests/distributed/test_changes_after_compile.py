"""Changes to a compiled model: its forward, requires_grad, and when ranks communicate.

The tests are regressions; their docstrings describe the earlier failures.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphshard
from graphshard.errors import ParameterError
from tests.distributed.nets import Net, full, rows
from tests.distributed.twins import assert_same, grads_of, params_of, twins, world_mesh
from tests.ranks import Ranks


def _wrap(model: Any) -> None:
    """Wrap forward like a library that converts a model's outputs."""
    original = model.forward
    model.forward = lambda *args, **kwargs: original(*args, **kwargs).double() * 2


def _wrap_by_class(model: Any) -> None:
    original = type(model).forward
    model.forward = types.MethodType(lambda self, x: original(self, x) + 1, model)


def _wrapped(rank: int, world_size: int, wrap: Callable[[Any], None], after: int) -> None:
    torch.manual_seed(0)
    seen: list[Any] = []
    for model in twins(Net(), world_mesh()):
        losses = []
        for step in range(3):
            if step == after:
                wrap(model)
            loss = model(rows(rank + step)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        seen.append({"losses": losses, **full(grads_of(model))})
    assert_same(*seen, f"{wrap.__name__} after {after}")


@pytest.mark.parametrize("wrap", [_wrap, _wrap_by_class])
@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.slow
def test_a_forward_that_wraps_the_original(ranks: Ranks, wrap: Callable[[Any], None], after: int) -> None:
    """The wrapper itself was captured, and failed when it called the original forward."""
    ranks(2).run(_wrapped, wrap, after)


def _replicas() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))


def _microbatches(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    seen = []
    for model in twins(Net(), _replicas()):
        states: list[Any] = []
        for step in range(2):
            for micro in range(3):
                model.set_requires_all_reduce(micro == 2)
                model.set_requires_gradient_sync(micro >= 1)
                model(rows(rank + 10 * step + micro)).square().mean().backward()
                states.append(full(grads_of(model)))
            model.zero_grad()
        seen.append(states)
    for actual, expected in zip(*seen, strict=True):
        assert_same(actual, expected, "gradients")


@pytest.mark.slow
def test_resuming_sync_includes_replicas(ranks: Ranks) -> None:
    """`set_requires_gradient_sync` kept the setting of `set_requires_all_reduce`; FSDP2 resets it."""
    ranks(2).run(_microbatches)


def _frozen(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = graphshard.compile(Net(), world_mesh(), backend="eager")
    x = rows(rank)
    model.set_requires_gradient_sync(False)
    model(x).sum().backward()
    model.head.requires_grad_(False)
    for again in (True, False):  # the first microbatch's gradients are lost
        model.set_requires_gradient_sync(again)
        with pytest.raises(ParameterError, match=r"head.weight was frozen between microbatches.*reset_iter"):
            model(x)
    with torch.no_grad():
        model(x)
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    model(x).sum().backward()
    model.head.requires_grad_(True)
    model.zero_grad()
    model(x).sum().backward()
    after = full(grads_of(model))
    model.zero_grad()
    model(x).sum().backward()
    assert_same(after, full(grads_of(model)), "nothing is left of the first microbatch")


def test_a_parameter_frozen_between_microbatches(ranks: Ranks) -> None:
    """Its accumulated gradient was dropped, and reappeared when the parameter was trained again."""
    ranks(2).run(_frozen)


def _clipped(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    ours, theirs = twins(Net(), world_mesh())
    optims = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
    step = graphshard.compile_step(ours, optims[0], lambda model, x: model(x).square().mean(), clip_norm=0.5)
    for number, communicates in enumerate((False, True)):
        for model in (ours, theirs):
            model.set_requires_gradient_sync(communicates)
        step(rows(rank + number))
        theirs(rows(rank + number)).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optims[1].step()
        optims[1].zero_grad()
        assert step.grad_norm == (norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        assert_same(full(params_of(ours)), full(params_of(theirs)), f"step {number}")


def test_clipping_without_communication(ranks: Ranks) -> None:
    """There is no gradient to clip: the norm is zero, as in torch; it was an IndexError."""
    ranks(2).run(_clipped)


def _kept_under_autocast(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    seen = []
    for model in twins(Net(), world_mesh()):
        losses = []
        for step in range(3):
            if step == 1:
                model.set_reshard_after_forward(False)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(rows(rank)).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        seen.append({"losses": losses, **full(grads_of(model))})
    assert_same(*seen, "losses and gradients")


@pytest.mark.slow
def test_keeps_parameters_that_autocast_casts(ranks: Ranks) -> None:
    """The plan was reused from the previous program, although other values are alive at once, and a rule failed."""
    ranks(2).run(_kept_under_autocast)


class _Strict(Net):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 4:
            raise ValueError(f"a batch of {len(x)} is too long")
        assert x.dim() == 2, "rows are wanted"
        return super().forward(x)


def _skipping(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    seen = []
    for model in twins(_Strict(), world_mesh()):
        told: list[Any] = []
        for x in (rows(rank), torch.ones(5, 4), torch.ones(2, 2, 4), rows(rank)):
            try:
                loss = model(x).square().mean()
                loss.backward()
                told.append(loss.detach())
            except (ValueError, AssertionError) as error:
                told.append(f"{type(error).__name__}: {error}")
        seen.append({"told": told, **full(grads_of(model))})
    assert_same(*seen, "what is told")
    assert seen[0]["told"][1:3] == ["ValueError: a batch of 5 is too long", "AssertionError: rows are wanted"]


@pytest.mark.slow
def test_exceptions_of_forward_propagate(ranks: Ranks) -> None:
    """A script that skips such a batch got a CaptureError."""
    ranks(2).run(_skipping)


def _compiled_again(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = Net()
    ours, theirs = twins(model, world_mesh())
    around = torch.compile(lambda x: ours(x * 2) + 1, backend="eager")
    expected = theirs(rows(rank) * 2) + 1
    for _ in range(2):
        assert torch.equal(around(rows(rank)), expected)
    assert torch.equal(torch.compile(ours, backend="eager")(rows(rank)), theirs(rows(rank)))
    assert torch.equal(torch.compile(lambda x: ours.stem(x), backend="eager")(rows(rank)), theirs.stem(rows(rank)))
    assert [program.reason for program in graphshard.programs(ours)] == ["first call", "first call"]


def test_torch_compile_does_not_trace_a_compiled_model(ranks: Ranks) -> None:
    """Dynamo traced into graphshard's code and failed."""
    ranks(2).run(_compiled_again)
