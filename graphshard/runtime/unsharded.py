"""Full parameters outside of programs: gathered by hand and kept for several calls, and shown by modules.

They are gathered by `unshard`, or left by the forward of units with `reshard_after_forward=False` until the next
forward or backward. Modules show them meanwhile, as FSDP2's do, and the shards again before backward runs, so that it
can free each full parameter after reading it.

FSDP2's are separate parameters: an optimizer that is made of them trains nothing, and flags and hooks are lost with
them. Here they are the shards in all but their values: `grad` and `requires_grad` are the shard's, copies and pickles
are of the shard, and what cannot be passed on is an error.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import Self

from graphshard.errors import UnsupportedError
from graphshard.ir.graph import c10d
from graphshard.ir.mesh import Axis, Mesh, axes_around
from graphshard.ir.operators import copied_to
from graphshard.ir.param_table import ParamSpec
from graphshard.ir.plan import SMALL
from graphshard.ir.transport import Steps, gather_epilogue, prologue
from graphshard.runtime.collective_launches import all_gather_coalesced
from graphshard.runtime.parameter_writes import sums_of
from graphshard.runtime.process_groups import on_gloo
from graphshard.runtime.shards import SHARD_ATTRIBUTE, ParamRef, padded_shard, shard_of
from graphshard.torch_compat.dtensor import dtensor_of, process_group
from graphshard.torch_compat.torch_ops import make_subclass, use_count


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
    """

    full: dict[str, Gathering | torch.Tensor] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    calls: Counter[str] = field(default_factory=Counter)
    several: dict[str, int] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
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
        by_gloo = on_gloo(process_group(groups[axis.name]), device.type)
        gather = all_gather_coalesced if by_gloo else c10d.all_gather_into_tensor_coalesced
        buffers = gather(shards, axis.size, groups[axis.name])
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
    # Of earlier steps, to be used again.
    _made: dict[str, ShownParameter] = field(default_factory=dict)

    def show(self, ref: ParamRef, full: torch.Tensor, *, until_next_call: bool = False) -> None:
        """Show a full parameter, unless it is shown already."""
        if ref.name in self._left and not until_next_call:
            self.hide([ref.name])
        if ref.name in self._now:
            return
        shard, made = ref.param, self._made.get(ref.name)
        shown: nn.Parameter
        if ref.row.split is not None:
            shown = _shown_dtensor(full, shard, ref.row, ref.name)
        elif made is not None and made.fits(full, shard):
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

    def connect(self) -> None:
        """Let gradients of what is shown reach the shards."""
        shown = ((name, param) for name, (param, _) in self._now.items() if isinstance(param, ShownParameter))
        new = {name: param for name, param in shown if param.is_unconnected}
        if new and self.connector is not None:
            self.connector(new)

    def forget(self) -> None:
        """Hide all, and reuse no parameters: what shards are may change."""
        self.hide()
        self._made.clear()

    def hide(self, names: Iterable[str] | None = None) -> None:
        """Let modules hold their shards again; by default all of them.

        What a graph of autograd has saved stays as it is until its backward.

        Raises:
            UnsupportedError: the data of a shown parameter was exchanged for data of another shape, which is lost.
        """
        resized = []
        for name in list(self._now if names is None else names):
            if name not in self._now:
                continue
            shown, ref = self._now.pop(name)
            self._left.discard(name)
            shard = shard_of(shown)
            assert shard is not None
            ref.put(shard, instead_of=shown)
            if isinstance(shown, ShownParameter):
                resized += [name] if shown.shape != shard.shape else []
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
        if not self._left:
            return
        names = self._left.intersection(names)
        shown = [self._now[name][0] for name in names]
        self.hide(names)
        for param in shown:
            if isinstance(param, ShownParameter):
                param.check_not_written()


class ShownParameter(nn.Parameter):
    """A full parameter that a module shows. It shares memory with what programs read or have left to backward."""

    _graphshard_shard: nn.Parameter
    _path: str
    _written: int
    _flag: bool
    _nothing: torch.Tensor
    _dtype: torch.dtype

    @classmethod
    def of(cls, full: torch.Tensor, shard: nn.Parameter, path: str) -> Self:
        """Show a tensor as the parameter that is called `path` in the model."""
        shown = make_subclass(cls, full.detach(), False)
        shown._graphshard_shard, shown._path, shown._nothing = shard, path, full.new_empty(0)
        shown._written, shown._dtype, shown._flag = shown._version, full.dtype, shard.requires_grad
        return shown

    def fits(self, full: torch.Tensor, shard: nn.Parameter) -> bool:
        """Return whether this can show a tensor of a shard; to make a new parameter takes several times as long."""
        alike = full.dtype is self._dtype and shard.requires_grad == self._flag
        return alike and shard is self._graphshard_shard

    def show(self, full: torch.Tensor) -> None:
        """Show another tensor."""
        self.data = full
        self._written = self._version

    def check_not_written(self) -> None:
        """Raise UnsupportedError if it was written to, which backward would use and the shard not see."""
        if self._version != self._written:
            raise UnsupportedError(
                f"the gathered parameter {self._path} was written to after a forward that has kept it. The shard does "
                "not see that. Call reshard() before, and write to the shard."
            )

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Refuse: an optimizer that is made of it asks for it."""
        raise self._refused("was given to an optimizer, or asked whether it is a leaf of autograd")

    @property
    def grad(self) -> torch.Tensor | None:
        """Gradient of the shard."""
        return self._graphshard_shard.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self._graphshard_shard.grad = value

    @property
    def requires_grad(self) -> bool:
        """Flag of the shard."""
        return self._graphshard_shard.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> ShownParameter:
        """Set the flag of the shard."""
        self._graphshard_shard.requires_grad_(requires_grad)
        self.follow(requires_grad)
        return self

    def register_hook(self, hook: Any) -> NoReturn:
        """Refuse: gradients of the model's calls go to the shard."""
        raise self._refused("was given a hook")

    register_post_accumulate_grad_hook = register_hook

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return copy.deepcopy(self._graphshard_shard, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._graphshard_shard.__reduce_ex__(protocol)

    @property
    def is_unconnected(self) -> bool:
        """Whether gradients of it would not reach the shard, which is trained."""
        return self._flag and self.grad_fn is None

    def release(self) -> None:
        """Free the memory, and leave the graph of autograd, which has not saved this."""
        torch.Tensor.detach_(self)
        self.data = self._nothing

    def follow(self, requires_grad: bool) -> None:
        """Let autograd see the shard's flag; a gradient that would not reach the shard is an error."""
        self._flag = requires_grad
        if self.grad_fn is None:
            torch.Tensor.requires_grad_(self, requires_grad)
        elif not requires_grad:
            torch.Tensor.detach_(self)
        if requires_grad and self.grad_fn is None:
            torch.Tensor.register_hook(self, functools.partial(_refuse_gradient, self._path))

    def _refused(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"the gathered parameter {self._path} {what}, and gradients go to its shard. Do that before the model is "
            "called or unsharded, or call reshard() first."
        )


class WholeParameter(ShownParameter):
    """A full parameter that is copied and pickled itself, not as its shard."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        memo[id(self)] = whole = nn.Parameter(self.data.clone(), self.requires_grad)
        return whole

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)


def _shown_dtensor(full: torch.Tensor, shard: nn.Parameter, row: ParamSpec, path: str) -> nn.Parameter:
    """Make a parameter that is split over the tensor axis the DTensor that it was before it was sharded."""
    assert row.split is not None
    assert isinstance(shard, DTensor)
    shape, mesh = torch.Size(row.split.shape), axes_around(shard.device_mesh, row.split.found_on)
    whole = dtensor_of(full, mesh, row.split.found_placed, shape, row.stride_of(shape))
    shown = nn.Parameter(whole, requires_grad=shard.requires_grad)
    vars(shown)[SHARD_ATTRIBUTE] = shard
    if shard.requires_grad:
        shown.register_hook(functools.partial(_refuse_gradient, path))
    return shown


def _refuse_gradient(path: str, _: torch.Tensor) -> NoReturn:
    raise UnsupportedError(
        f"a gradient reached the gathered parameter {path}, which modules show after unshard() or a forward: something "
        "outside of the model's forward computed with it. Compute that in forward, or under torch.no_grad()."
    )
