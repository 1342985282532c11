"""Data-dependent sizes: selected tokens, masks, numbers read from tensors. They differ between ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphshard
from graphshard.errors import CaptureError
from tests.distributed.nets import full
from tests.distributed.twins import assert_same, fsdp2, grads_of, twins, world_mesh
from tests.ranks import RankError, Ranks


class Experts(nn.Module):
    """Each token goes to the expert that the router prefers; the counts differ at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (tokens,) = torch.where(chosen == number)
            out.index_add_(0, tokens, expert(x[tokens]) * weights[tokens, None])
        return out.square().mean()


class Masked(nn.Module):
    """Returns tensors whose sizes depend on values; the loss needs one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            rows = torch.nonzero(x[:, 0] > 0).squeeze(-1)
            x = x.index_add(0, rows, layer(x[rows]).tanh())
        mask = x > 0
        return x[mask].square().sum(), x.masked_select(~mask)


class Shortened(nn.Module):
    """Uses the number of rows that a tensor contains."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        count = (x[:, 0] > 0).sum().item()
        torch._check(count <= 5)
        torch._check_tensor_all(x < 100)
        return self.linear(x)[:count].square().sum()


class Listed(nn.Module):
    """Sorts tokens by experts and splits them by a list of sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 2)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.sort(stable=True).indices
        sizes = torch.nn.functional.one_hot(chosen, 2).sum(0).tolist()
        parts = x[order].split(sizes)
        out = torch.cat([expert(part) for expert, part in zip(self.experts, parts)])
        return (out * weights[order, None]).square().mean()


class Looped(nn.Module):
    """Runs the experts that the router selects."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for row in torch.nonzero(self.linear(x)[:, 0] > 0):
            x = x.index_add(0, row, self.linear(x[row]))
        return x.sum()


MODELS: tuple[Callable[[], nn.Module], ...] = (Experts, Masked, Shortened, Listed)


def _rows(seed: int) -> Tensor:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
    x[0, 0] = -1.0
    return x


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    result = model(x)
    return result[0] if isinstance(result, tuple) else result


def _train(rank: int, world_size: int, make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    pair = twins(make(), world_mesh(), **options)
    for step in range(4):
        losses = [_loss(model, _rows(10 * step + rank)) for model in pair]
        assert_same({"loss": losses[0]}, {"loss": losses[1]}, f"step {step}")
        for loss in losses:
            loss.backward()
        assert_same(*map(grads_of, pair), f"gradients of step {step}")
    assert len(graphshard.programs(pair[0])) == 1


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.quick_cases("Masked")
def test_training_equals_fsdp2(ranks: Ranks, make: Callable[[], nn.Module]) -> None:
    """One program for all sizes matches bit for bit, although the sizes differ between ranks."""
    ranks(2).run(_train, make, {})


@pytest.mark.slow
def test_captures_are_shared_and_parameters_kept(ranks: Ranks) -> None:
    """The other ranks read the program from JSON, with its sizes."""
    ranks(2).run(_train, Experts, {"reshard_after_forward": False})


def _train_with_inductor(rank: int, world_size: int, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    twin = make()
    twin.load_state_dict(model.state_dict())
    compiled = graphshard.compile(model, world_mesh())
    twin = fsdp2(twin, world_mesh())
    for step in range(3):
        for each in (compiled, twin):
            _loss(each, _rows(10 * step + rank)).backward()
        torch.testing.assert_close(*(full(grads_of(each)) for each in (compiled, twin)))


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.quick_cases("Shortened")
def test_inductor_compiles_regions_for_all_sizes(ranks: Ranks, make: Callable[[], nn.Module]) -> None:
    ranks(2).run(_train_with_inductor, make)


def _checks(rank: int, world_size: int, wrong: Tensor) -> None:
    model = graphshard.compile(Shortened(), world_mesh(), backend="eager")
    model(_rows(rank))
    model(wrong)


@pytest.mark.parametrize(
    ("wrong", "line"),
    [(torch.ones(6, 4), r"torch\._check\(count"), (torch.eye(6, 4) * 200, r"torch\._check_tensor_all\(x")],
)
def test_torch_check_is_enforced(ranks: Ranks, wrong: Tensor, line: str) -> None:
    with pytest.raises(RankError, match=rf"InputError: forward raises .*dependent\.py:\d+: {line}"):
        ranks(1).run(_checks, wrong)


def _refused(rank: int, world_size: int) -> list[str]:
    messages = []
    with pytest.raises(CaptureError) as caught:
        graphshard.compile(Looped(), world_mesh(), backend="eager", fullgraph=True)(_rows(0))
    messages.append(str(caught.value))
    return messages


def test_rejects_a_data_dependent_loop(ranks: Ranks) -> None:
    """A loop over data-dependent values."""
    ((looped,),) = ranks(1).run(_refused)
    assert re.search(r"dependent\.py:\d+\n +for row in torch\.nonzero", looped)


def _load(rank: int, world_size: int, path: Path) -> None:
    torch.manual_seed(0)
    model = Experts()
    twin = Experts()
    twin.load_state_dict(model.state_dict())
    graphshard.export(model, 1, path, example_inputs=(_rows(0),), device="cpu", backend="eager")
    loaded = graphshard.load(path, model, world_mesh())
    for seed in range(3):
        _loss(loaded, _rows(seed)).backward()
        _loss(twin, _rows(seed)).backward()
    assert_same(full(grads_of(loaded)), grads_of(twin), "loaded")


def test_artifacts_hold_data_dependent_sizes(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1).run(_load, tmp_path / "experts.gshard")
