"""Parameters that are gathered by hand, ahead of the calls that use them, and kept for several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from graphshard.ir.graph import c10d
from graphshard.ir.mesh import Axis
from graphshard.ir.params import ParamRow
from graphshard.ir.transport import landing, prologue
from graphshard.runtime.gloo import all_gather_coalesced
from graphshard.runtime.shards import padded_shard


@dataclass
class Unsharded:
    """State of a compiled model that all its programs share; parameters go by their names in the model.

    Attributes:
        full: gathered parameters, or what is on its way.
        kept: those that stay gathered after a backward.
    """

    full: dict[str, _Gathering | torch.Tensor] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)

    def read(self, name: str) -> torch.Tensor:
        """A gathered parameter; waits until it has arrived."""
        value = self.full[name]
        if isinstance(value, _Gathering):
            value = self.full[name] = value.wait()
        return value

    def free(self, names: Iterable[str]) -> None:
        """Forget gathered parameters; what is on its way is waited for first."""
        for name in list(names):
            if name in self.full:
                self.read(name)
                del self.full[name]


@dataclass(frozen=True)
class _Gathering:
    """An all-gather under way."""

    buffer: torch.Tensor
    row: ParamRow

    def wait(self) -> torch.Tensor:
        full = c10d.wait_tensor(self.buffer)
        for target, args, kwargs in landing(self.row):
            full = target(full, *args, **kwargs)
        return full


@torch.no_grad()
def start_gathering(
    params: Iterable[tuple[ParamRow, torch.nn.Parameter]], axis: Axis, groups: Mapping[str, str]
) -> dict[str, _Gathering]:
    """Start to gather parameters over an axis, in their compute dtypes; one launch for each dtype that travels.

    Args:
        groups: names of the process groups by the names of the axes.
    """
    sent: dict[torch.dtype, list[tuple[ParamRow, torch.Tensor]]] = {}
    for row, param in params:
        shard = padded_shard(param, row).to(row.compute_dtype)
        for target, args, kwargs in prologue(row):
            shard = target(shard, *args, **kwargs)
        sent.setdefault(shard.dtype, []).append((row, shard))
    found: dict[str, _Gathering] = {}
    for members in sent.values():
        shards = [shard.contiguous() for _, shard in members]
        on_cpu = shards[0].device.type == "cpu"
        gather = all_gather_coalesced if on_cpu else c10d.all_gather_into_tensor_coalesced
        buffers = gather(shards, axis.size, groups[axis.name])
        found.update((row.name, _Gathering(buffer, row)) for (row, _), buffer in zip(members, buffers, strict=True))
    return found


class UnshardHandle:
    """What `unshard(async_op=True)` returns."""

    def __init__(self, unsharded: Unsharded, names: Iterable[str]) -> None:
        self._unsharded, self._names = unsharded, tuple(names)

    def wait(self) -> None:
        """Return when the parameters have arrived; the next call of the model waits otherwise."""
        for name in self._names:
            if name in self._unsharded.full:
                self._unsharded.read(name)
