"""Memory of a training step of the example's model on gloo ranks, as the kernel counts it: graphshard, FSDP2 and DDP.

    python -m benchmarks.step_memory [--steps 6] [--ranks 2] [--sizes 4,256,4,128 4,512,4,128 8,512,8,256]

A size is layers, width, sequences of a rank's batch and tokens of a sequence. Each variant has processes of its own,
one after the other. Memory is the most that a rank has resident during a step (VmHWM), over what it holds at rest,
after two steps, with parameters and states of AdamW in place; the median of the steps, of the rank that takes most.
What malloc keeps of freed memory is given back between steps, and counts within one.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile

import torch
import torch.distributed as dist

from benchmarks.giant_parameters import reset_peak
from benchmarks.step_time import BASE, VARIANTS, llama, stepper, variant, whole_stepper
from tests.helpers import resident

SIZES = ("4,256,4,128", "4,512,4,128", "8,512,8,256")


def run(rank: int, name: str, size: tuple[int, int, int, int], args: argparse.Namespace, store: str) -> None:
    """One rank of one variant."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    layers, dim, batch, seq = size
    torch.manual_seed(0)
    ready = variant(name, llama.Llama(llama.LlamaConfig(layers=layers, dim=dim, seq=seq)))
    optimizer = torch.optim.AdamW(ready.parameters(), lr=1e-3)
    step = (whole_stepper if "compile_step" in name else stepper)(ready, optimizer)
    torch.manual_seed(rank)
    tokens = torch.randint(256, (2, batch, seq))
    peaks = []
    for number in range(2 + args.steps):
        before = reset_peak()
        step(tokens)
        if number >= 2:
            peaks.append(resident("VmHWM") - before)
    most = torch.tensor(statistics.median(peaks))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if rank == 0:
        with open(f"{store}.result", "w") as file:
            file.write(str(most.item()))
    dist.destroy_process_group()


def main() -> None:
    """A line for each size and variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    args = parser.parse_args()
    for text in args.sizes:
        layers, dim, batch, seq = map(int, text.split(","))
        print(f"layers {layers}, dim {dim}, batch {batch} x {seq}: MiB over rest, and to {BASE}")
        found: dict[str, float] = {}
        for name in sorted(args.variants, key=lambda name: name != BASE):
            with tempfile.TemporaryDirectory() as folder:
                store = f"{folder}/store"
                torch.multiprocessing.spawn(run, (name, (layers, dim, batch, seq), args, store), args.ranks)
                with open(f"{store}.result") as file:
                    found[name] = float(file.read())
            ratio = found[name] / found[BASE] if BASE in found else float("nan")
            print(f"  {name:33}{found[name] / 2**20:8.1f}{ratio:8.2f}", flush=True)


if __name__ == "__main__":
    main()
