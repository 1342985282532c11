"""Run functions on real ranks, of gloo or NCCL, that stay alive from test to test.

Importing torch and starting a process takes seconds, a test milliseconds. So the processes are started once, a run
of n ranks takes the first n of them, and each test sends them a function of its own module:

    def _sum(rank: int, world_size: int, x: int) -> int:
        total = torch.tensor(rank * x)
        dist.all_reduce(total)
        return total.item()

    def test_sum(ranks: Ranks) -> None:
        assert ranks(2).run(_sum, 3) == [3, 3]

        test process                                 rank 0, rank 1
        run(_sum, 3) --- "tests.test_x._sum", 3 -->  make a process group, call _sum(rank, 2, 3)
        [3, 3]       <-- value or traceback -------
                                                     leave the group (at the next run, if all went well)

Ranks see graphshard's environment variables as the test has set them, for this run.

Each run creates its process groups. Cached groups would accumulate sockets and threads, and their names would depend on
the order of tests. Leaving at once after an error wakes the ranks that wait for the failing one.

The processes are spawned, not forked: each then has its own hash seed, as in a real job, and a result that depends on
the order of a set differs between ranks.

Only the first rank verifies the program after every pass, because the program is the same on all ranks.

`ranks(2, "nccl")` are ranks of NCCL on the GPUs that are there, or on one GPU: see `ONE_GPU`.

If a rank dies or hangs, its pool is closed, and the next run starts a new one. The test process repeats the ranks'
output, so pytest shows it with a failing test.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, TextIO, TypeAlias
from unittest import mock

import psutil
import torch
import torch.distributed as dist

# Defaults; the environment of the test process takes precedence.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # A pool of compile workers in each rank costs more than it saves.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    # Otherwise gloo resolves the host name, which may lead to an external address or to none.
    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
}
# One order of sums, whatever the bytes of a collective, so that results are compared bit for bit; only loopback.
NCCL = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_MAX_NCHANNELS": "1",
}
# Ways to have several ranks on one GPU, which NCCL takes for a mistake: it compares hashes of hosts, and bus ids. With
# separate host ids, ranks meet over loopback; from NCCL 2.30 on, a variable permits it.
ONE_GPU: dict[str, dict[str, str]] = {
    "NCCL_HOSTID": {"NCCL_HOSTID": "{rank}", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
    "NCCL_MULTI_RANK_GPU_ENABLE": {"NCCL_MULTI_RANK_GPU_ENABLE": "1"},
}
# The way that is taken, by name.
WAY = "GRAPHSHARD_TEST_NCCL"
START_TIMEOUT = 300.0

# Environment of all ranks except the first.
UNVERIFIED = {"GRAPHSHARD_VERIFY": "off"}

# Ranks with more threads are replaced. Some DTensor models leak process groups, whose threads poll a hundred times a
# second; hundreds of them take half of the machine.
MOST_THREADS = 60

# Prefix of graphshard's environment variables.
OURS = "GRAPHSHARD_"


class RankError(Exception):
    """A rank raised, died or hung. The message holds the traceback or stack of each, root cause first."""


class RankPool:
    """Processes that serve as ranks. They start on the first run, and again after a run that lost one."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []
        self._store: dist.Store | None = None
        self._folder = contextlib.ExitStack()
        self._runs = itertools.count()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def world(self, world_size: int, backend: str = "gloo") -> World:
        """Return a world of the pool's first ranks, with the default process group of a backend."""
        return World(self, world_size, backend)

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        backend: str = "gloo",
        timeout: float = 300.0,
        grace: float = 20.0,
    ) -> list[Any]:
        """Call `function(rank, world_size, *args)` on every rank; return the values in rank order.

        `function` is sent by name and must be at the top level of its module. Arguments and results, including tensors,
        are pickled. The ranks have `timeout` seconds, and `grace` seconds after the first error.
        """
        __tracebackhide__ = True
        environment = {name: value for name, value in os.environ.items() if name.startswith(OURS)}
        call = pickle.dumps((function, args))
        request = pickle.dumps(_Request(next(self._runs), world_size, backend, call, environment))
        try:
            if any(rank.num_threads() > MOST_THREADS for rank in self._ranks):
                self.close()
            self._start(world_size)
            chosen = self._ranks[:world_size]
            for rank in chosen:
                rank.send(request)
            answers = _collect(chosen, timeout, grace)
        except BaseException:
            self.close()  # an interrupted run leaves answers in the pipes
            raise
        if any(answer.lost for answer in answers):
            self.close()
        self._relay_output()
        _raise_errors(answers)
        return [pickle.loads(answer.value) for answer in answers]

    def close(self) -> None:
        """Kill the processes; a regular exit takes a second each, because torch shuts down slowly."""
        self._relay_output()
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.close()
        self._ranks = []
        self._store = None
        self._folder.close()

    def _start(self, world_size: int) -> None:
        """Start the missing processes."""
        if not self._ranks:
            self._directory = Path(self._folder.enter_context(tempfile.TemporaryDirectory(prefix="ranks-")))
            # The test process serves the store: its port is free, and it outlives any rank.
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        assert self._store is not None
        missing = range(len(self._ranks), world_size)
        for rank in missing:
            of_rank = {**nccl_environment(rank, world_size), "PYTHONHASHSEED": str(rank)}
            with mock.patch.dict(os.environ, {**ENVIRONMENT, **os.environ, **of_rank}):
                self._ranks.append(_Rank.start(rank, self._store.port, self._directory))
        if missing:
            _raise_errors(_collect(self._ranks[missing.start :], START_TIMEOUT, grace=0.0))

    def _relay_output(self) -> None:
        for rank in self._ranks:
            for line in rank.log.read().splitlines():
                print(f"[rank {rank.rank}] {line}")


@dataclass(frozen=True)
class World:
    """The first ranks of a pool, as one world."""

    pool: RankPool
    world_size: int
    backend: str = "gloo"

    def run(self, function: Callable[..., Any], *args: Any, **limits: Any) -> list[Any]:
        """See `RankPool.run`."""
        __tracebackhide__ = True
        return self.pool.run(self.world_size, function, *args, backend=self.backend, **limits)


Ranks: TypeAlias = Callable[..., World]
FakeWorld: TypeAlias = Callable[..., None]


@dataclass(frozen=True)
class _Request:
    """A call for a rank to run as one of `world_size` ranks."""

    number: int
    world_size: int
    backend: str
    call: bytes  # the pickled function and its arguments; loading it imports the test's module
    environment: dict[str, str]  # graphshard's variables in the test process


def _collect(ranks: list[_Rank], timeout: float, grace: float) -> list[_Answer]:
    """Wait for an answer of each rank; report an error for ranks that hang."""
    waiting = {rank.connection: rank for rank in ranks}
    answers: list[_Answer] = []
    deadline = time.monotonic() + timeout
    limit = f"{timeout:g} s"
    while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
        for connection in ready:
            answer = waiting.pop(connection).receive()
            answers.append(answer)
            if answer.error and time.monotonic() + grace < deadline:
                deadline = time.monotonic() + grace
                limit = f"{grace:g} s after the first error"
    answers += _hanging(list(waiting.values()), f"no answer within {limit}")
    return sorted(answers, key=lambda answer: answer.rank)


@dataclass(frozen=True)
class _Answer:
    """A rank's result or error."""

    rank: int
    value: bytes = b""  # pickled by the rank, so that a failure to pickle is an ordinary error
    error: str = ""
    detail: str = ""
    time: float = 0.0  # of the error; all processes share the clock
    lost: bool = False  # the process died or hangs


def _raise_errors(answers: list[_Answer]) -> None:
    """Raise one RankError for all errors, if any."""
    __tracebackhide__ = True
    errors = sorted((answer for answer in answers if answer.error), key=lambda answer: answer.time)
    if errors:
        title = f"rank {errors[0].rank} of {len(answers)}: {errors[0].error}"
        raise RankError("\n".join([title, *(f"---- rank {e.rank}: {e.error}\n{e.detail}" for e in errors)]))


@dataclass
class _Rank:
    """A rank's process as seen by the test process."""

    rank: int
    process: SpawnProcess
    connection: Connection
    log: TextIO  # output of the rank
    stacks: TextIO  # stack traces that a hanging rank writes on request

    def num_threads(self) -> int:
        """Return how many threads the process has; 0 if it is gone."""
        try:
            return psutil.Process(self.process.pid).num_threads()
        except psutil.NoSuchProcess:
            return 0

    @classmethod
    def start(cls, rank: int, port: int, folder: Path) -> _Rank:
        log, stacks = folder / f"log{rank}", folder / f"stacks{rank}"
        log.touch()
        stacks.touch()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        args = (rank, port, theirs, log, stacks)
        process = context.Process(target=_serve, args=args, name=f"rank {rank}", daemon=True)
        process.start()
        theirs.close()  # the rank holds the only other end, so its death closes the pipe
        return cls(rank, process, ours, log.open(errors="replace"), stacks.open())

    def send(self, request: bytes) -> None:
        with contextlib.suppress(OSError):  # a dead rank is found when its answer is due
            self.connection.send_bytes(request)

    def receive(self) -> _Answer:
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.process.join(10.0)
            # The errors of the other ranks follow from this one, so it gets the earliest time.
            return _Answer(self.rank, error=f"died with exit code {self.process.exitcode}", lost=True)

    def close(self) -> None:
        self.process.join()
        self.process.close()
        self.connection.close()
        self.log.close()
        self.stacks.close()


def _hanging(ranks: list[_Rank], error: str) -> list[_Answer]:
    """Return answers with the stack traces of ranks that hang."""
    for rank in ranks:
        os.kill(rank.process.pid, signal.SIGUSR1)
    if ranks:
        time.sleep(1.0)  # they write their stacks
    return [_Answer(r.rank, error=error, detail=r.stacks.read(), time=math.inf, lost=True) for r in ranks]


def _serve(rank: int, port: int, connection: Connection, log: Path, stacks: Path) -> None:
    """Answer requests until the process is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test process
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    with stacks.open("w") as stacks_file, log.open("w") as log_file:
        faulthandler.register(signal.SIGUSR1, file=stacks_file, all_threads=True)
        os.dup2(log_file.fileno(), 1)
        os.dup2(log_file.fileno(), 2)
        sys.stdout.reconfigure(line_buffering=True)
        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        connection.send_bytes(pickle.dumps(_Answer(rank)))
        frozen = 0
        while True:
            request = pickle.loads(connection.recv_bytes())
            reset_distributed()  # only now: before, another rank may still be in a collective
            gc.collect()
            if len(sys.modules) > frozen:  # keep imported objects out of collections, which take 0.1 s
                frozen = len(sys.modules)
                gc.freeze()
            answer = _answer(request, dist.PrefixStore(f"run{request.number}", store), rank)
            connection.send_bytes(pickle.dumps(answer))
            if answer.error:
                reset_distributed()


def nccl_environment(rank: int, world_size: int) -> dict[str, str]:
    """Return the variables with which a rank starts so that NCCL can join it to the others."""
    if not torch.cuda.is_available() or torch.cuda.device_count() >= world_size:
        return NCCL
    way = ONE_GPU[os.environ.get(WAY) or "NCCL_HOSTID"]
    return {**NCCL, **{name: value.format(rank=rank) for name, value in way.items()}}


def _leave_with_parent() -> None:
    """Exit when the test process dies, even if this rank hangs."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _answer(request: _Request, store: dist.Store, rank: int) -> _Answer:
    with mock.patch.dict(os.environ):  # undone for the next run
        for name in [name for name in os.environ if name.startswith(OURS)]:
            del os.environ[name]
        os.environ.update(request.environment if rank == 0 else request.environment | UNVERIFIED)
        return _answer_here(request, store, rank)


def _answer_here(request: _Request, store: dist.Store, rank: int) -> _Answer:
    try:
        if "nccl" in request.backend:
            torch.cuda.set_device(rank % torch.cuda.device_count())
        dist.init_process_group(request.backend, store=store, rank=rank, world_size=request.world_size)
        function, args = pickle.loads(request.call)
        torch.manual_seed(0)  # last: the first run of a module imports it above
        value = pickle.dumps(function(rank, request.world_size, *args))
        check_modes()
        return _Answer(rank, value=value)
    except BaseException as error:  # including SystemExit and pytest.fail
        summary = "".join(traceback.format_exception_only(error)).strip()
        # A group of NCCL with an unfinished collective cannot be destroyed.
        lost = "nccl" in request.backend
        return _Answer(rank, error=summary, detail=traceback.format_exc(), time=time.monotonic(), lost=lost)


def check_modes() -> None:
    """Check that no torch mode is left open; it would affect the next run."""
    torch.autocast_increment_nesting()
    assert torch.autocast_decrement_nesting() == 0, "autocast is left open"
    assert not torch.is_autocast_enabled("cpu"), "autocast is left open"
    assert torch.is_grad_enabled(), "gradients are left off"
    assert not torch.is_inference_mode_enabled(), "inference mode is left open"
    assert torch._C._functorch.maybe_current_level() is None, "a transform of torch.func is left open"
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack(), "a mode of operators is left open"
    assert torch._C._len_torch_function_stack() == 0, "a mode of functions is left open"


def reset_distributed() -> None:
    """Destroy all process groups and clear what names or holds them.

    DTensor caches its plans by device mesh. A mesh can equal one of an earlier run whose plan names groups that are
    gone or belong to other ranks by now. A cached mesh also keeps its groups alive, whose threads poll a hundred times
    a second.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _collective_utils, _redistribute
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
        _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
        _redistribute._gen_transform_infos.cache_clear()
        _redistribute.clear_redistribute_planner_cache()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
