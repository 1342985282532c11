"""Jobs in which one rank does something wrong, each in separate processes; `test_faults.py` checks the errors.

    python -m tests.distributed.faulty [CASE ...]      prints a line of JSON for each rank of each case

The processes are forked from this one, which has imported torch. One serves the rendezvous store, as torchrun does. The
ranks end as scripts do: by an uncaught error, or at the end of their code.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.errors import CaptureError, PassError
from graphshard.ir.program import Program
from graphshard.passes import Pass
from graphshard.runtime import peers
from tests.distributed.launching import NAME, LaunchingGroup, join
from tests.ranks import ENVIRONMENT, nccl_environment

RANKS = 3
ODD = 1
LIMIT = 60.0


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, width), nn.Linear(width, 4)])
        self.branches = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        if self.branches and x.sum() > 0:
            x = x + 1
        return x.square().mean()


@dataclass(frozen=True)
class Broken(Pass):
    """Requires: nothing. Ensures: nothing. Preserves: nothing.

    Breaks the program on one rank only.
    """

    name = "broken"

    def rewrite(self, program: Program) -> int:
        if dist.get_rank() == ODD:
            raise PassError("broken: this pass is broken")
        return 0


@dataclass
class Job:
    """One rank of a job."""

    rank: int
    store: dist.Store
    group: LaunchingGroup | None = None
    device: str = "cpu"

    @property
    def odd(self) -> bool:
        return self.rank == ODD

    def model(self, width: int = 8, **options: Any) -> Any:
        torch.manual_seed(0)
        mesh = init_device_mesh(self.device, (RANKS,))
        return graphshard.compile(Net(width).to(self.device), mesh, backend="eager", **options)

    def steps(self, model: Any, number: int, rows: int = 2) -> None:
        for _ in range(number):
            model(torch.ones(rows, 4, device=self.device)).backward()

    def trained(self, **options: Any) -> Any:
        """Train a model for two steps on all ranks, before the fault."""
        model = self.model(**options)
        self.steps(model, 2)
        dist.barrier()
        return model

    def fault(self) -> None:
        """Mark the time of the fault."""
        if self.odd:
            self.store.set("fault", str(time.time()))

    def end(self) -> None:
        """End the odd rank's script; a barrier before ensures that it is on time."""
        self.fault()
        if self.odd:
            sys.exit()

    def kill(self) -> None:
        """Kill the odd rank's process."""
        self.fault()
        if self.odd:
            os.kill(os.getpid(), signal.SIGKILL)


def capture_error(job: Job) -> None:
    model = job.model(fullgraph=True)
    model.branches = job.odd
    job.fault()
    job.steps(model, 1)


def caught_capture_error(job: Job) -> None:
    """Raise and catch a capture error; the process survives."""
    with contextlib.suppress(CaptureError):
        capture_error(job)
    time.sleep(20)


def pass_error(job: Job) -> None:
    job.fault()
    job.steps(job.model(passes=graphshard.Pipeline().insert(Broken(), after="plan")), 1)


def another_width(job: Job) -> None:
    job.fault()
    job.steps(job.model(width=256 if job.odd else 8), 1)


def requires_grad(job: Job) -> None:
    model = job.trained()
    job.fault()
    model.layers[0].bias.requires_grad_(not job.odd)
    job.steps(model, 1)


def accumulation(job: Job) -> None:
    model = job.trained()
    job.fault()
    model.set_requires_gradient_sync(not job.odd)
    job.steps(model, 2)


def known_accumulation(job: Job) -> None:
    """Change accumulation on one rank; all have accumulated before, so no rank compiles a new program."""
    model = job.trained()
    for sync in (False, True, False, True):
        model.set_requires_gradient_sync(sync)
        job.steps(model, 1)
    dist.barrier()
    job.fault()
    model.set_requires_gradient_sync(not job.odd)
    job.steps(model, 2)


def gathered_ahead(job: Job) -> None:
    """Write to a shard on one rank between two steps, so only this rank gathers again."""
    model = job.trained(width=4)
    step = graphshard.compile_step(model, torch.optim.SGD(model.parameters(), lr=0.1), gather_ahead=True)
    x = torch.ones(2, 4)
    for _ in range(2):
        step(x)
    dist.barrier()
    job.fault()
    if job.odd:
        with torch.no_grad():
            next(model.parameters()).to_local().mul_(0.5)
    step(x)


def extra_call(job: Job) -> None:
    """Make an extra call on one rank; the other ranks' scripts end."""
    model = job.trained()
    job.fault()
    job.steps(model, 3 if job.odd else 2)


def extra_call_of_many(job: Job) -> None:
    """Make an extra call on one rank; the other ranks do something else."""
    model = job.trained()
    job.fault()
    if job.odd:
        job.steps(model, 1)
    time.sleep(20)


def ends_early(job: Job) -> None:
    model = job.trained()
    job.end()
    job.steps(model, 1)


def stands_still(job: Job) -> None:
    model = job.trained()
    job.fault()
    if job.odd:
        time.sleep(6)
    else:
        job.steps(model, 1)


def out_of_memory(job: Job) -> None:
    model = job.trained()
    job.fault()
    if job.odd:
        raise torch.OutOfMemoryError("CUDA out of memory")
    job.steps(model, 1)


def cannot_abort(job: Job) -> None:
    """Kill a rank in a job whose process group raises when it is aborted."""
    assert job.group is not None
    with mock.patch.object(job.group, "abort", side_effect=RuntimeError("no such call")):
        killed(job)
        job.group.synchronize()


def users_error(job: Job) -> None:
    model = job.trained()
    job.fault()
    if job.odd:
        raise ValueError("a bad batch")
    job.steps(model, 1)


def killed(job: Job) -> None:
    model = job.trained()
    job.kill()
    job.steps(model, 1)


def killed_before_a_new_program(job: Job) -> None:
    """Kill one rank while the others wait to compare their programs, outside of collectives."""
    model = job.trained()
    job.kill()
    model.layers[0].bias.requires_grad_(False)
    job.steps(model, 1)


def never_compiles(job: Job) -> None:
    if job.odd:
        job.store.wait(["0 has compiled", "2 has compiled"])
    job.end()
    model = job.model()
    job.store.set(f"{job.rank} has compiled", "")
    job.steps(model, 1)


CASES: dict[str, Callable[[Job], None]] = {
    function.__name__: function
    for function in (
        capture_error,
        caught_capture_error,
        pass_error,
        another_width,
        requires_grad,
        accumulation,
        known_accumulation,
        gathered_ahead,
        extra_call,
        extra_call_of_many,
        ends_early,
        stands_still,
        out_of_memory,
        cannot_abort,
        users_error,
        killed,
        killed_before_a_new_program,
        never_compiles,
    )
}


def run(name: str, rank: int, port: int) -> None:
    """Run one rank of a case and print its outcome.

    The name ends with ":steps" to check each step, with ":nccl" to run on GPUs, or with ":launching" for collectives
    on CPUs that behave as NCCL's.
    """
    case, _, how = name.partition(":")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    own = dist.PrefixStore(name, store)
    launches, lines = how in (NAME, "nccl"), list[tuple[float, str]]()
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: lines.append((time.time(), record.getMessage()))  # type: ignore[method-assign]
    logging.getLogger("graphshard").addHandler(handler)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"GRAPHSHARD_CHECK": "" if launches else how}))
        group, device, synchronize = None, "cpu", lambda: None
        if how == NAME:
            group = join(own, rank, RANKS)
            synchronize = group.synchronize
            stack.enter_context(mock.patch.object(peers, "completion_on", group.completion))
        else:
            if how == "nccl":
                os.environ.update(nccl_environment(rank, RANKS))
                torch.cuda.set_device(rank % torch.cuda.device_count())
                device, synchronize = "cuda", torch.cuda.synchronize
            backend = "nccl" if how == "nccl" else "gloo"
            dist.init_process_group(backend, store=own, rank=rank, world_size=RANKS, timeout=timedelta(seconds=LIMIT))
        found, message = "", ""
        try:
            CASES[case](Job(rank, dist.PrefixStore("job", own), group, device))
            synchronize()
        except Exception as error:
            found, message = type(error).__name__, str(error)
            raise
        finally:
            fault = float(dist.PrefixStore("job", own).get("fault"))
            row: dict[str, Any] = {"case": name, "rank": rank, "error": found, "message": message}
            row |= {"seconds": round(time.time() - fault, 2)}
            if launches:
                row["lines"] = [(round(at - fault, 2), line) for at, line in lines]
                row["aborted"] = group is not None and group.ended.wait(2.0)
            os.write(1, f"{json.dumps(row)}\n".encode())  # one write, because other processes write, too


def serve() -> tuple[int, int]:
    """Fork the process that serves the store and return it and its port. It has no other threads at the fork."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writer, str(server.port).encode())
        signal.pause()
    return child, int(os.read(reader, 100))


def main() -> None:
    os.environ.update(ENVIRONMENT)
    server, port = serve()
    for name in sys.argv[1:] or CASES:
        children = []
        for rank in range(RANKS):
            child = os.fork()
            if child == 0:
                run(name, rank, port)
                return
            children.append(child)
        wait_for(children)
    os.kill(server, signal.SIGKILL)


def wait_for(children: list[int]) -> None:
    """Wait for processes, and kill them after the time limit."""
    deadline = time.monotonic() + LIMIT
    while children and time.monotonic() < deadline:
        children = [child for child in children if os.waitpid(child, os.WNOHANG) == (0, 0)]
        time.sleep(0.05)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
