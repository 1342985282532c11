"""Train random programs with graphshard and with FSDP2, and find differences.

    python -m benchmarks.fuzz --programs 1000 --seed 0       # seeds 0 to 999
    python -m benchmarks.fuzz --replay '{"blocks":[...]}'    # one program, as a failure prints it

Every program is three steps of AdamW on 2 or 3 ranks of this machine; with `backend="eager"`, losses, gradients,
parameters and buffers must have the same bits. One of `--inductor-every` programs is compiled by Inductor instead, and
must be close. A failure is shrunk while it still fails in the same way, and printed as a line that replays it. Seeds
are independent, so after Ctrl-C you can continue anywhere with `--seed`.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable

from tests.distributed.random_programs import Program, from_json, random_program, smaller, to_json
from tests.distributed.random_runs import differences
from tests.ranks import RankError, RankPool


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return the number of programs that differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--programs", type=int, default=100, help="number of programs")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first program; the next ones follow")
    parser.add_argument(
        "--inductor-every",
        type=int,
        default=50,
        help="compile one of this number of programs with Inductor; 0 for none",
    )
    parser.add_argument("--replay", help="run this program, in the form that a failure prints, instead of random ones")
    parser.add_argument("--no-shrink", action="store_true", help="print failures without shrinking them")
    options = parser.parse_args(arguments)
    with RankPool() as pool:
        if options.replay:
            return int(_report(pool, from_json(options.replay), shrink=not options.no_shrink))
        return _run(pool, options)


def _run(pool: RankPool, options: argparse.Namespace) -> int:
    failures, impossible, start = 0, 0, time.monotonic()
    seed = options.seed
    try:
        for seed in range(options.seed, options.seed + options.programs):
            inductor = options.inductor_every > 0 and seed % options.inductor_every == options.inductor_every - 1
            program = random_program(seed, backend="inductor" if inductor else "eager")
            found = outcome(pool, program)
            if found.startswith("FSDP2"):
                impossible += 1
                print(f"\rseed {seed}: {found}")
            elif found:
                print(f"\rseed {seed}:")
                failures += _report(pool, program, shrink=not options.no_shrink, found=found)
            done = seed + 1 - options.seed
            each = (time.monotonic() - start) / done
            print(f"\r{done} of {options.programs}, {failures} differ, {each:.2f} s each ", end="", flush=True)
    except KeyboardInterrupt:
        print(f"\nInterrupted; go on with --seed {seed} --programs {options.seed + options.programs - seed}")
    done = seed + 1 - options.seed
    print(f"\n{done} programs from seed {options.seed}: {failures} differ, {impossible} that FSDP2 cannot do")
    return failures


def outcome(pool: RankPool, program: Program) -> str:
    """Return the `differences` of a program on ranks, or the error that ended it; "" if all is equal."""
    try:
        found = pool.run(program.world_size, differences, program, timeout=240.0, grace=5.0)
    except RankError as error:
        return f"ranks: {str(error).splitlines()[0]}"
    return next((f for f in found if f), "")


def _report(pool: RankPool, program: Program, *, shrink: bool, found: str = "") -> bool:
    """Print a program that differs, shrunk; return False if it does not differ."""
    found = found or outcome(pool, program)
    if not found:
        print("no difference")
        return False
    print(f"  {found}", flush=True)
    if shrink:
        program = shrunk(program, found, lambda p: outcome(pool, p))
        print(f"  {outcome(pool, program)}")
    print(f"  python -m benchmarks.fuzz --replay '{to_json(program)}'", flush=True)
    return True


def shrunk(program: Program, found: str, run: Callable[[Program], str]) -> Program:
    """Shrink the program while it fails in the same way."""
    sort = _sort(found)
    before = None
    while before != program:
        before, index = program, 0
        candidates = list(smaller(program))
        while index < len(candidates):
            if _sort(run(candidates[index])) == sort:
                program = candidates[index]
                candidates = list(smaller(program))  # the next one takes the same index
            else:
                index += 1
    return program


def _sort(found: str) -> str:
    """Return the kind of a failure: its error, or that values differ."""
    if found.startswith(("raises", "ranks", "FSDP2")):
        return re.sub(r"\d+", "", found)[:60]
    return "differs" if found else ""


if __name__ == "__main__":
    sys.exit(main() > 0)
