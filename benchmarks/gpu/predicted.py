"""Part "predicted": `graphshard calibrate`, then predictions with its profile next to measurements."""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace
from pathlib import Path

import graphshard
from benchmarks.gpu.settings import POLICY, WORLDS, Setup, Size, world
from benchmarks.gpu.steps import ranks
from benchmarks.gpu.table import Emit, Row
from benchmarks.gpu.workers import said
from graphshard.cli.main import main as command
from graphshard.predict.step_profile import StepProfile, Timing

# Number of regions per size in the table, the longest first.
_REGIONS = 12


def measure(setup: Setup, emit: Emit, folder: Path) -> None:
    """Calibrate, then measure a step of each size on one rank, and as a rank of eight, which has regions per unit.

    Args:
        folder: for the profile, and a trace and a table per size.
    """
    profile = folder / "profile.json"
    print("graphshard calibrate", flush=True)
    status = command(["calibrate", "--out", str(profile), "--device", setup.device, "--ranks", "1"])
    emit(Row("predicted", variant="graphshard calibrate", failed=status != 0, note=profile.name))
    for size, num_ranks in itertools.product(setup.sizes(), WORLDS[:2]):
        row = Row("predicted", f"{size}, {ranks(num_ranks)}")
        print(row.setting, flush=True)
        try:
            found = _step(setup, size, profile, num_ranks)
        except Exception as error:
            emit(replace(row, failed=True, note=said(error)))
            continue
        (folder / f"step_{size.name}_of_{num_ranks}.txt").write_text(f"{found}\n", "utf-8")
        found.save_trace(folder / f"step_{size.name}_of_{num_ranks}.json")
        for part in rows_of(found, row):
            emit(part)


def _step(setup: Setup, size: Size, profile: Path, num_ranks: int) -> StepProfile:
    gc.collect()
    with world(setup, num_ranks) as mesh:
        model = size.model(setup.device)
        model = graphshard.compile(model, mesh, mp_policy=POLICY, backend=setup.backend, hardware=str(profile))
        tokens = size.tokens(setup.device)
        return graphshard.profiling.profile_step(model, (tokens[0], tokens[1]))


def rows_of(found: StepProfile, row: Row, regions: int = _REGIONS) -> list[Row]:
    """Return rows for the step, its parts, and its longest regions."""
    memory = found.memory
    step = replace(
        timing_row(found.step, row, "step without the optimizer"),
        peak=None if memory is None else int(memory.measured.median),
        predicted_peak=None if memory is None or memory.predicted is None else int(memory.predicted),
    )
    parts = ((found.compute, "all regions"), (found.exposed, "exposed communication"), (found.other, "the rest"))
    rows = [step, *(timing_row(timing, row, name) for timing, name in parts)]
    longest = [timing_row(t, row, f"{t.name}, {t.phase}") for t in found.regions[:regions]]
    return rows + [replace(r, note=f"{t.calls} calls; {t.where}") for r, t in zip(longest, found.regions)]


def timing_row(timing: Timing, row: Row, what: str) -> Row:
    """Return the row of one measured and predicted time."""
    return replace(row, variant=what, step=timing.measured.median, predicted=timing.predicted)
