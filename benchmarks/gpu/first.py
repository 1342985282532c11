"""Part "first": seconds of a first step in a separate process, with empty caches and with the caches it filled.

python -m benchmarks.gpu.first VARIANT RANKS [--dry]      the part's subprocess; prints the seconds
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.gpu.settings import ROOT, Setup, world
from benchmarks.gpu.steps import ranks
from benchmarks.gpu.table import Emit, Row
from benchmarks.gpu.variants import variants
from benchmarks.gpu.workers import said

# Variants, and whether they use the caches of the previous process.
_ORDER = (
    ("graphshard", False),
    ("graphshard", True),
    ("FSDP2, compiled blocks", False),
    ("FSDP2, compiled blocks", True),
)
_RANKS = 8


def measure(setup: Setup, emit: Emit, folder: Path, seconds: float) -> None:
    """Run one process after the other.

    Args:
        folder: where their caches go.
        seconds: for all of them.
    """
    end = time.monotonic() + seconds
    for variant, warm in _ORDER:
        row = Row("first", f"{setup.sizes()[0]}, {ranks(_RANKS)}", variant, note="warm caches" if warm else "no caches")
        caches = folder / "caches" / variant.replace(", ", "-").replace(" ", "-")
        if not warm:  # an earlier run may have filled caches in this folder
            shutil.rmtree(caches, ignore_errors=True)
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(caches),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "GRAPHSHARD_CACHE": str(caches / "graphshard"),
        }
        command = [sys.executable, "-m", "benchmarks.gpu.first", variant, str(_RANKS)]
        try:
            done = subprocess.run(
                [*command, *(["--dry"] if setup.is_dry else [])],
                cwd=ROOT,
                env=environment,
                check=True,
                stdout=subprocess.PIPE,
                text=True,
                timeout=max(end - time.monotonic(), 1.0),
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            emit(replace(row, note=f"{row.note}; {said(error)}", failed=True))
            continue
        emit(replace(row, first=float(done.stdout.split()[-1])))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("variant")
    parser.add_argument("ranks", type=int)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    setup = Setup.of(dry=args.dry)
    size = setup.sizes()[0]
    with world(setup, args.ranks) as mesh:
        model, tokens = size.model(setup.device), size.tokens(setup.device)
        finish = contextlib.nullcontext if setup.is_dry else torch.cuda.synchronize
        finish()
        began = time.perf_counter()
        variants(setup)[args.variant](model, mesh, tokens)()
        finish()
        print(time.perf_counter() - began)


if __name__ == "__main__":
    main()
