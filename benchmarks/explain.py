"""Seconds that explain takes for models of Llama-3 shapes on the meta device.

    python benchmarks/explain.py [--shape 405b] [--layers 126] [--ranks 1024] [--seq 8192] [--hardware h100]
        [--every-block] [--one-network] [--grid]

Prints the time of each step (wall clock, and this process's CPU time, which a busy machine inflates less) and the
prediction. With `--grid` it is one table of 24: four settings on three meshes, of two machines.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from graphshard.options.options import Options
from graphshard.predict.study import Study

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import llama

SHAPES = {
    "8b": {"layers": 32, "dim": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336, "vocab": 128256},
    "70b": {"layers": 80, "dim": 8192, "heads": 64, "kv_heads": 8, "hidden": 28672, "vocab": 128256},
    "405b": {"layers": 126, "dim": 16384, "heads": 128, "kv_heads": 8, "hidden": 53248, "vocab": 128256},
}

GRID: dict[str, dict[str, Any]] = {
    "reshard": {},
    "keep": {"reshard_after_forward": False},
    "in the node": {"reshard_after_forward": 8},
    "full": {"activation": "full"},
}


def main() -> None:
    """Time one prediction, and a second one on another machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="405b")
    parser.add_argument("--layers", type=int, help="number of layers (default: the shape's)")
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--every-block", action="store_true", help="capture all blocks, even if they are equal")
    parser.add_argument("--one-network", action="store_true", help="predict only for the isolated network")
    parser.add_argument("--grid", action="store_true", help="print a table of 24 predictions instead")
    args = parser.parse_args()
    sizes = {**SHAPES[args.shape], **({"layers": args.layers} if args.layers else {})}
    with torch.device("meta"):
        model = llama.Llama(llama.LlamaConfig(seq=args.seq, **sizes))
    tokens = torch.zeros(1, args.seq, dtype=torch.long)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    started = last = (time.perf_counter(), time.process_time())
    doing = ""

    def show(text: str) -> None:
        nonlocal last, doing
        now = (time.perf_counter(), time.process_time())
        if doing:
            print(f"{doing:24} {now[0] - last[0]:7.1f} s {now[1] - last[1]:7.1f} s CPU", flush=True)
        last, doing = now, text

    if args.grid:
        grid = graphshard.explain_grid(
            model,
            [(args.ranks // 4,), (args.ranks // 2,), (args.ranks,)],
            example_inputs=(tokens, tokens),
            hardware=["h100", "b200"],
            settings=GRID,
            mp_policy=policy,
            show=show,
        )
        show("")
        last, doing = started, f"{len(grid.rows)} predictions"
        show("")
        print(f"most memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
        print(grid)
        return
    study = Study(model, (tokens, tokens), None, Options(mp_policy=policy), show=show, every_block=args.every_block)
    found = study.explain((args.ranks,), graphshard.profiling.load_profile(args.hardware), "isolated")
    if not args.one_network:
        show("another network")
        study.explain((args.ranks,), graphshard.profiling.load_profile(args.hardware), "in-training")
    show("")
    last, doing = started, f"all of {sizes['layers']} layers"
    show("")
    print(f"most memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
    print(found)


if __name__ == "__main__":
    main()
