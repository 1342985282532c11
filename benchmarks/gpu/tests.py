"""Part "tests": run `tests/gpu` and report each test as it ends."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections import Counter

import pytest

from benchmarks.gpu.settings import ROOT
from benchmarks.gpu.table import Emit, Row

# In this order: the longest come last.
FILES = (
    "test_cuda.py",
    "test_offload.py",
    "test_graphs.py",
    "test_two_ranks.py",
    "test_export.py",
    "test_models.py",
    "test_cache.py",
)


class _Tell:
    """Pytest plugin that turns tests into rows."""

    def __init__(self, emit: Emit) -> None:
        self.emit = emit
        self.outcomes: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        self.outcomes[report.outcome] += 1
        if report.failed:
            said = str(report.longrepr).strip().splitlines()
            told = next((line for line in reversed(said) if line.startswith("E ")), said[-1] if said else "")
            self.emit(Row("tests", variant=report.nodeid, failed=True, note=told.removeprefix("E").strip()[:300]))


def measure(emit: Emit, *, dry: bool) -> None:
    """Run the tests that need a GPU; in a dry run, run them on a CPU if possible.

    The project's pytest options are omitted: their plugins may be missing, and with other versions a warning is not an
    error.
    """
    tell = _Tell(emit)
    chosen = ["-k", "on_cpu"] if dry else ["-m", "gpu"]
    options = ["-o", "addopts=", "-W", "default", "-p", "no:cacheprovider", "-v", "--tb=short"]
    options.append("--continue-on-collection-errors")
    workers = min(4, (os.cpu_count() or 1) // 4)
    if workers > 1 and importlib.util.find_spec("xdist"):  # tests share the GPU; most of their time is host time
        options += ["-n", str(workers), "--dist", "loadgroup"]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # over its share: pytest stops, and reports its results
    files = [str(ROOT / "tests/gpu" / name) for name in FILES]
    status = pytest.main([*options, *chosen, *files], plugins=[tell])
    found = ", ".join(f"{number} {outcome}" for outcome, number in sorted(tell.outcomes.items()))
    ended = status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    note = found or "no tests ran"
    emit(Row("tests", variant="all", failed=not ended, note=note if ended else f"{note}; pytest: {status}"))
