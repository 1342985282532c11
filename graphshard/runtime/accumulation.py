"""Which gradients the next backward reduces, and what backwards before it left to be reduced later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from graphshard.ir.program import Phase, Slot
from graphshard.passes.accumulate_gradients import AccumulateGradients

# What backwards leave to each other.
LEFT = ("accumulated", "partial")


@dataclass
class Accumulation:
    """State of a compiled model that all its programs share.

    Parameters go by their names in the model; `names` gives these by the names that a program has for them.

    Attributes:
        unsynced: parameters whose gradients are not reduced at all for now.
        unreplicated: those whose gradients are reduced over shards, but not over replicas.
        sums: what earlier backwards left, by slot.
    """

    unsynced: set[str] = field(default_factory=set)
    unreplicated: set[str] = field(default_factory=set)
    sums: dict[Slot, torch.Tensor] = field(default_factory=dict)

    def step(self, names: Mapping[str, str]) -> AccumulateGradients | None:
        """What the next backward does about these parameters; None reduces their gradients and nothing else."""

        def those(chosen: set[str]) -> frozenset[str]:
            return frozenset(own for own, name in names.items() if name in chosen)

        if not (self.unsynced or self.unreplicated or self.sums):
            return None
        left = {kind: {slot.name for slot in self.sums if slot.kind == kind} for kind in LEFT}
        step = AccumulateGradients(
            those(self.unsynced), those(self.unreplicated), those(left["accumulated"]), those(left["partial"])
        )
        return step if step != AccumulateGradients() else None

    def take(self, slot: Slot, names: Mapping[str, str]) -> torch.Tensor:
        """What earlier backwards left; it is forgotten here."""
        return self.sums.pop(Slot(slot.kind, names[slot.name]))

    def put(self, slot: Slot, names: Mapping[str, str], value: torch.Tensor) -> None:
        """Leave something for later backwards."""
        self.sums[Slot(slot.kind, names[slot.name])] = value

    def follow(self, phase: Phase, names: Mapping[str, str]) -> None:
        """Take and leave what a backward would, without values."""
        for slot in phase.inputs:
            if slot.kind in LEFT:
                self.take(slot, names)
        for slot in phase.outputs:
            if slot.kind in LEFT:
                self.put(slot, names, torch.empty(0))
