"""How close plans are to their bound, and to others' schedules: 20 shapes, three machines, four sizes of mesh.

    python -m benchmarks.gaps [--json FILE] [--models 8B GPT]

One Markdown row for each shape and machine: the gap at 8, 64, 256 and 1,024 ranks with 2,048 tokens each on an isolated
network, where communication and compute are most alike and gaps are largest; "*" marks gaps that are left as the search
was stopped. Then the least ratio of another schedule to ours (`benchmarks.rivals`), and the longest planning in CPU
seconds. A row whose tokens no machine could hold is no less a problem of scheduling, so memory is not looked at.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.schedule import COLUMNS, compare
from benchmarks.shapes import MORE, SHAPES

MACHINES = ("a100", "h100", "b200")
RANKS = (8, 64, 256, 1024)
TOKENS = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[shape.name for shape in (*SHAPES, *MORE)], help="or parts")
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    args = parser.parse_args()
    rows = []
    print("| | | " + " | ".join(f"{ranks:,}" for ranks in RANKS) + " | least ratio |")
    print("|--|--|" + "--|" * (len(RANKS) + 1))
    for shape in (s for s in (*SHAPES, *MORE) if any(model in s.name for model in args.models)):
        for machine in MACHINES:
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


def _least(rows: list[dict]) -> float:
    return min(row[name] for row in rows for name in COLUMNS if row[name])


if __name__ == "__main__":
    main()
