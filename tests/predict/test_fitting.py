"""Search for the largest batch and the smallest mesh, with a memory function: results, and numbers of predictions."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from graphshard.predict.answers import Outcome
from graphshard.predict.what_if import largest, smallest

ROOM = 1000.0


def outcome(ranks: int, batch: int, memory: float, state: float = 0.0) -> Outcome:
    zero = dict.fromkeys(("microbatches", "step_tokens"), 1)
    return Outcome(
        mesh={"shard": ranks},
        hardware="h100",
        network="isolated",
        batch=batch,
        **zero,
        step_time_s=1.0,
        tokens_per_second_per_gpu=1.0,
        mfu=0.5,
        exposed_comm_s=0.0,
        peak_memory_bytes=int(memory),
        state_bytes=int(state),
        memory_capacity_bytes=ROOM,
        num_ranks=ranks,
        cost=None,
    )


class Asked:
    """Predicts memory by batch and records the calls."""

    def __init__(self, memory: Callable[[int], float], broken: tuple[int, ...] = ()) -> None:
        self.memory, self.broken = memory, broken
        self.counts: list[int] = []

    def __call__(self, batch: int) -> Outcome | str:
        self.counts.append(batch)
        return "no such inputs" if batch in self.broken else outcome(8, batch, self.memory(batch))


@pytest.mark.parametrize("begin", [1, 2, 7, 12, 40])
@pytest.mark.parametrize("slope", [3, 40, 170, 450])
def test_linear_memory_takes_three_predictions(begin: int, slope: int) -> None:
    """The start, one more point, and the answer."""
    asked = Asked(lambda batch: 100 + slope * batch)
    found = largest("", asked, begin)
    assert found.outcome is not None
    assert found.outcome.batch == 900 // slope
    assert found.why == ""
    assert len(set(asked.counts)) == len(asked.counts) <= 3


def test_nonlinear_memory_is_corrected() -> None:
    """Allocations in blocks: the answer fits, and the next batch does not."""
    asked = Asked(lambda batch: 100 + 30 * batch + 0.4 * batch**2 + 60 * (batch // 16))
    found = largest("", asked, 2)
    assert found.outcome is not None
    assert found.outcome.batch is not None
    assert asked.memory(found.outcome.batch) <= ROOM < asked.memory(found.outcome.batch + 1)
    assert len(asked.counts) <= 6


def test_no_batch_fits() -> None:
    asked = Asked(lambda batch: 1200 + batch)
    found = largest("", asked, 4)
    assert found.outcome is None
    assert found.why == "one sequence for each rank is too large"
    assert len(asked.counts) <= 4


def test_constant_memory_has_no_largest_batch() -> None:
    found = largest("", Asked(lambda batch: 10.0), 1)
    assert found.outcome is not None
    assert found.outcome.batch == 1024
    assert found.why == "more than 1024 were not tried"


def test_names_a_batch_without_prediction() -> None:
    found = largest("", Asked(lambda batch: 100 + 10 * batch, broken=(2,)), 1)
    assert found.outcome is not None
    assert found.outcome.batch == 1
    assert found.why == "batch 2: no such inputs"


def on_ranks(fixed: float, state: float, counts: list[int]) -> Callable[[int], Outcome | str]:
    def at(ranks: int) -> Outcome | str:
        counts.append(ranks)
        return outcome(ranks, 1, fixed + state / ranks, state / ranks)

    return at


@pytest.mark.parametrize(
    ("fixed", "state", "begin", "expected", "predictions"),
    [
        (100, 7000, 64, 8, 2),
        (100, 900, 64, 1, 2),
        (100, 7000, 8, 8, 1),
        (100, 7000, 4, 8, 2),
        (100, 400_000, 8, 512, 2),
        (100, 7000, 24, 12, 2),
        (1100, 7000, 8, None, 1),
    ],
)
def test_the_smallest_mesh(fixed: float, state: float, begin: int, expected: int | None, predictions: int) -> None:
    """Halves the mesh if it fits, doubles it if not."""
    counts: list[int] = []
    found = smallest("", on_ranks(fixed, state, counts), begin)
    assert (found.outcome and found.outcome.num_ranks) == expected
    assert len(counts) == predictions


def test_skips_impossible_meshes() -> None:
    """Inner axes cannot be halved."""
    plain = on_ranks(100, 100, [])
    found = smallest("", lambda ranks: plain(ranks) if ranks >= 16 else "there is no such mesh", 64)
    assert found.outcome is not None
    assert found.outcome.num_ranks == 16
