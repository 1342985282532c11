"""Parts for several GPUs: "collectives", each predicted and measured, and "llama", Llama 8B next to FSDP2.

python -m benchmarks.gpu.many PROFILE [--dry]      one rank of "collectives"; prints rows of rank 0
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from benchmarks.gpu.predicted import rows_of, timing_row
from benchmarks.gpu.settings import POLICY, ROOT, Setup, Size, llama
from benchmarks.gpu.table import Emit, Row
from graphshard.cli._bench_command import run_ranks

# Of a dry run, on a CPU.
_DRY_RANKS = 2
_COLLECTIVES = 12


def measure_collectives(setup: Setup, emit: Emit, folder: Path) -> None:
    """Calibrate all ranks, and measure a step of the widest size with that profile."""
    number = _ranks(setup)
    profile = folder / "profile_of_all.json"
    row = Row("collectives", f"{number} ranks")
    command = ["-m", "graphshard", "calibrate", "--out", str(profile), "--device", setup.device, "--ranks", str(number)]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, check=False)
    emit(replace(row, variant="graphshard calibrate", failed=done.returncode != 0, note=profile.name))
    if done.returncode:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(number)}
    common |= {"LOCAL_WORLD_SIZE": str(number), "OMP_NUM_THREADS": "1"}
    of_ranks = {rank: {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number)}
    dry = ["--dry"] if setup.is_dry else []
    found = run_ranks(["-m", "benchmarks.gpu.many", str(profile), *dry], of_ranks)
    for each in found:
        if "error" in each:
            emit(replace(row, failed=True, note=each["error"]))
    for each in found[0].get("rows", ()):
        emit(Row(**each))


def _ranks(setup: Setup) -> int:
    return _DRY_RANKS if setup.is_dry else torch.cuda.device_count()


def main() -> None:
    """Profile a step as one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("profile")
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    setup = Setup.of(dry=args.dry)
    if not setup.is_dry:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if setup.is_dry else "nccl")
    mesh = init_device_mesh(setup.device, (dist.get_world_size(),))
    size = setup.sizes()[-1]
    model = graphshard.compile(
        size.model(setup.device), mesh, mp_policy=POLICY, backend=setup.backend, hardware=args.profile
    )
    tokens = size.tokens(setup.device, seed=dist.get_rank())
    found = graphshard.profiling.profile_step(model, (tokens[0], tokens[1]))
    row = Row("collectives", f"{size}, {mesh.size()} ranks")
    rows = rows_of(found, row, regions=0)
    for title, timings in (("in flight at most", found.collectives), ("waited for", found.waits)):
        rows += [timing_row(t, row, f"{t.name}, {t.phase}, {title}") for t in timings[:_COLLECTIVES]]
    print(json.dumps({"rows": [asdict(each) for each in rows]}), flush=True)
    dist.destroy_process_group()


def measure_llama(setup: Setup, emit: Emit, folder: Path) -> None:
    """Run `graphshard bench` on Llama 8B with 32 blocks; in a dry run, on a tiny one."""
    path = folder / "llama.bench.json"
    options = ["--param-dtype", "bfloat16", "--reduce-dtype", "float32", "--also", "compile-step", "--json", str(path)]
    options += ["--device", setup.device, "--backend", setup.backend, "--ranks", str(_ranks(setup))]
    options += ["--steps", "2", "--no-first"] if setup.is_dry else ["--steps", "15"]
    made = f"benchmarks.gpu.many:{'tiny' if setup.is_dry else 'llama_8b'}"
    path.unlink(missing_ok=True)
    subprocess.run([sys.executable, "-m", "graphshard", "bench", made, *options], cwd=ROOT, check=False)
    if not path.exists():
        emit(Row("llama", made, failed=True, note="graphshard bench has no table, see the log"))
        return
    found = json.loads(path.read_text("utf-8"))
    for name, row in found["rows"].items():
        emit(bench_row(name, row, f"{made.partition(':')[2]}, {found['ranks']} ranks"))


def bench_row(name: str, found: dict[str, Any], setting: str) -> Row:
    """Return a row of `graphshard bench`."""
    if found["error"]:
        return Row("llama", setting, name, failed=True, note=found["error"])
    told = [f"{found['tokens_per_s']:,.0f} tokens/s"]
    if found["exposed_s"] is not None:
        told.append(f"{found['exposed_s'] * 1e3:.1f} ms exposed")
    if found["losses_differ_by"] is not None:
        told.append(f"losses differ from FSDP2's by {found['losses_differ_by']:.1e} at most")
    numbers = {"step": found["step_s"], "peak": found["peak_bytes"], "first": found["first_step_s"]}
    return Row("llama", setting, name, note=", ".join(told), **numbers)


def llama_8b() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return Llama 3 8B, and a batch of one sequence of this rank."""
    large = torch.cuda.get_device_properties(0).total_memory > 100 * 2**30
    wide = {"dim": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336}
    return _made(Size("8B", 1, {"layers": 32, **wide, "seq": 4096 if large else 2048, "vocab": 128256}))


def tiny() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return a model of a dry run."""
    return _made(Size("tiny", 2, {"layers": 2, "dim": 16, "heads": 2, "hidden": 32, "seq": 16, "vocab": 64}))


def _made(size: Size) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    tokens = size.tokens("cpu", seed=int(os.environ.get("RANK", "0")))
    device = torch.get_default_device()
    return llama.Llama(llama.LlamaConfig(**size.config)), tuple(tokens.to(device).unbind())


if __name__ == "__main__":
    main()
