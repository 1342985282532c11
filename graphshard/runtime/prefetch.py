"""Gathers of the next forward that are started while other parameters are still updated.

They are the gathers at the head of the program (`line_rewrites.take_out_gathers`), each started when the last of its
parameters has been updated and the backward has started its last reduction. The next forward takes them if it is a call
of the same program and the parameters were not written to; otherwise they are dropped, and gathered again.

Torch counts writes to tensors, but not through `.data`, `_foreach` functions or other memory of the same numbers. So
what was sent is kept, a shard of the parameters, and compared with what would be sent now.
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
from graphshard.lower.executor import Executor
from graphshard.lower.executor_lines import Boxed
from graphshard.lower.line_rewrites import take_out_gathers
from graphshard.runtime.bound_program import BoundProgram, SlotValues, profiling
from graphshard.runtime.shards import ParamRef
from graphshard.runtime.unsharded import Written, written
from graphshard.torch_compat.autograd_state import disable_autocast
from graphshard.torch_compat.torch_ops import assert_async

# Inputs of forward that gathers send.
_OF_SHARD = ("param", "part")
_NOT_RECORDED = (
    "gather_ahead: of {} something was written to after a step in a way that torch does not record (.data, _foreach "
    "functions, other memory of the same numbers), and was gathered before that. Call model.reshard() after writing, "
    "or make the step with compile_step(gather_ahead=False)."
)


@dataclass(frozen=True)
class _UnderWay:
    """A gather that was started: its results, what was sent, and the parameters' versions then."""

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


class GatherPrefetch:
    """The gathers at the head of a program's forward.

    Args:
        phase: the forward.
    """

    def __init__(self, program: BoundProgram, phase: Phase, values: SlotValues) -> None:
        executor = phase.module
        assert isinstance(executor, Executor)
        shards = [place for place, slot in enumerate(phase.inputs) if slot.kind in _OF_SHARD]
        lines, gathers = take_out_gathers(executor.lines, shards)
        begun = [functools.partial(self._begin, number) for number in range(len(gathers))]
        self._make_code: Callable[[], Boxed] = lambda: program.function(phase, lines, begun=begun)
        self._codes: dict[bool, Boxed] = {}
        self._values = values
        self._gathers: list[_Gather] = []
        for gather in gathers:
            slots = tuple(phase.inputs[place] for place in gather.sources)
            refs = tuple(values.params[name] for name in dict.fromkeys(slot.name for slot in slots))
            start, sent = executor.function(gather.start), executor.function(gather.sent)
            self._gathers.append(_Gather(slots, refs, start, sent, gather.num_results))
        self._under_way: dict[int, _UnderWay] = {}
        weakref.finalize(self, _end, self._under_way)
        # For each gather the parameters that updates may change, and the ones that are not updated yet.
        self._own: list[set[nn.Parameter]] = []
        self._left: list[set[nn.Parameter]] = []

    def __bool__(self) -> bool:
        """Return whether there is anything to start."""
        return bool(self._gathers)

    def begin(self) -> None:
        """Begin a backward that is followed by updates, before which nothing is gathered."""
        self.forget()
        self._own = [{ref.param for ref in gather.refs if ref.param.requires_grad} for gather in self._gathers]
        self._left = [set(own) for own in self._own]

    def first(self, params: Collection[nn.Parameter]) -> bool:
        """Return whether some parameters are among the first gathers."""
        return any(not own.isdisjoint(params) for own in self._own)

    def updated(self, params: Collection[nn.Parameter], *, start: bool) -> None:
        """Note that parameters have their values for the next forward; start gathers that wait for no other."""
        for number, left in enumerate(self._left):
            left.difference_update(params)
            if start and not left and number not in self._under_way:
                self._start(number)

    def finish(self) -> None:
        """Start the other gathers: all parameters have their values."""
        for number in range(len(self._gathers)):
            if number not in self._under_way:
                self._start(number)

    def holds(self) -> bool:
        """Return whether this forward would gather what is under way, as far as torch knows of writes.

        Raises:
            ParameterError: it would not, and torch does not know.
        """
        if any(one.written != self._written(number) for number, one in self._under_way.items()):
            return False
        for number, one in self._under_way.items():
            gather = self._gathers[number]
            for then, now in zip(one.sent, gather.sent(self._read(gather)), strict=True):
                if not _same(then, now, text := _NOT_RECORDED.format(", ".join(ref.row.name for ref in gather.refs))):
                    self.forget()
                    raise ParameterError(text)
        return bool(self._under_way)

    def run(self, inputs: list[Any]) -> Any:
        """Run the forward with what is under way; it starts the other gathers itself."""
        ranges = profiling()
        if ranges not in self._codes:
            self._codes[ranges] = self._make_code()
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
        shards = self._read(gather)
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

    def _read(self, gather: _Gather) -> list[Any]:
        return [self._values.read(slot, ()) for slot in gather.slots]

    def _written(self, number: int) -> tuple[Written, ...]:
        return tuple(written(ref.param) for ref in self._gathers[number].refs)


def _end(under_way: Mapping[int, _UnderWay]) -> None:
    """Wait, at the end of the process, for what the last step has started: else torch warns of each collective.

    While there are process groups the other ranks may not have started theirs.
    """
    if dist.is_initialized():
        return
    for one in under_way.values():
        for result in one.results:
            with contextlib.suppress(RuntimeError):  # the group was torn down by an error
                c10d.wait_tensor(result)


def _same(then: torch.Tensor, now: torch.Tensor, text: str) -> bool:
    """Return whether two tensors have the same bits; on a GPU the device checks, and fails with the text."""
    bits = [one.contiguous().reshape(-1).view(torch.uint8) for one in (then, now)]
    if now.is_cuda:
        assert_async((bits[0] == bits[1]).all(), text)
        return True
    return torch.equal(*bits)
