"""Hand the gradients of a backward over when they have arrived, instead of returning them.

Where shards are offloaded, the updates run on the host in a thread, while backward computes on the device:

    this thread      kernels ... | arrived(0) | kernels ...        | arrived(1) | kernels ... | finish
    update thread                  waits for copies, updates 0 ...   waits for copies, updates 1 ...

A gradient is handed over when its copy to the host has been started. The thread waits until that copy is there, and
until copies to the device that were started before have read the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.fx import GraphModule

from graphshard.ir.operators import copies_so_far
from graphshard.ir.program import Phase, Slot
from graphshard.ir.subclasses import shard_in
from graphshard.lower.executor import Executor
from graphshard.lower.executor_lines import Arrive, Boxed, Start
from graphshard.lower.line_rewrites import Groups, Taken, hand_over_gradients
from graphshard.runtime.bound_program import BoundProgram, profiling
from graphshard.runtime.shards import ParamRef

# Inputs of a phase that share memory with a shard, whatever the phase.
_OF_SHARD = ("param", "part", "piece")


class Arrival(NamedTuple):
    """The reduced gradient of a parameter: this rank's shard of it, without padding."""

    param: nn.Parameter
    grad: torch.Tensor


class UpdateThread:
    """One thread, which runs functions in order when copies have completed."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._begun: list[Future[None]] = []

    def run(self, work: Callable[[], None], device: torch.device) -> None:
        """Run a function when the copies to and from a device that have been started are there; returns at once."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "graphshard-updates")
        self._begun.append(self._pool.submit(_run_after, copies_so_far(device), work, self._begun[-1:]))

    def finish(self) -> None:
        """Wait for all functions; raise the first exception, after which none was run."""
        begun, self._begun = self._begun, []
        wait(begun)
        for done in begun:
            done.result()


def _run_after(ready: Callable[[], None], work: Callable[[], None], before: list[Future[None]]) -> None:
    for done in before:
        done.result()  # raises the exception of the work before
    ready()
    with torch.no_grad():  # a setting of threads
        work()


@dataclass
class GradientConsumer:
    """Consumer of the gradients of a model's parameters, while a backward runs that is to hand them over.

    Attributes:
        take: is called with gradients that have arrived together.
        params: names in the model of the parameters whose gradients are taken.
        ran: whether a backward has run that handed them over.
        at_the_end: whether that backward has started its last collective.
        thread: takes gradients that are on their way to the host; finish it after the backward.
    """

    take: Callable[[list[Arrival]], None]
    params: Collection[str] = ()
    ran: bool = False
    at_the_end: bool = False
    thread: UpdateThread = field(default_factory=UpdateThread)
    _codes: WeakKeyDictionary[GraphModule, dict[tuple[frozenset[str], bool], _Code]] = field(
        default_factory=WeakKeyDictionary
    )

    def run(
        self,
        program: BoundProgram,
        phase: Phase,
        inputs: list[Any],
        refs: Sequence[ParamRef | None],
        names: Sequence[str],
        local: Callable[[torch.Tensor, Slot, nn.Parameter], torch.Tensor],
    ) -> Any:
        """Run a backward.

        Args:
            inputs: of the executor, which empties the list.
            refs: for each of its outputs, the parameter whose gradient is to be taken, or None.
            names: of these in the model.
            local: cuts the padding off a gradient.
        """
        self.ran = True
        codes = self._codes.setdefault(phase.module, {})
        key = frozenset(name for name, ref in zip(names, refs) if ref is not None), profiling()
        if key not in codes:
            codes[key] = _Code(program, phase, _taken(phase, inputs, refs))
        code = codes[key]
        to_host = program.program.device if program.program.offloaded else None

        def arrived(number: int, grads: list[torch.Tensor]) -> None:
            found = []
            for place in code.groups[number]:
                ref = refs[place]
                assert ref is not None
                found.append((grads.pop(0), phase.outputs[place], ref.param))
            self.at_the_end = number >= code.at_the_end

            def take() -> None:
                self.take([Arrival(param, local(grad, slot, param)) for grad, slot, param in found])

            if to_host is None:
                take()
            else:
                self.thread.run(take, to_host)

        code.hand_to = arrived
        try:
            return code.run(inputs)
        finally:
            code.hand_to = None


class _Code:
    """Code that hands gradients over to `hand_to`.

    Attributes:
        groups: places of the gradients that are handed over together.
        at_the_end: number of groups before the last collective is started.
    """

    def __init__(self, program: BoundProgram, phase: Phase, taken: Sequence[Taken]) -> None:
        assert isinstance(phase.module, Executor)
        lines, groups = hand_over_gradients(phase.module.lines, taken)
        last = max((index for index, line in enumerate(lines) if isinstance(line, Start)), default=0)
        self.at_the_end = sum(isinstance(line, Arrive) for line in lines[:last])
        self.groups: Groups = groups
        self.hand_to: Callable[[int, list[torch.Tensor]], None] | None = None
        self.run: Boxed = program.function(phase, lines, arrived=self._arrived)

    def _arrived(self, number: int, grads: list[torch.Tensor]) -> None:
        assert self.hand_to is not None
        self.hand_to(number, grads)


def _taken(phase: Phase, inputs: Sequence[Any], refs: Sequence[ParamRef | None]) -> list[Taken]:
    memory = [_address(value) if isinstance(value, torch.Tensor) else 0 for value in inputs]
    taken = []
    for place, ref in enumerate(refs):
        if ref is not None:
            own, name = _address(shard_in(ref.param)), phase.outputs[place].name
            sources = tuple(
                index
                for index, slot in enumerate(phase.inputs)
                if (slot.kind in _OF_SHARD and slot.name == name) or (own and memory[index] == own)
            )
            taken.append(Taken(place, sources, gathered=ref.row.num_shards > 1))
    return taken


def _address(tensor: torch.Tensor) -> int:
    """Return where a tensor's memory begins; 0 if it has none."""
    return tensor.untyped_storage().data_ptr()
