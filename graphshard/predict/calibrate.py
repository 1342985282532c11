"""Measure this machine and write its profile: `graphshard calibrate`.

    torchrun --nproc-per-node 8 -m graphshard calibrate --out machine.json     the ranks and links that training has
    graphshard calibrate --out machine.json                                    starts local ranks itself

All ranks measure at the same time, because that is how they will run; the slowest rank counts. Chips, memory and links
are shared with whatever else runs here, so a busy machine gives a slow profile.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timezone

import torch
import torch.distributed as dist

from graphshard.cost.profile import AttentionSpeed, MatmulRate, Profile, Protocol, builtin_profiles, load_profile
from graphshard.errors import ArgumentError
from graphshard.predict.microbenchmarks import Chip, Links, measure_chip, measure_links
from graphshard.utils.argument_validation import check_count, path_of, write_given
from graphshard.utils.progress import progress
from graphshard.utils.text import say

# That one machine can start.
_MOST_RANKS = 1024
# Rounds of measurements: a machine that others use is slow at times.
ROUNDS = {"cpu": 3, "cuda": 1}


def run(args: argparse.Namespace) -> int:
    """Measure and write; rank 0 writes."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("--device cuda: torch.cuda.is_available() is False here.")
    out = path_of("--out", args.out, "a file to write")
    if out.is_dir():
        raise ArgumentError(f"--out must be a file to write, got the directory {args.out!r}.")
    if args.ranks is not None:
        check_count("--ranks", args.ranks, most=_MOST_RANKS)
    ranks = args.ranks or (torch.cuda.device_count() if device == "cuda" else 2)
    if "RANK" not in os.environ and ranks > 1:
        launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "graphshard")
        options = ["--out", args.out, "--device", device, *(["--name", args.name] if args.name else [])]
        return subprocess.run([sys.executable, "-m", *launcher, "calibrate", *options], check=False).returncode
    started = "RANK" in os.environ and not dist.is_initialized()
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if started:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        with progress("graphshard calibrate", lines=True) as show:
            profile = calibrate(device, args.name or out.stem, show)
        if not dist.is_initialized() or dist.get_rank() == 0:
            write_given("--out", args.out, profile.to_json())
            say(f"{args.out}: profile {profile.name}, hash {profile.hash[:12]}")
    finally:
        if started:
            dist.destroy_process_group()
    return 0


def calibrate(device: str, name: str, show: Callable[[str], None] = lambda _: None) -> Profile:
    """Measure the machine with all ranks of the default process group, or alone if there is none.

    Args:
        device: "cpu" or "cuda".
        name: of the profile.
        show: told what is being measured.
    """
    sources: dict[str, str] = {}

    def note(path: str, value: float, source: str) -> float:
        sources[path] = source
        return value

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rounds = ROUNDS[device]
    here = f"measured, {ranks} ranks at once, slowest" + (f"; best of {rounds} rounds" if rounds > 1 else "")
    chip, links = _measure(device, rounds, show)
    known = _known(device)
    rates = {}
    for label, speed in chip.matmul.items():
        attention = min(chip.attention[label], speed)
        peak = known.rate(label).peak if known is not None else speed
        product = f"{here}: products of several sizes"
        both = f"{here}: causal attention, forward and backward"
        paths = [f"rates.{label}.attention.flash.{direction}" for direction in ("forward", "backward")]
        from_sheet = known.sources[f"rates.{label}.peak"] if known else product
        rates[label] = MatmulRate(
            note(f"rates.{label}.peak", peak, from_sheet),
            note(f"rates.{label}.matmul", speed / peak, product),
            {"flash": AttentionSpeed(*(note(path, attention / peak, both) for path in paths))},
        )
    nodes = links.nodes
    taken = f"{here}: CPU time of all threads in a gather" if device == "cpu" else "assumed: not measured"
    for kind, link in links.inside.items():
        for field in ("bandwidth", "latency", "tensor_seconds"):
            note(f"inside.{kind}.{field}", getattr(link, field), links_source(ranks // nodes))
        note(f"inside.{kind}.switched", link.switched, "part of the measured bandwidth")
    for network, found in links.outside.items():
        measured = "measured" if nodes > 1 else "assumed: as inside; one node here"
        note(f"outside.{network}.bandwidth", found.bandwidth, measured)
        for field in ("nics", "reached", "rails", "crossing"):
            note(f"outside.{network}.{field}", getattr(found, field), "part of the bandwidth of a rank")
    for field in ("base", "inside", "outside", "posted"):
        note(f"protocols.0.{field}", 0.0, "part of the measured latency")
    note("protocols.0.fraction", 1.0, "part of the measured bandwidth")
    local = max(ranks // nodes, 1)
    return Profile(
        name=name,
        title=f"{name}: {_chip(device)}",
        device=device,
        memory_capacity=note("memory_capacity", _capacity(device, local), "reported by the system, per rank"),
        memory_bandwidth=note("memory_bandwidth", chip.memory, f"{here}: reads and writes of an addition"),
        host_bandwidth=note("host_bandwidth", chip.host, f"{here}: copy from the host"),
        kernel_seconds=note("kernel_seconds", chip.launch, f"{here}: addition to one element"),
        vector=note("vector", chip.vector, f"{here}: geometric mean of multiplication and exponential"),
        units=int(note("units", 0, "not modelled: rates are of whole products")),
        split=int(note("split", 0, "not modelled")),
        split_seconds=note("split_seconds", 0.0, "not modelled"),
        tile_seconds=note("tile_seconds", 0.0, "not modelled"),
        sustained=note("sustained", 1.0, "not modelled: rates are of whole products"),
        head_power=note("head_power", 0.0, "not modelled"),
        host_seconds={
            mode: note(f"host_seconds.{mode}", 0.0, "part of kernel_seconds") for mode in ("eager", "compiled")
        },
        ranks_per_node=int(note("ranks_per_node", local, "as measured")),
        rates=rates,
        tiles=(),
        protocols=(Protocol("measured", "ring", 0.0, 0.0, 0.0, 0.0, 1.0),),
        inside=links.inside,
        outside=links.outside,
        contention=note("contention", links.contention, taken),
        pack_below=note("pack_below", links.pack_below, links_source(ranks // nodes)),
        straggler=note("straggler", 0.0, "not modelled: the slowest rank was measured"),
        made={
            "torch": str(torch.__version__),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "ranks": ranks,
            "threads": torch.get_num_threads(),
        },
        sources=sources,
    )


def _measure(device: str, rounds: int, show: Callable[[str], None]) -> tuple[Chip, Links]:
    """The best of several rounds."""
    chips, links = [], []
    for number in range(1, rounds + 1):

        def say(text: str, counted: str = f" ({number} of {rounds})" if rounds > 1 else "") -> None:
            show(text + counted)

        chips.append(measure_chip(device, say))
        links.append(measure_links(device, say))
    return functools.reduce(Chip.better, chips), functools.reduce(Links.better, links)


def links_source(ranks: int) -> str:
    """Where the numbers of links are from."""
    return f"measured with {ranks} ranks, slowest" if ranks > 1 else "assumed: not measured, one rank"


def _capacity(device: str, ranks: int) -> int:
    if device == "cuda":
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks


def _chip(device: str) -> str:
    if device == "cuda":
        return f"{dist.get_world_size() if dist.is_initialized() else 1} x {torch.cuda.get_device_name()}"
    return f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}, gloo"


def _known(device: str) -> Profile | None:
    """The data sheet of this GPU, for its peaks."""
    if device != "cuda":
        return None
    chip = torch.cuda.get_device_name().lower()
    return next((load_profile(name) for name in builtin_profiles() if name in chip), None)
