"""Models with a graph break: Python runs forward, units run as separate programs, with FSDP2's bits."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import graphshard
from graphshard.ir.units import find_units, modules_of
from tests.distributed.twins import BF16, assert_same, grads_of, params_of, world_mesh
from tests.ranks import Ranks

BF16_OUT = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32, cast_forward_inputs=True
)


class Net(nn.Module):
    """Layers as units, modules and parameters of the root around them, and a hook for subclasses."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.layers = nn.ModuleList(self.block(width) for _ in range(3))
        self.position = nn.Parameter(torch.randn(width))
        self.scales = nn.ParameterList(torch.ones(width) for _ in range(2))
        self.dropout = nn.Dropout(0.1)

    def block(self, width: int) -> nn.Module:
        """Make one layer."""
        return nn.Sequential(nn.Linear(width, width), nn.GELU())

    def order(self, x: Tensor) -> list[nn.Module]:
        """Return the layers that run."""
        return list(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)) + self.position
        for layer in self.order(x):
            x = self.dropout(layer(x)) * self.scales[0]
        return (x * self.stem.weight.sum() * self.scales[1]).float().square().mean()


class ByValue(Net):
    """The outermost forward branches on values, which are equal on all ranks."""

    def order(self, x: Tensor) -> list[nn.Module]:
        return [*self.layers, self.layers[0]] if self.position.sum() > 0 else list(self.layers)[::-1]


class ByChance(Net):
    """The outermost forward branches on Python's random numbers."""

    def order(self, x: Tensor) -> list[nn.Module]:
        return [layer for layer in self.layers if random.random() > 0.4]


class Hooked(Net):
    """A full backward hook on a unit, and on a part of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        for module in (self.layers[1], self.norm):
            module.register_full_backward_hook(self._double)

    def _double(self, module: nn.Module, grads: Any, of_results: Any) -> Any:
        self.seen.append(of_results[0].clone())
        return tuple(None if grad is None else 2 * grad for grad in grads)

    def __deepcopy__(self, memo: Any) -> Hooked:
        twin = Hooked()
        twin.load_state_dict(self.state_dict())
        return twin


class _Broken(nn.Module):
    """A block that cannot be traced, around a unit that can."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.outer, self.shift = nn.Linear(width, width), nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x) + self.shift
        return self.outer(x) if self.shift.sum() > -100 else x


class Nested(Net):
    """Graph breaks in the blocks and in the outermost forward."""

    def block(self, width: int) -> nn.Module:
        return _Broken(width)

    def order(self, x: Tensor) -> list[nn.Module]:
        return list(self.layers) if self.position.sum() > -100 else []


class OnlyBlocks(Net):
    """Graph breaks only in the blocks."""

    def block(self, width: int) -> nn.Module:
        return _Broken(width)


class Penalized(Net):
    """The gradient of a leaf created in forward is a part of the loss."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = super().forward(x)
        if not torch.is_grad_enabled():
            return y
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        return y + grad.square().sum() if self.position.sum() > -100 else y


class PenalizedAlone(nn.Module):
    """A penalty without units."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = self.second(self.first(x).tanh()).sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        return y + (grad.norm(dim=1) - 1).square().mean()


class Recurrent(Net):
    """A recurrent module, which also keeps a list of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(8, 8)

    def order(self, x: Tensor) -> list[nn.Module]:
        x, _ = self.recurrent(x)
        return list(self.layers) if x.sum() > -1000 else []


class Frozen(ByValue):
    """Some parameters of the root and of a unit are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.stem.requires_grad_(False)
        self.layers[1].requires_grad_(False)


def _batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def _train(rank: int, world_size: int, make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    model, mesh = make(), world_mesh()
    theirs = copy.deepcopy(model)
    own = {name: value for name, value in options.items() if name != "units"}
    units = () if make is Penalized else find_units(model, options.get("units"))  # FSDP2 fails with units
    for unit in (*reversed(units), ""):
        modules = [theirs.get_submodule(name) for name in modules_of(unit)]
        fully_shard(modules if len(modules) > 1 else modules[0], mesh=mesh, **own)
    ours = graphshard.compile(model, mesh, backend="eager", **options)
    if make is Penalized:  # the first gradients that have a graph are added in another order
        ours(_batch(rank, 0))
    losses: list[list[Tensor]] = []
    for model in (ours, theirs):
        torch.manual_seed(5 + rank)
        random.seed(5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        losses.append([])
        for step in range(4):
            loss = model(_batch(rank, step))
            loss.backward()
            losses[-1].append(loss.detach())
            if step == 2:
                losses[-1] += [grad.to_local() for grad in grads_of(model).values() if isinstance(grad, DTensor)]
            optimizer.step()
            optimizer.zero_grad()
    for number, (a, b) in enumerate(zip(*losses, strict=True)):
        assert torch.equal(a, b), f"{number}: {a} != {b}"
    assert_same(params_of(ours), params_of(theirs), "parameters")
    if make is PenalizedAlone:
        return
    for model in (ours, theirs):  # afterwards FSDP2's root shows full parameters
        model.eval()
        random.seed(6)
        with torch.no_grad():
            losses.append([model(_batch(rank, 9))])
    assert torch.equal(*losses[-2], *losses[-1])
    assert all(isinstance(param, DTensor) for param in ours.parameters())
    if isinstance(ours, Hooked):
        assert len(ours.seen) == len(theirs.seen)
        assert all(map(torch.equal, ours.seen, theirs.seen))


NESTED = ["layers.*", "layers.*.inner"]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (ByValue, {}),
        (ByValue, {"mp_policy": BF16}),
        (ByValue, {"mp_policy": BF16_OUT}),
        (ByValue, {"reshard_after_forward": False}),
        (ByValue, {"units": ["layers.*", "norm"]}),
        (ByValue, {"units": ["layers.0", "layers.1", ("norm", "layers.2")]}),
        (ByChance, {}),
        (Hooked, {}),
        (Hooked, {"mp_policy": BF16}),
        (Nested, {}),
        (Nested, {"units": NESTED}),
        (OnlyBlocks, {}),
        (OnlyBlocks, {"units": NESTED, "mp_policy": BF16}),
        (Penalized, {}),
        (PenalizedAlone, {}),
        (Recurrent, {}),
        (Frozen, {}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "-".join(map(str, value)) or "plain",
)
@pytest.mark.quick_cases("OnlyBlocks-units-mp_policy")
def test_matches_fsdp2(ranks: Ranks, make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    """Four steps of AdamW and a call without gradients: losses, gradients and parameters, bit for bit."""
    ranks(2).run(_train, make, options)
