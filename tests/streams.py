"""An oracle of streams: the code of an executor runs on values that know who has written them, and checks every access.

    problems(executor.lines, [COMPUTE, HOST, ...])      accesses that are not ordered, in words

The code that runs is that of the executor, with another `torch` in its scope, and so are `upload`, `arrived` and
`download`. Names are let go of where the code lets go of them: a buffer ends when Python drops the last reference.
What the model takes for granted is what torch does on CUDA devices:

* A region and an operator run on the compute stream. Their results are allocated there.
* A collective runs on the stream of its process group, behind all that the compute stream has been given by then. Its
  results are allocated on the compute stream. Its work holds what it reads until somebody waits for it
  (`ProcessGroupNCCL` stashes it), but not what it writes.
* `wait_tensor` lets the compute stream wait for the collective, those of all tensors that travel together.
* What is freed is at once there again for the stream that it was allocated on, or when those that `record_stream` was
  told have done what they have been given by then. One of these must be behind every other stream that has used it.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.fx.node import map_aggregate

import graphshard.ir.operators as operators
from graphshard.ir.graph import ALL_REDUCES, GATHERS, REDUCES, WAIT
from graphshard.ir.operators import ARRIVED, BEGINS, DOWNLOAD, OWN_CHUNK, RELOAD, SETTLED, TOGETHER, UPLOAD
from graphshard.lower.executor_lines import CallLine, Line, print_lines
from graphshard.runtime.gloo import FUNCTIONAL

COMPUTE, HOST, KEPT = "compute", "host", "kept "
CUDA = torch.device("cuda", 0)
_COLLECTIVES = GATHERS | REDUCES | ALL_REDUCES | FUNCTIONAL.keys()


class Buffer:
    """Memory, and the accesses that others must be ordered behind.

    Attributes:
        home: the stream that it was allocated on; HOST is no device's memory.
        written: the last write: a stream and its count.
        used: the last access of each stream.
        recorded: streams that `record_stream` was called with.
    """

    def __init__(self, machine: Machine, name: str, home: str) -> None:
        self.machine, self.name, self.home = machine, name, home
        self.written: tuple[str, int] | None = None
        self.used: dict[str, int] = {}
        self.recorded: set[str] = set()

    def __del__(self) -> None:
        self.machine.freed(self)


@dataclass(eq=False)
class Value:
    """A tensor: a reference to a buffer, with as much of the interface as copies use."""

    buffer: Buffer

    @property
    def is_cuda(self) -> bool:
        return self.buffer.home != HOST

    @property
    def device(self) -> torch.device:
        return CUDA if self.is_cuda else torch.device("cpu")

    def to(self, device: Any, *, non_blocking: bool = False) -> Value:
        return self.buffer.machine.copied(self, torch.device(device).type, non_blocking)

    def copy_(self, source: Value, *, non_blocking: bool = False) -> Value:
        machine = self.buffer.machine
        stream = machine.current if self.is_cuda or source.is_cuda else HOST
        machine.reads(source, stream)
        machine.writes(self, stream)
        if not non_blocking:
            machine.waits(HOST, machine.current)
        return self

    def view_as(self, other: Value) -> Value:
        return Value(self.buffer)

    def record_stream(self, stream: Stream) -> None:
        self.buffer.recorded.add(stream.name)


@dataclass(frozen=True)
class Stream:
    """`torch.cuda.Stream` of a machine."""

    machine: Machine
    name: str

    def wait_stream(self, other: Stream) -> None:
        self.machine.waits(self.name, other.name)

    def record_event(self) -> Event:
        return Event(self.machine, self.machine._clock(self.name).copy())


@dataclass(frozen=True)
class Event:
    """What a stream had been given when it was recorded."""

    machine: Machine
    clock: Counter[str]

    def synchronize(self) -> None:
        self.machine._wait_for(HOST, self.clock)


@dataclass(eq=False)
class Work:
    """A collective that is under way: where its stream was behind it, and what it holds."""

    end: Counter[str]
    holds: list[Value]


@dataclass(eq=False)
class Machine:
    """Streams, what each of them is behind of, and collectives under way.

    Attributes:
        holds: whether works hold what they read.
        problems: accesses that are not ordered, in order.
    """

    holds: bool = True
    problems: list[str] = field(default_factory=list)
    current: str = COMPUTE
    _behind: dict[str, Counter[str]] = field(default_factory=dict)
    _work_of: weakref.WeakKeyDictionary[Buffer, Work] = field(default_factory=weakref.WeakKeyDictionary)
    _under_way: list[Work] = field(default_factory=list)
    _numbers: Counter[str] = field(default_factory=Counter)

    def made(self, name: str, home: str | None = None) -> Value:
        """A new buffer, allocated on the current stream."""
        self._numbers[name] += 1
        return Value(Buffer(self, f"{name} {self._numbers[name]}", home or self.current))

    def reads(self, value: Value, stream: str) -> None:
        """A stream reads a value: it must be behind its write."""
        written = value.buffer.written
        if written is not None and not self._is_behind(stream, *written):
            self.problems.append(f"{stream} reads {value.buffer.name} while {written[0]} writes it")
        value.buffer.used[stream] = self._counts(stream)

    def writes(self, value: Value, stream: str) -> None:
        """A stream writes a value: it must be behind all that has used it."""
        for other, count in value.buffer.used.items():
            if not self._is_behind(stream, other, count):
                self.problems.append(f"{stream} writes {value.buffer.name} while {other} uses it")
        value.buffer.used[stream] = count = self._counts(stream)
        value.buffer.written = stream, count

    def freed(self, buffer: Buffer) -> None:
        """Nobody refers to a buffer any more."""
        until = {buffer.home, *buffer.recorded}  # have done what they have been given by now, when it is used again
        for other, count in buffer.used.items():
            if buffer.home != HOST and not any(self._is_behind(stream, other, count) for stream in until):
                self.problems.append(f"{buffer.name} is freed while {other} uses it")

    def waits(self, stream: str, other: str) -> None:
        """A stream waits for all that another has been given by now."""
        self._wait_for(stream, self._clock(other))

    def started(self, group: str, given: Sequence[Value], results: Sequence[Value]) -> None:
        """A collective of a group starts."""
        stream = f"group {group}"
        self.waits(stream, self.current)
        for value in given:
            self.reads(value, stream)
        for value in results:
            self.writes(value, stream)
        work = Work(self._clock(stream).copy(), list(given) if self.holds else [])
        self._under_way.append(work)
        self._work_of.update((value.buffer, work) for value in results)

    def waited(self, value: Value) -> None:
        """The current stream waits for the collective that makes a value, if it is under way."""
        work = self._work_of.pop(value.buffer, None)
        if work is not None:
            self._wait_for(self.current, work.end)
            work.holds.clear()

    def copied(self, value: Value, device: str, non_blocking: bool) -> Value:
        """A copy of a value on another device, made by the current stream."""
        self.reads(value, self.current)
        made = self.made("copy", HOST if device == "cpu" else None)
        self.writes(made, self.current)
        if not non_blocking:
            self.waits(HOST, self.current)
        return made

    def end(self) -> None:
        """Works that nobody has waited for are waited for at some time."""
        self._under_way.clear()

    def _counts(self, stream: str) -> int:
        clock = self._clock(stream)
        clock[stream] += 1
        return clock[stream]

    def _clock(self, stream: str) -> Counter[str]:
        return self._behind.setdefault(stream, Counter())

    def _is_behind(self, stream: str, other: str, count: int) -> bool:
        # What the host has done itself was done before it launched anything else.
        return other in (stream, HOST) or self._clock(stream)[other] >= count

    def _wait_for(self, stream: str, clock: Mapping[str, int]) -> None:
        mine = self._clock(stream)
        mine |= clock  # the larger count of each

    # --- what stands for torch ------------------------------------------------------------------------------

    def torch(self) -> Any:
        """`torch` in the scope of an executor's code."""
        dtypes = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
        return types.SimpleNamespace(ops=_Operators(self, torch.ops), **dtypes)

    @contextlib.contextmanager
    def copies(self) -> Iterator[None]:
        """In the block copies between host and device are made on this machine."""

        @contextlib.contextmanager
        def on(stream: Stream) -> Iterator[None]:
            before, self.current = self.current, stream.name
            try:
                yield
            finally:
                self.current = before

        def empty_like(like: Value, device: str = "", dtype: Any = None, pin_memory: bool = False) -> Value:
            return self.made("host", HOST if device == "cpu" or not (device or like.is_cuda) else None)

        numbers = iter(range(1000))
        cuda = types.SimpleNamespace(
            Stream=lambda device: Stream(self, f"copies {next(numbers)}"),
            current_stream=lambda: Stream(self, self.current),
            current_device=lambda: 0,
            stream=on,
        )
        fake = types.SimpleNamespace(cuda=cuda, device=torch.device, empty_like=empty_like)
        streams = functools.cache(operators._copies.__wrapped__)
        with mock.patch.object(operators, "torch", fake), mock.patch.object(operators, "_copies", streams):
            yield

    def call(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator."""
        if operator in _COLLECTIVES:
            return self._collective(operator, args)
        if operator is WAIT:
            self.waited(args[0])
            return Value(args[0].buffer)
        if operator is UPLOAD:
            return operators._upload(args[0], "cuda", *args[2:])
        if operator is RELOAD:
            return operators._reload(args[0], "cuda")
        if operator is ARRIVED:
            return operators._arrived(args[0])
        if operator is DOWNLOAD:
            return operators._download(args[0])
        if operator is SETTLED:
            self.waited(args[0])
            return Value(args[0].buffer)
        if operator in TOGETHER.values():
            results = [self.made(operator._opname) for _ in args[0]]
            self.started(args[-1], args[0], results)
            for result in results:
                self.waited(result)
            return results
        if operator in BEGINS or operator in BEGINS.values():
            result = self.made(operator._opname)
            self.started(args[-1], [args[0]], [result])
            if operator in BEGINS:
                self.waited(result)
            return result
        if operator.namespace in ("graphshard", "_c10d_functional") and operator is not OWN_CHUNK:
            raise NotImplementedError(operator)
        values: list[Value] = []
        map_aggregate((args, kwargs), lambda arg: values.append(arg) if isinstance(arg, Value) else None)
        if any(result.alias_info is not None for result in operator._schema.returns):
            return self._views(operator, values[0], args)
        for value in values:
            self.reads(value, self.current)
        result = self.made(operator._opname)
        self.writes(result, self.current)
        return result

    def _views(self, operator: Any, value: Value, args: tuple[Any, ...]) -> Any:
        if "split" in operator._opname:
            assert isinstance(args[1], (list, tuple)), operator
            return [Value(value.buffer) for _ in args[1]]
        return Value(value.buffer)

    def _collective(self, operator: Any, args: tuple[Any, ...]) -> Any:
        several = isinstance(args[0], (list, tuple))
        given = list(args[0]) if several else [args[0]]
        if operator in FUNCTIONAL:  # over what is given
            results = given
            self.started(args[-1], given, given)
        elif operator in ALL_REDUCES:  # of a copy
            results = [self.call(torch.ops.aten.clone.default, (value,), {}) for value in given]
            self.started(args[-1], results, results)
        else:
            results = [self.made(operator._opname) for _ in given]
            self.started(args[-1], given, results)
        return results if several else results[0]


@dataclass
class _Operators:
    """`torch.ops` of a machine, down to overloads, which it runs."""

    machine: Machine
    real: Any

    def __getattr__(self, name: str) -> Any:
        return _Operators(self.machine, getattr(self.real, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.machine.call(self.real, args, kwargs)


@dataclass
class _Regions:
    """`self` of an executor's code: its methods are regions."""

    machine: Machine
    results: Mapping[str, int]

    def __getattr__(self, name: str) -> Callable[[list[Any]], list[Value]]:
        count = self.results[name]

        def run(inputs: list[Any]) -> list[Value]:
            for value in inputs:
                if isinstance(value, Value):
                    self.machine.reads(value, self.machine.current)
            results = [self.machine.made(name) for _ in range(count)]
            for value in results:
                self.machine.writes(value, self.machine.current)
            inputs.clear()
            return results

        return run


def problems(
    lines: Sequence[Line],
    inputs: Sequence[str],
    *,
    change: Callable[[str], str] = lambda code: code,
    holds: bool = True,
    offloaded: bool = False,
    updates: Mapping[int, Sequence[int]] | None = None,
    finishes: bool = True,
    unread: Collection[int] = (),
) -> list[str]:
    """Accesses of the code of some lines that are not ordered.

    Args:
        inputs: for each input where it was allocated, COMPUTE or HOST, behind KEPT if somebody else has it, too.
        change: makes a fault in the code.
        holds: whether works hold what they read.
        offloaded: whether the host waits for copies in the end, before it writes to what it has given.
        updates: for each group of gradients that arrive, the places of the inputs that the optimizer writes then.
        finishes: whether the host does wait for them.
        unread: places of results that nobody reads before backward gets them back.
    """
    machine = Machine(holds)
    counts = {line.region: len(line.results) for line in lines if isinstance(line, CallLine)}
    given = [machine.made("input", HOST if HOST in where else None) for where in inputs]
    kept = {place: value for place, value in enumerate(given) if inputs[place].startswith(KEPT)}

    def arrived(number: int, gradients: list[Value]) -> None:
        for value in gradients:
            machine.reads(value, COMPUTE)
        for place in (updates or {})[number]:
            machine.writes(kept[place], COMPUTE)
        gradients.clear()

    code = change(print_lines(lines))
    scope = {"torch": machine.torch(), "arrived": arrived, "device": torch.device, "inf": float("inf")}
    made: dict[str, Any] = {}
    exec(code, scope, made)
    with machine.copies():
        # Inputs are this list's alone while the code runs, as those of a step are.
        results = made["forward"](_Regions(machine, counts), given)
        if offloaded and finishes:
            operators.finish_copies(CUDA)
        for place, value in kept.items():  # the user may load a checkpoint now
            if HOST in inputs[place]:
                machine.writes(value, HOST)
        for place, value in enumerate(results):
            if isinstance(value, Value) and place not in unread:
                machine.reads(value, HOST if value.buffer.home == HOST else COMPUTE)
    machine.end()
    del results
    kept.clear()
    return machine.problems
