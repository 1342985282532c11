"""Parameters that are gathered by hand, ahead of the calls that use them, and kept for several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from graphshard.ir.graph import c10d
from graphshard.ir.mesh import Axis, Mesh
from graphshard.ir.operators import copied_to
from graphshard.ir.param_table import ParamSpec
from graphshard.ir.plan import SMALL
from graphshard.ir.subclasses import shard_in
from graphshard.ir.transport import Steps, landing, prologue
from graphshard.runtime.gloo import all_gather_coalesced
from graphshard.runtime.groups import on_gloo
from graphshard.runtime.shards import Alias, ParamRef, padded_shard
from graphshard.runtime.shown import Shown, places_of
from graphshard.torch_compat.dtensor import process_group


@dataclass
class Unsharded:
    """State of a compiled model that all its programs share; parameters go by their names in the model.

    Attributes:
        full: gathered parameters, or what is on its way.
        kept: those that stay gathered after a backward.
        calls: how often the model and entries, by name, were called with gradients since the last backward.
        several: how often that was before the last backward, where it was more than once.
        left: what tells whether a parameter that was gathered for several calls was written to since, as far as torch
            knows: `.data` and `_foreach` functions leave no trace, so it is kept for no more calls than there were.
    """

    full: dict[str, _Gathering | torch.Tensor] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    calls: Counter[str] = field(default_factory=Counter)
    several: dict[str, int] = field(default_factory=dict)
    left: dict[str, Written] = field(default_factory=dict)
    shown: Shown = field(default_factory=Shown)

    @property
    def by_hand(self) -> set[str]:
        """Those that the next backward frees."""
        return self.full.keys() - self.kept

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
                self.left.pop(name, None)
            self.shown.hide([name])

    def end(self) -> None:
        """A backward has ended: free what is not kept for others."""
        self.free(self.by_hand)
        self.shown.hide()
        if self.calls and not self.kept:  # others of the same step are to come
            self.several = {name: count for name, count in self.calls.items() if count > 1}
            self.calls.clear()

    def is_one_of_several(self, name: str) -> bool:
        """Whether a call is one of several before a backward, by the last one."""
        return self.calls[name] < self.several.get(name, 0)

    def leave(self, params: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Watch parameters that were gathered for several calls: nobody has said that they do not change."""
        self.left.update((name, written(param)) for name, param in params if name in self.full)

    def written(self, params: Iterable[tuple[str, torch.nn.Parameter]]) -> list[str]:
        """Which of them have changed since."""
        return [name for name, param in params if name in self.left and self.left[name] != written(param)]

    def show(self, refs: Iterable[ParamRef], aliases: Sequence[Alias]) -> None:
        """Let modules show the gathered parameters that have arrived, as FSDP2's do, until the next backward."""
        for ref in refs:
            full = self.full.get(ref.row.name)
            if isinstance(full, torch.Tensor):
                self.shown.show(places_of(ref, aliases, ref.row.name), full)

    def show_after_call(self, refs: Iterable[ParamRef], aliases: Sequence[Alias]) -> None:
        """As `show`; of those that nobody has unsharded, which would be shown if this call had gathered them."""
        several = self.left.keys() | self.kept
        self.show((ref for ref in refs if ref.row.name not in several), aliases)
        kept = [ref for ref in refs if ref.row.shows and ref.row.name in several and ref.row.name in self.full]
        self.shown.show_left((places_of(ref, aliases, ref.row.name), self.read(ref.row.name)) for ref in kept)


# A shard, and how often it and the parameter were written to.
Written = tuple[int, int, int]


def written(param: torch.nn.Parameter) -> Written:
    """What is other when a parameter or its shard were written to, or replaced, as far as torch knows."""
    local = shard_in(param)
    return id(local), local._version, param._version


@dataclass(frozen=True)
class _Gathering:
    """An all-gather under way, whose buffer small parameters share."""

    buffer: torch.Tensor | _Packed
    row: ParamSpec

    def wait(self, left: int = 0) -> torch.Tensor:
        """The parameter, but for steps of its landing that are left to do."""
        full = self.buffer.wait() if isinstance(self.buffer, _Packed) else c10d.wait_tensor(self.buffer)
        steps = landing(self.row)
        return _after(full, steps[: len(steps) - left])


def landed(full: torch.Tensor, row: ParamSpec, left: int) -> torch.Tensor:
    """A parameter, after the last steps of its landing."""
    steps = landing(row)
    return _after(full, steps[len(steps) - left :])


def _after(full: torch.Tensor, steps: Steps) -> torch.Tensor:
    for target, args, kwargs in steps:
        full = target(full, *args, **kwargs)
    return full


@dataclass(frozen=True)
class _Packed:
    """Part of a buffer: of each rank's piece those elements that are one parameter's."""

    buffer: torch.Tensor
    sizes: Sequence[int]
    index: int
    shape: torch.Size

    def wait(self) -> torch.Tensor:
        """The parameter's shards, one behind another."""
        ranks = c10d.wait_tensor(self.buffer).view(-1, sum(self.sizes))
        part = ranks.split(list(self.sizes), 1)[self.index].contiguous()
        return part.view(len(ranks) * self.shape[0], *self.shape[1:])


@torch.no_grad()
def start_gathering(
    params: Iterable[tuple[ParamSpec, torch.nn.Parameter]], mesh: Mesh, groups: Mapping[str, str], device: torch.device
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
        shard = shard.to(row.compute_dtype)
        for target, args, kwargs in prologue(row):
            shard = target(shard, *args, **kwargs)
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
        packed = [_Packed(buffers[-1], sizes, index, shard.shape) for index, (_, shard) in enumerate(small)]
        found.update((row.name, _Gathering(part, row)) for (row, _), part in zip(small, packed, strict=True))
    return found


class UnshardHandle:
    """What `unshard(async_op=True)` returns."""

    def __init__(self, unsharded: Unsharded, refs: Sequence[ParamRef], aliases: Sequence[Alias]) -> None:
        self._unsharded, self._refs, self._aliases = unsharded, refs, aliases

    def wait(self) -> None:
        """Return when the parameters have arrived, and let modules show them; the next call waits otherwise."""
        for ref in self._refs:
            if ref.row.name in self._unsharded.full:
                self._unsharded.read(ref.row.name)
        self._unsharded.show(self._refs, self._aliases)
