"""Full parameters outside of programs: gathered by hand and kept for several calls, and shown by modules.

They are gathered by `unshard`, or left by the forward of units with `reshard_after_forward=False` until the next
forward or backward. Modules show them meanwhile, as FSDP2's do, and the shards again before backward runs, so that it
can free each full parameter after reading it.

Parameters of the root by default are shown where modules' attributes are read (`AttributeParameter`): `parameters()`
goes on with shards.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from graphshard.errors import UnsupportedError
from graphshard.ir.graph import c10d
from graphshard.ir.mesh import Axis, Mesh
from graphshard.ir.operators import copied_to
from graphshard.ir.param_table import ParamSpec
from graphshard.ir.plan import SMALL
from graphshard.ir.transport import Steps, gather_epilogue, prologue
from graphshard.runtime.collective_launches import all_gather
from graphshard.runtime.parameter_writes import sums_of
from graphshard.runtime.process_groups import on_gloo
from graphshard.runtime.shards import ParamRef, padded_shard, shard_of
from graphshard.runtime.shown_parameters import AttributeParameter, ShownParameter, shown_dtensor
from graphshard.torch_compat.dtensor import process_group
from graphshard.torch_compat.torch_ops import use_count


@dataclass
class Unsharded:
    """Gathered parameters of a compiled model, shared by all its programs, by their names in the model.

    Attributes:
        full: gathered parameters, or what is on its way.
        kept: parameters that stay gathered after a backward.
        calls: number of calls of the model and entries, by name, with gradients since the last backward.
        several: `calls` before the last backward, where it was more than one.
        left: parameters that were gathered for several calls.
        sums: over the bits of the shards that `full` was gathered from.
        read_outside: parameters of the root that something outside of forward has read, by default of
            `reshard_after_forward`.
    """

    full: dict[str, Gathering | torch.Tensor] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    calls: Counter[str] = field(default_factory=Counter)
    several: dict[str, int] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    read_outside: set[str] = field(default_factory=set)
    shown: Shown = field(default_factory=lambda: Shown(ShownParameter))

    def read(self, name: str) -> torch.Tensor:
        """Return a gathered parameter, when it has arrived."""
        value = self.full[name]
        if isinstance(value, Gathering):
            value = self.full[name] = value.wait()
        return value

    def free(self, names: Iterable[str]) -> None:
        """Free gathered parameters, when they have arrived."""
        names = list(names)
        for name in names:
            if name in self.full:
                self.read(name)
                del self.full[name]
                self.left.discard(name)
                del self.sums[name]
        self.shown.hide(names)

    def end(self) -> None:
        """End a backward: free what is not kept for others."""
        self.free(self.full.keys() - self.kept)
        self.shown.hide()
        if self.calls and not self.kept:  # else other backwards of the same step are to come
            self.several = {name: count for name, count in self.calls.items() if count > 1}
            self.calls.clear()

    def add(self, ref: ParamRef, full: Gathering | torch.Tensor) -> None:
        """Add a parameter that is gathered from its present shard."""
        self.full[ref.name], self.sums[ref.name] = full, sums_of(ref.param)

    def show(self, refs: Iterable[ParamRef]) -> None:
        """Let modules show the gathered parameters that have arrived, as FSDP2's do, until the next backward."""
        for ref in refs:
            full = self.full.get(ref.name)
            if isinstance(full, torch.Tensor):
                self.shown.show(ref, full)
        self.shown.connect()

    def show_after_call(self, refs: Iterable[ParamRef]) -> None:
        """As `show`; parameters that were not unsharded by hand only if this call would have left them gathered."""
        several = self.left | self.kept
        self.show(ref for ref in refs if ref.name not in several)
        for ref in refs:
            if ref.row.shows and ref.name in several and ref.name in self.full:
                self.shown.show(ref, self.read(ref.name), until_next_call=True)
        self.shown.connect()


@dataclass(frozen=True)
class UnshardHandle:
    """Handle that `unshard(async_op=True)` returns."""

    _unsharded: Unsharded
    _refs: Sequence[ParamRef]

    def wait(self) -> None:
        """Return when the parameters have arrived, and let modules show them; the next call waits otherwise."""
        for ref in self._refs:
            if ref.name in self._unsharded.full:
                self._unsharded.read(ref.name)
        self._unsharded.show(self._refs)


# --- gathering ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gathering:
    """An all-gather under way."""

    arrive: Callable[[], torch.Tensor]
    row: ParamSpec

    def wait(self, left: int = 0) -> torch.Tensor:
        """Return the parameter, without the last `left` steps of its epilogue."""
        steps = gather_epilogue(self.row) if self.row.num_shards > 1 else []
        return _after(self.arrive(), steps[: len(steps) - left])


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
    params: Iterable[tuple[ParamSpec, torch.Tensor]], mesh: Mesh, groups: Mapping[str, str], device: torch.device
) -> dict[str, Gathering]:
    """Start to gather parameters on a device, in their compute dtypes: one launch for each axis and dtype sent.

    A parameter that is not sharded is there.
    """
    params = list(params)
    shards = copied_to([padded_shard(param, row) for row, param in params], device)
    sent: dict[tuple[Axis, torch.dtype], list[tuple[ParamSpec, torch.Tensor]]] = {}
    found: dict[str, Gathering] = {}
    for (row, _), shard in zip(params, shards):
        if row.num_shards == 1:
            found[row.name] = Gathering(functools.partial(shard.to, row.compute_dtype), row)
            continue
        shard = _after(shard.to(row.compute_dtype), prologue(row))
        sent.setdefault((row.on(mesh).shard, shard.dtype), []).append((row, shard))
    for (axis, _), members in sent.items():
        small = [(row, shard) for row, shard in members if shard.nbytes < SMALL]
        large = [(row, shard) for row, shard in members if shard.nbytes >= SMALL]
        shards = [shard.contiguous() for _, shard in large]
        if small:
            shards.append(torch.cat([shard.flatten() for _, shard in small]))
        where = axis.size, groups[axis.name]
        if on_gloo(process_group(groups[axis.name]), device.type):
            buffers = [all_gather(shard, *where) for shard in shards]
        else:
            buffers = c10d.all_gather_into_tensor_coalesced(shards, *where)
        for (row, _), buffer in zip(large, buffers):
            found[row.name] = Gathering(functools.partial(c10d.wait_tensor, buffer), row)
        sizes = [shard.numel() for _, shard in small]
        for index, (row, shard) in enumerate(small):
            found[row.name] = Gathering(functools.partial(_unpacked, buffers[-1], sizes, index, shard.shape), row)
    return found


def _unpacked(buffer: torch.Tensor, sizes: list[int], index: int, shape: torch.Size) -> torch.Tensor:
    """Wait for a buffer that small parameters share, and return one's part: some elements of each rank's piece."""
    ranks = c10d.wait_tensor(buffer).view(-1, sum(sizes))
    part = ranks.split(sizes, 1)[index].contiguous()
    return part.view(len(ranks) * shape[0], *shape[1:])


# --- full parameters in modules ----------------------------------------------------------------------------------


@dataclass
class Shown:
    """Full parameters of class `kind` that modules show now, by their names in the model.

    `connector` makes them results of autograd, whose gradients reach the shards; None refuses gradients.
    """

    kind: type[ShownParameter]
    connector: Callable[[Mapping[str, ShownParameter]], None] | None = None
    _now: dict[str, tuple[nn.Parameter, ParamRef]] = field(default_factory=dict)
    # Shown until the next forward or backward.
    _left: set[str] = field(default_factory=set)
    # Shown as attributes of modules, which hold their shards.
    _attributes: dict[str, tuple[AttributeParameter, ParamRef]] = field(default_factory=dict)
    # Of earlier steps, to be used again.
    _made: dict[str, ShownParameter] = field(default_factory=dict)
    _made_attributes: dict[str, AttributeParameter] = field(default_factory=dict)

    def show(self, ref: ParamRef, full: torch.Tensor, *, until_next_call: bool = False) -> None:
        """Show a full parameter, unless it is shown already."""
        if (ref.name in self._left and not until_next_call) or ref.name in self._attributes:
            self.hide([ref.name])
        if ref.name in self._now:
            return
        shard, made = ref.param, self._made.get(ref.name)
        shown: nn.Parameter
        if ref.row.is_dtensor:
            shown = shown_dtensor(full, shard, ref.row, ref.name)
        elif made is not None and made.fits(full.dtype, shard):
            made.show(full)
            shown = made
        else:
            shown = self._made[ref.name] = self.kind.of(full, shard, ref.name)
        if self.connector is None and isinstance(shown, ShownParameter):
            shown.follow(shard.requires_grad)
        ref.put(shown)
        self._now[ref.name] = shown, ref
        if until_next_call:
            self._left.add(ref.name)

    def show_as_attribute(
        self, ref: ParamRef, dtype: torch.dtype, device: torch.device, fetch: Callable[[ParamRef], torch.Tensor]
    ) -> None:
        """Show a full parameter where its module's attribute is read; `fetch` returns it when it is computed with."""
        if ref.name in self._now or ref.name in self._attributes:
            return
        made = self._made_attributes.pop(ref.name, None)
        if made is None or not made.fits(dtype, ref.param):
            made = AttributeParameter.of_shard(ref, dtype, device)
        made.ref, made.fetch = ref, fetch
        for owner, attribute in ref.places:
            owner.__dict__[attribute] = made
        self._attributes[ref.name] = made, ref

    def _hide_attributes(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._attributes:
                shown, ref = self._attributes.pop(name)
                for owner, attribute in ref.places:
                    if owner.__dict__.get(attribute) is shown:
                        del owner.__dict__[attribute]
                if shown.end():
                    self._made_attributes[name] = shown

    def connect(self) -> None:
        """Let gradients of what is shown reach the shards."""
        every = {**self._now, **self._attributes}
        shown = ((name, param) for name, (param, _) in every.items() if isinstance(param, ShownParameter))
        new = {name: param for name, param in shown if param.is_unconnected}
        if new and self.connector is not None:
            self.connector(new)

    def forget(self) -> None:
        """Hide all, and reuse no parameters: what shards are may change."""
        self.hide()
        self._made.clear()
        self._made_attributes.clear()

    def hide(self, names: Iterable[str] | None = None) -> None:
        """Let modules hold their shards again; by default all of them.

        What a graph of autograd has saved stays as it is until its backward.

        Raises:
            UnsupportedError: the data of a shown parameter was exchanged for data of another shape, which is lost.
        """
        resized = []
        names = list((*self._now, *self._attributes) if names is None else names)
        self._hide_attributes(names)
        for name in names:
            if name not in self._now:
                continue
            shown, ref = self._now.pop(name)
            self._left.discard(name)
            shard = shard_of(shown)
            assert shard is not None
            ref.put(shard, instead_of=shown)
            if isinstance(shown, ShownParameter):
                resized += [name] if shown.shape != ref.row.shape else []
                if use_count(shown) > 1:
                    self._made.pop(name, None)
                else:
                    shown.release()
        if resized:
            raise UnsupportedError(
                f"the gathered parameter {resized[0]} was given data of another shape, which the shard does not see: "
                "it is as before. Resize it within `with graphshard.unsharded(model):`."
            )

    def hide_left(self, names: Iterable[str]) -> None:
        """Let modules hold the shards of what forwards have left, which must not have been written to."""
        if self._attributes:
            self._hide_attributes(names)
        if not self._left:
            return
        names = self._left.intersection(names)
        shown = [self._now[name][0] for name in names]
        self.hide(names)
        for param in shown:
            if isinstance(param, ShownParameter):
                param.check_not_written()
