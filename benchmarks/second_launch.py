"""Seconds of the first training step and the first evaluation of successive launches, which share their caches.

    python -m benchmarks.second_launch [--model llama] [--ranks 2 2 4] [--backend inductor] [--vary] [--log]

A launch trains a small random model of transformers on this repository's README, as a user's script does: a step, an
evaluation under `no_grad`, and another step; with `--vary` these have a mask, and the last one another length. Each
launch is new processes, on as many ranks as `--ranks` says, in turn; the first one has empty caches. Seconds are those
of the slower rank, without imports, without making the model and without joining the process group; "CPU s" is that
rank's processor time in them. "found" is the number of programs that a rank takes from graphshard's cache, "made" the
number that it compiles. "regions" are compiled by all ranks together.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.first_step import ROOT, run_ranks

PHASES = ("compile", "train", "evaluate", "again")


def main() -> None:
    """Run the launches one after the other, and print a line for each."""
    args = _parse_args()
    if args.child:
        print(json.dumps(_child(args)))
        return
    print(f"{'ranks':>5}{'seconds':>9}{'CPU s':>8}" + "".join(f"{phase:>10}" for phase in PHASES), end="")
    print(f"{'found':>7}{'made':>6}{'regions':>9}")
    launches = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in args.ranks:
            launches.append(_launch(ranks, args, Path(folder)))
            found = launches[-1]
            numbers = "".join(f"{found[phase]:10.2f}" for phase in PHASES)
            print(f"{ranks:5}{found['seconds']:9.2f}{found['cpu']:8.2f}{numbers}", end="")
            print(f"{found['found']:7}{found['made']:6}{found['regions']:9}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(launches, indent=1))


def _launch(ranks: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run one launch: the numbers of its slower rank, and the regions that all of them compiled."""
    command = ["-m", "benchmarks.second_launch", "--child"]
    command += [
        "--ranks",
        str(ranks),
        "--model",
        args.model,
        "--backend",
        args.backend,
        *["--log"] * args.log,
        *["--vary"] * args.vary,
    ]
    environment = {
        "GRAPHSHARD_CACHE": str(folder / "programs"),
        "OMP_NUM_THREADS": "1",  # the number of threads is in generated code
        "PYTHONPATH": str(ROOT),
    }
    numbers = run_ranks(command, ranks, folder, environment)
    slower = max(numbers, key=lambda one: float(one["seconds"]))
    return {**slower, "ranks": ranks, "regions": sum(one["regions"] for one in numbers)}


def _child(args: argparse.Namespace) -> dict[str, float]:
    """Run one rank, timed from `compile` to the end of the second step."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import graphshard

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("graphshard").addHandler(handler)
    logging.getLogger("graphshard").setLevel(logging.INFO)
    if args.log and os.environ["RANK"] == "0":
        logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    (ranks,), rank = args.ranks, int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{args.store}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    model = _model(args.model)
    text = torch.tensor(list((ROOT / "README.md").read_bytes())[: 4 * 64 * ranks]).view(ranks, 4, 64)[rank]
    _ = graphshard.compile  # imports its dependencies
    dist.barrier()
    times, used = [time.perf_counter()], time.process_time()
    graphshard.compile(model, mesh, backend=args.backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    times.append(time.perf_counter())
    for phase in PHASES[1:]:
        if phase == "evaluate":
            model.eval()
            with torch.no_grad():
                model(input_ids=text, labels=text).loss.item()
            model.train()
        else:
            if args.vary and phase == "again":
                text = text[:, :40].contiguous()
            mask = {"attention_mask": torch.ones_like(text)} if args.vary else {}
            loss = model(input_ids=text, labels=text, **mask).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
        times.append(time.perf_counter())
    result: dict[str, float] = {phase: times[index + 1] - times[index] for index, phase in enumerate(PHASES)}
    result |= {"seconds": times[-1] - times[0], "cpu": time.process_time() - used}
    result["regions"] = _regions_compiled()
    result["made"] = sum(text.startswith("lowered ") for text in said)
    result["found"] = len(graphshard.programs(model)) - result["made"]
    dist.barrier()
    dist.destroy_process_group()
    return result


def _model(name: str) -> Any:
    if name == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(GPT2Config(n_embd=128, n_layer=4, n_head=4, n_positions=64, vocab_size=256))
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "vocab_size": 256}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))


def _regions_compiled() -> int:
    """Return the number of graphs that Inductor compiled in this process without finding them in its cache."""
    from torch._dynamo.utils import counters

    return counters["inductor"]["fxgraph_cache_miss"]


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("llama", "gpt2"), default="llama")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 2, 2], help="number of ranks of each launch")
    parser.add_argument("--backend", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--vary", action="store_true", help="a mask, and another length in the second step")
    parser.add_argument("--log", action="store_true", help="show rank 0's log")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
