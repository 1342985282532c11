"""Seconds from a model to the end of its first training step: compiled in process, and loaded from an exported file.

    python -m benchmarks.startup [--layers 2 8] [--backend inductor eager] [--without-export]

One rank, in a new process each time. "cached" finds Inductor's kernels of an earlier run in its cache, and "kept" the
program of an earlier launch in graphshard's; they are interleaved. "written" is the launch that fills graphshard's
cache: it writes the program, and finds Inductor's kernels. Importing torch and graphshard and creating the model are
excluded.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def main() -> None:
    args = _parse_args()
    if args.child:
        print(json.dumps(_child(args)))
        return
    print(f"{'layers':>6} {'backend':>8} {'export':>8} {'compile':>8} {'cached':>8} {'written':>8}", end="")
    print(f" {'kept':>8} {'load':>8}")
    for layers in args.layers:
        for backend in args.backend:
            _measure(layers, backend, args.repeats, export=not args.without_export)


def _measure(layers: int, backend: str, repeats: int, *, export: bool) -> None:
    nan = float("nan")
    with tempfile.TemporaryDirectory() as directory:
        common = ["--layers", str(layers), "--backend", backend, "--file", f"{directory}/llama.gshard"]
        kernels, kept = f"{directory}/compile", f"{directory}/kept"
        exported = _run("export", common, f"{directory}/export") if export else nan
        compiled = _run("compile", common, kernels)
        written = _run("compile", common, kernels, kept)
        turns: dict[str, list[float]] = {"cached": [], "kept": [], "load": [nan]}
        for _ in range(repeats):
            turns["cached"].append(_run("compile", common, kernels))
            turns["kept"].append(_run("compile", common, f"{directory}/none", kept))
            if export:
                turns["load"].append(_run("load", common, f"{directory}/load"))
    cached, found = (statistics.median(turns[name]) for name in ("cached", "kept"))
    loaded = statistics.median(turns["load"][1:] or [nan])
    numbers = f"{exported:8.1f} {compiled:8.1f} {cached:8.2f} {written:8.2f} {found:8.2f} {loaded:8.2f}"
    print(f"{layers:6} {backend:>8} {numbers}", flush=True)


def _run(what: str, common: list[str], cache: str, kept: str = "off") -> float:
    environment = {
        **os.environ,
        "GRAPHSHARD_CACHE": kept,
        "TORCHINDUCTOR_CACHE_DIR": cache,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}",
    }
    command = [sys.executable, "-m", "benchmarks.startup", "--child", what, *common]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def _child(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from llama import Llama, LlamaConfig
    from torch.distributed.device_mesh import init_device_mesh

    import graphshard

    (layers,), (backend,) = args.layers, args.backend
    config = LlamaConfig(layers=layers, dim=64, heads=2, seq=32)
    tokens = torch.randint(0, 256, (2, 32))
    if args.child == "export":
        with torch.device("meta"):
            model = Llama(config)
        start = time.perf_counter()
        graphshard.export(model, (1,), args.file, example_inputs=(tokens, tokens), backend=backend, device="cpu")
        return {"seconds": time.perf_counter() - start}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    model = Llama(config)
    _ = graphshard.compile, graphshard.load  # imports their dependencies
    start = time.perf_counter()
    if args.child == "load":
        graphshard.load(args.file, model, mesh)
    else:
        graphshard.compile(model, mesh, backend=backend)
    model(tokens, tokens).backward()
    return {"seconds": time.perf_counter() - start}


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--backend", nargs="+", default=["eager", "inductor"], choices=["eager", "inductor"])
    parser.add_argument("--repeats", type=int, default=3, help="number of runs, of which the median is printed")
    parser.add_argument("--without-export", action="store_true", help="skip export and load")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
