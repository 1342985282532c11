"""Seconds to compile the example model, by depth: graphshard by region, and torch.compile of the whole model.

    python benchmarks/compile_time.py [--layers 4 8 16 32] [--dim 256] [--seq 128] [--batch 4] [--json FILE]
    python benchmarks/compile_time.py --stages --layers 4 32 126 [--repeat 5]

Every measurement is a separate process with an empty Inductor cache, so nothing is reused. Both compile forward and
backward. graphshard compiles for a fake world of 8 ranks; torch.compile does no sharding.

`--stages` skips code generation (`backend="eager"`). It prints CPU seconds of a process, which a busy machine inflates
less: by stage with few of the equal blocks captured, and in total with every block (GRAPHSHARD_EVERY_BLOCK=1). "stages"
is the sum of the three columns before it; "all" adds verification and printing between them, sharding, and the rest of
`compile`. Repeated runs are interleaved, and medians are printed.
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
from unittest import mock

EXAMPLES = Path(__file__).parents[1] / "examples"
STAGES = ("capture", "passes", "planning", "lowering")
WAYS = ("few blocks", "every block")


def main() -> None:
    """Measure each depth in new processes and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=1, help="processes per measurement; medians are printed")
    parser.add_argument("--stages", action="store_true", help="CPU seconds by stage, without code generation")
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    parser.add_argument("--measure", choices=("graphshard", "torch.compile", *WAYS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stages:
        print_stages(args)
        return
    if args.measure:
        print(json.dumps(measure(args.measure, args.layers[0], args.dim, args.seq, args.batch)))
        return

    rows = {}
    print(
        f"{'layers':>6} {'capture':>8} {'passes':>8} {'planning':>8} {'lowering':>8} {'total':>8} {'regions':>8}",
        end="",
    )
    print(f" {'distinct':>8}   {'torch.compile':>13}   seconds, everything compiled from nothing")
    for layers in args.layers:
        ours = fresh_process("graphshard", layers, args)
        whole = fresh_process("torch.compile", layers, args)
        rows[layers] = {"graphshard": ours, "torch.compile": whole}
        times = " ".join(f"{ours[stage]:8.1f}" for stage in (*STAGES, "total"))
        print(f"{layers:6} {times} {ours['regions']:8.0f} {ours['distinct']:8.0f}   {whole['total']:13.1f}", flush=True)
    if args.json:
        partial = args.json.with_suffix(".partial")
        partial.write_text(json.dumps(rows, indent=1))
        partial.replace(args.json)


def print_stages(args: argparse.Namespace) -> None:
    """Measure both ways at each depth."""
    columns = ("capture", "passes", "planning", "stages", "lowering", "all", WAYS[1])
    print(f"{'layers':>6}", *(f"{column:>11}" for column in columns), "  CPU seconds of compile(backend='eager')")
    once = argparse.Namespace(**{**vars(args), "repeat": 1})
    runs = [
        (layers, way, fresh_process(way, layers, once))
        for _ in range(args.repeat)
        for layers in args.layers
        for way in WAYS
    ]
    for layers in args.layers:
        of = {way: [found for depth, by, found in runs if (depth, by) == (layers, way)] for way in WAYS}
        seconds = {stage: statistics.median(found[stage] for found in of[WAYS[0]]) for stage in STAGES}
        three = statistics.median(sum(found[stage] for stage in STAGES[:3]) for found in of[WAYS[0]])
        whole = [statistics.median(found["cpu"] for found in of[way]) for way in WAYS]
        row = (*(seconds[stage] for stage in STAGES[:3]), three, seconds["lowering"], *whole)
        print(f"{layers:6}", *(f"{value:11.2f}" for value in row), flush=True)


def fresh_process(what: str, layers: int, args: argparse.Namespace) -> dict[str, float]:
    """Return medians over processes that start with an empty cache."""
    sizes = ["--layers", layers, "--dim", args.dim, "--seq", args.seq, "--batch", args.batch]
    runs = []
    for _ in range(args.repeat):
        with tempfile.TemporaryDirectory() as cache:
            env = {**os.environ, "GRAPHSHARD_CACHE": "off", "TORCHINDUCTOR_CACHE_DIR": cache}
            if what in WAYS:
                env["GRAPHSHARD_EVERY_BLOCK"] = str(WAYS.index(what))
            command = [sys.executable, __file__, "--measure", what, *map(str, sizes)]
            output = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
        runs.append(json.loads(output.splitlines()[-1]))
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def measure(what: str, layers: int, dim: int, seq: int, batch: int) -> dict[str, float]:
    """Compile the example model once in this process."""
    import torch

    sys.path.insert(0, str(EXAMPLES))
    from llama import Llama, LlamaConfig

    torch.manual_seed(0)
    model = Llama(LlamaConfig(layers=layers, dim=dim, heads=max(1, dim // 64), seq=seq))
    tokens = torch.randint(0, 256, (batch, seq))
    if what == "graphshard":
        return measure_graphshard(model, tokens, "inductor")
    if what in WAYS:
        with mock.patch.object(time, "perf_counter", time.process_time):  # stages in CPU seconds
            return measure_graphshard(model, tokens, "eager")
    start = time.perf_counter()
    torch.compile(model, fullgraph=True)(tokens, tokens).backward()
    return {"total": time.perf_counter() - start}


def measure_graphshard(model, tokens, backend: str) -> dict[str, float]:
    """Compile for a fake world of 8 ranks; nothing runs."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import graphshard

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    mesh = init_device_mesh("cpu", (8,))
    start, used = time.perf_counter(), time.process_time()
    graphshard.compile(model, mesh, example_inputs=(tokens, tokens), backend=backend)
    total, used = time.perf_counter() - start, time.process_time() - used
    (program,) = graphshard.programs(model)
    seconds = {stage.name: stage.seconds for stage in program.history}
    capture, planning = seconds["capture"], seconds["plan"]
    passes = sum(seconds.values()) - capture - planning - seconds["lower"]
    dist.destroy_process_group()
    return {
        "capture": capture,
        "passes": passes,
        "planning": planning,
        "lowering": program.lowering_seconds,
        "total": total,
        "cpu": used,
        "regions": program.num_regions,
        "distinct": program.num_distinct_regions,
    }


if __name__ == "__main__":
    main()
