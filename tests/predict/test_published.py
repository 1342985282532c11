"""Published steps, rebuilt and predicted; the constants fitted to them, and the order of variants."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.published import FREE, Case, case_of, fit, left_out, machine, orders
from benchmarks.published_steps import ROWS
from graphshard.cost.flops import Gemm
from graphshard.cost.kernels import Work
from graphshard.schedule.clock import Launch, TimedCall, TimedWait

LARGE = Gemm(1, 8192, 8192, 8192)
REGION = (
    Work("matmul", LARGE.flop, 0, 3 * 2 * 8192**2, "bfloat16", (LARGE,)),
    Work("pointwise", 0, 10**8, 10**9, "bfloat16"),
)


def case(row, matmuls: int, moves: int, seconds: float | None = None) -> Case:
    """Build a step of some matmuls and copies after one gather, with a measured time."""
    events = (
        Launch("gather", "forward", 0, None, "gather", "node", 10**8, 0.0),
        TimedWait("gather", "forward", 0, None, 0),
        TimedCall("region", "forward", 0, None, "", 0.0, True),
    )
    kernels = {"region": (REGION[0],) * matmuls + (REGION[1],) * moves}
    return Case(row if seconds is None else replace(row, seconds=seconds), kernels, events, {0: 1}, 10**8, 1.0)


def row_of(source: str, machine_name: str = "a100"):
    """Build a row of a source, in eager mode on one node."""
    return replace(ROWS[0], source=source, machine=machine_name, ranks=8)


def test_rows_are_plausible():
    """Each row is unique, on a known machine; its seconds cover the tokens of a step."""
    assert len(set(ROWS)) == len(ROWS) == 35
    assert all(machine(row.machine).units for row in ROWS)
    assert all(0.4 < row.seconds < 200 for row in ROWS)
    assert len({row.source for row in ROWS}) == 6


def test_fsdps_copies_are_counted():
    """FSDP copies gathered parameters out of a buffer on the compute stream; XLA does not."""
    eager, xla = (case(replace(row_of("x"), backend=b), 1, 0).seconds(machine("a100")) for b in ("eager", "xla"))
    assert eager > xla + 2 * 10**8 / machine("a100").memory_bandwidth


def test_fit_finds_a_constant():
    """The fit recovers a lower limit from steps generated with it, between the limit and the prior."""
    truth = {free.name: free.prior for free in FREE}
    name = FREE[0].name
    truth[name] *= 0.9
    cases = [case(row_of("x"), n, m) for n, m in ((100, 1), (50, 50), (1, 100))]
    measured = [
        case(c.row, n, m, float(c.seconds(machine("a100", truth))))
        for c, (n, m) in zip(cases, ((100, 1), (50, 50), (1, 100)))
    ]
    found = fit(measured)
    assert found[name] == pytest.approx(truth[name], rel=0.03)
    assert found["straggler"] == pytest.approx(truth["straggler"]), "which one node says nothing about"


def test_a_left_out_source_does_not_affect_the_fit():
    """The prediction for it does not depend on its measurement."""
    other = case(row_of("other"), 50, 50, 0.3)
    found = [left_out([other, case(row_of("odd"), 50, 50, seconds)]) for seconds in (0.3, 3.0)]
    odd = [next(value for row, value in each.items() if row.source == "odd") for each in found]
    rest = [next(value for row, value in each.items() if row.source == "other") for each in found]
    assert odd[0] == pytest.approx(odd[1])
    assert rest[0] != pytest.approx(rest[1])


def test_order_of_variants():
    """Only within one setup, and only if the measurements differ."""
    one = replace(ROWS[0], seconds=1.0)
    slower, same = replace(one, seconds=1.5, backend="compiled"), replace(one, seconds=1.01, checkpointing="full")
    elsewhere = replace(one, seconds=2.0, seq=1)
    found = list(orders({one: 1.0, slower: 0.9, same: 1.0, elsewhere: 0.1}))
    assert [(a.seconds, b.seconds, right) for a, b, right in found] == [(1.0, 1.5, False), (1.01, 1.5, False)]


def test_arrays_of_factors():
    """Predictions for several factors at once equal separate ones."""
    step = case(row_of("x"), 10, 10)
    factors = np.array([0.9, 1.0, 1.1])
    together = step.seconds(machine("a100", {"memory bandwidth": factors}))
    alone = [float(step.seconds(machine("a100", {"memory bandwidth": float(f)}))) for f in factors]
    assert together.tolist() == pytest.approx(alone)


@pytest.mark.parametrize(
    ("source", "model", "ranks", "error"),
    [
        ("KempnerForge", "llama3-8b", 1, 0.039),
        ("torchtitan A100", "llama3-8b", 64, 0.006),
        ("llm-foundry H100", "mpt-7b", 128, -0.088),
    ],
)
@pytest.mark.slow
def test_published_steps(source, model, ranks, error):
    """Llama-3 8B, compiled on one H200 and eager on 64 A100, and MPT-7B, which copies tokens other than padding.

    The errors equal those when the constants were fitted.
    """
    (row,) = (r for r in ROWS if (r.source, r.model, r.ranks) == (source, model, ranks))
    found = float(case_of(row).seconds(machine(row.machine)))
    assert found / row.seconds - 1 == pytest.approx(error, abs=0.005)
