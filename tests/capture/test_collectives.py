"""Collectives in a forward that are not functional ones are an error that names the line and what to call instead."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.distributed import broadcast
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.ir.errors import CaptureError
from tests.ranks import FakeWorld


class _Net(nn.Module):
    def __init__(self, communicate: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.lin, self.communicate = nn.Linear(4, 4), communicate

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x).mean(0)
        mean = y.detach().clone()
        self.communicate(mean)
        return (y - mean).square().sum()


class _Meaned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


CALLS: dict[str, Callable[[Tensor], object]] = {
    "all_reduce": lambda x: dist.all_reduce(x),
    "all_reduce ": lambda x: dist.all_reduce(x, async_op=True).wait(),
    "all_reduce  ": lambda x: _Meaned.apply(x),
    "broadcast": lambda x: broadcast(x, 0),
    "all_gather": lambda x: dist.all_gather([torch.empty(4), torch.empty(4)], x),
    "all_gather_into_tensor": lambda x: dist.all_gather_into_tensor(torch.empty(8), x),
    "reduce_scatter_tensor": lambda x: dist.reduce_scatter_tensor(torch.empty(2), x),
    "all_to_all_single": lambda x: dist.all_to_all_single(torch.empty(4), x),
    "send": lambda x: dist.send(x, 1),
    "barrier": lambda x: dist.barrier(),
    "all_gather_object": lambda x: dist.all_gather_object([None, None], "here"),
    "nn.functional.all_gather": lambda x: differentiable.all_gather(x),
    "nn.functional.all_reduce": lambda x: torch.distributed.nn.all_reduce(x),
}


@pytest.mark.parametrize("name", CALLS)
def test_those_that_write(fake_world: FakeWorld, name: str) -> None:
    fake_world(2)
    model = graphshard.compile(_Net(CALLS[name]), init_device_mesh("cpu", (2,)), backend="eager")
    with pytest.raises(CaptureError) as caught:
        model(torch.ones(2, 4))
    message = str(caught.value)
    assert re.search(r"cannot capture _Net\.forward at .*test_collectives\.py:\d+\n", message), message
    assert f"(torch.distributed.{name.strip()})" in message
    assert "Use those of torch.distributed._functional_collectives, which return tensors" in message
    x = torch.ones(2)
    assert dist.all_reduce(x) is None  # what was exchanged is back


class _Kept:
    reduce = staticmethod(dist.all_reduce)


UNSEEN: dict[str, Callable[[Tensor], object]] = {
    "allreduce_": lambda x: _Kept.reduce(x),
    "allreduce_ ": lambda x: dist.group.WORLD.allreduce([x]).wait(),
    "_allgather_base_": lambda x: dist.group.WORLD._allgather_base(torch.empty(8), x).wait(),
}


@pytest.mark.parametrize("name", UNSEEN)
@pytest.mark.parametrize("allow", [(), ("random",)])
def test_those_that_are_called_otherwise(fake_world: FakeWorld, name: str, allow: tuple[str, ...]) -> None:
    """The message said that forward draws with Python's `random`, and to allow that."""
    fake_world(2)
    model = graphshard.compile(_Net(UNSEEN[name]), init_device_mesh("cpu", (2,)), backend="eager", allow=allow)
    with pytest.raises(CaptureError) as caught:
        model(torch.ones(2, 4))
    message = str(caught.value)
    assert re.search(r"cannot capture _Net\.forward at .*test_collectives\.py:\d+\n", message), message
    assert f"(operator c10d.{name.strip()}.default)" in message
