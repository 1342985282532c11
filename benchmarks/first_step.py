"""Seconds from a model to the end of its first training step on gloo ranks, with cold and with warm caches.

    python -m benchmarks.first_step [--layers 4] [--variants graphshard fsdp2-blocks] [--repeats 1] [--json FILE]

"cold" starts with empty caches, without kernels, precompiled headers or Inductor's probes of the CPU. "warm" runs the
same again in new processes. Variants are interleaved, so that the load of a shared machine affects all alike. Importing
torch and graphshard, creating the model and joining the process group are excluded. "seconds" is the time of the slower
rank, "CPU s" user and system time of all processes, including compilers and imports.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphshard.cli import _bench_command

ROOT = Path(__file__).parents[1]
VARIANTS = ("graphshard", "fsdp2-blocks", "fsdp2")
PHASES = ("compile", "capture", "passes", "lower", "rest")


def main() -> None:
    """Measure all variants interleaved and print one table."""
    args = _parse_args()
    if args.child:
        print(json.dumps(_child(args)))
        return
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _ in range(args.repeats):
        for variant in args.variants:
            with tempfile.TemporaryDirectory() as folder:
                for caches in ("cold", "warm")[: 1 if args.without_warm else 2]:
                    rows.setdefault((variant, caches), []).append(_ranks(variant, args, Path(folder)))
    phases = "".join(f"{phase:>9}" for phase in PHASES)
    print(f"{'':14}{'caches':>7}{'seconds':>9}{'CPU s':>8}{phases}{'compiled':>10}")
    for (variant, caches), runs in rows.items():
        found = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        numbers = "".join(f"{found[phase]:9.2f}" for phase in PHASES)
        print(f"{variant:14}{caches:>7}{found['seconds']:9.2f}{found['cpu']:8.1f}{numbers}{found['compiled']:10.0f}")
    if args.json:
        args.json.write_text(json.dumps([[*key, runs] for key, runs in rows.items()], indent=1))


def _ranks(variant: str, args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Measure one launch: seconds of the slower rank and of its phases, and CPU seconds of all processes."""
    before = _cpu_seconds()
    command = ["-m", "benchmarks.first_step", "--child", variant]
    for name in ("ranks", "layers", "dim", "batch", "seq"):
        command += [f"--{name}", str(getattr(args, name))]
    environment = {
        "GRAPHSHARD_CACHE": "off",
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // args.ranks)),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")]),
    }
    found = run_ranks(command, args.ranks, folder, environment)
    slower = max(found, key=lambda one: one["seconds"])
    return {**slower, "compiled": sum(one["compiled"] for one in found), "cpu": _cpu_seconds() - before}


def run_ranks(command: Sequence[str], ranks: int, folder: Path, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Run Python with arguments and a new `--store` as each of local ranks; return what each prints as its last line.

    Caches of Inductor and of compilers are in the folder.
    """
    given = {
        **os.environ,
        "TMPDIR": str(folder),  # precompiled headers are here, regardless of TORCHINDUCTOR_CACHE_DIR
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "LOCAL_WORLD_SIZE": str(ranks),
        "WORLD_SIZE": str(ranks),
        **environment,
    }
    store = folder / f"store-{time.monotonic_ns()}"
    command = [*command, "--store", str(store)]
    of_ranks = {rank: {**given, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)}
    found = _bench_command.run_ranks(command, of_ranks)
    if errors := [each["error"] for each in found if "error" in each]:
        raise SystemExit(f"{' '.join(command)}: {errors[0]}")
    return found


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _child(args: argparse.Namespace) -> dict[str, float]:
    """Run one rank, timed from `compile`, or `fully_shard`, to the end of the first step."""
    import torch
    import torch.distributed as dist
    from llama import Llama, LlamaConfig
    from torch.distributed.device_mesh import init_device_mesh

    import graphshard

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{args.store}", rank=rank, world_size=args.ranks)
    mesh = init_device_mesh("cpu", (args.ranks,))
    torch.manual_seed(0)
    model = Llama(LlamaConfig(layers=args.layers, dim=args.dim, seq=args.seq))
    torch.manual_seed(rank)
    tokens = torch.randint(256, (args.batch, args.seq))
    _ = graphshard.compile  # imports its dependencies
    dist.barrier()
    start = time.perf_counter()
    if args.child == "graphshard":
        graphshard.compile(model, mesh)
    else:
        _bench_command.with_fsdp2(model, mesh, compiled="blocks" if args.child == "fsdp2-blocks" else "")
    compiled = time.perf_counter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    _bench_command.stepper(model, optimizer)(tokens, tokens).item()
    seconds = time.perf_counter() - start
    phases = dict.fromkeys(PHASES, 0.0) | {"compile": compiled - start}
    if args.child == "graphshard":
        (program,) = graphshard.programs(model)
        taken = {stage.name: stage.seconds for stage in program.history}
        phases["capture"] = taken.pop("capture", 0.0)
        phases["lower"] = taken.pop("lower", program.lowering_seconds)
        phases["passes"] = sum(taken.values())
    phases["rest"] = seconds - sum(phases.values())
    result = {**phases, "seconds": seconds, "compiled": _regions_compiled()}
    dist.barrier()
    dist.destroy_process_group()
    return result


def _regions_compiled() -> int:
    """Return the number of graphs that Inductor compiled in this process without finding them in its cache."""
    from torch._dynamo.utils import counters

    return counters["inductor"]["fxgraph_cache_miss"]


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 2), ("layers", 4), ("dim", 256), ("batch", 4), ("seq", 128), ("repeats", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS[:2])
    parser.add_argument("--without-warm", action="store_true", help="skip the second launch")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
