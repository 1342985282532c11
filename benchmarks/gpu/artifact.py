"""Part "artifact": load a file that was made without a GPU, train, and compare the losses with `compile`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

import graphshard
from benchmarks.gpu.settings import POLICY, ROOT, Setup, size_in_a_file, stepper, world
from benchmarks.gpu.table import Emit, Row

_STEPS = 5
# The file's kernels are not tuned, so the order of sums may differ; losses come from bf16 products.
_TOLERANCE = 2e-2


def export(setup: Setup, path: Path, capability: tuple[int, int] | None) -> None:
    """Write the file; with a capability, for a GPU that need not exist here."""
    size = size_in_a_file()
    given = {"device": "cpu"} if setup.is_dry else {"device": "cuda", "capability": capability}
    tokens = torch.zeros(2, size.batch, size.config["seq"], dtype=torch.long)
    options = {"mp_policy": POLICY, "backend": setup.backend, "example_inputs": (tokens[0], tokens[1]), **given}
    graphshard.export(size.model("meta"), (1,), path, **options)


def measure(setup: Setup, emit: Emit, folder: Path, given: Path | None) -> None:
    """Load and train next to a compiled twin.

    Args:
        folder: where the file goes if none is given.
    """
    path = given or folder / "llama.gshard"
    row = Row("artifact", str(size_in_a_file()))
    if given is None:
        began = time.perf_counter()
        try:
            _export_without_gpu(setup, path)
        except subprocess.CalledProcessError as error:  # as with torch 2.11; continue with the rest
            note = f"export without a GPU ended with {error.returncode}, see the log; the file is made with the GPU"
            emit(Row("artifact", row.setting, "export", note=note, failed=True))
            export(setup, path, None)
        else:
            size = path.stat().st_size / 2**20
            note = f"export without a GPU took {time.perf_counter() - began:.0f} s, {size:.1f} MiB"
            emit(Row("artifact", row.setting, "export", note=note))
    emit(_compared(setup, path, row))


def _export_without_gpu(setup: Setup, path: Path) -> None:
    major, minor = (0, 0) if setup.is_dry else torch.cuda.get_device_capability()
    command = [sys.executable, "-m", "benchmarks.gpu", "--export", str(path), "--capability", f"{major}.{minor}"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([*command, *(["--dry"] if setup.is_dry else [])], cwd=ROOT, env=environment, check=True)


def _compared(setup: Setup, path: Path, row: Row) -> Row:
    size = size_in_a_file()
    losses, seconds = {}, 0.0
    with world(setup, 1) as mesh:
        for way in ("compile", "load"):
            model = size.model(setup.device)
            began = time.perf_counter()
            if way == "load":
                model = graphshard.load(path, model, mesh)
            else:
                model = graphshard.compile(model, mesh, mp_policy=POLICY, backend=setup.backend)
            step = stepper(model, size.tokens(setup.device), contextlib.nullcontext)
            found = [step().item()]
            seconds = time.perf_counter() - began
            losses[way] = torch.tensor(found + [step().item() for _ in range(_STEPS - 1)])
    return compared(losses["load"], losses["compile"], Row("artifact", row.setting, "load and train", first=seconds))


def compared(ours: torch.Tensor, theirs: torch.Tensor, row: Row) -> Row:
    """Return the row that compares losses that should be equal."""
    difference = ((ours - theirs).abs() / theirs.abs()).max().item()
    note = f"{len(ours)} losses as of compile, bit for bit"
    if not torch.equal(ours, theirs):
        note = f"{len(ours)} losses differ from those of compile by {difference:.1e} at most"
    return Row(**{**vars(row), "note": note, "failed": not difference <= _TOLERANCE})
