"""Split models called in other ways: single parts, microbatches, checkpoints, ranks that differ."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard.ir.units import find_units
from tests.distributed.twins import assert_same, grads_of, params_of, world_mesh
from tests.ranks import Ranks


def _pair(model: nn.Module, units: Sequence[str] | None = None) -> tuple[nn.Module, nn.Module]:
    mesh, twin = world_mesh(), copy.deepcopy(model)
    for unit in (*reversed(find_units(model, units)), ""):
        fully_shard(twin.get_submodule(unit), mesh=mesh)
    return graphshard.compile(model, mesh, backend="eager", units=units), twin


def _batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


class Net(nn.Module):
    """The outermost forward branches on the values of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Run one layer."""
        return layer(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) * self.scale
        for layer in self.layers if self.scale.sum() > -100 else ():
            x = self.run(layer, x)
        return x.square().mean()


class Gan(nn.Module):
    """Parts called by the training loop; one of them has a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.discriminator = Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.discriminator(self.generator(x))


def _gan(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    models = _pair(Gan(), ["generator", "discriminator", "discriminator.layers.*"])
    seen: list[list[Tensor]] = []
    for model in models:
        seen.append([])
        of_generator = torch.optim.Adam(model.generator.parameters(), lr=0.1)
        of_discriminator = torch.optim.Adam(model.discriminator.parameters(), lr=0.1)
        for step in range(3):
            fake = model.generator(_batch(rank, step))
            loss = model.discriminator(_batch(rank, step + 5)) - model.discriminator(fake.detach())
            loss.backward()
            of_discriminator.step()
            model.zero_grad()
            other = model.discriminator(model.generator(_batch(rank, step)))
            other.backward()
            of_generator.step()
            model.zero_grad()
            seen[-1] += [loss.detach(), other.detach()]
    assert all(map(torch.equal, *seen))
    assert_same(*map(params_of, models), "parameters")


def _microbatches(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    models = _pair(Net())
    for model in models:
        for step in range(3):
            model.set_requires_gradient_sync(step == 2)
            model(_batch(rank, step)).backward()
    assert_same(*map(grads_of, models), "gradients of microbatches")
    for model in models:
        model.zero_grad()
        (model(_batch(rank, 4)) + model(_batch(rank, 5))).backward()
    assert_same(*map(grads_of, models), "gradients of two calls")
    for model in models:
        model.set_reshard_after_forward(False)
        model.unshard()
        model(_batch(rank, 6)).backward()
    assert_same(*map(grads_of, models), "gradients after unshard")


class Checkpointed(Net):
    """A checkpoint recomputes layers in backward."""

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(super().run, layer, x, use_reentrant=False)


class RootInRegions(Net):
    """The root's layer and parameter, inside and outside of regions, next to a unit and in nested regions."""

    def inner(self, x: Tensor) -> Tensor:
        """Run the nested region."""
        return self.stem(x).sin() * self.scale

    def region(self, x: Tensor) -> Tensor:
        """Read the root's parameters before and after a unit."""
        x = checkpoint(self.inner, x.cos(), use_reentrant=False).tanh()
        return self.stem(self.layers[0](x).exp() * self.scale).sin()

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.region, self.stem(x) * self.scale, use_reentrant=False)
        return super().forward(x)


class BrokenUnit(nn.Module):
    """A unit with a graph break, and a region that holds a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.bias = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.zeros(8))

    def region(self, x: Tensor) -> Tensor:
        """Read a parameter and a submodule of the unit."""
        return self.first(x.tanh() + self.bias).exp()

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.region, x, use_reentrant=False).sin()
        return self.second(x) if x.sum() > -100 else x


class UnitsInRegions(Net):
    """Units with graph breaks, called twice, one of them within a region."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(BrokenUnit() for _ in range(2))

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(checkpoint(super().run, self.layers[0], x, use_reentrant=False))


class Slope(nn.Module):
    """A unit with a graph break that asks for a gradient, for which torch recomputes the region at once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.requires_grad_()
        y = self.linear(x.sin()).tanh()
        y = y.sin() if y.sum() > -100 else y
        return y + torch.autograd.grad(y.sum(), x, create_graph=True)[0]


class SlopesInRegions(UnitsInRegions):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Slope() for _ in range(2))


def _checkpoints(rank: int, world_size: int) -> None:
    for make in (Checkpointed, RootInRegions, UnitsInRegions, SlopesInRegions):
        torch.manual_seed(0)
        models = _pair(make())
        for model in models:
            for step in range(2):
                model(_batch(rank, step)).backward()
            checkpoint(model, _batch(rank, 2), use_reentrant=False).backward()
        assert_same(*map(grads_of, models), f"gradients of {make.__name__}")


class Residual(nn.Module):
    """A unit whose result has its input's memory layout, unlike its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x * x.square().mean(-1, keepdim=True).rsqrt())


class Transposed(Net):
    """Units with a transposed input, whose gradients are summed before them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([x * number for number in range(1, 20)], 2).transpose(1, 2) * self.scale
        for layer in self.layers if self.scale.sum() > -100 else ():
            x = layer(x)
        return self.stem(x).square().mean()


def _transposed(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    models = _pair(Transposed())
    for model in models:
        for step in range(2):
            model(_batch(rank, step)).backward()
    assert_same(*map(grads_of, models), "gradients")


class OnOneRank(Net):
    """A graph break in forward on the first rank only."""

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            return super().forward(x)
        x = self.stem(x) * self.scale
        for layer in self.layers:
            x = self.run(layer, x)
        return x.square().mean()


def _on_one_rank(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = OnOneRank()
    model.is_first = rank == 0
    models = _pair(model)
    for model in models:
        for step in range(2):
            model(_batch(rank, step)).backward()
    assert_same(*map(grads_of, models), "gradients")
    assert "Linear-layers.0-0" in [program.title for program in graphshard.programs(models[0])]


class Fails(Net):
    """A model whose forward raises after its graph break."""

    def forward(self, x: Tensor) -> Tensor:
        if self.scale.sum() > -100 and self.fails:
            raise ValueError("no batch")
        return super().forward(x)


def _fails(rank: int, world_size: int) -> None:
    """Call the model again after the error."""
    torch.manual_seed(0)
    models = _pair(Fails())
    for model in models:
        model.fails = True
        with pytest.raises(ValueError, match="no batch"):
            model(_batch(rank))
        model.fails = False
        model(_batch(rank)).backward()
    assert_same(*map(grads_of, models), "gradients")
    assert all(isinstance(param, DTensor) for param in models[0].parameters())


@pytest.mark.parametrize(
    "run", [_gan, _microbatches, _checkpoints, _transposed, _on_one_rank, _fails], ids=lambda run: run.__name__
)
@pytest.mark.quick_cases("_microbatches", "_checkpoints", "_transposed")
def test_matches_fsdp2(ranks: Ranks, run: Callable[..., Any]) -> None:
    """Losses, gradients and parameters, bit for bit; a graph break on one rank splits the model on all."""
    ranks(2).run(run)
