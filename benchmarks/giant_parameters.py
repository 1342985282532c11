"""Memory and time of a step with a large vocabulary: FSDP2, graphshard, and graphshard with the passes for it.

    python -m benchmarks.giant_parameters [--vocab 50257] [--dim 256] [--layers 2] [--rows 2048] [--steps 5]

Two gloo ranks train the example's Llama, most of which is embedding and head. Each variant runs in separate processes,
one after the other. Memory is the peak resident memory of a rank's process during a step (VmHWM), above its memory
before the step (with SGD, which has no optimizer state). Seconds are CPU time of a rank, which other work on the
machine hardly changes; medians of the steps after the first two.

With `--explain` it prints the prediction of `explain` for four layers of Llama 8B on 64 H100s instead.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from graphshard.passes import ChunkedLoss, ChunkedReduceScatter, EmbeddingRowExchange, VocabShardedLoss
from tests.distributed.twins import fsdp2, load_example, world_mesh
from tests.helpers import resident

CHUNKED = graphshard.Pipeline().insert(ChunkedLoss(256), before="insert-collectives")
PIECED = (
    graphshard.Pipeline()
    .insert(VocabShardedLoss(16), after="mixed-precision")
    .insert(ChunkedReduceScatter(), before="overlap-model-collectives")
)
PIPELINES = {
    "graphshard": graphshard.Pipeline(),
    "chunked loss": CHUNKED,
    "and rows": CHUNKED.insert(EmbeddingRowExchange(), before="overlap-model-collectives"),
    "pieced loss": PIECED,
    "pieced and rows": PIECED.insert(EmbeddingRowExchange(), before="overlap-model-collectives"),
}


def main() -> None:
    """Print a line for each variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"vocab": 50257, "dim": 256, "layers": 2, "rows": 2048, "steps": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--backend", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--variants", nargs="*", default=["fsdp2", *PIPELINES])
    parser.add_argument("--explain", action="store_true")
    args = parser.parse_args()
    if args.explain:
        _explain()
        return
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    for variant in args.variants:
        mp.spawn(_rank, (variant, args), nprocs=2)


def _explain() -> None:
    """Print a line of the predicted step for each pipeline, as a table."""
    llama = load_example("llama")
    config = llama.LlamaConfig(layers=4, dim=4096, heads=32, kv_heads=8, hidden=14336, seq=4096, vocab=128256)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    pieced = graphshard.Pipeline().insert(VocabShardedLoss(4), after="mixed-precision")
    pipelines = {
        "graphshard": graphshard.Pipeline(),
        "`ChunkedLoss(1024)`": graphshard.Pipeline().insert(ChunkedLoss(1024), before="insert-collectives"),
        "`VocabShardedLoss(4)`": pieced,
        "and `ChunkedReduceScatter()`": pieced.insert(ChunkedReduceScatter(), before="overlap-model-collectives"),
    }
    print("| | step, ms | exposed | head | tail | peak, GiB |\n|--|--|--|--|--|--|")
    for name, passes in pipelines.items():
        with torch.device("meta"):
            model = llama.Llama(config)
        tokens = torch.zeros(1, 4096, dtype=torch.long)
        found = graphshard.explain(model, (64,), example_inputs=(tokens, tokens), mp_policy=policy, passes=passes)
        seconds = (found.step_time_s, found.exposed_comm_s, found.head_s, found.tail_s)
        times = " | ".join(f"{1e3 * each:.1f}" for each in seconds)
        print(f"| {name} | {times} | {found.peak_memory_bytes / 2**30:.2f} |", flush=True)


def _rank(rank: int, variant: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    llama = load_example("llama")
    torch.manual_seed(0)
    seq = 256
    model = llama.Llama(llama.LlamaConfig(layers=args.layers, dim=args.dim, heads=4, seq=seq, vocab=args.vocab))
    if variant == "fsdp2":
        model = fsdp2(model, world_mesh())
    else:
        graphshard.compile(model, world_mesh(), backend=args.backend, passes=PIPELINES[variant])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    tokens, targets = torch.randint(args.vocab, (2, args.rows // seq, seq)).unbind()
    before, seconds = 0, []
    for step in range(args.steps):
        if step == 1:
            before = reset_peak()
        start = time.process_time()
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - start)
    peak = (resident("VmHWM") - before) / 2**20
    if rank == 0:
        print(
            f"{variant:16}{peak:8.0f} MiB{statistics.median(seconds[2:]):8.2f} s CPU   loss {loss.item():.6f}",
            flush=True,
        )
    dist.destroy_process_group()


def reset_peak() -> int:
    """Reset the peak, and return the resident bytes."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


if __name__ == "__main__":
    main()
