"""Full parameters that modules show instead of their shards, as FSDP2's do while parameters are gathered.

They are gathered by hand, or left by the forward of units with `reshard_after_forward=False` until the next forward or
backward. Modules show the shards again before backward runs, so that it can free each full parameter after reading it.

FSDP2's are separate parameters: an optimizer that is made of them trains nothing, flags and hooks that are set on them
are lost with them, and `zero_grad` and clipping do not reach the shards. Here they are the shards in all but their
values: `grad` and `requires_grad` are the shard's, copies and pickles are of the shard, and what cannot be passed on is
an error.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import Self

from graphshard.errors import UnsupportedError
from graphshard.ir.mesh import axes_around
from graphshard.ir.param_table import ParamSpec
from graphshard.runtime.shards import SHARD_ATTRIBUTE, Alias, ParamRef, shard_of
from graphshard.torch_compat.dtensor import dtensor_of
from graphshard.torch_compat.torch_ops import make_subclass


@dataclass(frozen=True)
class Places:
    """Modules and attributes at which a parameter and its tied names are registered; `name` is in the model."""

    name: str
    ref: ParamRef
    at: tuple[tuple[nn.Module, str], ...]


def places_of(ref: ParamRef, aliases: Iterable[Alias], name: str) -> Places:
    """Return the places of a parameter that is called `name` in the model."""
    tied = [(alias.owner, alias.attribute) for alias in aliases if alias.ref.row.name == ref.row.name]
    return Places(name, ref, ((ref.owner, ref.attribute), *tied))


@dataclass
class Shown:
    """Full parameters that modules show now, by their names in the model.

    Attributes:
        kind: class of the full parameters.
    """

    kind: type[ShownParameter] = field(default_factory=lambda: ShownParameter)
    _now: dict[str, tuple[nn.Parameter, Places]] = field(default_factory=dict)
    _left: set[str] = field(default_factory=set)
    # Of earlier steps, to be used again.
    _made: dict[str, ShownParameter] = field(default_factory=dict)

    def show(self, places: Places, full: torch.Tensor) -> None:
        """Show what was gathered by hand, unless it is shown already."""
        if places.name in self._left:
            self.hide([places.name])
        if places.name not in self._now:
            self._put(places, full)

    def show_left(self, left: Iterable[tuple[Places, torch.Tensor]]) -> None:
        """Show what a forward has left."""
        for places, full in left:
            if places.name not in self._now:
                self._put(places, full)
                self._left.add(places.name)

    def forget(self) -> None:
        """Hide all, and reuse no parameters: what shards are may change."""
        self.hide()
        self._made.clear()

    def hide(self, names: Iterable[str] | None = None) -> None:
        """Let modules hold their shards again; by default all of them."""
        for name in list(self._now if names is None else names):
            if name not in self._now:
                continue
            shown, places = self._now.pop(name)
            self._left.discard(name)
            shard = shard_of(shown)
            for owner, attribute in places.at:
                if owner._parameters.get(attribute) is shown:
                    owner._parameters[attribute] = shard
            if isinstance(shown, ShownParameter):
                shown.data = shown._nothing

    def hide_left(self, names: Iterable[str]) -> None:
        """Let modules hold the shards of what forwards have left.

        Raises:
            UnsupportedError: what was shown was written to.
        """
        if not self._left:
            return
        names = self._left.intersection(names)
        shown = [self._now[name][0] for name in names]
        self.hide(names)
        for param in shown:
            if isinstance(param, ShownParameter):
                param.check_not_written()

    def _put(self, places: Places, full: torch.Tensor) -> None:
        shard, made = places.ref.param, self._made.get(places.name)
        shown: nn.Parameter
        if places.ref.row.split is not None:
            shown = _shown_dtensor(full, shard, places.ref.row, places.name)
        elif made is not None and made.fits(full, shard):
            made.show(full)
            shown = made
        else:
            shown = self._made[places.name] = self.kind.of(full, shard, places.name)
        for owner, attribute in places.at:
            owner._parameters[attribute] = shown
        self._now[places.name] = shown, places


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
        shown = make_subclass(cls, full.detach(), shard.requires_grad)
        shown._graphshard_shard, shown._path, shown._nothing = shard, path, full.new_empty(0)
        shown._written, shown._dtype = shown._version, full.dtype
        shown._follow(shard.requires_grad)
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
        self._follow(requires_grad)
        return self

    def register_hook(self, hook: Any) -> NoReturn:
        """Refuse: no gradient comes here."""
        raise self._refused("was given a hook")

    register_post_accumulate_grad_hook = register_hook

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return copy.deepcopy(self._graphshard_shard, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._graphshard_shard.__reduce_ex__(protocol)

    def _follow(self, requires_grad: bool) -> None:
        """Let autograd see the shard's flag, so that what computes with it outside of forward is told."""
        self._flag = requires_grad
        torch.Tensor.requires_grad_(self, requires_grad)
        if requires_grad:
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
    """Make a parameter that is split over the tensor axis the DTensor that it was before it was sharded.

    Raises:
        UnsupportedError: the mesh that it was on is not found.
    """
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
