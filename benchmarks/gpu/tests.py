"""Parts that run tests, and report each as it ends: "nccl", "faults", "tests", "bits" and "checkpoints".

"nccl" comes first and has several ranks of NCCL. On a single GPU it finds out which way NCCL permits that.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections import Counter
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu.settings import ROOT
from benchmarks.gpu.table import Emit, Row
from tests.ranks import ONE_GPU, WAY, RankError, RankPool

# In this order: the longest come last.
FILES = (
    "test_cuda.py",
    "test_offload.py",
    "test_graphs.py",
    "test_two_ranks.py",
    "test_faults.py",
    "test_export.py",
    "test_models.py",
    "test_cache.py",
)
# By part: the file, the tests, and in a dry run the tests of gloo.
OTHERS = {
    "faults": ("test_faults.py", "nccl", "../distributed/test_faults.py", "launched_collectives and killed"),
    "bits": ("test_all_gpus.py", "nccl and bits", "test_all_gpus.py", "on_cpu and bits and bf16"),
    "checkpoints": ("test_all_gpus.py", "nccl and checkpoint", "test_all_gpus.py", "on_cpu and checkpoint"),
}
# Seconds until ranks have started and met.
_LONGEST_START = 60.0


class _Tell:
    """Pytest plugin that turns tests into rows."""

    def __init__(self, emit: Emit, part: str) -> None:
        self.emit, self.part = emit, part
        self.outcomes: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        self.outcomes[report.outcome] += 1
        if report.failed:
            said = str(report.longrepr).strip().splitlines()
            told = next((line for line in reversed(said) if line.startswith("E ")), said[-1] if said else "")
            self.emit(Row(self.part, variant=report.nodeid, failed=True, note=told.removeprefix("E").strip()[:300]))


def measure_nccl(emit: Emit, *, dry: bool) -> None:
    """Join two ranks by NCCL, then run the tests that have several; in a dry run, join them by gloo."""
    backend = "gloo" if dry else "nccl"
    several = dry or torch.cuda.device_count() > 1
    failed = []
    for way in ("",) if several else ONE_GPU:
        os.environ[WAY] = way
        try:
            with RankPool() as pool:
                found = pool.world(2, backend).run(_sum, backend, timeout=_LONGEST_START)
        except RankError as error:
            failed.append(f"{way or backend}: {str(error).splitlines()[0]}")
            continue
        assert found == [3, 3], found
        versions = [f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"] if not dry else []
        where = f"on one GPU by {way}" if way else "on a device each" if not dry else "on a CPU"
        emit(Row("nccl", "2 ranks", f"{backend} {where}", note="; ".join([*versions, *failed])))
        break
    else:
        emit(Row("nccl", "2 ranks", backend, failed=True, note="; ".join(failed)))
        return
    if not dry:
        _run("nccl", emit, ["-m", "gpu", "-k", "nccl", str(ROOT / "tests/gpu/test_two_ranks.py")])


def _sum(rank: int, world_size: int, backend: str) -> int:
    total = torch.tensor(rank + 1, device="cpu" if backend == "gloo" else "cuda")
    dist.all_reduce(total)
    return int(total)


def way_of(rows: Iterable[Row]) -> str:
    """Return the way to several ranks on one GPU that part "nccl" has found; "" if it has not."""
    return next((way for row in rows for way in ONE_GPU if row.variant.endswith(f" by {way}")), "")


def measure_others(part: str, emit: Emit, *, dry: bool) -> None:
    """Run the tests of a part of `OTHERS`."""
    file, chosen, dry_file, on_cpu = OTHERS[part]
    where = (ROOT / "tests/gpu" / (dry_file if dry else file)).resolve()
    _run(part, emit, ["-k", on_cpu if dry else chosen, str(where)])


def measure(emit: Emit, *, dry: bool) -> None:
    """Run the other tests that need a GPU; in a dry run, run them on a CPU if possible."""
    chosen = ["-k", "on_cpu"] if dry else ["-m", "gpu", "-k", "not nccl"]
    _run("tests", emit, [*chosen, *(str(ROOT / "tests/gpu" / name) for name in FILES)])


def _run(part: str, emit: Emit, chosen: list[str]) -> None:
    """Run chosen tests.

    The project's pytest options are omitted: their plugins may be missing, and with other versions a warning is not an
    error.
    """
    tell = _Tell(emit, part)
    options = ["-o", "addopts=", "-W", "default", "-p", "no:cacheprovider", "-v", "--tb=short"]
    options.append("--continue-on-collection-errors")
    workers = min(4, (os.cpu_count() or 1) // 4) if part == "tests" else 1
    if workers > 1 and importlib.util.find_spec("xdist"):  # tests share the GPU; most of their time is host time
        options += ["-n", str(workers), "--dist", "loadgroup"]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # over its share: pytest stops, and reports its results
    status = pytest.main([*options, *chosen], plugins=[tell])
    found = ", ".join(f"{number} {outcome}" for outcome, number in sorted(tell.outcomes.items()))
    ended = status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    note = found or "no tests ran"
    emit(Row(part, variant="all", failed=not ended, note=note if ended else f"{note}; pytest: {status}"))
