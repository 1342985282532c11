"""Gathers of the next forward that are started while the updates of other parameters run.

They are those at the head of the program (`lower/ahead.py`), each started when the last of its parameters has been
updated and the backward has no reduction to start any more. Nothing else is gathered then. The next forward takes what
is under way if it is one of the same program and nobody has written to the parameters; otherwise it is dropped, and
gathered again.

Torch counts writes to tensors, but not those through `.data`, `_foreach` functions or other memory of the same numbers.
So what was sent is kept, a shard of the parameters, and compared with what would be sent now.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphshard.errors import ParameterError
from graphshard.ir.graph import c10d
from graphshard.ir.program import Phase, Slot
from graphshard.lower.executor import Boxed, Executor
from graphshard.lower.replays import Replays
from graphshard.runtime.shards import ParamRef
from graphshard.runtime.unsharded import Written, written
from graphshard.torch_compat.autograd_state import disable_autocast
from graphshard.torch_compat.operators import assert_async

# Of what forward is given, what gathers are made of.
_OF_SHARD = ("param", "part")
_NOT_RECORDED = (
    "gather_ahead: of {} something was written to after a step in a way that torch does not record (.data, _foreach "
    "functions, other memory of the same numbers), and was gathered before that. Call model.reshard() after writing, "
    "or make the step with compile_step(gather_ahead=False)."
)


@dataclass(frozen=True)
class _UnderWay:
    """A gather that was started: what is to arrive, what was sent, and how the parameters were then."""

    results: tuple[Any, ...]
    sent: tuple[torch.Tensor, ...]
    written: tuple[Written, ...]


@dataclass(frozen=True)
class _Gather:
    """A gather at the head of a forward.

    Attributes:
        start: returns `num_results` values that are on their way, and then what is sent.
        sent: returns what is sent.
    """

    slots: tuple[Slot, ...]
    refs: tuple[ParamRef, ...]
    start: Boxed
    sent: Boxed
    num_results: int


class Ahead:
    """The gathers at the head of a program's forward.

    Args:
        phase: the forward, bound to its process groups.
        params: where parameters live, by their names in the program.
        read: what the forward is given for a slot.
        replays: who launches runs of regions, if anybody does.
    """

    def __init__(
        self, phase: Phase, params: dict[str, ParamRef], read: Callable[[Slot], Any], replays: Replays | None
    ) -> None:
        assert isinstance(phase.module, Executor)
        self._executor, self._read = phase.module, read
        self._shards = [place for place, slot in enumerate(phase.inputs) if slot.kind in _OF_SHARD]
        self._begun: list[Boxed] = []
        self._codes: dict[bool, Boxed] = {}
        self._codes[False], gathers = phase.module.with_gathers(self._shards, self._begun, replays=replays)
        self._gathers: list[_Gather] = []
        for number, gather in enumerate(gathers):
            slots = tuple(phase.inputs[place] for place in gather.sources)
            start, sent = phase.module.code_of(gather.start), phase.module.code_of(gather.sent)
            refs = tuple(params[name] for name in dict.fromkeys(slot.name for slot in slots))
            self._gathers.append(_Gather(slots, refs, start, sent, gather.num_results))
            self._begun.append(functools.partial(self._begin, number))
        self._under_way: dict[int, _UnderWay] = {}
        weakref.finalize(self, _end, self._under_way)
        # Of each gather the parameters that updates may change, and those of them that are not updated yet.
        self._own: list[set[nn.Parameter]] = []
        self._left: list[set[nn.Parameter]] = []

    def __bool__(self) -> bool:
        """Whether there is anything to start."""
        return bool(self._gathers)

    def begin(self) -> None:
        """A backward begins that is followed by updates: nothing is to be gathered before these."""
        self.forget()
        self._own = [{ref.param for ref in gather.refs if ref.param.requires_grad} for gather in self._gathers]
        self._left = [set(own) for own in self._own]

    def first(self, params: Collection[nn.Parameter]) -> bool:
        """Whether some parameters are among those that are gathered first."""
        return any(not own.isdisjoint(params) for own in self._own)

    def updated(self, params: Collection[nn.Parameter], *, start: bool) -> None:
        """Parameters have their values for the next forward; start gathers that wait for no other."""
        for number, left in enumerate(self._left):
            left.difference_update(params)
            if start and not left and number not in self._under_way:
                self._start(number)

    def finish(self) -> None:
        """All parameters have their values: start what is left."""
        for number in range(len(self._gathers)):
            if number not in self._under_way:
                self._start(number)

    def holds(self) -> bool:
        """Whether what is under way is what this forward would gather, as far as torch knows of writes.

        Raises:
            ParameterError: it is not, and torch does not know.
        """
        for number, one in self._under_way.items():
            if one.written != self._written(number):
                return False
        for number, one in self._under_way.items():
            gather = self._gathers[number]
            for then, now in zip(one.sent, gather.sent([self._read(slot) for slot in gather.slots]), strict=True):
                if not _same(then, now, text := _NOT_RECORDED.format(", ".join(ref.row.name for ref in gather.refs))):
                    self.forget()
                    raise ParameterError(text)
        return bool(self._under_way)

    def run(self, inputs: list[Any], *, ranges: bool) -> Any:
        """Run the forward with what is under way; starts the rest where it would.

        Args:
            inputs: as of the executor.
            ranges: whether a profiler is to see what the executor does.
        """
        if ranges not in self._codes:
            self._codes[ranges] = self._executor.with_gathers(self._shards, self._begun, ranges=ranges)[0]
        try:
            return self._codes[ranges](inputs)
        finally:
            self.forget()

    def forget(self) -> None:
        """Drop what is under way, when it has arrived."""
        for one in self._under_way.values():
            for result in one.results:
                c10d.wait_tensor(result)
        self._under_way.clear()

    @torch.no_grad()
    def _start(self, number: int) -> None:
        gather = self._gathers[number]
        shards = [self._read(slot) for slot in gather.slots]
        memory = {shard.untyped_storage().data_ptr() for shard in shards}
        with disable_autocast():
            started = gather.start(shards)
        results, sent = started[: gather.num_results], started[gather.num_results :]
        kept = tuple(one.clone() if one.untyped_storage().data_ptr() in memory else one for one in sent)
        self._under_way[number] = _UnderWay(results, kept, self._written(number))

    def _begin(self, number: int, inputs: list[Any]) -> Sequence[Any]:
        one = self._under_way.pop(number, None)
        if one is not None:
            inputs.clear()
            return one.results
        gather = self._gathers[number]
        started: Sequence[Any] = gather.start(inputs)
        return started[: gather.num_results]

    def _written(self, number: int) -> tuple[Written, ...]:
        return tuple(written(ref.param) for ref in self._gathers[number].refs)


def _end(under_way: Mapping[int, _UnderWay]) -> None:
    """At the end of the process: what the last step has started is no collective that somebody forgot to wait for.

    Torch would say so of each. While there are process groups nobody knows whether the other ranks have started theirs.
    """
    if dist.is_initialized():
        return
    for one in under_way.values():
        for result in one.results:
            with contextlib.suppress(RuntimeError):  # of a group that was torn down by an error
                c10d.wait_tensor(result)


def _same(then: torch.Tensor, now: torch.Tensor, text: str) -> bool:
    """Whether two tensors have the same bits; on a GPU the device finds out, and fails with the text."""
    bits = [one.contiguous().reshape(-1).view(torch.uint8) for one in (then, now)]
    if now.is_cuda:
        assert_async((bits[0] == bits[1]).all(), text)
        return True
    return torch.equal(*bits)
