"""Which gradients the next backward reduces, and what backwards before it left to be reduced later."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from graphshard.errors import UnsupportedError
from graphshard.ir.program import Phase, Slot, SlotKind
from graphshard.ir.split import Sum
from graphshard.passes.accumulate_gradients import AccumulateGradients
from graphshard.runtime.ahead import Ahead
from graphshard.runtime.arrivals import Taker
from graphshard.torch_compat.autograd_state import number_of_backward

# What backwards leave to each other.
LEFT = ("accumulated", "partial", "pending")


class Left(NamedTuple):
    """What a backward leaves of a parameter, by its name in the model, and what is yet to be added up of it."""

    kind: SlotKind
    name: str
    summand: tuple[Sum, ...] = ()


@dataclass
class Accumulation:
    """State of a compiled model that all its programs share.

    Parameters go by their names in the model; `names` gives these by the names that a program has for them.

    Attributes:
        unsynced: parameters whose gradients are not reduced at all for now.
        unreplicated: those whose gradients are reduced over shards, but not over replicas.
        sums: what earlier backwards left.
        calls: nodes of calls in graphs of autograd that are alive.
        measured: backwards are measured now, which return gradients that stand for those that would be accumulated.
        taker: takes gradients of the backward that comes now where they arrive; None lets it return them.
        ahead: what was gathered for the next forward already.
    """

    unsynced: set[str] = field(default_factory=set)
    unreplicated: set[str] = field(default_factory=set)
    sums: dict[Left, torch.Tensor] = field(default_factory=dict)
    calls: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    measured: bool = False
    taker: Taker | None = None
    ahead: Ahead | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Accumulation:
        """Of a copy of the model, which was not called yet."""
        return Accumulation(set(self.unsynced), set(self.unreplicated), copy.deepcopy(self.sums, memo))

    @property
    def added_up(self) -> set[str]:
        """Names of parameters of which earlier microbatches have left gradients."""
        return {left.name for left in self.sums if left.kind != "pending"}

    def may_be_left(self) -> set[str]:
        """Return names of parameters of which backwards have left gradients, or may, as calls are still to come."""
        return {left.name for left in self.sums} | {name for call in self.calls for name in call.executable.trained}

    def begin(self) -> None:
        """A call outside of backward: what the last one left to a part of it that never came is forgotten."""
        if number_of_backward() == -1:
            for left in [left for left in self.sums if left.kind == "pending"]:
                del self.sums[left]

    def drop_ahead(self) -> None:
        """Let the next forward gather everything itself."""
        if self.ahead is not None:
            self.ahead.forget()
            self.ahead = None

    def step(self, names: Mapping[str, str], deferred: Collection[str] = ()) -> AccumulateGradients | None:
        """What the next backward does about these parameters; None reduces their gradients and nothing else.

        Args:
            deferred: those, by their names in the model, that another call's part of this backward sees to.
        """

        def those(chosen: Collection[str]) -> frozenset[str]:
            return frozenset(own for own, name in names.items() if name in chosen)

        if not (self.unsynced or self.unreplicated or self.sums or deferred):
            return None
        left = {kind: {each.name for each in self.sums if each.kind == kind} for kind in LEFT}
        step = AccumulateGradients(
            those(self.unsynced),
            those(self.unreplicated),
            those(left["accumulated"]),
            those(left["partial"]),
            those(deferred),
            those(left["pending"]),
        )
        return step if step != AccumulateGradients() else None

    def take(self, slot: Slot, names: Mapping[str, str], summand: tuple[Sum, ...] = ()) -> torch.Tensor:
        """What earlier backwards left; it is forgotten here.

        Args:
            summand: what ranks of the tensor axes are yet to add up.

        Raises:
            UnsupportedError: for what earlier backwards left it is otherwise.
        """
        left = Left(slot.kind, names[slot.name], summand)
        if left not in self.sums:
            raise UnsupportedError(
                f"gradients of {left.name} are partial sums over the tensor axis in some calls and whole in others, "
                "and cannot be added up over microbatches. Give all microbatches one shape, or reduce each "
                "(set_requires_gradient_sync(True))."
            )
        return self.sums.pop(left)

    def put(self, slot: Slot, names: Mapping[str, str], value: torch.Tensor, summand: tuple[Sum, ...] = ()) -> None:
        """Leave something for later backwards."""
        self.sums[Left(slot.kind, names[slot.name], summand)] = value

    def follow(self, phase: Phase, names: Mapping[str, str]) -> None:
        """Take and leave what a backward would, without values."""
        for slot in phase.inputs:
            if slot.kind in LEFT:
                self.take(slot, names)
        for slot in phase.outputs:
            if slot.kind in LEFT:
                self.put(slot, names, torch.empty(0))
