"""Training with CUDA graph replays has the bits of training without, whatever happens between two launches."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard import Pipeline
from graphshard.passes import OffloadParameters
from tests.distributed.twins import BF16, FP32, assert_same, fsdp2, grads_of, params_of, world_mesh
from tests.graphs import on_cpu
from tests.ranks import Ranks


class Block(nn.Module):
    def __init__(self, width: int, *, dropout: float = 0.0, again: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.dropout, self.again = nn.LayerNorm(width), dropout, again

    def _computed(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(F.gelu(self.up(self.norm(x))), self.dropout, self.training))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._computed, x, use_reentrant=False) if self.again else self._computed(x)


class Net(nn.Module):
    """Tokens, optional blocks, logits and a loss, and a buffer that forward writes."""

    def __init__(self, width: int = 8, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, width)
        self.layers = nn.ModuleList(Block(width, **options) for _ in range(3))
        self.head = nn.Linear(width, 13)
        self.register_buffer("calls", torch.zeros(()))
        self.calls: Tensor

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        self.calls.add_(1)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()), logits


# Trains a model with its optimizer and records values to compare.
Script = Callable[[Any, Any, list[Any]], None]


@functools.cache  # one cached batch: its address must not depend on earlier frees
@torch.inference_mode(False)  # whichever script calls first
def _tokens(rank: int, number: int, batch: int = 2) -> Tensor:
    return torch.randint(0, 13, (batch, 5), generator=torch.Generator().manual_seed(100 * rank + number))


def _steps(model: Any, optim: Any, seen: list[Any]) -> None:
    """Record every output and gradient for the comparison at the end."""
    for number in range(6):
        loss, logits = model(_tokens(dist.get_rank(), number))
        loss.backward()
        seen += [loss, logits, grads_of(model)]
        optim.step()
        optim.zero_grad()


def _two_sizes(model: Any, optim: Any, seen: list[Any]) -> None:
    for number in range(10):
        loss, _ = model(_tokens(dist.get_rank(), number, batch=2 + number % 2))
        loss.backward()
        optim.step()
        optim.zero_grad(set_to_none=False)
        seen.append(loss)


def _microbatches(model: Any, optim: Any, seen: list[Any]) -> None:
    for number in range(4):
        for part in range(3):
            model.set_requires_gradient_sync(part == 2)
            loss, _ = model(_tokens(dist.get_rank(), 3 * number + part))
            loss.backward()
            seen.append(loss)
        seen.append(grads_of(model))
        optim.step()
        optim.zero_grad()


def _several_forwards(model: Any, optim: Any, seen: list[Any]) -> None:
    """Run three forwards before their backward; the last one keeps its graph."""
    for number in range(5):
        losses = [model(_tokens(dist.get_rank(), 3 * number + part))[0] for part in range(3)]
        losses[0].backward()
        losses[2].backward(retain_graph=True)
        losses[1].backward()
        losses[2].backward()
        seen += [*losses, grads_of(model)]
        optim.step()
        optim.zero_grad()


def _moved(model: Any, optim: Any, seen: list[Any]) -> None:
    """Move parameters to other addresses from the fourth step on."""
    for number in range(9):
        if number == 4:
            state = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(state, assign=True)
        loss, _ = model(_tokens(dist.get_rank(), number))
        loss.backward()
        seen += [loss, grads_of(model)]
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
                param.grad = None


def _evaluated(model: Any, optim: Any, seen: list[Any]) -> None:
    """Run inference between steps, also in inference mode and at the start."""
    for number in range(6):
        with torch.inference_mode(number % 2 == 0), torch.no_grad():
            seen.append(model(_tokens(dist.get_rank(), number))[1].clone())
        loss, _ = model(_tokens(dist.get_rank(), number))
        loss.backward()
        seen.append(loss)
        optim.step()
        optim.zero_grad()


def _train(rank: int, world_size: int, script: Script, options: dict[str, Any], made: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model = Net(**made)
    twin = copy.deepcopy(model)
    seen: tuple[list[Any], list[Any]] = [], []
    with on_cpu() as graphs:
        graphshard.compile(model, world_mesh(), backend="eager", **{"cuda_graphs": True, **options})
        graphshard.compile(twin, world_mesh(), backend="eager", **{**options, "cuda_graphs": False})
        for each, found in zip((model, twin), seen):
            torch.manual_seed(rank)
            script(each, torch.optim.AdamW(each.parameters(), lr=1e-2), found)
            found.append(torch.get_rng_state())
    assert graphs.launched > graphs.captured > 0
    assert_same(*({str(i): value for i, value in enumerate(_flat(found))} for found in seen), "what was seen")
    assert_same(params_of(model), params_of(twin), "parameters")
    assert torch.equal(model.calls, twin.calls)


def _flat(found: list[Any]) -> list[Any]:
    return [value for each in found for value in (each.values() if isinstance(each, dict) else [each])]


SCRIPTS = [_steps, _two_sizes, _microbatches, _several_forwards, _moved, _evaluated]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__.strip("_"))
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.quick_cases("1-several_forwards")
def test_scripts(ranks: Ranks, world_size: int, script: Script) -> None:
    ranks(world_size).run(_train, script, {"mp_policy": BF16, "max_captures": 16}, {})


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.slow
def test_graphs_chosen_by_cost(ranks: Ranks, world_size: int) -> None:
    """Some regions are in graphs, others are not."""
    options = {"mp_policy": BF16, "cuda_graphs": "auto", "hardware": "h100"}
    ranks(world_size).run(_train, _steps, options, {"dropout": 0.5})


@pytest.mark.parametrize(
    ("script", "made"),
    [(_steps, {"dropout": 0.5}), (_microbatches, {"dropout": 0.5, "again": True})],
    ids=["dropout", "recomputed dropout"],
)
@pytest.mark.slow
def test_random_numbers(ranks: Ranks, script: Script, made: dict[str, Any]) -> None:
    """The generator has the same state as without graphs, also at the end."""
    ranks(2).run(_train, script, {"mp_policy": FP32}, made)


def _dynamic(rank: int, world_size: int) -> None:
    shapes = {"tokens": {0: torch.export.Dim("batch", max=64)}}
    _train(rank, world_size, _two_sizes, {"dynamic_shapes": shapes}, {})


@pytest.mark.slow
def test_dynamic_sizes(ranks: Ranks) -> None:
    """One program, and a graph for each size."""
    ranks(2).run(_dynamic)


def _offloaded(rank: int, world_size: int, script: Script) -> None:
    passes = Pipeline().insert(OffloadParameters(always=True), before="plan")
    _train(rank, world_size, script, {"passes": passes, "mp_policy": BF16}, {})


@pytest.mark.parametrize("script", [_steps, _microbatches], ids=["steps", "microbatches"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.slow
def test_offloading(ranks: Ranks, world_size: int, script: Script) -> None:
    ranks(world_size).run(_offloaded, script)


def _updates(rank: int, world_size: int) -> None:
    """Consume gradients when they arrive."""
    torch.manual_seed(1)
    model = Net()
    twin = copy.deepcopy(model)
    losses: list[dict[str, Any]] = []
    with on_cpu() as graphs:
        graphshard.compile(model, world_mesh(), backend="eager", cuda_graphs=True)
        graphshard.compile(twin, world_mesh(), backend="eager")
        for each in (model, twin):
            optim = torch.optim.AdamW(each.parameters(), lr=1e-2)
            step = graphshard.compile_step(each, optim, lambda model, tokens: model(tokens)[0], clip_norm=1.0)
            losses.append({str(i): step(_tokens(rank, i)) for i in range(6)})
    assert graphs.launched > graphs.captured > 0
    assert_same(*losses, "losses")
    assert_same(params_of(model), params_of(twin), "parameters")


@pytest.mark.slow
def test_updates_in_backward(ranks: Ranks) -> None:
    ranks(2).run(_updates)


def _compare_with_fsdp2(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    model = Net()
    twin = fsdp2(copy.deepcopy(model), world_mesh(), mp_policy=BF16)
    seen: tuple[list[Any], list[Any]] = [], []
    with on_cpu() as graphs:
        graphshard.compile(model, world_mesh(), backend="eager", cuda_graphs=True, mp_policy=BF16)
        for each, found in zip((model, twin), seen):
            _steps(each, torch.optim.AdamW(each.parameters(), lr=1e-2), found)
    assert graphs.launched > 0
    assert_same(*({str(i): value for i, value in enumerate(_flat(found))} for found in seen), "what was seen")
    assert_same(params_of(model), params_of(twin), "parameters")


def test_matches_fsdp2(ranks: Ranks) -> None:
    ranks(2).run(_compare_with_fsdp2)
