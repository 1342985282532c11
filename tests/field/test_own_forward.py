"""Models whose `forward` is an attribute of the instance, put there before they are compiled.

TRL's trainers fuse the head with the loss in such a forward, Accelerate wraps one around casts, and notebooks assign a
`types.MethodType`.
"""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

import torch
from torch import Tensor, nn

import graphshard
from tests.distributed.twins import world_mesh
from tests.field.trials import assert_equal, full, on_graphshard, on_plain_torch, parameters
from tests.ranks import Ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), nn.Linear(4, 3)

    def hidden(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x

    def forward(self, x: Tensor, **others: Any) -> Tensor:
        return self.head(self.hidden(x))


def _fused(model: Any) -> None:
    """As TRL's `add_fused_lm_head`: another forward with the head's weight, or the one of before."""
    before = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: Any, x: Tensor, fused: bool = False) -> Tensor:
        if not fused:
            return before(x)
        return (self.hidden(x) @ self.head.weight.t() + self.head.bias).square().mean()

    model.forward = types.MethodType(forward, model)


def _wrapped(model: Any) -> None:
    """As Accelerate's `convert_outputs_to_fp32`."""
    before = model.forward
    model.forward = lambda *args, **kwargs: before(*args, **kwargs).float() * 2


def _net(replace: Any) -> nn.Module:
    model = Net()
    replace(model)
    return model


def _train(model: nn.Module, **keywords: Any) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    for _ in range(2):
        loss = model(torch.rand(2, 4), **keywords).square().mean()
        loss.backward()
        found += [loss.detach(), *(param.grad.clone() for param in model.parameters() if param.grad is not None)]
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    param.sub_(param.grad)
                param.grad = None
    return [*found, *parameters(model)]


FORWARDS = {
    "fused": (_fused, {"fused": True}),
    "fused, not used": (_fused, {}),
    "wrapped": (_wrapped, {}),
}


def _own_forwards(rank: int, world_size: int) -> None:
    for replace, keywords in FORWARDS.values():
        build = functools.partial(_net, replace)
        expected = on_plain_torch(build, functools.partial(_train, **keywords))
        copies = (_copied,) if keywords else ()  # the others call the forward of the model that they were made for
        for train in (_train, _generated, *copies):
            assert_equal(on_graphshard(build, functools.partial(train, **keywords)), expected)


def _copied(model: nn.Module, **keywords: Any) -> list[Tensor | None]:
    return _train(copy.deepcopy(model), **keywords)


def _generated(model: Any, **keywords: Any) -> list[Tensor | None]:
    """Train after a block without programs, and with a forward that is wrapped again later."""
    with graphshard.uncompiled(model):
        assert model(torch.ones(2, 4)).shape == (2, 3)
    before = model.forward
    model.forward = lambda *args, **kwargs: before(*args, **kwargs)
    return _train(model, **keywords)


def test_forwards_that_are_attributes(ranks: Ranks) -> None:
    ranks(2).run(_own_forwards)


def _by_unit(rank: int, world_size: int) -> None:
    train = functools.partial(_train, fused=True)
    expected = on_plain_torch(functools.partial(_net, _fused), train)
    torch.manual_seed(0)
    model = _net(_fused)
    for block in model.blocks:
        graphshard.fully_shard(block, mesh=world_mesh())
    graphshard.fully_shard(model, mesh=world_mesh(), backend="eager")
    torch.manual_seed(1)
    assert_equal([tensor if tensor is None else full(tensor) for tensor in train(model)], expected)
    assert len(graphshard.programs(model)) == 1


def test_forwards_of_models_sharded_from_the_inside(ranks: Ranks) -> None:
    ranks(2).run(_by_unit)
