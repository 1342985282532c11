"""One rank fails, differs or dies, on real processes: the errors of all ranks, and after how many seconds.

`docs/explanation/reliability.md` has the measured times. The bound here allows for a busy machine; without detection,
survivors would wait for ten minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

import pytest

from tests.distributed.faulty import ODD, RANKS

pytestmark = pytest.mark.slow

MOST_SECONDS = 120.0
OTHERS = [rank for rank in range(RANKS) if rank != ODD]


@dataclass(frozen=True)
class End:
    """A rank's final error; `error` is "" if its script reached its end."""

    error: str
    message: str
    seconds: float
    aborted: bool = False
    lines: tuple[tuple[float, str], ...] = ()


def ends(case: str) -> dict[int, End]:
    """Run a case and return how each rank ended; killed ranks are missing."""
    command = [sys.executable, "-m", "tests.distributed.faulty", case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = {row.pop("rank"): End(**{name: row[name] for name in row.keys() - {"case"}}) for row in rows}
    assert set(found) >= set(OTHERS), done.stderr[-5000:]
    return found


def assert_all_say(found: dict[int, End], error: str, *parts: str, but: tuple[int, ...] = ()) -> None:
    for rank, end in found.items():
        if rank not in but:
            assert end.error == error, found
            assert all(part in end.message for part in parts), end.message
            assert end.seconds < MOST_SECONDS


@pytest.mark.parametrize("case", ["capture_error", "caught_capture_error", "capture_error:steps"])
def test_capture_error(case: str) -> None:
    """The other ranks report rank 1's error and line, whether its process ends or not."""
    found = ends(case)
    assert_all_say(
        found,
        "PeerError",
        "rank 1 makes a program of Net (first call) and failed: GraphBreak: graphshard cannot capture Net.forward at",
        "if self.branches and x.sum() > 0:",
        but=(ODD,),
    )


def test_pass_error() -> None:
    assert_all_say(ends("pass_error"), "PeerError", "rank 1 ", "PassError: broken: this pass is broken", but=(ODD,))


def test_another_width() -> None:
    """Nothing was launched, and the error does not mention memory."""
    assert_all_say(
        ends("another_width"),
        "DivergenceError",
        "they first differ at parameter layers.0.weight:",
        "rank 1: f32[256, 4] in 3 shards along dim 0",
        ": f32[8, 4] in 3 shards along dim 0",
    )


@pytest.mark.parametrize("case", ["requires_grad", "requires_grad:steps"])
def test_requires_grad(case: str) -> None:
    """Rank 1 compiles a new program; the others are in a collective of the old one."""
    assert_all_say(
        ends(case),
        "DivergenceError",
        "ranks do not run the same in step 5: ",
        "rank 1 makes a program of Net (dtype or requires_grad of a parameter changed)",
        "runs forward of Net (gather: 2)",
    )


def test_accumulation() -> None:
    assert_all_say(
        ends("accumulation"),
        "DivergenceError",
        "ranks do not run the same in step 6: ",
        "rank 1 makes a program of Net (gradients through outputs 0 and microbatches)",
        "runs backward of Net",
    )


@pytest.mark.parametrize("case", ["known_accumulation", "known_accumulation:steps"])
def test_accumulation_with_known_programs(case: str) -> None:
    """No rank compiles a program; with steps compared, the error also names the first different collective."""
    found = ends(case)
    expected = ["step 14", "rank 1 runs backward of Net (gather: 1)", "runs backward of Net (gather: 1, reduce: 2)"]
    if case.endswith("steps"):
        expected.append("They first differ at collective 1: ")
    assert_all_say(found, "DivergenceError", *expected)


def test_gathered_ahead() -> None:
    """Rank 1's gathers would match gathers of other parameters."""
    found = ends("gathered_ahead:steps")
    expected = ("step 9: ", "rank 1 runs forward of Net (gather: 2)", ", beginning with what was gathered ahead")
    assert_all_say(found, "DivergenceError", *expected)


@pytest.mark.parametrize("case", ["extra_call", "extra_call:steps"])
def test_extra_call(case: str) -> None:
    found = ends(case)
    assert_all_say(found, "PeerError", " has ended, after 8 steps. Rank 1 runs forward of Net", "in step 9", but=(0, 2))
    assert {found[rank].error for rank in OTHERS} == {""}


def test_extra_call_while_the_others_live() -> None:
    """They might still call; with steps compared the ranks wait four seconds."""
    found = ends("extra_call_of_many:steps")
    assert_all_say(
        found,
        "PeerError",
        "rank 1 runs forward of Net (gather: 2) and has waited 4 s for rank 2: rank 2 is in the user's program at",
        "faulty.py",
        "after 4 steps",
        but=(0, 2),
    )


@pytest.mark.parametrize("case", ["ends_early", "ends_early:steps"])
def test_ends_early(case: str) -> None:
    found = ends(case)
    assert_all_say(found, "PeerError", "rank 1 has ended, after 4 steps. Rank ", "in step 5", but=(ODD,))


def test_error_of_the_user() -> None:
    found = ends("users_error")
    assert_all_say(found, "PeerError", "rank 1 has ended with ValueError: a bad batch, after 4 steps.", but=(ODD,))


@pytest.mark.parametrize("case", ["killed", "killed_before_a_new_program", "killed:steps"])
def test_killed(case: str) -> None:
    """Gloo notices in a collective; in a rendezvous the thread that watches the process notices."""
    assert_all_say(ends(case), "PeerError", "rank 1 has died without a word; ", but=(ODD,))


def test_never_compiles() -> None:
    """The other ranks know only the connection of a rank that has never called compile."""
    assert_all_say(ends("never_compiles"), "PeerError", "rank 1 has ended. Rank ", "makes a program of Net", but=(ODD,))


# --- collectives that run after the host has launched them -----------------------------------------------------------

# By case: the finding, and the error that the others raise where the host waits.
LAUNCHED = {
    "killed": ("rank 1 has died without a word", "PeerError"),
    "ends_early": ("rank 1 has ended, after 4 steps.", "PeerError"),
    "users_error": ("rank 1 has ended with ValueError: a bad batch, after 4 steps.", "PeerError"),
    "out_of_memory": ("rank 1 has ended with OutOfMemoryError: CUDA out of memory, after 4 steps.", "PeerError"),
    "known_accumulation": ("ranks do not run the same in step 14: rank ", "DivergenceError"),
}


def check_launched(case: str, how: str) -> None:
    """Check that an error line names rank, step and collective, and that the host raises where it waits."""
    text, error = LAUNCHED[case]
    for rank, end in ends(f"{case}:{how}").items():
        if rank == ODD:
            continue
        assert end.error == error
        assert text in end.message
        (seconds, line), *_ = end.lines
        assert text in line
        assert f"Rank {rank} runs forward of Net (gather: 2), in step " in line
        assert seconds < MOST_SECONDS
        assert end.aborted or how == "nccl"


def check_standing_still(how: str) -> None:
    """Check that a rank that may go on is named, and that nothing is aborted until it has ended."""
    found = ends(f"stands_still:{how}")
    (seconds, line), *_ = found[0].lines
    assert 3.5 < seconds < 8  # 4 s after the step has begun, and a busy machine
    assert "rank 0 runs forward of Net (gather: 2) in step 5 and has waited 4 s for rank 1: rank 1 is in the" in line
    assert "faulty.py" in line
    assert {found[rank].error for rank in OTHERS} == {"PeerError"}


@pytest.mark.parametrize("case", LAUNCHED)
def test_launched_collectives_are_aborted(case: str) -> None:
    check_launched(case, "launching")


def test_a_rank_that_stands_still_is_named() -> None:
    check_standing_still("launching")


def test_a_group_that_cannot_be_aborted() -> None:
    found = ends("cannot_abort:launching")
    for rank in OTHERS:
        assert found[rank].error == "PeerError"
        assert "process group 0 (launching) cannot be aborted: no such call. End the job." in found[rank].lines[-1][1]
