"""Functions of torch.nn.functional that are replaced between calls: guards check them."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphshard
from tests.distributed.twins import world_mesh
from tests.ranks import Ranks

LINEAR, ATTENTION = F.linear, F.scaled_dot_product_attention


class Net(nn.Module):
    """A torch layer, and attention called by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return F.scaled_dot_product_attention(x, x, x).sum()


def _scaled(function: Callable[..., Tensor], factor: float) -> Callable[..., Tensor]:
    def scaled(*args: Tensor) -> Tensor:
        return function(*args) * factor

    return scaled


class Halved:
    """A callable object instead of a function."""

    def __call__(self, *args: Tensor) -> Tensor:
        return LINEAR(*args) / 2


def _calls(rank: int, world_size: int) -> list[str]:
    net, plain = Net(), Net()
    plain.load_state_dict(net.state_dict())
    graphshard.compile(net, world_mesh(), backend="eager")
    functional = "torch.nn.functional"

    def both() -> None:
        x = torch.randn(2, 3, 4)
        assert torch.equal(net(x), plain(x))

    both()
    for factor in (2.0, 3.0, 2.0):  # a new function each time; two are alike
        with mock.patch(f"{functional}.scaled_dot_product_attention", _scaled(ATTENTION, factor)):
            both()
    both()
    for other in (_scaled(LINEAR, 2.0), Halved()):
        with mock.patch(f"{functional}.linear", other):
            both()
    with mock.patch(f"{functional}.scaled_dot_product_attention", lambda q, k, v: F.gelu(q)):
        both()
        with mock.patch(f"{functional}.gelu", F.silu):  # a torch function under another name
            both()
    both()
    return [program.reason for program in graphshard.programs(net)]


def test_calls_use_the_current_functions(ranks: Ranks) -> None:
    (reasons,) = ranks(1).run(_calls)
    assert len(reasons) == 7
    assert all("torch.nn.modules.linear.F." in reason for reason in reasons[1:])
