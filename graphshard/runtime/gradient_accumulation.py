"""State that a model's programs share between backwards: gradients left to be reduced later, and calls alive."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from graphshard.errors import UnsupportedError
from graphshard.ir.mesh import PendingReduction
from graphshard.ir.program import Phase, SlotKind
from graphshard.passes.accumulate_gradients import AccumulateGradients
from graphshard.runtime.step_overlap import GatherPrefetch, GradientConsumer
from graphshard.torch_compat.autograd_state import fate_at, number_of_backward

# Kinds of slots that backwards leave to each other.
LEFT = ("accumulated", "partial", "pending")


class LeftGradient(NamedTuple):
    """Key of what a backward leaves of a parameter, by its name in the model, and the sums that are yet to be made."""

    kind: SlotKind
    name: str
    summand: tuple[PendingReduction, ...] = ()


@dataclass
class Accumulation:
    """State of a compiled model that all its programs share.

    Parameters go by their names in the model; `names` gives these by the names that a program has for them.

    Attributes:
        unsynced: parameters whose gradients are not reduced at all for now.
        unreplicated: parameters whose gradients are reduced over shards, but not over replicas.
        calls: nodes of calls in graphs of autograd that are alive.
        measured: backwards are measured now, which return gradients instead of accumulating them.
        consumer: takes gradients of the next backward when they arrive; None lets it return them.
        prefetch: gathers of the next forward that were started.
    """

    unsynced: set[str] = field(default_factory=set)
    unreplicated: set[str] = field(default_factory=set)
    sums: dict[LeftGradient, torch.Tensor] = field(default_factory=dict)
    calls: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    measured: bool = False
    consumer: GradientConsumer | None = None
    prefetch: GatherPrefetch | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Accumulation:
        """Copy the state for a copy of the model, which was not called yet."""
        return Accumulation(set(self.unsynced), set(self.unreplicated), copy.deepcopy(self.sums, memo))

    @property
    def added_up(self) -> set[str]:
        """Names of parameters of which earlier microbatches have left gradients."""
        return {left.name for left in self.sums if left.kind != "pending"}

    def may_be_left(self) -> set[str]:
        """Return names of parameters of which backwards have left gradients, or may, as calls are still to come."""
        return {left.name for left in self.sums} | {name for call in self.calls for name in call.executable.trained}

    def begin(self) -> None:
        """Begin a call outside of backward: drop what a backward left to another part of it that never ran."""
        if number_of_backward() == -1:
            for left in [left for left in self.sums if left.kind == "pending"]:
                del self.sums[left]

    def drop_prefetch(self) -> None:
        """Let the next forward gather everything itself."""
        if self.prefetch is not None:
            self.prefetch.forget()
            self.prefetch = None

    def free_gathered(self, names: Collection[str]) -> None:
        """Free full parameters that calls hold for their backwards, which gather them again."""
        for call in self.calls:
            own = call.executable.names_in_model
            call.full.update((slot, None) for slot in call.full if own[slot.name] in names)

    def still_to_come(self, ctx: Any) -> set[str]:
        """Return names of parameters of other calls that the backward of a call goes through later.

        As autograd adds up what flows into a parameter before FSDP2 reduces it, the last of these calls reduces. Calls
        by `torch.func.functional_call` have other parameters of the same names.
        """
        calls = [call for call in self.calls if call.ran != ctx.ran and fate_at(call) != "dropped"]
        own = ctx.read.params
        return {name for call in calls for name in call.executable.trained if call.read.params[name] is own.get(name)}

    def trained_by_one_call(self, loss: torch.Tensor) -> frozenset[str]:
        """Return names of parameters all of whose gradient comes from the only call that a loss goes through.

        There are none if the loss goes through several calls, or a custom function, which may hide some (a reentrant
        checkpoint), or if it reads one of the parameters directly.
        """
        found: Any = None
        seen: set[Any] = set()
        leaves: set[int] = set()
        left: list[Any] = [loss.grad_fn]
        while left:
            node = left.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            following = [next_node for next_node, _ in node.next_functions]
            if node in self.calls:
                if found is not None:
                    return frozenset()
                found = node
                of_inputs = (of != "param" for of in node.executable.differentiated)
                following = [next_node for next_node, inputs in zip(following, of_inputs) if inputs]
            elif isinstance(node, torch.autograd.function.BackwardCFunction):
                return frozenset()
            elif hasattr(node, "variable"):
                leaves.add(id(node.variable))
            left += following
        if found is None:
            return frozenset()
        trained = found.executable.trained
        reads_parameter = leaves and any(id(ref.param) in leaves for ref in trained.values())
        return frozenset() if reads_parameter else frozenset(trained)

    def step(self, names: Mapping[str, str], deferred: Collection[str] = ()) -> AccumulateGradients | None:
        """Return what the next backward does about these parameters; another call's part of it reduces `deferred`."""
        if not (self.unsynced or self.unreplicated or self.sums or deferred):
            return None
        left = [{each.name for each in self.sums if each.kind == kind} for kind in LEFT]
        chosen = (self.unsynced, self.unreplicated, left[0], left[1], deferred, left[2])
        step = AccumulateGradients(*(frozenset(own for own, name in names.items() if name in each) for each in chosen))
        return step if step != AccumulateGradients() else None

    def take(self, left: LeftGradient) -> torch.Tensor:
        """Remove and return what earlier backwards left; raises UnsupportedError if they left something else."""
        if left not in self.sums:
            raise UnsupportedError(
                f"gradients of {left.name} are partial sums over the tensor axis in some calls and whole in others, "
                "and cannot be added up over microbatches. Give all microbatches one shape, or reduce each "
                "(set_requires_gradient_sync(True))."
            )
        return self.sums.pop(left)

    def follow(self, phase: Phase, names: Mapping[str, str]) -> None:
        """Take and leave what a backward would, without values."""
        for slot in phase.inputs:
            if slot.kind in LEFT:
                del self.sums[LeftGradient(slot.kind, names[slot.name])]
        for slot in phase.outputs:
            if slot.kind in LEFT:
                self.sums[LeftGradient(slot.kind, names[slot.name])] = torch.empty(0)
