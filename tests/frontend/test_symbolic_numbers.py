"""Changing numbers become symbols at their second value, and Inductor compiles regions with them."""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphshard
from graphshard.codec.program_format import program_from_json, program_to_json
from graphshard.frontend.capture import capture
from graphshard.ir.printer import print_program
from tests.distributed.twins import world_mesh
from tests.ranks import Ranks


class _Annealed(nn.Module):
    """Reads a temperature that the caller changes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(self.b(self.a(x).tanh()) / self.temperature, -1).pow(2).sum()


class _LearningRate(nn.Module):
    """A float that is also clamped and compared with elements of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: Tensor, lr: float) -> Tensor:
        y = self.a(x) * lr + x * lr
        return torch.where(y > lr / 3, y, y * (1 - lr)).clamp(max=lr * 20).pow(2).sum()


class _Counter(nn.Module):
    """Counts its calls, uses the number in a formula, and compares it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        warmup = self.step / 10 if self.step < 6 else 1.0
        return self.a(x).pow(2).sum() * warmup * 0.9**self.step


class _Times(nn.Module):
    """Multiplies by an int, sometimes 0 and 1, and adds it to integers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: Tensor, n: int) -> Tensor:
        return (self.a(x) * n + (torch.arange(6) + n)).pow(2).mean() / (n * n + 1)


class _Gpt(nn.Module):
    """A small language model whose loss combines the dynamic sizes of tokens and targets."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(11, 8), nn.Embedding(32, 8)
        self.norm, self.qkv = nn.LayerNorm(8), nn.Linear(8, 24)
        self.mlp, self.head = nn.Linear(8, 8), nn.Linear(8, 11)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        batch, length = tokens.shape
        x = self.embed(tokens) + self.positions(torch.arange(length))
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 6, 4).transpose(1, 2).chunk(3, dim=1)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.mlp(attention).view(batch * length, 8).relu().view(batch, length, 8)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def _x(step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def _annealed(model: Any, step: int) -> tuple[Any, ...]:
    model.temperature = 1 + 0.3 * step
    return (_x(step),)


def _tokens(step: int) -> tuple[Tensor, Tensor]:
    shape = (2 + step % 6, (5, 9, 16)[step // 6])
    tokens, targets = torch.randint(0, 11, (2, *shape), generator=torch.Generator().manual_seed(step))
    return tokens, targets


CASES: dict[str, tuple[type[nn.Module], Callable[[Any, int], tuple[Any, ...]], int, int]] = {
    "annealed": (_Annealed, _annealed, 8, 2),
    "learning rate": (_LearningRate, lambda _, step: (_x(step), 0.1 + 0.07 * step), 8, 2),
    "counter": (_Counter, lambda _, step: (_x(step),), 9, 3),
    "int": (_Times, lambda _, step: (_x(step), 3 - step), 8, 2),
    "sizes": (_Gpt, lambda _, step: _tokens(step), 18, 3),
}


def _train(rank: int, world_size: int, name: str) -> int:
    cls, inputs, steps, _ = CASES[name]
    torch.manual_seed(0)
    plain = cls()
    ours = graphshard.compile(copy.deepcopy(plain), world_mesh(), backend="inductor")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Inductor cannot compile")
        for step in range(steps):
            losses = [model(*inputs(model, step)) for model in (plain, ours)]
            torch.testing.assert_close(losses[1], losses[0])
            for loss, model in zip(losses, (plain, ours)):
                model.zero_grad()
                loss.backward()
            for (path, param), full in zip(plain.named_parameters(), ours.parameters()):
                assert param.grad is not None
                assert full.grad is not None
                torch.testing.assert_close(full.grad.full_tensor(), param.grad, msg=f"{path}, step {step}")
    return len(graphshard.programs(ours))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_inductor_compiles_changing_numbers(ranks: Ranks, name: str) -> None:
    """Few programs serve all values, with gradients as in eager mode."""
    assert ranks(1).run(_train, name) == [CASES[name][3]]


class _Numbers(_LearningRate):
    """A model that also gets a negative int."""

    def forward(self, x: Tensor, lr: float, n: int = -1) -> Tensor:
        return super().forward(x, lr) * n


def _shown(text: str) -> str:
    """Return a program without torch's numbered names of floats."""
    return re.sub(r"zf\d+", "zf", text)


def _file(rank: int, world_size: int) -> str:
    texts = []

    def captured(*args: Any, **kwargs: Any) -> Any:
        program = capture(*args, **kwargs)
        texts.append((print_program(program), program_to_json(replace(program, trace=None))))
        return program

    ours = graphshard.compile(_Numbers(), world_mesh(), backend="eager")
    with mock.patch("graphshard.module.tracer.capture_call", captured):
        for step in range(2):
            ours(_x(step), 0.1 + step, -2 - step)
    text, file = texts[-1]
    again = program_from_json(file)
    assert _shown(print_program(again)) == _shown(text)
    return json.dumps(list(json.loads(file)["symbols"].values()))


def test_files_hold_numbers(ranks: Ranks) -> None:
    """Floats must not be written as sizes, and negative ints must load."""
    (symbols,) = ranks(1).run(_file)
    assert {"hint": -3, "range": [None, None]} in json.loads(symbols)
    assert {"hint": 1.1, "range": None} in json.loads(symbols)
