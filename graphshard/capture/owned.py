"""Tensors that a module holds as parameters and buffers, and where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from graphshard.ir.params import ParamTable
from graphshard.ir.program import Slot
from graphshard.ir.state import Place


@dataclass
class Owned:
    """A tensor that a module holds: which slot it is, and where it is held."""

    slot: Slot
    tensor: torch.Tensor
    places: list[tuple[nn.Module, str, str]] = field(default_factory=list)

    def holders(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Dictionaries to put another tensor into, with its name there."""
        for owner, kind, name in self.places:
            yield owner.__dict__[kind], name


def place_of(slot: Slot) -> Place:
    """Where a module holds a parameter or buffer."""
    module, _, name = slot.name.rpartition(".")
    return Place(module, (("attribute", name),))


def owned_tensors(module: nn.Module, params: ParamTable) -> list[Owned]:
    """Parameters in the order of the table, and buffers."""
    owned: dict[int, Owned] = {}
    rows = {row.name: Owned(Slot("param", row.name), torch.empty(0)) for row in params}
    for prefix, owner in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        for name, param in owner._parameters.items():
            if param is not None:
                entry = rows[params[f"{dot}{name}"].name]
                entry.tensor = param
                entry.places.append((owner, "_parameters", name))
                owned[id(param)] = entry
    for prefix, owner in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        for name, value in owner._buffers.items():
            if value is not None:
                entry = owned.setdefault(id(value), Owned(Slot("buffer", f"{dot}{name}"), value))
                entry.places.append((owner, "_buffers", name))
    return [*rows.values(), *(entry for entry in owned.values() if entry.slot.kind != "param")]
