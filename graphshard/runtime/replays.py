"""Runs of regions that are captured once and replayed: what a GPU is told by one launch instead of dozens.

    first and second call     the regions run as they always do
    third call                inputs are copied into the arena, and the run is captured, with copies of its results
    from then on              inputs are copied in, the graph is launched, results are copied out

A graph reads and writes at fixed addresses, and the rest of a step knows nothing of that. So what goes in and out is
copied, by a few launches for all tensors, and results are as new as those of regions: they may live as long as
autograd, a process group, an accumulated gradient or the user wants, and several forwards may wait for their backward.
Only parameters and buffers are read where they lie; a graph is forgotten when they have moved.

* **All graphs of a model use the same memory**, the arena for inputs and results, which is as large as the largest run
  needs, and a pool for the rest. Nothing lives in it from one launch to the next, so sharded models keep what sharding
  has saved: an arena for each run would hold all parameters gathered.
* **A graph is for one set of shapes and sizes.** The last eight of a run are kept. One that comes back after that is
  captured again, after two calls as before.
* **What cannot be captured runs as ever**, and the log says why. So do calls on another stream than the first: the
  memory is used in the order of one stream.
* **Collectives are not in graphs.** NCCL wants all ranks to capture, and to launch what they captured, in the same
  calls. Which calls do is decided here by each rank alone, by its addresses, and must not become a reason to hang.
  Graphs with NCCL's kernels would also have to be gone before `destroy_process_group`.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphshard.cost.costs import Costs
from graphshard.cost.replays import piece_of, runs_that_pay
from graphshard.ir.program import Program, Region
from graphshard.lower.executor import Executor
from graphshard.lower.lines import Call, Line, Variable
from graphshard.lower.replays import Boxed, Run, can_be_replayed
from graphshard.runtime.captured_run import CapturedRun, bytes_of, capture_run
from graphshard.runtime.device_graphs import DeviceGraphs

log = logging.getLogger(__name__)

# Calls before a graph is captured: kernels are loaded, tuned and given their workspaces meanwhile.
WARM_UP = 2
# Graphs of a run that are kept, for as many shapes.
MOST_GRAPHS = 8
# An input that has moved so often moves in every step, and is copied: memory may be the same for a few steps by chance.
MOST_MOVES = 2

# What a graph is for: shapes, strides and dtypes of tensors, and numbers.
Key = tuple[Any, ...]


@dataclass
class Arena:
    """Memory for inputs and results of graphs while they run.

    Attributes:
        graphs: of the device.
        largest: bytes that a run has needed so far.
    """

    graphs: DeviceGraphs
    device: torch.device
    largest: int = 0
    _memory: Tensor | None = None
    _stream: object = None

    def reserve(self, num_bytes: int) -> Tensor:
        """Memory of at least so many bytes, which all that is reserved shares."""
        self.largest = max(self.largest, num_bytes)
        if self._memory is None or self._memory.numel() < num_bytes:
            self._memory = torch.empty(self.largest, dtype=torch.uint8, device=self.device)
        return self._memory

    def is_on_stream(self) -> bool:
        """Whether the current stream is the one that the memory is used on."""
        now = self.graphs.stream()
        if self._stream is None:
            self._stream = now
        return now is not None and bool(now == self._stream)


@dataclass
class Replaying:
    """What a model's programs need to replay runs.

    Attributes:
        arena: of the model.
        costs: by which runs are chosen; None replays all that can be.
        runs: what was put in the place of regions so far.
    """

    arena: Arena
    costs: Costs | None
    runs: list[Replayed] = field(default_factory=list)

    def of(self, program: Program, executor: Executor) -> _Replays:
        """Who launches the runs of an executor of a program."""
        names = program.region_names
        return _Replays(self, program, executor, lambda call: program.regions[names[call.region]])

    def forget(self, programs: Sequence[Program]) -> None:
        """Drop the runs of programs that were evicted, with the graphs that nobody else holds."""
        self.runs[:] = [run for run in self.runs if not any(run.program is program for program in programs)]


@dataclass(frozen=True)
class _Replays:
    """Those of one executor: `graphshard.lower.replays.Replays`."""

    replaying: Replaying
    program: Program
    executor: Executor
    region: Callable[[Call], Region]

    def wants(self, call: Call) -> bool:
        """Whether a region launches the same kernels in each call."""
        can_be = getattr(self.executor, call.region).can_be_captured
        return can_be and can_be_replayed(self.region(call).module, self.program.device)

    def runs(self, lines: Sequence[Line], kept: Set[Variable], own: Set[Variable]) -> Sequence[range]:
        """All of the lines, or those that save time."""
        costs = self.replaying.costs
        if costs is None:
            return [range(len(lines))]
        base: dict[Variable, Variable] = {}  # of what a view is one
        pieces, places = [], []
        for place, line in enumerate(lines):
            if isinstance(line, Call):
                given = [base.get(name, name) for name in line.inputs]
                pieces.append(piece_of(costs, self.region(line), given, line.results, own))
                places.append(place)
            elif line.reads:
                base.update(dict.fromkeys(line.results, base.get(line.reads[0], line.reads[0])))
        found = runs_that_pay(costs, pieces, {base.get(name, name) for name in kept})
        return [range(places[run[0]], places[run[-1]] + 1) for run in found]

    def replay(self, run: Run, code: Boxed) -> Boxed:
        """What runs in the place of a run."""
        self.replaying.runs.append(Replayed(self.replaying.arena, run, code, self.program))
        return self.replaying.runs[-1]


@dataclass
class _Seen:
    """Calls with one key.

    Attributes:
        calls: before a graph was captured.
        places: addresses of the lasting inputs in the last of them.
        made: bytes of its results.
        graph: what was captured.
    """

    calls: int = 0
    places: tuple[int, ...] = ()
    made: int = 0
    graph: CapturedRun | None = None


class Replayed:
    """A run of a program: its code at first, and then a graph of it for each of a few shapes."""

    def __init__(self, arena: Arena, run: Run, code: Boxed, program: Program | None = None) -> None:
        self.program = program
        self._arena, self._run, self._code = arena, run, code
        self._seen: OrderedDict[Key, _Seen] = OrderedDict()
        # How often each lasting input was elsewhere than before, where a graph or a warm-up has found it.
        self._moves: Counter[int] = Counter()
        self._problem = ""

    @property
    def graphs(self) -> int:
        """How many are kept."""
        return sum(seen.graph is not None for seen in self._seen.values())

    def __call__(self, inputs: list[Any]) -> Any:
        if self._problem or not self._arena.is_on_stream():
            return self._code(inputs)
        key = tuple(map(_layout, inputs))
        seen = self._seen.setdefault(key, _Seen())
        self._seen.move_to_end(key)
        if len(self._seen) > MOST_GRAPHS:
            self._seen.popitem(last=False)
        if seen.graph is not None:
            moved = seen.graph.moved(inputs)
            if not moved:
                return seen.graph(inputs)
            self._moves.update(moved)
            self._seen[key] = seen = _Seen()
        places = self._places(inputs)
        moved = [i for i, (here, before) in enumerate(zip(places, seen.places or places)) if here != before]
        self._moves.update(moved)
        copied = [i for i, value in enumerate(inputs) if isinstance(value, Tensor) and self._is_copied(i, moved)]
        if seen.calls < WARM_UP:
            seen.calls, seen.places = seen.calls + 1, places
            return self._warm_up(seen, inputs, copied)
        return self._capture(seen, inputs, copied)

    def _is_copied(self, index: int, moved: Collection[int]) -> bool:
        return not self._run.lasting[index] or index in moved or self._moves[index] >= MOST_MOVES

    def _places(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        return tuple(
            value.data_ptr() if lasting and isinstance(value, Tensor) else 0
            for value, lasting in zip(inputs, self._run.lasting, strict=True)
        )

    def _warm_up(self, seen: _Seen, inputs: list[Any], copied: Sequence[int]) -> Any:
        given = bytes_of(inputs[index] for index in copied)
        results = self._code(inputs)
        seen.made = bytes_of(results)
        self._arena.largest = max(self._arena.largest, given + seen.made)
        unfit = next(filter(None, map(_unfit, results)), "")
        if unfit:
            self._give_up(f"it makes {unfit}")
        return results

    def _capture(self, seen: _Seen, inputs: list[Any], copied: Sequence[int]) -> Any:
        unfit = next(filter(None, map(_unfit, inputs)), "")
        if unfit:
            self._give_up(f"it is given {unfit}")
            return self._code(inputs)
        try:
            seen.graph = capture_run(self._arena.graphs, self._arena.reserve, self._code, inputs, copied, seen.made)
        except RuntimeError as error:
            self._give_up(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
            return self._code(inputs)
        return seen.graph(inputs)

    def _give_up(self, why: str) -> None:
        self._problem = why
        self._seen.clear()
        log.warning("cuda_graphs: %s runs without one: %s", self._run.where or "a run of regions", why)


def _layout(value: Any) -> Any:
    return (value.dtype, value.shape, value.stride()) if isinstance(value, Tensor) else value


def _unfit(value: Any) -> str:
    """Why a value can be no input or result of a graph; "" if it can."""
    if not isinstance(value, Tensor):
        return ""
    if type(value) not in (Tensor, torch.nn.Parameter):
        return f"a {type(value).__name__}"
    if any(size > 1 and stride == 0 for size, stride in zip(value.shape, value.stride())):
        return "a tensor that is expanded"
    return ""
