"""Hand the gradients of one backward over where they have arrived, instead of returning them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.fx import GraphModule

from graphshard.ir.program import Phase, Slot
from graphshard.ir.subclasses import shard_in
from graphshard.lower.arrivals import Arrived, Groups, Taken
from graphshard.lower.executor import Boxed, Executor
from graphshard.lower.replays import Replays
from graphshard.runtime.beside import Beside
from graphshard.runtime.shards import ParamRef

# What a phase is given that shares memory with a shard, whatever the phase.
_OF_SHARD = ("param", "part", "piece")


class Arrival(NamedTuple):
    """The reduced gradient of a parameter: this rank's shard of it, without padding."""

    param: nn.Parameter
    grad: torch.Tensor


@dataclass
class Taker:
    """Takes gradients of a model's parameters, while a backward runs that was asked to hand them over.

    Attributes:
        take: is given gradients that have arrived together.
        params: the parameters, by their names in the model, whose gradients are taken.
        ran: whether a backward has run that handed them over.
        at_the_end: whether that backward has no collective to start any more.
        beside: takes those that are on their way to the host, in a thread of its own; finish it behind the backward.
    """

    take: Callable[[list[Arrival]], None]
    params: Collection[str] = ()
    ran: bool = False
    at_the_end: bool = False
    beside: Beside = field(default_factory=Beside)
    _codes: WeakKeyDictionary[GraphModule, dict[tuple[frozenset[str], bool], _Code]] = field(
        default_factory=WeakKeyDictionary
    )

    def run(
        self,
        phase: Phase,
        inputs: list[Any],
        refs: Sequence[ParamRef | None],
        names: Sequence[str],
        local: Callable[[torch.Tensor, Slot, nn.Parameter], torch.Tensor],
        *,
        ranges: bool,
        replays: Replays | None = None,
        to_host: torch.device | None = None,
    ) -> Any:
        """Run a backward.

        Args:
            inputs: of the executor, which empties the list.
            refs: of each of its outputs, the parameter that it is a gradient of, if it is to be taken.
            names: of these in the model.
            local: the shard of a gradient without padding, of the value that the executor makes.
            ranges: whether a profiler is to see what the executor does.
            replays: who launches runs of regions, where none does.
            to_host: the device that gradients are copied to the host from; None if they stay where they are.
        """
        self.ran = True
        codes = self._codes.setdefault(phase.module, {})
        key = frozenset(name for name, ref in zip(names, refs) if ref is not None), ranges
        if key not in codes:
            codes[key] = _code(phase, inputs, refs, ranges=ranges, replays=replays)
        code = codes[key]

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
                self.beside.run(take, to_host)

        code.hand_to = arrived
        try:
            return code.run(inputs)
        finally:
            code.hand_to = None


class _Code:
    """An executor's code that hands gradients over, to whom it is told to."""

    def __init__(self, executor: Executor, taken: Sequence[Taken], *, ranges: bool, replays: Replays | None) -> None:
        self.hand_to: Arrived | None = None
        self.run: Boxed
        self.groups: Groups
        self.at_the_end: int
        self.run, self.groups, self.at_the_end = executor.with_arrivals(
            taken, self._arrived, ranges=ranges, replays=replays
        )

    def _arrived(self, number: int, grads: list[torch.Tensor]) -> None:
        assert self.hand_to is not None
        self.hand_to(number, grads)


def _code(
    phase: Phase,
    inputs: Sequence[Any],
    refs: Sequence[ParamRef | None],
    *,
    ranges: bool,
    replays: Replays | None,
) -> _Code:
    memory = [_memory(value) if isinstance(value, torch.Tensor) else 0 for value in inputs]
    taken = []
    for place, ref in enumerate(refs):
        if ref is not None:
            own, name = _memory(shard_in(ref.param)), phase.outputs[place].name
            sources = (
                index
                for index, slot in enumerate(phase.inputs)
                if (slot.kind in _OF_SHARD and slot.name == name) or (own and memory[index] == own)
            )
            taken.append(Taken(place, tuple(sources), gathered=ref.row.num_shards > 1))
    assert isinstance(phase.module, Executor)
    return _Code(phase.module, taken, ranges=ranges, replays=replays)


def _memory(tensor: torch.Tensor) -> int:
    """Where a tensor's memory begins; 0 if it has none."""
    return tensor.untyped_storage().data_ptr()
