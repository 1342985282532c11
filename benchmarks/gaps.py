"""Gaps of plans to their bound, and to other schedules: 20 shapes, three machines, four sizes of mesh.

    python -m benchmarks.gaps [--json FILE] [--models 8B GPT] [--shards 8]

Prints one Markdown row for each shape and machine: the gap at 8, 64, 256 and 1,024 ranks with 2,048 tokens each on an
isolated network, where communication and compute are most alike and gaps are largest; "*" marks searches that ended at
their budget. Then come the least ratio of another schedule to graphshard's (`benchmarks.rivals`), and the longest
planning in CPU seconds.

With --shards, parameters are sharded over this number of ranks and replicated over the others (HSDP), without a
comparison with other schedules. Memory is ignored, because a row that fits no machine is still a valid scheduling
problem.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

from benchmarks.schedule import COLUMNS, SEQ, compare, planned
from benchmarks.shapes import MORE, SHAPES, Shape, problem
from graphshard.cost.costs import Costs
from graphshard.cost.profile import load_profile
from graphshard.ir.mesh import Mesh
from graphshard.schedule.axis_links import PhaseAxes, link_of

MACHINES = ("a100", "h100", "b200")
RANKS = (8, 64, 256, 1024)
TOKENS = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models",
        nargs="+",
        default=[shape.name for shape in (*SHAPES, *MORE)],
        help="names of models, or parts of them",
    )
    parser.add_argument("--shards", type=int, help="replicate beyond this number of ranks")
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    args = parser.parse_args()
    rows = []
    columns = [ranks for ranks in RANKS if ranks > (args.shards or 0)]
    print("| | | " + " | ".join(f"{ranks:,}" for ranks in columns) + " | least ratio |")
    print("|--|--|" + "--|" * (len(columns) + 1))
    for shape in (s for s in (*SHAPES, *MORE) if any(model in s.name for model in args.models)):
        for machine in MACHINES:
            if args.shards:
                here = [replicated(shape, machine, ranks, args.shards) for ranks in RANKS if ranks > args.shards]
            else:
                here = [compare(shape, machine, ranks, "isolated", TOKENS, with_inductor=False) for ranks in RANKS]
            rows += here
            gaps = " | ".join(f"{row['gap']:.2%}{'*' if row['stopped'] else ''}" for row in here)
            print(f"| {shape.name} | {machine} | {gaps} | {_least(here):.3f} |", flush=True)
    worst, planning = max(row["gap"] for row in rows), max(row["plan_s"] for row in rows)
    print(f"\nlargest gap {worst:.2%}; least ratio of another schedule to ours {_least(rows):.4f}")
    print(f"longest planning {planning:.1f} s")
    if args.json:
        partial = args.json.with_suffix(".partial")
        partial.write_text(json.dumps(rows, indent=1))
        partial.replace(args.json)


def replicated(shape: Shape, machine: str, ranks: int, shards: int) -> dict:
    """Return a row of a mesh with replicas: graphshard's step and bound in seconds, and CPU seconds of planning."""
    mesh = Mesh.of_shape({"replicate": ranks // shards, "shard": shards})
    costs = Costs(load_profile(machine), mesh=mesh)
    link = link_of(costs, PhaseAxes(mesh.shard, mesh.shard, mesh.replicate))
    fine = problem(shape, costs, shards, TOKENS, min(SEQ, TOKENS), link)
    start = time.process_time()
    found = planned(fine)
    plan_s = time.process_time() - start
    row = {"model": shape.name, "hardware": machine, "ranks": ranks, "shards": shards, "plan_s": plan_s}
    row |= {"step_s": found.step_seconds, "bound_s": found.lower_bound, "gap": found.gap, "stopped": found.stopped}
    return row


def _least(rows: list[dict]) -> float:
    return min((row[name] for row in rows for name in COLUMNS if row.get(name)), default=math.nan)


if __name__ == "__main__":
    main()
