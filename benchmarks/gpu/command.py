"""Command that `tests/gpu/run.sh` runs; the package's docstring says what for.

    tests/gpu/run.sh [--out gpu] [--budget 580] [--parts nccl steps] [--artifact FILE]
    tests/gpu/run.sh --wheels DIR                             with packages that are missing here
    tests/gpu/run.sh --dry                                    all of it at a small scale, on a CPU
    tests/gpu/run.sh --export FILE --capability 9.0           the file for --artifact, without a GPU

It prints one Markdown table, and writes the table and a JSON file to the folder `--out`, next to the output of the
parts. A failure appears in the table, does not stop the other parts, and makes the exit status 1.

Parts that do not fit into the budget are left for the next call with the same folder, which skips the parts that are
done, and repeats failed ones last. So ten minutes twice are all parts; `--again` starts over.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import Part, run_parts
from benchmarks.gpu.table import Emit, Row, appending, markdown, rows_in

# Seconds of each part, on one GPU and on several; less than 15 minutes in all.
ONE = {"nccl": 230, "races": 110, "faults": 90, "offload": 50, "delays": 60}
ONE |= {"tests": 80, "artifact": 35, "first": 70, "predicted": 45, "steps": 80}
SEVERAL = {"nccl": 120, "bits": 150, "collectives": 120, "llama": 300, "faults": 90, "checkpoints": 60}
_STATE = "state.json"
# Purpose of each package; a machine with a GPU may have torch and little else.
NEEDED = {
    **dict.fromkeys(("cattrs", "filelock", "jinja2", "numpy", "rich", "sympy", "torch"), "graphshard"),
    **dict.fromkeys(("pytest", "psutil"), "the tests"),
    "xdist": "the tests side by side",
    "triton": "kernels",
    "cffi": "export without a GPU, unless --artifact gives a file",
}
# Seconds that a part takes to start and to end.
_STARTING = 15.0
_ROOT = Path(__file__).parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts, or one of them in this process."""
    args = _parse_args(argv)
    if args.export is not None:
        return _export(args)
    return _all(args) if args.part is None else _part(args)


def _all(args: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that parts also end
    folder = args.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    if args.wheels is not None:
        _install(args.wheels, folder / "site")

    def show(line: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {line}", file=sys.stderr, flush=True)

    missing = missing_packages()
    if missing:
        show(missing)
    # Each run has a separate Inductor cache, so that first steps are first.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    os.environ["GRAPHSHARD_CACHE"] = "off"
    seconds = {**SEVERAL, **ONE}
    names = args.parts or list(seconds if args.dry else SEVERAL if _several_gpus() else ONE)
    state = _state(folder, args)
    chosen, left = choose(names, state["parts"], args.budget)
    if done := [name for name in names if name not in chosen and name not in left]:
        show(f"done before, in {folder}: {', '.join(done)} (--again repeats them)")
    rest = [*(["--dry"] if args.dry else []), *(["--artifact", str(args.artifact.resolve())] if args.artifact else [])]
    own = (sys.executable, "-m", "benchmarks.gpu", "--out", str(folder), *rest, "--part")
    parts = [Part(name, seconds[name], (*own, name)) for name in chosen]
    set_way(folder)

    def ended(name: str, rows: list[Row]) -> None:
        (folder / f"{name}.jsonl").unlink(missing_ok=True)
        write = appending(folder / f"{name}.jsonl")
        for row in rows:
            write(row)
        state["parts"][name] = "failed" if any(row.failed for row in rows) else "done"
        (folder / _STATE).write_text(json.dumps(state), "utf-8")
        set_way(folder)

    run_parts(parts, args.budget, folder, show, _ROOT, ended)
    rows = [row for name in names if name in state["parts"] for row in rows_in(folder / f"{name}.jsonl")]
    rows += [Row(name, note="left for the next call: no time") for name in left if name not in state["parts"]]
    made = machine()
    title = f"{made['device']}, torch {made['torch']}, Python {made['python']}, {made['date']}"
    text = f"{title}{'; ' + missing if missing else ''}\n\n{markdown(rows)}\n"
    (folder / "table.md").write_text(text, "utf-8")
    found = {"machine": made, "command": sys.argv, "missing": missing, "rows": [asdict(row) for row in rows]}
    (folder / "found.json").write_text(json.dumps(found, indent=1), "utf-8")
    print(text)
    return int(any(row.failed for row in rows))


def _several_gpus() -> bool:
    import torch

    return torch.cuda.device_count() > 1


def _state(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return how parts of earlier calls ended, by name; nothing if they ran elsewhere, or are to be repeated."""
    fresh = {"dry": args.dry, "parts": {}}
    try:
        found = json.loads((folder / _STATE).read_text("utf-8"))
    except (OSError, ValueError):
        return fresh
    return found if not args.again and found.get("dry") == args.dry and "parts" in found else fresh


def choose(names: Sequence[str], ended: Mapping[str, str], budget: float) -> tuple[list[str], list[str]]:
    """Return the parts to run within the budget, failed ones last, and those for which no time is left."""
    waiting = [name for name in names if name not in ended]
    waiting += [name for name in names if ended.get(name) == "failed"]
    chosen, used = waiting[:1], 0.0
    for name in waiting:
        used += {**SEVERAL, **ONE}[name]
        if name not in chosen and used <= budget:
            chosen.append(name)
    return chosen, [name for name in waiting if name not in chosen]


def set_way(folder: Path) -> None:
    """Let ranks of later parts share a GPU as part "nccl" has found out."""
    from benchmarks.gpu import tests

    if way := tests.way_of(rows_in(folder / "nccl.jsonl")):
        os.environ[tests.WAY] = way


def _install(wheels: Path, site: Path) -> None:
    """Unpack wheels to a folder that this process and the parts import from; nothing is downloaded."""
    found = sorted(map(str, wheels.glob("*.whl")))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--upgrade", "--target", str(site)]
    subprocess.run([*pip, *found], check=True)
    sys.path.append(str(site))
    os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", str(_ROOT)), str(site)])


def _part(args: argparse.Namespace) -> int:
    failed = []
    write = appending(args.rows)

    def emit(row: Row) -> None:
        write(row)
        if row.failed:
            failed.append(row)

    logging.basicConfig(format="%(relativeCreated)7d ms %(name)s: %(message)s")
    logging.getLogger("graphshard").setLevel(logging.INFO)
    try:
        _measure(args, emit)
    except Exception as error:
        from benchmarks.gpu.workers import said

        emit(Row(args.part, failed=True, note=said(error)))
    return int(bool(failed))


def _measure(args: argparse.Namespace, emit: Emit) -> None:
    from benchmarks.gpu import tests

    if args.part in ("nccl", "tests"):
        return (tests.measure_nccl if args.part == "nccl" else tests.measure)(emit, dry=args.dry)
    if args.part in tests.OTHERS:
        return tests.measure_others(args.part, emit, dry=args.dry)
    from benchmarks.gpu import artifact, delays, first, many, offload, predicted, races, steps
    from benchmarks.gpu.settings import Setup

    setup, seconds = Setup.of(dry=args.dry), args.seconds - _STARTING
    measure: dict[str, Callable[[], None]] = {
        "races": lambda: races.measure(setup, emit),
        "offload": lambda: offload.measure(setup, emit),
        "delays": lambda: delays.measure(setup, emit, args.out),
        "artifact": lambda: artifact.measure(setup, emit, args.out, args.artifact),
        "first": lambda: first.measure(setup, emit, args.out, seconds),
        "predicted": lambda: predicted.measure(setup, emit, args.out),
        "steps": lambda: steps.measure(setup, emit, seconds),
        "collectives": lambda: many.measure_collectives(setup, emit, args.out),
        "llama": lambda: many.measure_llama(setup, emit, args.out),
    }
    measure[args.part]()


def _export(args: argparse.Namespace) -> int:
    from benchmarks.gpu import artifact
    from benchmarks.gpu.settings import Setup

    major, _, minor = args.capability.partition(".")
    artifact.export(Setup.of(dry=args.dry), args.export, (int(major), int(minor)))
    return 0


def missing_packages() -> str:
    """Return one line that names missing packages and their purpose; "" if all are installed."""
    missing = [f"{name} ({use})" for name, use in NEEDED.items() if importlib.util.find_spec(name) is None]
    return f"missing: {', '.join(missing)}. --wheels DIR takes wheels of them" if missing else ""


def machine() -> dict[str, str]:
    """Return the machine and the versions that numbers depend on."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores, no GPU"
    return {
        "device": device,
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tests/gpu/run.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="folder for the table, JSON, logs and caches")
    parser.add_argument("--budget", type=float, default=580.0, help="seconds for all parts")
    parser.add_argument("--parts", nargs="+", choices={**ONE, **SEVERAL}, help="default: all for these GPUs")
    parser.add_argument("--again", action="store_true", help="also repeat parts that an earlier call has done")
    parser.add_argument("--artifact", type=Path, help="file written by --export on another machine")
    parser.add_argument("--wheels", type=Path, help="folder with wheels of missing packages")
    parser.add_argument("--dry", action="store_true", help="run everything at a small scale on a CPU")
    parser.add_argument("--export", type=Path, help="only write a file for --artifact; needs no GPU")
    parser.add_argument("--capability", default="9.0", help="the GPU that --export writes for")
    for hidden in ("--part", "--rows", "--seconds"):
        kind = {"--rows": Path, "--seconds": float}.get(hidden, str)
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.budget <= 0:
        parser.error(f"--budget must be seconds, got {args.budget:g}")
    if args.artifact is not None and not args.artifact.is_file():
        parser.error(f"--artifact must be a file that --export made, got {args.artifact}")
    if args.wheels is not None and not list(args.wheels.glob("*.whl")):
        parser.error(f"--wheels must be a folder with wheels, got {args.wheels}")
    return args
