"""State that a model's programs share between backwards: gradients left to be reduced later, and calls alive."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from graphshard.ir.mesh import PendingReduction
from graphshard.ir.operators import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from graphshard.ir.program import Phase, SlotKind
from graphshard.passes.accumulate_gradients import AccumulateGradients
from graphshard.runtime.shards import ParamRef
from graphshard.runtime.step_overlap import GatherPrefetch, GradientConsumer
from graphshard.torch_compat.autograd_state import fate_at, number_of_backward
from graphshard.torch_compat.dtensor import process_group

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
        own: parameters of the model by name.
        calls: nodes of calls in graphs of autograd that are alive.
        measured: backwards are measured now, which return gradients instead of accumulating them.
        consumer: takes gradients of the next backward when they arrive; None lets it return them.
        prefetch: gathers of the next forward that were started.
    """

    unsynced: set[str] = field(default_factory=set)
    unreplicated: set[str] = field(default_factory=set)
    sums: dict[LeftGradient, torch.Tensor] = field(default_factory=dict)
    own: Mapping[str, ParamRef] = field(default_factory=dict)
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

    def still_to_come(self, ctx: Any) -> set[str] | None:
        """Return names of parameters of other calls that the backward of a call goes through later.

        As autograd adds up what flows into a parameter before FSDP2 reduces it, the last of these calls reduces.
        Programs that leave other sums over tensor axes to the reduction reduce by themselves. None, which is not to
        take part in this: a call by `torch.func.functional_call` with other parameters, while gradients are left.
        """
        calls = [call for call in self.calls if call.ran != ctx.ran and fate_at(call) != "dropped"]
        if (self.unsynced or self.unreplicated or self.sums) and self._has_other_parameters(ctx):
            return None
        calls = [call for call in calls if not self._has_other_parameters(call)]
        params, sums = ctx.read.params, ctx.executable.summands
        named = [(name, call) for call in calls for name in call.executable.trained]
        named = [(name, call) for name, call in named if call.read.params[name] is params.get(name)]
        return {name for name, call in named if call.executable.summands[name] == sums.get(name)}

    def _has_other_parameters(self, call: Any) -> bool:
        """Return whether a call had other parameters than the model, by `torch.func.functional_call`."""
        params = call.read.params
        return any(name in self.own and params[name] is not self.own[name].param for name in call.executable.trained)

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

    def step(
        self,
        names: Mapping[str, str],
        deferred: Collection[str] = (),
        summands: Mapping[str, tuple[PendingReduction, ...]] = MappingProxyType({}),
    ) -> AccumulateGradients | None:
        """Return what the next backward does about these parameters; another call's part of it reduces `deferred`."""
        if not (self.unsynced or self.unreplicated or self.sums or deferred):
            return None
        sums = [each for each in self.sums if each.kind != "pending" or each.summand == summands.get(each.name, ())]
        left = [{each.name for each in sums if each.kind == kind} for kind in LEFT]
        chosen = (self.unsynced, self.unreplicated, left[0], left[1], deferred, left[2])
        step = AccumulateGradients(*(frozenset(own for own, name in names.items() if name in each) for each in chosen))
        return step if step != AccumulateGradients() else None

    def take(self, left: LeftGradient, groups: Mapping[str, str]) -> torch.Tensor:
        """Remove and return what earlier backwards left, as a sum that `left.summand` is yet to be applied to.

        Args:
            groups: names of process groups by axis.
        """
        found = left if left in self.sums else next(each for each in self.sums if each[:2] == left[:2])
        value = self.sums.pop(found)
        if found.summand == left.summand:
            return value
        for sums in found.summand:
            group = groups[sums.axis]
            if sums.num_pieces > 1:
                value = REDUCE_SCATTER(value, sums.operation, sums.num_pieces, group)
            else:
                value = ALL_REDUCE(value, sums.operation, group)
        for sums in reversed(left.summand):
            group = groups[sums.axis]
            if sums.num_pieces > 1:
                value = ALL_GATHER(value, sums.num_pieces, group)
            if sums.operation == "sum":
                value = value / process_group(group).size()
        return value

    def follow(self, phase: Phase, names: Mapping[str, str]) -> None:
        """Take and leave what a backward would, without values."""
        for slot in phase.inputs:
            if slot.kind in LEFT:
                del self.sums[LeftGradient(slot.kind, names[slot.name])]
        for slot in phase.outputs:
            if slot.kind in LEFT:
                self.sums[LeftGradient(slot.kind, names[slot.name])] = torch.empty(0)
