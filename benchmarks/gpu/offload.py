"""Part "offload": peak memory of steps that offload while the host is far ahead of the GPU, next to the prediction."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy

import graphshard
from benchmarks.gpu.settings import POLICY, Setup, world
from benchmarks.gpu.steps import ranks
from benchmarks.gpu.table import Emit, Row
from benchmarks.gpu.workers import said
from graphshard.passes import OffloadActivations

_RANKS = 8
# A second or half of one, in which the host launches all of a step.
_CYCLES = 10**9
# A peak beyond the prediction by more fails.
_MOST = 1.1


def measure(setup: Setup, emit: Emit) -> None:
    """Measure a step that offloads parameters, and one that also offloads saved values, as rank 0 of eight."""
    size = setup.sizes()[0]
    for what, passes in (
        ("parameters", None),
        ("parameters and saved values", graphshard.Pipeline().insert(OffloadActivations(), before="plan")),
    ):
        row = Row("offload", f"{size}, {ranks(_RANKS)}", f"{what} on the host, the GPU stands still for all launches")
        gc.collect()
        try:
            with world(setup, _RANKS) as mesh:
                options: dict[str, Any] = {} if passes is None else {"passes": passes}
                options["offload_policy"] = CPUOffloadPolicy(pin_memory=not setup.is_dry)
                model = graphshard.compile(size.model("cpu"), mesh, mp_policy=POLICY, backend=setup.backend, **options)
                emit(_peaks(setup, model, size.tokens(setup.device), row))
        except Exception as error:
            emit(replace(row, failed=True, note=said(error)))


def _peaks(setup: Setup, model: Any, tokens: torch.Tensor, row: Row) -> Row:
    found = graphshard.profiling.profile_step(model, (tokens[0], tokens[1])).memory
    predicted = None if found is None or found.predicted is None else int(found.predicted)
    usual = None if found is None else int(found.measured.median)
    if setup.is_dry:
        return replace(row, peak=usual, predicted_peak=predicted, note="a CPU does not stand still; the host's peak")
    peak = 0
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda._sleep(_CYCLES)
        loss = model(tokens[0], tokens[1])
        loss.backward()
        model.zero_grad()
        del loss
        torch.cuda.synchronize()
        peak = int(torch.cuda.memory_stats()["active_bytes.all.peak"])
    return compared(peak, usual, predicted, row)


def compared(peak: int, usual: int | None, predicted: int | None, row: Row) -> Row:
    """Return the row of a peak with the host far ahead, and the peak without."""
    note = "" if usual is None else f"{usual / 2**30:.2f} GiB if the host is not ahead"
    failed = predicted is not None and peak > _MOST * predicted
    return replace(row, peak=peak, predicted_peak=predicted, note=note, failed=failed)
