"""Muon's seconds per step on 64 and 1,024 GPUs: by owners, and by gathering every matrix on every rank.

    python -m benchmarks.matrix_optimizers [--ranks 64 1024] [--hardware h100] [--tokens 8192] [--batch 8388608]

The step without the optimizer is `explain`'s, times microbatches. A Newton-Schulz iteration has three
products in bfloat16, and torch.optim.Muon runs five.

* gathered: each rank gathers all momenta in float32 and computes all matrices, one after the other.
* after backward: owners receive shards, compute, and send pieces, all after backward, in rounds that overlap.
* owners: `MatrixOptimizer` with `compile_step`: gradients and parameters travel in backward, so the products of the
  slowest owner and the last round of pieces are exposed.

"moved" are the bytes of the all-to-alls over the bytes of FSDP's gathers and reductions.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from graphshard.cost.costs import Costs
from graphshard.cost.flops import Gemm
from graphshard.cost.kernels import Work
from graphshard.cost.profile import load_profile
from graphshard.ir.mesh import Mesh
from graphshard.optim._owners import longest_first
from graphshard.optim.matrix_optimizer import _ROUNDS, newton_schulz_flops

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import llama

ITERATIONS = 5
LLAMA3 = {"kv_heads": 8, "vocab": 128256}
MODELS = {
    "Llama 3 8B": {"layers": 32, "dim": 4096, "heads": 32, "hidden": 14336, **LLAMA3},
    "Llama 3 70B": {"layers": 80, "dim": 8192, "heads": 64, "hidden": 28672, **LLAMA3},
}
# Qwen3 30B A3B: experts' weights are batches of matrices.
MIXTURE = {"layers": 48, "experts": 128, "active": 8, "dim": 2048, "hidden": 768, "heads": 32 * 128, "kv": 4 * 128}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--hardware", default="h100", help="name of a profile")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a microbatch, per rank")
    parser.add_argument("--batch", type=int, default=1 << 23, help="tokens of a step, on all ranks")
    args = parser.parse_args()
    print("| model | GPUs | step s | gathered ms | after backward ms | owners ms | of the step | moved |")
    print("|--|--|--|--|--|--|--|--|")
    for name, config in MODELS.items():
        with torch.device("meta"):
            model = llama.Llama(llama.LlamaConfig(seq=args.tokens, **config))
        for ranks in args.ranks:
            batch = torch.empty(1, args.tokens, dtype=torch.int64, device="meta")
            found = graphshard.explain(
                model,
                (ranks,),
                example_inputs=(batch, batch),
                hardware=args.hardware,
                activation="full",
                mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            )
            shapes = [p.shape for p in model.layers.parameters() if p.ndim == 2]
            step = (found.step_time_s - found.optimizer_s) * max(args.batch // (ranks * args.tokens), 1)
            _row(name, ranks, step, shapes, args.hardware)
    for ranks in args.ranks:
        shapes = _mixture()
        active = sum(s.numel() for s in shapes) * MIXTURE["active"] / MIXTURE["experts"]
        profile = load_profile(args.hardware)
        # No capture: eight FLOPs for each active parameter and token with recomputation, at 40 % of the peak.
        step = 8 * active * max(args.batch / ranks, args.tokens) / (0.4 * profile.rate("bfloat16").peak)
        _row("Qwen3 30B A3B", ranks, step, shapes, args.hardware)


def _mixture() -> list[torch.Size]:
    """Return the shapes of the matrices of a mixture of experts, one per expert."""
    m = MIXTURE
    attention = [(m["heads"], m["dim"]), (m["kv"], m["dim"]), (m["kv"], m["dim"]), (m["dim"], m["heads"])]
    experts = [(2 * m["hidden"], m["dim"]), (m["dim"], m["hidden"])] * m["experts"]
    return [torch.Size(shape) for shape in [*attention, *experts] * m["layers"]]


def _row(name: str, ranks: int, step: float, shapes: list[torch.Size], hardware: str) -> None:
    mesh = Mesh.of_shape((ranks,))
    costs = Costs(load_profile(hardware), mesh=mesh)
    seconds = {shape: _newton_schulz(costs, shape) for shape in set(shapes)}
    costs_of = [newton_schulz_flops(shape) for shape in shapes]
    owners = longest_first(costs_of, [None] * len(shapes), [0.0] * ranks)
    busy = [0.0] * ranks
    for shape, owner in zip(shapes, owners):
        busy[owner] += seconds[shape]
    num_bytes = sum(shape.numel() for shape in shapes) * 4
    # All matrices of a round, sent by all ranks: what each rank has of it is 1 / ranks.
    out = costs.collective("all_to_all", num_bytes / ranks / _ROUNDS, 1, mesh.shard)
    into = costs.collective("all_to_all", 2 * num_bytes / ranks / _ROUNDS, 1, mesh.shard)
    compute = max(busy) / _ROUNDS
    after = into + max(into, compute) * (_ROUNDS - 1) + compute + out
    ours = compute + max(out, compute) * (_ROUNDS - 1) + out
    gathered = sum(seconds[shape] for shape in shapes) + costs.collective("gather", num_bytes, len(shapes), mesh.shard)
    moved = 3 * num_bytes / ranks / (2 * num_bytes / 2 + num_bytes)
    print(
        f"| {name} | {ranks} | {step:.2f} | {gathered * 1e3:,.0f} | {after * 1e3:.1f} | {ours * 1e3:.1f} | "
        f"{ours / step:.1%} | {moved:.1%} |",
        flush=True,
    )


def _newton_schulz(costs: Costs, shape: torch.Size) -> float:
    """Return the seconds of the iterations for a matrix: `A = X X'`, `B = A A`, `B X`, each an addition, too."""
    small, large = sorted(shape)
    gemms = [Gemm(1, small, small, large), Gemm(1, small, small, small), Gemm(1, small, large, small)]
    moved = [2 * small * large + small**2, 3 * small**2, 3 * small * large + small**2]
    kernels = [Work("matmul", gemm.flop, 0, 2 * each, "bfloat16", (gemm,)) for gemm, each in zip(gemms, moved)]
    return ITERATIONS * float(costs.kernels(kernels))


if __name__ == "__main__":
    main()
