"""`torch.cond` in forward matches FSDP2; each rank takes the branch that its values select."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphshard
from tests.distributed.nets import full
from tests.distributed.twins import assert_same, fsdp2, grads_of, params_of, twins, world_mesh
from tests.ranks import RankError, Ranks


class Gate(nn.Module):
    """Selects a layer; `scale` is used in one branch only, `shift` inside and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale, self.shift = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = x * 0.7 + self.shift
        chosen = torch.cond(
            x.mean() > 0,
            lambda a: self.left(a) * self.scale + hidden * self.shift + hidden.sin() * self.shift,
            lambda a: self.right(a).tanh() - self.shift * a,
            (hidden.cos(),),
        )
        return chosen + hidden + x


class Gates(nn.Module):
    """Two units, one of which is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gate() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, self.layers[0]):
            x = layer(x)
        return x.square().mean()


class Checkpointed(Gates):
    """A checkpoint recomputes the condition in backward."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()


class Roots(nn.Module):
    """The branch that is not taken has no finite gradient: the root of zero, and a singular matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.w).relu() * (x.mean() > 0)
        singular = y.mT @ y + torch.eye(4) * (x.mean() > 0)
        root = torch.cond(x.mean() > 0, lambda: y.sqrt().nan_to_num(posinf=0.0), lambda: y + self.w.sum())
        inverse = torch.cond(x.mean() > 0, lambda: torch.linalg.inv_ex(singular)[0].contiguous(), lambda: singular * 2)
        return root.where(y > 0, 0 * y).sum() + inverse.sum()


class Nested(nn.Module):
    """A condition in a branch, dictionaries of results, a condition that Python decides."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        def inner(a: Tensor) -> Tensor:
            return torch.cond(a.max() > 1, lambda b: b * self.w + a * self.w, lambda b: b - self.w * b, (a * self.w,))

        results = torch.cond(
            x.mean() > 0,
            lambda a: {"y": inner(a) * a},
            lambda a: {"y": a * self.w.exp() + a * self.w},
            (x + self.w,),
        )
        y = torch.cond(x.shape[0] > 2, lambda a: a * 2, lambda a: a.new_zeros(()), (results["y"],))
        return y.square().sum()


class Experts(nn.Module):
    """Calls one of two units."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 1)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.router(x).mean()
        chosen = torch.cond(x.mean() > 0, self.experts[0], self.experts[1], (x * weight,))
        return (chosen + x * weight).square().mean()


MODELS: tuple[Callable[[], nn.Module], ...] = (Gates, Checkpointed, Roots, Nested)


def _rows(seed: int) -> Tensor:
    """Return rows; every second seed selects the first branches."""
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)).abs() * (-1) ** seed


def _train(rank: int, world_size: int, make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    pair = twins(make(), world_mesh(), **options)
    optims = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in pair]
    for step in range(4):
        losses = [model(_rows(step + rank)) for model in pair]
        assert_same({"loss": losses[0]}, {"loss": losses[1]}, f"step {step}")
        for loss in losses:
            loss.backward()
            assert torch.isfinite(loss)
        assert_same(*map(grads_of, pair), f"gradients of step {step}")
        for optim in optims:
            optim.step()
            optim.zero_grad()
    assert_same(*map(params_of, pair), "parameters")
    assert len(graphshard.programs(pair[0])) == 1


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.slow
def test_training_equals_fsdp2(ranks: Ranks, make: Callable[[], nn.Module]) -> None:
    """Ranks take different branches at each step, and one program serves them."""
    ranks(2).run(_train, make, {})


def _train_with_inductor(rank: int, world_size: int, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, twin = make(), make()
    twin.load_state_dict(model.state_dict())
    compiled, twin = graphshard.compile(model, world_mesh()), fsdp2(twin, world_mesh())
    for step in range(2):
        for each in (compiled, twin):
            each(_rows(step + rank)).backward()
        torch.testing.assert_close(*(full(grads_of(each)) for each in (compiled, twin)))


@pytest.mark.slow
def test_inductor_compiles_both_branches(ranks: Ranks) -> None:
    ranks(2).run(_train_with_inductor, Gates)


def _load(rank: int, world_size: int, path: Path) -> None:
    torch.manual_seed(0)
    model, twin = Nested(), Nested()
    twin.load_state_dict(model.state_dict())
    graphshard.export(model, 1, path, example_inputs=(_rows(0),), device="cpu", backend="eager")
    loaded = graphshard.load(path, model, world_mesh())
    for seed in range(3):
        loaded(_rows(seed)).backward()
        twin(_rows(seed)).backward()
    assert_same(full(grads_of(loaded)), grads_of(twin), "loaded")


@pytest.mark.slow
def test_artifacts_hold_both_branches(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1).run(_load, tmp_path / "nested.gshard")


class Inverse(nn.Module):
    """A model with an operator that raises in a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor, mean: Tensor) -> Tensor:
        return torch.cond(mean > 0, lambda a: torch.linalg.inv(a * self.w).mT, lambda a: a * self.w, (x,))


def _experts(rank: int, world_size: int) -> None:
    """FSDP2's hooks cannot be in a branch; compare with plain torch on the same rows on both ranks."""
    torch.manual_seed(0)
    model, plain = Experts(), Experts()
    plain.load_state_dict(model.state_dict())
    compiled = graphshard.compile(model, world_mesh(), backend="eager")
    for seed in range(3):
        losses = [each(_rows(seed)) for each in (compiled, plain)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
    # The sum of two equal gradients, halved.
    assert_same(full(grads_of(compiled)), grads_of(plain), "gradients")


@pytest.mark.slow
def test_branches_call_units(ranks: Ranks) -> None:
    """All ranks gather both units, whichever branch they take."""
    ranks(2).run(_experts)


def _invert(rank: int, world_size: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = Inverse()
    model = graphshard.compile(copy.deepcopy(plain), world_mesh(), backend="eager", **options)
    x = torch.randn(4, 4)
    for mean in (-1.0, 1.0):
        assert torch.equal(model(x, torch.tensor(mean)), plain(x, torch.tensor(mean)))


def test_an_operator_with_checks_in_a_branch(ranks: Ranks) -> None:
    ranks(1).run(_invert, {})
    with pytest.raises(RankError, match=r"GraphBreak: .* such as torch\.linalg\.inv_ex"):
        ranks(1).run(_invert, {"fullgraph": True})
