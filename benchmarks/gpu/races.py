"""Part "races": the same bits although collectives run late and freed memory holds NaN, and torch's CUDA sanitizer.

    TORCH_CUDA_SANITIZER=1 python -m benchmarks.gpu.races [--dry]      the part's subprocess: one rank that offloads

A step that reads a gathered parameter before its wait, writes over what a collective still reads, or frees it, computes
other numbers on `LateGroup`, in which collectives take milliseconds and unused memory is NaN.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.cuda._sanitizer import CUDASanitizerDispatchMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

import graphshard
from benchmarks.gpu.settings import POLICY, ROOT, Setup, size_in_a_file, stepper, world
from benchmarks.gpu.table import Emit, Row
from graphshard.passes import OffloadActivations
from tests.ranks import RankError, RankPool

NAME = "late"
STEPS = 4
# Of each collective: seconds on a CPU, and clock cycles on a GPU.
_LATE, _CYCLES = 0.004, 10_000_000
_LIMIT = 120.0
# Names of torch 2.13 and later, and those of before.
_ALIASES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}


class LateGroup(dist.ProcessGroup):
    """Process group that starts the collectives of another one late, and fills freed memory with NaN meanwhile.

    On a GPU they follow a kernel that sleeps on a separate stream. On a CPU a thread runs them, after it has slept.

    Attributes:
        launched: number of collectives.
    """

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner, self.launched = inner, 0
        self._sizes, self._device = list[int](), torch.device("cpu")
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def getBackendName(self) -> str:
        return NAME

    def getSize(self) -> int:
        return int(self.inner.size())

    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    def _serve(self) -> None:
        while True:
            self._queue.get()()

    def _launch(self, name: str, outputs: Any, *args: Any) -> Any:
        self.launched += 1
        run = getattr(self.inner, name, None) or getattr(self.inner, _ALIASES[name])
        tensors = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        results = tensors if args and isinstance(args[0], (torch.Tensor, list)) else []  # others work in place
        self._device = tensors[0].device
        if self._device.type == "cuda":
            return self._launch_on_gpu(run, results, outputs, args)
        self._sizes = [*self._sizes, *(tensor.nbytes for tensor in tensors)][-32:]
        _fill(results)
        _fill([torch.empty(size // 4) for size in self._sizes])  # malloc gives what was freed last
        future: torch.futures.Future[Any] = torch.futures.Future()

        def late() -> None:
            time.sleep(_LATE)
            try:
                run(outputs, *_summing(args, results, self.getSize())).wait()
                future.set_result(None)
            except Exception as error:
                future.set_exception(error)

        self._queue.put(late)
        return _create_work_from_future(future)

    def _launch_on_gpu(self, run: Callable[..., Any], results: list[torch.Tensor], outputs: Any, args: Any) -> Any:
        blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
        freed = [block["size"] for block in blocks if block["state"] == "inactive"]
        _fill([torch.empty(size // 4, device=self._device) for size in freed])
        late = torch.cuda.Stream()
        late.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(late):
            _fill(results)
            torch.cuda._sleep(_CYCLES)
            return run(outputs, *args)  # NCCL's stream waits for the current one


def _method(name: str) -> Callable[..., Any]:
    def call(self: LateGroup, *args: Any) -> Any:
        return self._launch(name, *args)

    return call


for _name in (*_ALIASES, *_ALIASES.values(), "allreduce", "allreduce_coalesced", "broadcast"):
    setattr(LateGroup, _name, _method(_name))


def _fill(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)


def _summing(args: Any, results: list[torch.Tensor], ranks: int) -> Any:
    """Return arguments that gloo takes: it sums inputs that are divided before."""
    if not args or getattr(args[-1], "reduceOp", None) != dist.ReduceOp.AVG:
        return args
    args[-1].reduceOp = dist.ReduceOp.SUM
    inputs = args[0] if isinstance(args[0], list) else [args[0]]
    divided = [tensor / ranks for tensor in inputs]
    return (divided if isinstance(args[0], list) else divided[0], *args[1:])


def late_group(kind: str) -> LateGroup:
    """Return a new group of all ranks over one of the kind "gloo" or "nccl"."""
    inner = dist.new_group(backend=kind)
    if NAME.upper() not in dist.Backend._plugins:  # type: ignore[attr-defined]
        dist.Backend.register_backend(NAME, lambda *_: LateGroup(_inner.pop()), devices=["cpu", "cuda"])
    _inner.append(inner)
    group = dist.new_group(backend=NAME)
    assert isinstance(group, LateGroup)
    return group


# The group that the next `LateGroup` wraps.
_inner: list[dist.ProcessGroup] = []


def trained(rank: int, world_size: int, device: str, backend: str, *, late: bool, offload: bool) -> list[Any]:
    """Train a small model; return its losses and parameters, and how many collectives came late."""
    group: Any = late_group(backend) if late else dist.group.WORLD
    mesh = DeviceMesh.from_group(group, device)
    size = size_in_a_file()
    options: dict[str, Any] = {"mp_policy": POLICY, "backend": "eager"}
    if offload:
        options["passes"] = graphshard.Pipeline().insert(OffloadActivations(least=1), before="plan")
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device == "cuda")
    model = graphshard.compile(size.model("cpu" if offload else device), mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        tokens = size.tokens(device, seed=rank + world_size * step)
        loss = model(tokens[0], tokens[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    params = [param.to_local() if isinstance(param, DTensor) else param for param in model.parameters()]
    return [losses, [param.detach().cpu() for param in params], group.launched if late else 0]


def measure(setup: Setup, emit: Emit) -> None:
    """Compare training on late collectives with training, and run a rank under torch's sanitizer."""
    backend = "gloo" if setup.is_dry else "nccl"
    for offload in (False, True):
        row = Row("races", "2 ranks", f"late {backend}, freed memory is NaN{', offloading' if offload else ''}")
        try:
            with RankPool() as pool:
                ranks = pool.world(2, "cpu:gloo,cuda:nccl" if offload and not setup.is_dry else backend)
                given = (setup.device, backend, offload)
                usual, late = (ranks.run(_trained, *given, late, timeout=_LIMIT) for late in (False, True))
        except RankError as error:
            emit(Row(**{**vars(row), "failed": True, "note": str(error).splitlines()[0]}))
            continue
        emit(compared(late, usual, row))
    emit(_sanitized(setup))


def _trained(rank: int, world_size: int, device: str, backend: str, offload: bool, late: bool) -> list[Any]:
    return trained(rank, world_size, device, backend, late=late, offload=offload)


def compared(late: list[list[Any]], usual: list[list[Any]], row: Row) -> Row:
    """Return the row that compares all ranks' losses and parameters."""
    number = sum(len(params) for _, params, _ in usual)
    unlike = sum(not torch.equal(a, b) for x, y in zip(late, usual) for a, b in zip(x[1], y[1]))
    losses = [x[0] == y[0] for x, y in zip(late, usual)]
    note = f"{STEPS} losses and {number} shards, {unlike} differ; {late[0][2]} collectives of a rank were late"
    return Row(**{**vars(row), "note": note, "failed": bool(unlike) or not all(losses) or not late[0][2]})


def _sanitized(setup: Setup) -> Row:
    command = [sys.executable, "-m", "benchmarks.gpu.races", *(["--dry"] if setup.is_dry else [])]
    environment = {**os.environ, **({} if setup.is_dry else {"TORCH_CUDA_SANITIZER": "1"})}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, flush=True)
    found = [line for line in done.stderr.splitlines() if "data race" in line.lower()]
    told = (done.stderr.strip().splitlines() or [""])[-1][:200]
    note = f"{len(found)} data races; {told}" if done.returncode else "no data race in steps that offload"
    where = ", on a CPU, where it sees nothing" if setup.is_dry else ""
    return Row("races", "one rank", "TORCH_CUDA_SANITIZER=1", failed=done.returncode != 0, note=note + where)


def main() -> None:
    """Train as one rank that offloads parameters and saved values."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry", action="store_true")
    setup = Setup.of(dry=parser.parse_args().dry)
    size = size_in_a_file()
    passes = graphshard.Pipeline().insert(OffloadActivations(least=1), before="plan")
    with contextlib.ExitStack() as stack:
        if setup.is_dry:  # torch enters the mode by itself otherwise, and it asks for the stream of each operator
            stream = SimpleNamespace(cuda_stream=0)
            stack.enter_context(mock.patch("torch.cuda.current_stream", return_value=stream))
            stack.enter_context(CUDASanitizerDispatchMode())
        mesh = stack.enter_context(world(setup, 1))
        options = {"offload_policy": CPUOffloadPolicy(pin_memory=not setup.is_dry), "passes": passes}
        model = graphshard.compile(size.model("cpu"), mesh, mp_policy=POLICY, backend="eager", **options)
        step = stepper(model, size.tokens(setup.device), torch.enable_grad)
        print([step().item() for _ in range(STEPS)])


if __name__ == "__main__":
    main()
