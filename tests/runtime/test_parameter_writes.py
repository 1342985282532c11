"""Records of parameters that a forward has read, until its backward."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.errors import ParameterError
from tests.helpers import Blocks
from tests.ranks import FakeWorld


def test_a_forward_without_backward_keeps_no_optimizer(fake_world: FakeWorld) -> None:
    """Losses that are kept for a log, without a backward, must not keep other models' optimizer states alive."""
    fake_world(2)
    model = graphshard.compile(Blocks(2), init_device_mesh("cpu", (2,)), backend="eager")
    loss = model(torch.ones(3, 4)).sum()
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    other.step()
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None
    torch.optim.SGD(model.parameters(), lr=0.1, fused=True).step()
    with pytest.raises(ParameterError, match="was updated by an optimizer between a forward and its backward"):
        loss.backward()
