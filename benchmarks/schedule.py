"""Predicted steps of graphshard's schedules, their proven gap, and alternatives with the same compute and link.

    python -m benchmarks.schedule [--ranks 8 64 1024] [--tokens 2048 4096 16384] [--models 8B 405B]
        [--inductor 8B MoE] [--json FILE] [--capture LAYERS]

Times come from one simulator; a ratio is another schedule's step relative to graphshard's. The bound covers every
schedule in which transfers needed, or ready, at one position share a bucket; "*" marks searches that ended at their
budget. "FSDP2" packs each unit into a buffer and prefetches one ahead; "blocks" is the same without copies; "params"
sends every parameter separately. "Inductor" is torch's own schedule_overlap_bucketing, run on a graph of the chain with
the simulator's times, allowed 8 GB more than the unscheduled graph; it takes a minute for 32 layers, so the deeper
models are omitted by default. The last table is CPU seconds of planning by depth.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import rivals
from benchmarks.shapes import LLAMA_8B, LLAMA_405B, SHAPES, Shape, joined, link_of, problem
from graphshard.cost.costs import Costs
from graphshard.cost.profile import load_profile
from graphshard.schedule import Chain, Placement, Problem, Schedule, Solution, Solver
from graphshard.schedule.build_problem import Settings, build
from graphshard.schedule.simulator import simulate
from tests.helpers import captured, through

SEQ = 8192
COLUMNS = ("FSDP2", "blocks", "params", "Inductor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 16384], help="tokens per rank")
    parser.add_argument(
        "--models", nargs="+", default=[shape.name for shape in SHAPES], help="names of models, or parts of them"
    )
    parser.add_argument("--hardware", nargs="+", default=["h100"], help="names of profiles")
    parser.add_argument("--inductor", nargs="*", default=["8B", "MoE"], help="models to run Inductor's scheduler on")
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    parser.add_argument(
        "--capture", type=int, default=0, help="only check shapes against a graph with this number of layers"
    )
    args = parser.parse_args()
    if args.capture:
        check_capture(args.capture)
        return
    rows = []
    print(
        f"{'model':13} {'on':4} {'ranks':>5} {'network':12} {'tokens':>6} {'step ms':>9} {'bound':>9} {'gap':>6}",
        end="",
    )
    print("".join(f" {name:>8}" for name in COLUMNS), f" {'peak GB':>8} {'plan s':>6}")
    for shape in (s for s in SHAPES if any(model in s.name for model in args.models)):
        with_inductor = any(model in shape.name for model in args.inductor)
        settings = itertools.product(args.hardware, args.ranks, ("isolated", "in-training"), args.tokens)
        for hardware, ranks, network, tokens in settings:
            rows.append(compare(shape, hardware, ranks, network, tokens, with_inductor=with_inductor))
            print_row(rows[-1])
    print(f"\n{'layers':>6} {'plan s':>7}")
    depths = {}
    for layers in (8, 16, 32, 63, 126):
        shape = replace(LLAMA_405B, layers=layers)
        depths[layers] = compare(shape, "h100", 64, "isolated", 4096, with_inductor=False)["plan_s"]
        print(f"{layers:6} {depths[layers]:7.2f}", flush=True)
    worst = min((row[name] for row in rows for name in COLUMNS if row[name]), default=1.0)
    print(f"\nlargest gap {max(row['gap'] for row in rows):.2%}; least ratio of another schedule to ours {worst:.4f}")
    if args.json:
        partial = args.json.with_suffix(".partial")
        partial.write_text(json.dumps({"rows": rows, "planning": depths}, indent=1))
        partial.replace(args.json)


def print_row(row: dict) -> None:
    print(f"{row['model']:13} {row['hardware']:4} {row['ranks']:5} {row['network']:12} {row['tokens']:6}", end="")
    print(
        f" {1e3 * row['step_s']:9.2f} {1e3 * row['bound_s']:9.2f} {row['gap']:6.2%}{'*' if row['stopped'] else ' '}",
        end="",
    )
    print("".join(f" {row[name]:8.3f}" if row[name] else f" {'':8}" for name in COLUMNS), end="")
    print(f"  {row['peak'] / 1e9:8.1f} {row['plan_s']:6.2f}", flush=True)


def planned(fine: Problem) -> Solution:
    """Plan as `PlanByCost`: the best of all, or of the plans with one bucket per unit."""
    best = Solver()(replace(fine, chains=tuple(map(joined, fine.chains))))
    units = Solver()(replace(fine, chains=tuple(map(rivals.by_unit, fine.chains))))
    return replace(
        min(best, units, key=lambda found: found.step_seconds),
        lower_bound=min(best.lower_bound, units.step_seconds),
        stopped=best.stopped,
    )


def compare(shape: Shape, hardware: str, ranks: int, network: str, tokens: int, *, with_inductor: bool) -> dict:
    """Return a row: graphshard's step and bound in seconds, relative steps of the others, CPU seconds of planning."""
    costs = Costs(load_profile(hardware), network)
    link = link_of(costs, ranks)
    fine = problem(shape, costs, ranks, tokens, min(SEQ, tokens), link)
    start = time.process_time()
    found = planned(fine)
    plan_s = time.process_time() - start
    row = {"model": shape.name, "hardware": hardware, "ranks": ranks, "network": network, "tokens": tokens}
    row |= {"plan_s": plan_s, "step_s": found.step_seconds, "bound_s": found.lower_bound, "peak": found.peak}
    row |= {"gap": found.gap, "stopped": found.stopped}

    def ratio(schedule: Callable[[Chain], tuple[Chain, Placement]]) -> float:
        return sum(_seconds(fine, *schedule(chain)) for chain in fine.chains) / row["step_s"]

    row["FSDP2"] = ratio(rivals.fsdp2)
    row["blocks"] = ratio(lambda chain: rivals.fsdp2(chain, packed=False))
    row["params"] = ratio(lambda chain: rivals.fsdp2(chain, packed=False, whole=False))
    row["Inductor"] = 0.0
    if with_inductor:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        row["Inductor"] = ratio(lambda chain: rivals.inductor(chain, link, 8.0))
        dist.destroy_process_group()
    return row


def check_capture(layers: int) -> None:
    """Compare the example's Llama at the widths of the 8B model, captured on the meta device, with the shapes."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from llama import Llama, LlamaConfig

    shape, ranks, tokens = replace(LLAMA_8B, layers=layers), 64, 4096
    config = LlamaConfig(layers, shape.dim, shape.heads, shape.kv_heads, shape.ffn, tokens, shape.vocab)
    with torch.device("meta"):
        model = Llama(config).to(torch.float32)
    batch = torch.zeros(1, tokens, dtype=torch.long)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    program = through(captured(model, (batch, batch), world_size=ranks, mp_policy=policy), "partition")
    costs = Costs(load_profile("h100"))
    link = link_of(costs, ranks)
    real = build(program, costs, Settings(optimizer_states=2)).problem
    formulas = problem(shape, costs, ranks, tokens, tokens, link)
    print(f"{layers} layers of the 8B model on {ranks} ranks, {tokens} tokens: captured graph / shapes")
    for mine, theirs in zip(real.chains, formulas.chains):
        moved = [sum(t.num_bytes for t in (*c.gathers, *c.reductions)) for c in (mine, theirs)]
        placed = [Solver()(Problem((chain,), link)) for chain in (mine, joined(theirs))]
        print(
            f"  {mine.name:9} compute {mine.elapsed[-1] / theirs.elapsed[-1]:.3f}, bytes {moved[0] / moved[1]:.3f}, "
            f"planned time {placed[0].step_seconds / placed[1].step_seconds:.3f}, "
            f"peak {placed[0].peak / placed[1].peak:.3f}, gap of the captured one {placed[0].gap:.2%}"
        )


def _seconds(fine: Problem, chain: Chain, placement: Placement) -> float:
    return simulate(Problem((chain,), fine.link), Schedule((placement,))).step_seconds


if __name__ == "__main__":
    main()
