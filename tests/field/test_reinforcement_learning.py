"""GRPO and PPO: samples of growing lengths, old log-probabilities, inner epochs with clipping, a frozen reference."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import graphshard
from graphshard.module.compiled_module import CompiledModule
from tests.distributed.twins import fsdp2, world_mesh
from tests.field.trials import assert_equal, parameters
from tests.ranks import Ranks

_VOCABULARY, _WIDTH, _PROMPT, _ROWS = 11, 8, 3, 4
_ITERATIONS = 3


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        attended: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])
        return x + attended


class _Policy(nn.Module):
    """A language model with a value head, as TRL's and verl's critics have one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, _WIDTH)
        self.layers = nn.ModuleList(_Block() for _ in range(2))
        self.head, self.value = nn.Linear(_WIDTH, _VOCABULARY, bias=False), nn.Linear(_WIDTH, 1)

    def forward(self, ids: Tensor, keep: int) -> tuple[Tensor, Tensor]:
        """Return logits and values of the last tokens, as with transformers' `logits_to_keep`."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        x = x[:, -keep:]
        return self.head(x), self.value(x)[..., 0]


def _sample(policy: nn.Module, tokens: int) -> Tensor:
    """Continue prompts: all ranks sample the same number of tokens, as FSDP2 gathers for each."""
    ids = torch.randint(0, _VOCABULARY, (_ROWS, _PROMPT))
    is_ours = isinstance(policy, CompiledModule)
    with torch.no_grad(), graphshard.uncompiled(policy) if is_ours else contextlib.nullcontext():
        for _ in range(tokens):
            logits, _ = policy(ids, 1)
            ids = torch.cat([ids, torch.multinomial(logits[:, -1].softmax(-1), 1)], 1)
    return ids


def _scores(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the sampled tokens, and the values before them."""
    keep = ids.shape[1] - _PROMPT + 1
    logits, values = model(ids, keep)
    chosen = ids[:, -keep + 1 :, None]
    return logits[:, :-1].log_softmax(-1).gather(-1, chosen)[..., 0], values[:, :-1]


def _clipped(now: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    ratio = (now - old).exp()
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def _iterations(
    policy: nn.Module, reference: nn.Module, loss_of: Callable[..., Tensor], shorter: int
) -> list[Tensor | None]:
    """Train by samples that grow in each iteration; this rank's end `shorter` tokens earlier."""
    optimizer, found = torch.optim.AdamW(policy.parameters(), lr=1e-2), []
    for iteration in range(_ITERATIONS):
        policy.eval()
        ids = _sample(policy, 4 + 2 * iteration)
        ids = ids[:, : ids.shape[1] - shorter]
        policy.train()
        with torch.no_grad():
            old, values = _scores(policy, ids)
            expected, _ = _scores(reference, ids)
        advantages = torch.randn(_ROWS, 1).expand(old.shape)
        found += [ids, old, values, expected]
        for _ in range(2):
            for rows in (slice(0, 2), slice(2, 4)):
                now, value = _scores(policy, ids[rows])
                loss = loss_of(now, value, old[rows], values[rows], expected[rows], advantages[rows])
                loss.backward()
                found.append(loss.detach())
                torch.nn.utils.clip_grad_value_(policy.parameters(), 0.02)
                optimizer.step()
                optimizer.zero_grad()
        if isinstance(reference, FSDPModule):
            reference.reshard()  # FSDP2 shows full parameters after a call
        with torch.no_grad():  # the reference follows slowly, as in TRL's `sync_ref_model`
            for kept, new in zip(reference.parameters(), policy.parameters()):
                kept.data.mul_(0.4).add_(new.data, alpha=0.6)
    return [*found, *parameters(policy), *parameters(reference)]


def _grpo(now: Tensor, value: Tensor, old: Tensor, _: Tensor, expected: Tensor, advantages: Tensor) -> Tensor:
    difference = expected - now
    divergence = difference.exp() - difference - 1
    return (_clipped(now, old, advantages) + 0.1 * divergence).mean() + 0 * value.sum()


def _ppo(now: Tensor, value: Tensor, old: Tensor, values: Tensor, expected: Tensor, advantages: Tensor) -> Tensor:
    returns = values + advantages - 0.1 * (old - expected)
    near = values + (value - values).clamp(-0.2, 0.2)
    errors = torch.max((value - returns).square(), (near - returns).square())
    return _clipped(now, old, advantages).mean() + 0.5 * errors.mean()


_LOSSES = {"GRPO": _grpo, "PPO": _ppo}


def _trial(rank: int, world_size: int, name: str, ranks_differ: bool) -> None:
    def trained(shard: Callable[[nn.Module], nn.Module]) -> tuple[list[Tensor | None], list[nn.Module]]:
        torch.manual_seed(0)
        policy = _Policy()
        reference = copy.deepcopy(policy).requires_grad_(False).eval()
        models = [shard(policy), shard(reference)]
        torch.manual_seed(rank if ranks_differ else 0)
        return _iterations(*models, _LOSSES[name], shorter=rank if ranks_differ else 0), models

    ours, models = trained(lambda model: graphshard.compile(model, world_mesh(), backend="eager"))
    assert_equal(ours, trained(lambda model: fsdp2(model, world_mesh()))[0])
    if not ranks_differ:
        assert_equal(ours, trained(lambda model: model)[0])
    # The policy's scores with gradients and without, the reference's: one program of the first length, one of others.
    assert [len(graphshard.programs(model)) for model in models] == [4, 2]


@pytest.mark.parametrize("ranks_differ", [False, True], ids=["alike", "ranks differ"])
@pytest.mark.parametrize("name", _LOSSES)
@pytest.mark.quick_cases("PPO-ranks differ")
def test_policy_gradients(ranks: Ranks, name: str, ranks_differ: bool) -> None:
    """As in TRL's and verl's trainers: FSDP2's numbers, and no capture for another length."""
    ranks(2).run(_trial, name, ranks_differ)
