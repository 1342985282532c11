"""Kill ranks that save checkpoints, at random moments, and check that nothing is lost.

    python -m benchmarks.kills                 # 200 kills
    python -m benchmarks.kills --kills 20 --seed 7

Two ranks train and save after every step, alternating `save_checkpoint` and `async_save_checkpoint`. One of them, or
both, are killed (SIGKILL) after a random time; the survivor must end by itself. The next two load the newest checkpoint
and continue. Nothing is lost if every step has the same parameters in each run that trains or loads it, and if the
newest checkpoint is never older than one reported as complete to a rank.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import logging
import multiprocessing
import os
import random
import signal
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard

KEPT = 3
LONGEST = 2.5
_UNTIL_ENDED = 60.0


@dataclass
class Found:
    """Outcome of the runs.

    Attributes:
        kills: number of runs that a kill ended.
        faults: descriptions of what was lost.
        partial: number of incomplete checkpoints found.
        complete: the last step reported as saved to a rank.
        ended: seconds until a survivor ended.
        digests: of the parameters after each step.
    """

    kills: int = 0
    faults: list[str] = field(default_factory=list)
    partial: int = 0
    complete: int = -1
    ended: list[float] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)

    def read(self, told: Path) -> None:
        """Read the output of a run: lines of "loaded", "trained" or "saved", a step, and a digest."""
        for line in told.read_text().splitlines() if told.exists() else ():
            what, number, *digest = line.split()
            step = int(number)
            if what == "saved":
                self.complete = max(self.complete, step)
            elif self.digests.setdefault(step, digest[0]) != digest[0]:
                self.faults.append(f"{what} step {step} differs from before")
            if what == "loaded" and step < self.complete:
                self.faults.append(f"step {step} was loaded after step {self.complete} had been saved")


def run(kills: int, seed: int, folder: Path) -> Iterator[Found]:
    """Kill this number of runs, and yield the outcome so far after each."""
    fork = multiprocessing.get_context("fork")  # so that ranks need not import torch again
    chance, found = random.Random(seed), Found()
    for number in range(kills):
        told = folder / f"told-{number}"
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        started = [fork.Event() for _ in range(2)]
        arguments = [(rank, port, folder / "run", told, number % 2 == 1, started[rank]) for rank in range(2)]
        ranks = [fork.Process(target=_rank, args=args, daemon=True) for args in arguments]
        for process in ranks:
            process.start()
        try:
            if not all(event.wait(_UNTIL_ENDED) for event in started):
                found.faults.append("a run did not begin")
                break
            time.sleep(chance.uniform(0, LONGEST))
            victims = chance.choice([ranks[:1], ranks[1:], ranks])
            _kill(victims)
            since = time.monotonic()
            for survivor in (process for process in ranks if process not in victims):
                survivor.join(_UNTIL_ENDED)
                if survivor.is_alive():
                    found.faults.append(f"a survivor of kill {number} has not ended after {_UNTIL_ENDED:.0f} s")
                found.ended.append(time.monotonic() - since)
        finally:
            _kill(ranks)
        found.kills += 1
        found.partial += any((folder / "run").glob(".*.partial"))
        found.read(told)
        yield found


def _kill(ranks: list[BaseProcess]) -> None:
    for process in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid or 0, signal.SIGKILL)
        process.join()


def _rank(rank: int, port: int, folder: Path, told: Path, asynchronous: bool, started: object) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # discard a survivor's last messages
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    graphshard.compile(model, init_device_mesh("cpu", (2,)), backend="eager")
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step, newest = 0, graphshard.checkpoint.latest_checkpoint(folder)
    with told.open("a") as lines:

        def tell(what: str, step: int) -> None:
            digest = hashlib.sha256()
            for tensor in model.state_dict().values():
                digest.update(tensor.full_tensor().numpy().tobytes())
            if rank == 0:
                print(what, step, digest.hexdigest(), file=lines, flush=True)

        if newest is not None:
            step, _ = graphshard.checkpoint.load_checkpoint(newest, model, optim)
            tell("loaded", step)
        while True:
            step += 1
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optim.step()
            optim.zero_grad()
            tell("trained", step)
            started.set()  # type: ignore[attr-defined]  # it is captured
            path = folder / f"step-{step}"
            if asynchronous:
                future = graphshard.checkpoint.async_save_checkpoint(path, model, optim, extra=step, keep=KEPT)
                future.add_done_callback(lambda f, s=step: f.exception() or tell_saved(lines, rank, s))
            else:
                graphshard.checkpoint.save_checkpoint(path, model, optim, extra=step, keep=KEPT)
                tell_saved(lines, rank, step)


def tell_saved(lines: object, rank: int, step: int) -> None:
    """Record that a rank knows that a step is saved."""
    if rank == 0:
        print("saved", step, file=lines, flush=True)  # type: ignore[call-overload]


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return the number of faults."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments")
    options = parser.parse_args(arguments)
    found = Found()
    with tempfile.TemporaryDirectory() as folder:
        for found in run(options.kills, options.seed, Path(folder)):
            print(f"\r{found.kills} kills, {len(found.digests)} steps, {len(found.faults)} faults ", end="", flush=True)
    print("\n" + "\n".join(found.faults))
    print(
        f"{found.kills} kills: {len(found.digests)} steps trained, step {found.complete} saved last, "
        f"{len(found.faults)} faults; {found.partial} times a checkpoint was not complete; a survivor ended after "
        f"{statistics.median(found.ended or [0]):.2f} s (median), {max(found.ended, default=0):.2f} s (longest)"
    )
    return len(found.faults)


if __name__ == "__main__":
    raise SystemExit(main())
