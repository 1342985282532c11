"""The cache on several ranks: all ranks of a later launch find the program, or none does."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.module import tracer
from graphshard.module.program_compiler import LoweredProgram
from graphshard.runtime import peers
from graphshard.store.program_cache import CacheLookup
from tests.distributed.twins import load_example
from tests.ranks import RankPool, Ranks


def _train(
    rank: int, world_size: int, cache: str, backend: str, *, without: int = -1, steps: int = 3, evaluates: bool = False
) -> tuple[list[Tensor], int, list[str]]:
    """Train the example; return losses, the number of compilations, and the cache's messages.

    Args:
        without: rank without a cache.
        evaluates: after each step.
    """
    llama = load_example("llama")
    torch.manual_seed(0)
    model = llama.Llama(llama.LlamaConfig(layers=2, dim=32, heads=2, seq=16))
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("graphshard.cache")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with mock.patch.object(tracer, "run_pipeline", wraps=tracer.run_pipeline) as passes:
            mesh = init_device_mesh("cpu", (world_size,))
            graphshard.compile(model, mesh, backend=backend, cache=False if rank == without else cache)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            losses = []
            for step in range(steps):
                generator = torch.Generator().manual_seed(10 * step + rank)
                tokens = torch.randint(0, 256, (2, 16), generator=generator)
                loss = model(tokens, tokens)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
                if evaluates:
                    with torch.no_grad():
                        losses.append(model.eval()(tokens, tokens))
                    model.train()
    finally:
        logger.removeHandler(handler)
    return losses, passes.call_count, said


def _same(one: list[Any], other: list[Any]) -> bool:
    return all(torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x[0], y[0], strict=True))


def test_ranks_find_programs_together(ranks: Ranks, tmp_path: Path) -> None:
    """Evaluation gathers in another order than training, and reduces nothing: ranks agree on its program, too."""
    cache = str(tmp_path / "cache")
    first = ranks(2).run(_train_and_evaluate, cache)
    assert [each[1] for each in first] == [2, 2]
    assert len(list(Path(cache).glob("*.gscache"))) == 2
    second = ranks(2).run(_train_and_evaluate, cache)
    assert [each[1] for each in second] == [0, 0], second
    assert _same(first, second)


def _train_and_evaluate(rank: int, world_size: int, cache: str) -> Any:
    return _train(rank, world_size, cache, "eager", steps=1, evaluates=True)


@pytest.mark.slow
def test_one_rank_is_late(ranks: Ranks, tmp_path: Path) -> None:
    """A waiting rank polls for the others."""
    cache = str(tmp_path / "cache")
    first = ranks(2).run(_train_late, cache)
    assert [each[1] for each in first] == [1, 1]
    assert len(list(Path(cache).glob("*.gscache"))) == 1


def _train_late(rank: int, world_size: int, cache: str) -> Any:
    find = CacheLookup.find

    def late(search: CacheLookup) -> LoweredProgram | None:
        time.sleep(2.0 if rank == 1 else 0.0)
        return find(search)

    with (
        mock.patch.object(CacheLookup, "find", late),
        mock.patch.multiple(peers, _ASKS_EVERY=0.0 if rank == 0 else 600.0, _ASK_A_SECOND=1e9),
    ):
        return _train(rank, world_size, cache, "eager")


def test_one_rank_has_no_cached_program(ranks: Ranks, tmp_path: Path) -> None:
    """All capture, each program: none hangs, and none runs a different program."""
    cache = str(tmp_path / "cache")
    first = ranks(2).run(_train_and_evaluate, cache)
    second = ranks(2).run(_train_without, cache)
    assert [each[1] for each in second] == [2, 2]
    assert _same(first, second)
    assert any("is compiled, although it was found: another rank has not found it" in text for text in second[0][2])


def _train_without(rank: int, world_size: int, cache: str) -> Any:
    return _train(rank, world_size, cache, "eager", without=1, steps=1, evaluates=True)


@pytest.mark.slow
def test_other_numbers_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    ranks(2).run(_train, cache, "eager")
    found = ranks(1).run(_train, cache, "eager")
    assert [each[1] for each in found] == [1]
    assert [each[1] for each in ranks(1).run(_train, cache, "eager")] == [0]
    assert [each[1] for each in ranks(2).run(_train, cache, "eager")] == [0, 0]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Start processes that no other test has changed, like a job's launch, because their state is compared."""
    with RankPool() as pool:
        yield pool.world


@pytest.fixture
def other_processes() -> Iterator[Ranks]:
    with RankPool() as pool:
        yield pool.world


@pytest.mark.slow
def test_another_process_with_inductor(ranks: Ranks, other_processes: Ranks, tmp_path: Path) -> None:
    """Without compilers and without importing Inductor, losses have the same bits."""
    cache = str(tmp_path / "cache")
    first = ranks(2).run(_train, cache, "inductor")
    second = other_processes(2).run(_train_alone, cache)
    assert [each[1] for each in second] == [0, 0]
    assert _same(first, second)


def _train_alone(rank: int, world_size: int, cache: str) -> Any:
    with mock.patch("subprocess.Popen", side_effect=AssertionError("something is compiled")):
        found = _train(rank, world_size, cache, "inductor")
    assert "torch._inductor.compile_fx" not in sys.modules
    assert dist.is_initialized()
    return found


def _meet_lengths(rank: int, world_size: int, cache: str | bool, layers: int, options: dict[str, Any]) -> list[Tensor]:
    """Train the example; the last rank meets another length at the second step, and all of them one more later."""
    llama = load_example("llama")
    torch.manual_seed(0)
    model = llama.Llama(llama.LlamaConfig(layers=layers, dim=16, heads=2, seq=16))
    graphshard.compile(model, init_device_mesh("cpu", (world_size,)), backend="eager", cache=cache, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step, lengths in enumerate([(16, 16), (16, 12), (9, 9), (12, 16)]):
        generator = torch.Generator().manual_seed(10 * step + rank)
        tokens = torch.randint(0, 256, (2, lengths[rank]), generator=generator)
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("case", ["by cost", "equal blocks", "limit", "automatic"])
@pytest.mark.quick_cases("automatic")
def test_a_rank_meets_a_length_alone_after_a_launch_from_the_cache(ranks: Ranks, tmp_path: Path, case: str) -> None:
    """The plan of the program that was found serves it: the others cannot be asked then."""
    layers = 9 if case == "equal blocks" else 2
    options: dict[str, Any] = {"limit": {"memory_limit": 10**8}}.get(case, {})
    if case == "automatic":
        options = {"memory_limit": 10**8, "activation": "auto"}
    expected = ranks(2).run(_meet_lengths, False, layers, options)
    for _ in range(2):
        found = ranks(2).run(_meet_lengths, str(tmp_path / "cache"), layers, options)
        for ours, theirs in zip(found, expected, strict=True):
            assert all(map(torch.equal, ours, theirs))
