"""CUDA graphs of runs of regions: one launch instead of dozens.

    first and second call     the regions run as usual
    third call                inputs are copied into the arena, and the run is captured, with copies of its results
    later calls               inputs are copied in, the graph is launched, results are copied out

A graph reads and writes at fixed addresses, and the rest of a step does not depend on them. So inputs and results are
copied, those of a dtype by one launch, and results may live as long as autograd, a process group or the user wants.
Only parameters and buffers are read where they lie; a graph is dropped when they have moved.

* **All graphs of a model use the same memory**: the arena for inputs and results, which is as large as the largest run
  needs, and a pool for the rest. Nothing lives in it from one launch to the next, so sharded models keep what sharding
  has saved: an arena for each run would hold all parameters gathered.
* **A graph is for one set of shapes and sizes.** The last eight of a run are kept.
* **What cannot be captured runs as usual**, and the log says why. So do calls on another stream than the first: the
  memory is used in the order of one stream.
* **Collectives are not in graphs.** NCCL wants all ranks to capture, and to launch what they captured, in the same
  calls. Each rank decides alone which calls these are, by its addresses, which must not make ranks hang. Graphs with
  NCCL's kernels would also have to be gone before `destroy_process_group`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import operator
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from graphshard.cost.costs import Costs, piece_of, runs_that_pay
from graphshard.ir.program import Program, Region
from graphshard.ir.sizes import is_size
from graphshard.lower.executor import Boxed, CallLine, Executor, Line, Variable
from graphshard.lower.line_rewrites import Run, take_out_runs
from graphshard.torch_compat.torch_ops import OpOverload, clear_cublas_workspaces, foreach_copy_

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

# Calls before a graph is captured: kernels are loaded, tuned and given their workspaces meanwhile.
WARM_UP = 2
# Graphs of a run that are kept, one for each set of shapes.
MOST_GRAPHS = 8
# An input that has moved this often moves in every step, and is copied: memory may be the same for a few steps by
# chance.
MOST_MOVES = 2
# Tensors in the arena begin at multiples of this, as in torch's allocator.
_ALIGNMENT = 512
# The number or values of the results depend on values, so the host waits for the device; or the author says so.
_WAITS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.cudagraph_unsafe)


class CudaGraphs:
    """CUDA graphs of one device, which share a pool of memory, and are launched one after the other on one stream.

    Capture uses a separate stream, and its errors concern this thread only: another may load data meanwhile, and NCCL's
    watchdog asks for events. Torch's default generator takes part in every graph: each launch draws what is next in it.
    `tests/graphs.py` has a substitute for CPUs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def stream(self) -> object:
        """Return the current stream; None while the user captures it."""
        return None if torch.cuda.is_current_stream_capturing() else torch.cuda.current_stream(self._device)

    def capture(self, launch: Callable[[], ResultT]) -> tuple[Callable[[], None], ResultT]:
        """Capture what a function launches, without executing it; RuntimeError if something in it cannot be captured.

        Return what launches it again, on the stream that is current then, and the function's result. The memory of
        these tensors, as of all that the function allocates, is the graph's while it runs: other graphs use it, too.
        """
        graph = torch.cuda.CUDAGraph()
        if not self._graphs:  # torch frees a pool with the last graph that uses it
            self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self._device)
        clear_cublas_workspaces()
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = launch()
                except BaseException:
                    with contextlib.suppress(RuntimeError):  # what is half captured cannot be ended
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            clear_cublas_workspaces()
        self._graphs.add(graph)
        return graph.replay, result


@dataclass
class ModelGraphs:
    """Graphs of all programs of a model, and the memory of their inputs and results while they run.

    Costs decide which runs are captured; None captures all that can be. A run has needed `largest` bytes so far.
    """

    graphs: CudaGraphs
    device: torch.device
    costs: Costs | None
    runs: list[GraphedRun] = field(default_factory=list)
    largest: int = 0
    _memory: Tensor | None = None
    _stream: object = None

    def function(self, program: Program, executor: Executor, lines: Sequence[Line] | None, **known: Any) -> Boxed:
        """Compile lines as `Executor.function` does, with their runs of regions captured when they are called."""

        def wants(call: CallLine) -> bool:
            return can_be_captured(_region(program, call).module, program.device)

        choose = functools.partial(self.choose, program)
        lines, runs = take_out_runs(executor.lines if lines is None else lines, wants, choose)
        replays = [GraphedRun(self, run, executor.function(run.lines), program) for run in runs]
        self.runs += replays
        return executor.function(lines, replays=replays, **known)

    def choose(
        self, program: Program, lines: Sequence[Line], kept: Set[Variable], own: Set[Variable]
    ) -> Sequence[range]:
        """Return the ranges of lines that save time as graphs, or all; see `line_rewrites.Choose`."""
        costs = self.costs
        if costs is None:
            return [range(len(lines))]
        base: dict[Variable, Variable] = {}  # of views
        pieces, places = [], []
        for place, line in enumerate(lines):
            if isinstance(line, CallLine):
                given = [base.get(name, name) for name in line.inputs]
                pieces.append(piece_of(costs, _region(program, line), given, line.results, own))
                places.append(place)
            elif line.reads:
                base.update(dict.fromkeys(line.results, base.get(line.reads[0], line.reads[0])))
        found = runs_that_pay(costs, pieces, {base.get(name, name) for name in kept})
        return [range(places[run[0]], places[run[-1]] + 1) for run in found]

    def forget(self, programs: Sequence[Program]) -> None:
        """Drop the runs of programs that were evicted, with their graphs."""
        self.runs[:] = [run for run in self.runs if not any(run.program is program for program in programs)]

    def reserve(self, num_bytes: int) -> Tensor:
        """Return memory of at least `num_bytes`, shared by all reservations."""
        self.largest = max(self.largest, num_bytes)
        if self._memory is None or self._memory.numel() < num_bytes:
            self._memory = torch.empty(self.largest, dtype=torch.uint8, device=self.device)
        return self._memory

    def is_on_stream(self) -> bool:
        """Return whether the current stream is the one that the memory is used on."""
        now = self.graphs.stream()
        if self._stream is None:
            self._stream = now
        return now is not None and bool(now == self._stream)


def _region(program: Program, call: CallLine) -> Region:
    return program.regions[program.region_names[call.region]]


def can_be_captured(region: GraphModule, device: torch.device) -> bool:
    """Return whether a region launches the same kernels for all values of its inputs, all on one kind of device."""
    for node in region.graph.nodes:
        target = node.target
        computes = node.op == "call_function" and not is_size(node) and target is not operator.getitem
        # Other targets than operators run them with the state of a generator, which they read on the host.
        if computes and (not isinstance(target, OpOverload) or any(tag in target.tags for tag in _WAITS)):
            return False
        val = node.meta.get("val")
        tensors = val if isinstance(val, (tuple, list)) else [val]
        if any(isinstance(each, Tensor) and each.device.type != device.type for each in tensors):
            return False
    return True


@dataclass
class _Calls:
    """Calls of a run with the same shapes and sizes.

    Attributes:
        count: before a graph was captured.
        places: addresses of the lasting inputs in the last of them.
        result_bytes: bytes of the results in the arena.
    """

    count: int = 0
    places: tuple[int, ...] = ()
    result_bytes: int = 0
    graph: _CapturedRun | None = None


class GraphedRun:
    """A run of a program: its code at first, and then a graph of it for each of a few sets of shapes."""

    def __init__(self, memory: ModelGraphs, run: Run, code: Boxed, program: Program | None = None) -> None:
        self.program = program
        self._memory, self._run, self._code = memory, run, code
        self._seen: OrderedDict[tuple[Any, ...], _Calls] = OrderedDict()
        # How often each lasting input was elsewhere than before, where a graph or a warm-up has found it.
        self._moves: Counter[int] = Counter()
        self._problem = ""

    @property
    def graphs(self) -> int:
        """Number of graphs that are kept."""
        return sum(seen.graph is not None for seen in self._seen.values())

    def __call__(self, inputs: list[Any]) -> Any:
        if self._problem or not self._memory.is_on_stream():
            return self._code(inputs)
        key = tuple((v.dtype, v.shape, v.stride()) if isinstance(v, Tensor) else v for v in inputs)
        seen = self._seen.setdefault(key, _Calls())
        self._seen.move_to_end(key)
        if len(self._seen) > MOST_GRAPHS:
            self._seen.popitem(last=False)
        if seen.graph is not None:
            moved = seen.graph.moved(inputs)
            if not moved:
                return seen.graph(inputs)
            self._moves.update(moved)
            self._seen[key] = seen = _Calls()
        places = tuple(
            value.data_ptr() if lasting and isinstance(value, Tensor) else 0
            for value, lasting in zip(inputs, self._run.lasting, strict=True)
        )
        moved = [i for i, (here, before) in enumerate(zip(places, seen.places or places)) if here != before]
        self._moves.update(moved)
        copied = [
            i
            for i, (value, lasting) in enumerate(zip(inputs, self._run.lasting))
            if isinstance(value, Tensor) and (not lasting or i in moved or self._moves[i] >= MOST_MOVES)
        ]
        if seen.count < WARM_UP:
            seen.count, seen.places = seen.count + 1, places
            given = _arena_bytes(inputs[index] for index in copied)
            results = self._code(inputs)
            seen.result_bytes = _arena_bytes(results)
            self._memory.largest = max(self._memory.largest, given + seen.result_bytes)
            self._refuse("it makes", results)
            return results
        if self._refuse("it is given", inputs):
            return self._code(inputs)
        try:
            seen.graph = _capture_run(self._memory, self._code, inputs, copied, seen.result_bytes)
        except RuntimeError as error:
            self._give_up(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
            return self._code(inputs)
        return seen.graph(inputs)

    def _refuse(self, what: str, values: Sequence[Any]) -> bool:
        """Give up, and return True, if a value cannot be an input or result of a graph."""
        for value in values:
            if not isinstance(value, Tensor):
                continue
            if type(value) not in (Tensor, torch.nn.Parameter):
                self._give_up(f"{what} a {type(value).__name__}")
                return True
            if any(size > 1 and stride == 0 for size, stride in zip(value.shape, value.stride())):
                self._give_up(f"{what} a tensor that is expanded")
                return True
        return False

    def _give_up(self, why: str) -> None:
        self._problem = why
        self._seen.clear()
        log.warning("cuda_graphs: %s runs without one: %s", self._run.where or "a run of regions", why)


@dataclass
class _CapturedRun:
    """A run as a graph.

    Attributes:
        fixed: place and address of the inputs that are read where they lie.
        given: places of the other tensors, and the memory they are copied to, by dtype.
        made: places of results, and the memory they are in, by dtype.
        constants: results that are not tensors, by place.
    """

    launch: Callable[[], None]
    fixed: tuple[tuple[int, int], ...]
    given: list[tuple[list[int], list[Tensor]]]
    made: list[tuple[list[int], list[Tensor]]]
    constants: dict[int, Any]

    def moved(self, inputs: Sequence[Any]) -> list[int]:
        """Return the inputs that it reads in place and that have moved."""
        return [index for index, place in self.fixed if inputs[index].data_ptr() != place]

    def __call__(self, inputs: list[Any]) -> list[Any]:
        for places, memory in self.given:
            foreach_copy_(memory, [inputs[place] for place in places])
        inputs.clear()
        self.launch()
        results = dict(self.constants)
        for places, memory in self.made:
            fresh = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in memory]
            foreach_copy_(fresh, memory)
            results.update(zip(places, fresh))
        return [results[place] for place in range(len(results))]


@torch.inference_mode(False)  # what is captured here is launched outside of inference, too
@torch.no_grad()
def _capture_run(
    graphs: ModelGraphs, code: Boxed, inputs: Sequence[Any], copied: Sequence[int], result_bytes: int
) -> _CapturedRun:
    """Capture the code of a run for inputs such as these, of which some are copied."""
    begin = _arena_bytes(inputs[index] for index in copied)
    memory = graphs.reserve(begin + result_bytes)
    offsets = itertools.accumulate((_num_bytes(inputs[index]) for index in copied), initial=0)
    static = {index: _placed(memory, offset, inputs[index]) for index, offset in zip(copied, offsets)}
    fixed = tuple((i, v.data_ptr()) for i, v in enumerate(inputs) if isinstance(v, Tensor) and i not in static)

    def launch() -> dict[int, Any]:
        results = code([static.get(index, value) for index, value in enumerate(inputs)])
        offset, made = begin, dict(enumerate(results))
        for place, value in enumerate(results):
            if isinstance(value, Tensor):
                made[place] = _placed(memory, offset, value)
            offset += _num_bytes(value)
        for places, placed in _by_dtype(made):
            foreach_copy_(placed, [results[place] for place in places])
        return made

    replay, made = graphs.graphs.capture(launch)
    constants = {place: value for place, value in made.items() if not isinstance(value, Tensor)}
    return _CapturedRun(replay, fixed, _by_dtype(static), _by_dtype(made), constants)


def _by_dtype(values: dict[int, Any]) -> list[tuple[list[int], list[Tensor]]]:
    """Group places and tensors by dtype: one launch copies a group."""
    found: dict[torch.dtype, tuple[list[int], list[Tensor]]] = {}
    for place, value in values.items():
        if isinstance(value, Tensor):
            places, tensors = found.setdefault(value.dtype, ([], []))
            places.append(place)
            tensors.append(value)
    return list(found.values())


def _extent(value: Tensor) -> int:
    """Count elements from the first one to the last one in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride())) if value.numel() else 0


def _num_bytes(value: Any) -> int:
    """Return the bytes that a value takes of the arena."""
    if not isinstance(value, Tensor):
        return 0
    return math.ceil(_extent(value) * value.dtype.itemsize / _ALIGNMENT) * _ALIGNMENT


def _arena_bytes(values: Iterable[Any]) -> int:
    return sum(map(_num_bytes, values))


def _placed(memory: Tensor, offset: int, like: Tensor) -> Tensor:
    """Return a tensor like another, at an offset of `memory`."""
    part = memory[offset : offset + _extent(like) * like.dtype.itemsize].view(like.dtype)
    return part.as_strided(like.shape, like.stride(), offset // like.dtype.itemsize)
