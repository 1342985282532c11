"""A race detector for streams: runs an executor's code on values that record their accesses, and checks the order.

    problems(executor.lines, [COMPUTE, HOST, ...])      unordered accesses, in words

The code is the executor's, with a fake `torch` in its scope; `upload`, `arrived` and `download` are the real ones.
References die where the code drops them: a buffer is freed when Python drops the last reference. The model assumes what
torch does on CUDA devices:

* Regions and operators run on the compute stream and allocate their results there.
* A collective runs on the stream of its process group, after all work launched so far on the compute stream. Its
  results are allocated on the compute stream. Its `Work` holds the inputs until a wait (`ProcessGroupNCCL` stashes
  them), but not the outputs.
* `wait_tensor` makes the compute stream wait for the collective, with all tensors of a coalesced one.
* Freed memory is reused at once by the stream that allocated it, or, after `record_stream`, once the recorded streams
  have finished the work launched so far. One of these streams must be ordered after every other stream that used it.
* The host is far ahead of the device: it never sees that recorded streams have finished, so that `Machine.blocks`, what
  the allocator asks the device for, is the most that it may be.
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
from graphshard.ir.operators import ARRIVED, COALESCED_FORMS, DOWNLOAD, MODEL_WAIT, OWN_CHUNK, RELOAD, STARTS, UPLOAD
from graphshard.lower.executor import CallLine, Line, print_lines
from graphshard.runtime.collective_launches import _TOGETHER, IN_PLACE

COMPUTE, HOST, KEPT = "compute", "host", "kept "
CUDA = torch.device("cuda", 0)
_COLLECTIVES = GATHERS | REDUCES | ALL_REDUCES | set(IN_PLACE.values())


class Buffer:
    """Memory, and the accesses that later ones must be ordered after.

    Attributes:
        home: the stream that allocated it; HOST for host memory.
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
        if self.recorded <= {self.home}:
            self.machine.free[self.home] += 1


@dataclass(eq=False)
class Value:
    """A tensor: a reference to a buffer, with the methods that copies use."""

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
    """`torch.cuda.Event`: the clock of its stream when it was recorded."""

    machine: Machine
    clock: Counter[str]

    def synchronize(self) -> None:
        self.machine._wait_for(HOST, self.clock)


@dataclass(eq=False)
class Work:
    """A collective in flight: its stream's clock, and the inputs that it keeps alive."""

    end: Counter[str]
    holds: list[Value]


@dataclass(eq=False)
class Machine:
    """Streams with vector clocks, and collectives in flight.

    Attributes:
        holds: whether works keep their inputs alive.
        problems: unordered accesses, in program order.
        blocks: that the allocator has asked the device for, by stream.
        free: blocks that a stream may use again.
    """

    holds: bool = True
    problems: list[str] = field(default_factory=list)
    blocks: Counter[str] = field(default_factory=Counter)
    free: Counter[str] = field(default_factory=Counter)
    current: str = COMPUTE
    _clocks: dict[str, Counter[str]] = field(default_factory=dict)
    _work_of: weakref.WeakKeyDictionary[Buffer, Work] = field(default_factory=weakref.WeakKeyDictionary)
    _in_flight: list[Work] = field(default_factory=list)
    _numbers: Counter[str] = field(default_factory=Counter)

    def made(self, name: str, home: str | None = None) -> Value:
        """Allocate a buffer on the current stream."""
        self._numbers[name] += 1
        home = home or self.current
        (self.free if self.free[home] else self.blocks)[home] += -1 if self.free[home] else 1
        return Value(Buffer(self, f"{name} {self._numbers[name]}", home))

    def reads(self, value: Value, stream: str) -> None:
        """Record a read by a stream, which must be ordered after the last write."""
        written = value.buffer.written
        if written is not None and not self._is_ordered_after(stream, *written):
            self.problems.append(f"{stream} reads {value.buffer.name} while {written[0]} writes it")
        value.buffer.used[stream] = self._counts(stream)

    def writes(self, value: Value, stream: str) -> None:
        """Record a write by a stream, which must be ordered after all earlier accesses."""
        for other, count in value.buffer.used.items():
            if not self._is_ordered_after(stream, other, count):
                self.problems.append(f"{stream} writes {value.buffer.name} while {other} uses it")
        value.buffer.used[stream] = count = self._counts(stream)
        value.buffer.written = stream, count

    def freed(self, buffer: Buffer) -> None:
        """Check that the memory of an unreferenced buffer is not reused while a stream accesses it."""
        until = {buffer.home, *buffer.recorded}  # reuse waits for the work launched on these so far
        for other, count in buffer.used.items():
            if buffer.home != HOST and not any(self._is_ordered_after(stream, other, count) for stream in until):
                self.problems.append(f"{buffer.name} is freed while {other} uses it")

    def waits(self, stream: str, other: str) -> None:
        """Make a stream wait for all work launched so far on another one."""
        self._wait_for(stream, self._clock(other))

    def started(self, group: str, given: Sequence[Value], results: Sequence[Value]) -> None:
        """Start a collective of a group."""
        stream = f"group {group}"
        self.waits(stream, self.current)
        for value in given:
            self.reads(value, stream)
        for value in results:
            self.writes(value, stream)
        work = Work(self._clock(stream).copy(), list(given) if self.holds else [])
        self._in_flight.append(work)
        self._work_of.update((value.buffer, work) for value in results)

    def waited(self, value: Value) -> None:
        """Make the current stream wait for the collective that produces a value, if it is in flight."""
        work = self._work_of.pop(value.buffer, None)
        if work is not None:
            self._wait_for(self.current, work.end)
            work.holds.clear()

    def copied(self, value: Value, device: str, non_blocking: bool) -> Value:
        """Copy a value to another device on the current stream."""
        self.reads(value, self.current)
        made = self.made("copy", HOST if device == "cpu" else None)
        self.writes(made, self.current)
        if not non_blocking:
            self.waits(HOST, self.current)
        return made

    def end(self) -> None:
        """Finish the works without a wait."""
        self._in_flight.clear()

    def _counts(self, stream: str) -> int:
        clock = self._clock(stream)
        clock[stream] += 1
        return clock[stream]

    def _clock(self, stream: str) -> Counter[str]:
        return self._clocks.setdefault(stream, Counter())

    def _is_ordered_after(self, stream: str, other: str, count: int) -> bool:
        # The host finishes its own accesses before it launches anything else.
        return other in (stream, HOST) or self._clock(stream)[other] >= count

    def _wait_for(self, stream: str, clock: Mapping[str, int]) -> None:
        own = self._clock(stream)
        own |= clock  # elementwise maximum

    # --- fake torch -----------------------------------------------------------------------------------------

    def torch(self) -> Any:
        """Return `torch` as the executor's code sees it."""
        dtypes = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
        return types.SimpleNamespace(ops=_Operators(self, torch.ops), **dtypes)

    @contextlib.contextmanager
    def copies(self) -> Iterator[None]:
        """Run copies between host and device on this machine."""

        @contextlib.contextmanager
        def on(stream: Stream) -> Iterator[None]:
            before, self.current = self.current, stream.name
            try:
                yield
            finally:
                self.current = before

        def empty_like(like: Value, device: Any = "", dtype: Any = None, pin_memory: bool = False) -> Value:
            on_host = str(device) == "cpu" or not (device or like.is_cuda)
            return self.made("host" if on_host else "copy", HOST if on_host else None)

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
            return operators._download(*args)
        if operator is MODEL_WAIT:
            self.waited(args[0])
            return Value(args[0].buffer)
        if operator in COALESCED_FORMS.values():
            results = [self.made(operator._opname) for _ in args[0]]
            self.started(args[-1], args[0], results)
            for result in results:
                self.waited(result)
            return results
        if operator in STARTS or operator in STARTS.values():
            result = self.made(operator._opname)
            self.started(args[-1], [args[0]], [result])
            if operator in STARTS:
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
        if operator in IN_PLACE.values():  # in place
            results = given
            self.started(args[-1], given, given)
        elif operator in ALL_REDUCES:  # on a copy
            results = [self.call(torch.ops.aten.clone.default, (value,), {}) for value in given]
            self.started(args[-1], results, results)
        else:
            results = [self.made(operator._opname) for _ in given]
            self.started(args[-1], given, results)
        return results if several else results[0]


@dataclass
class _Operators:
    """`torch.ops` of a machine, down to overloads, which run on the machine."""

    machine: Machine
    real: Any

    def __getattr__(self, name: str) -> Any:
        return _Operators(self.machine, getattr(self.real, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.machine.call(self.real, args, kwargs)


@dataclass
class _Regions:
    """`self` in the executor's code: its methods are regions."""

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


def problems(lines: Sequence[Line], inputs: Sequence[str], **given: Any) -> list[str]:
    """Return the unordered accesses in the code of some lines; arguments are those of `run`."""
    return run(lines, inputs, **given).problems


def run(
    lines: Sequence[Line],
    inputs: Sequence[str],
    *,
    change: Callable[[str], str] = lambda code: code,
    holds: bool = True,
    offloaded: bool = False,
    updates: Mapping[int, Sequence[int]] | None = None,
    finishes: bool = True,
    unread: Collection[int] = (),
) -> Machine:
    """Run the code of some lines, and return the machine with what it found.

    Args:
        inputs: where each input was allocated: COMPUTE or HOST, prefixed with KEPT if the caller keeps a reference.
        change: injects a fault into the code.
        holds: whether works keep their inputs alive.
        offloaded: whether the program offloads, so that the host should wait for copies before it writes to the inputs.
        updates: indices of the inputs that the optimizer writes when a group of gradients arrives.
        finishes: whether the host does wait for them.
        unread: indices of results that are not read before backward receives them.
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
    together = {
        launch.__name__: functools.partial(lambda operator, *args: machine.call(operator, args, {}), operator)
        for operator, launch in _TOGETHER.items()
    }
    scope = {"torch": machine.torch(), "arrived": arrived, "device": torch.device, "inf": float("inf")}
    scope["collective_launches"] = types.SimpleNamespace(**together)
    made: dict[str, Any] = {}
    exec(code, scope, made)
    with machine.copies():
        # The list owns the inputs while the code runs, as in a step.
        results = made["forward"](_Regions(machine, counts), given)
        if offloaded and finishes:
            operators.finish_copies(CUDA)
        elif not offloaded:
            operators._copies(CUDA).release()  # as backward does, which reloads
        for place, value in kept.items():  # the user may load a checkpoint now
            if HOST in inputs[place]:
                machine.writes(value, HOST)
        for place, value in enumerate(results):
            if isinstance(value, Value) and place not in unread:
                machine.reads(value, HOST if value.buffer.home == HOST else COMPUTE)
    machine.end()
    del results
    kept.clear()
    return machine
