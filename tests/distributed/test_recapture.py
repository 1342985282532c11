"""Ranks that capture at different times: no rank hangs, and training has FSDP2's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphshard
from tests.distributed.twins import assert_same, fsdp2, grads_of, params_of, world_mesh
from tests.ranks import Ranks

STEPS = 14
TIMEOUT = 120.0


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, tokens: Tensor, tag: str = "", step: int = 0) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x).tanh()
        return (x.sin() if tag == "sine" else x).square().mean() + step


def _tokens(rank: int, step: int, rows: int, length: int) -> Tensor:
    return torch.randint(0, 11, (rows, length), generator=torch.Generator().manual_seed(1000 * rank + step))


Call = tuple[tuple[Any, ...], dict[str, Any]]


def _one_rank_alone(rank: int, step: int) -> Call:
    """Return rank 1's 12 lengths in 14 steps; the other rank has one."""
    return (_tokens(rank, step, 2, 3 + step % 12 if rank == 1 else 3),), {}


def _both(rank: int, step: int) -> Call:
    return (_tokens(rank, step, 2, 3 + (5 * rank + step) % 12),), {}


def _at_other_times(rank: int, step: int) -> Call:
    """Return a new length for each rank in steps in which the other has none."""
    return (_tokens(rank, step, 2, 3 + (step + rank) // 2),), {}


def _last_batch(rank: int, step: int) -> Call:
    """Return a smaller last batch of an epoch on rank 1."""
    return (_tokens(rank, step, 1 if rank == 1 and step % 5 == 4 else 2, 3),), {}


def _tag(rank: int, step: int) -> Call:
    return (_tokens(rank, step, 2, 3),), {"tag": ("sine", "", "a", "b")[step % 4] if rank == 1 else ""}


def _number(rank: int, step: int) -> Call:
    return (_tokens(rank, step, 2, 3),), {"step": rank * step}


# The calls of each rank, and the number of programs of each.
CASES: dict[str, tuple[Callable[[int, int], Call], list[int]]] = {
    "lengths of one rank": (_one_rank_alone, [1, 2]),
    "lengths of both": (_both, [2, 2]),
    "lengths at other times": (_at_other_times, [2, 2]),
    "the last batch of one rank": (_last_batch, [1, 2]),
    "tags of one rank": (_tag, [1, 2]),
    "numbers of one rank": (_number, [1, 2]),
}


def _train(rank: int, world_size: int, case: str, options: dict[str, Any], accumulate: bool) -> tuple[int, int]:
    """Train next to FSDP2; return the number of programs kept and the number of captures."""
    calls = CASES[case][0]
    twin = fsdp2(_Net(), world_mesh())
    pair = graphshard.compile(_Net(), world_mesh(), backend="eager", **options), twin
    optims = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in pair]
    for step in range(STEPS):
        args, kwargs = calls(rank, step)
        found = []
        for model in pair:
            if accumulate:
                model.set_requires_gradient_sync(step % 3 == 2)
            loss = model(*args, **kwargs)
            loss.backward()
            found.append({"loss": loss.detach()})
        assert_same(*found, f"step {step}")
        if not accumulate or step % 3 == 2:
            assert_same(*map(grads_of, pair), f"gradients of step {step}")
            for optim in optims:
                optim.step()
                optim.zero_grad()
    assert_same(*map(params_of, pair), "parameters")
    return len(graphshard.programs(pair[0])), pair[0]._graphshard.executables.added


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_a_rank_captures_alone(ranks: Ranks, case: str) -> None:
    found = ranks(2).run(_train, case, {}, False, timeout=TIMEOUT)
    assert [left for left, _ in found] == CASES[case][1]
    assert all(captures >= left for left, captures in found)  # equal traces share a program


@pytest.mark.parametrize("case", ["lengths of one rank", "lengths of both", "tags of one rank"])
@pytest.mark.slow
def test_a_rank_evicts_alone(ranks: Ranks, case: str) -> None:
    """It captures evicted programs again."""
    found = ranks(2).run(_train, case, {"max_captures": 2}, False, timeout=TIMEOUT)
    assert [left for left, _ in found] == [min(2, count) for count in CASES[case][1]]
    assert found[1][1] >= CASES[case][1][1]


@pytest.mark.parametrize("case", ["lengths of one rank", "lengths of both"])
@pytest.mark.parametrize("options", [{}, {"max_captures": 1}], ids=["default", "one program"])
@pytest.mark.slow
def test_microbatches_of_ranks_that_capture_alone(ranks: Ranks, case: str, options: dict[str, Any]) -> None:
    ranks(2).run(_train, case, options, True, timeout=TIMEOUT)


LIMITED = {"memory_limit": 1 << 30, "hardware": "cpu-gloo"}


@pytest.mark.parametrize("options", [LIMITED, {**LIMITED, "activation": "auto"}], ids=["plan", "activation"])
@pytest.mark.quick_cases("activation")
def test_a_rank_captures_alone_under_a_limit_of_memory(ranks: Ranks, options: dict[str, Any]) -> None:
    """This raised an error: ranks planned each size together."""
    found = ranks(2).run(_train, "lengths of one rank", options, False, timeout=TIMEOUT)
    assert [count for count, _ in found] == CASES["lengths of one rank"][1]
