"""Parameters that are gathered by hand, before the calls that use them, and kept for several calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from graphshard.ir.graph import c10d
from graphshard.ir.mesh import Axis, Mesh
from graphshard.ir.operators import copied_to
from graphshard.ir.param_table import ParamSpec
from graphshard.ir.plan import SMALL
from graphshard.ir.subclasses import shard_in
from graphshard.ir.transport import Steps, gather_epilogue, prologue
from graphshard.runtime.gloo import all_gather_coalesced
from graphshard.runtime.process_groups import on_gloo
from graphshard.runtime.shards import Alias, ParamRef, padded_shard
from graphshard.runtime.unsharded_view import Shown, places_of
from graphshard.torch_compat.dtensor import process_group

# Identity and version of a shard, and version of its parameter.
Written = tuple[int, int, int]


@dataclass
class Unsharded:
    """State of a compiled model that all its programs share; parameters go by their names in the model.

    Attributes:
        full: gathered parameters, or what is on its way.
        kept: parameters that stay gathered after a backward.
        calls: number of calls of the model and entries, by name, with gradients since the last backward.
        several: `calls` before the last backward, where it was more than one.
        left: versions of parameters that were gathered for several calls. `.data` and `_foreach` functions leave no
            trace, so these stay gathered for no more calls than there were before the last backward.
    """

    full: dict[str, _Gathering | torch.Tensor] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    calls: Counter[str] = field(default_factory=Counter)
    several: dict[str, int] = field(default_factory=dict)
    left: dict[str, Written] = field(default_factory=dict)
    shown: Shown = field(default_factory=Shown)

    def read(self, name: str) -> torch.Tensor:
        """Return a gathered parameter, when it has arrived."""
        value = self.full[name]
        if isinstance(value, _Gathering):
            value = self.full[name] = value.wait()
        return value

    def free(self, names: Iterable[str]) -> None:
        """Free gathered parameters, when they have arrived."""
        for name in list(names):
            if name in self.full:
                self.read(name)
                del self.full[name]
                self.left.pop(name, None)
            self.shown.hide([name])

    def end(self) -> None:
        """End a backward: free what is not kept for others."""
        self.free(self.full.keys() - self.kept)
        self.shown.hide()
        if self.calls and not self.kept:  # else other backwards of the same step are to come
            self.several = {name: count for name, count in self.calls.items() if count > 1}
            self.calls.clear()

    def is_one_of_several(self, name: str) -> bool:
        """Predict whether other calls follow before a backward, by the last one."""
        return self.calls[name] < self.several.get(name, 0)

    def leave(self, params: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Watch parameters that were gathered for several calls, as the user has not said that they do not change."""
        self.left.update((name, written(param)) for name, param in params if name in self.full)

    def written(self, params: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
        """Return which of the watched parameters have changed."""
        return [name for name, param in params if name in self.left and self.left[name] != written(param)]

    def show(self, refs: Iterable[ParamRef], aliases: Sequence[Alias]) -> None:
        """Let modules show the gathered parameters that have arrived, as FSDP2's do, until the next backward."""
        for ref in refs:
            full = self.full.get(ref.row.name)
            if isinstance(full, torch.Tensor):
                self.shown.show(places_of(ref, aliases, ref.row.name), full)

    def show_after_call(self, refs: Iterable[ParamRef], aliases: Sequence[Alias]) -> None:
        """As `show`; parameters that were not unsharded by hand only if this call would have left them gathered."""
        several = self.left.keys() | self.kept
        self.show((ref for ref in refs if ref.row.name not in several), aliases)
        kept = [ref for ref in refs if ref.row.shows and ref.row.name in several and ref.row.name in self.full]
        self.shown.show_left((places_of(ref, aliases, ref.row.name), self.read(ref.row.name)) for ref in kept)


def written(param: nn.Parameter) -> Written:
    """Return what changes when a parameter or its shard is written to, or replaced, as far as torch knows."""
    local = shard_in(param)
    return id(local), local._version, param._version


@dataclass(frozen=True)
class _Gathering:
    """An all-gather under way, whose buffer small parameters share."""

    buffer: torch.Tensor | _Packed
    row: ParamSpec

    def wait(self, left: int = 0) -> torch.Tensor:
        """Return the parameter, without the last `left` steps of its epilogue."""
        full = self.buffer.wait() if isinstance(self.buffer, _Packed) else c10d.wait_tensor(self.buffer)
        steps = gather_epilogue(self.row)
        return _after(full, steps[: len(steps) - left])


@dataclass(frozen=True)
class _Packed:
    """One parameter's part of a buffer: some elements of each rank's piece."""

    buffer: torch.Tensor
    sizes: Sequence[int]
    index: int
    shape: torch.Size

    def wait(self) -> torch.Tensor:
        """Return the parameter's shards, concatenated."""
        ranks = c10d.wait_tensor(self.buffer).view(-1, sum(self.sizes))
        part = ranks.split(list(self.sizes), 1)[self.index].contiguous()
        return part.view(len(ranks) * self.shape[0], *self.shape[1:])


def landed(full: torch.Tensor, row: ParamSpec, left: int) -> torch.Tensor:
    """Apply the last `left` steps of a parameter's epilogue."""
    steps = gather_epilogue(row)
    return _after(full, steps[len(steps) - left :])


def _after(value: torch.Tensor, steps: Steps) -> torch.Tensor:
    for target, args, kwargs in steps:
        value = target(value, *args, **kwargs)
    return value


@torch.no_grad()
def start_gathering(
    params: Iterable[tuple[ParamSpec, nn.Parameter]], mesh: Mesh, groups: Mapping[str, str], device: torch.device
) -> dict[str, _Gathering]:
    """Start to gather parameters, in their compute dtypes; one launch for each axis and dtype that travels.

    Args:
        groups: names of the process groups by the names of the axes.
        device: that gathers; shards that are offloaded are copied there first.
    """
    params = list(params)
    shards = copied_to([padded_shard(param, row) for row, param in params], device)
    sent: dict[tuple[Axis, torch.dtype], list[tuple[ParamSpec, torch.Tensor]]] = {}
    for (row, _), shard in zip(params, shards):
        shard = _after(shard.to(row.compute_dtype), prologue(row))
        sent.setdefault((row.on(mesh).shard, shard.dtype), []).append((row, shard))
    found: dict[str, _Gathering] = {}
    for (axis, _), members in sent.items():
        small = [(row, shard) for row, shard in members if shard.nbytes < SMALL]
        large = [(row, shard) for row, shard in members if shard.nbytes >= SMALL]
        shards = [shard.contiguous() for _, shard in large]
        if small:
            shards.append(torch.cat([shard.flatten() for _, shard in small]))
        by_gloo = on_gloo(process_group(groups[axis.name]), device.type)
        gather = all_gather_coalesced if by_gloo else c10d.all_gather_into_tensor_coalesced
        buffers = gather(shards, axis.size, groups[axis.name])
        found.update((row.name, _Gathering(buffer, row)) for (row, _), buffer in zip(large, buffers))
        sizes = [shard.numel() for _, shard in small]
        for index, (row, shard) in enumerate(small):
            found[row.name] = _Gathering(_Packed(buffers[-1], sizes, index, shard.shape), row)
    return found


@dataclass(frozen=True)
class UnshardHandle:
    """Handle that `unshard(async_op=True)` returns."""

    _unsharded: Unsharded
    _refs: Sequence[ParamRef]
    _aliases: Sequence[Alias]

    def wait(self) -> None:
        """Return when the parameters have arrived, and let modules show them; the next call waits otherwise."""
        for ref in self._refs:
            if ref.row.name in self._unsharded.full:
                self._unsharded.read(ref.row.name)
        self._unsharded.show(self._refs, self._aliases)
