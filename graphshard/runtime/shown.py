"""Which modules show full parameters now: those that were gathered by hand, or that a forward has left to backward.

A forward leaves those of units with `reshard_after_forward=False`, until the next forward or backward. Modules show the
shards again before backward runs, so that it can let go of each full parameter as soon as it has read it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from graphshard.runtime.shards import Alias, ParamRef
from graphshard.runtime.shown_parameter import ShownParameter, behind, shown_dtensor


@dataclass(frozen=True)
class Places:
    """Where a parameter is registered.

    Attributes:
        name: in the model.
        at: modules and attributes, with those of tied names.
    """

    name: str
    ref: ParamRef
    at: tuple[tuple[nn.Module, str], ...]


def places_of(ref: ParamRef, aliases: Iterable[Alias], name: str) -> Places:
    """The places of a parameter that is called `name` in the model."""
    tied = [(alias.owner, alias.attribute) for alias in aliases if alias.ref.row.name == ref.row.name]
    return Places(name, ref, ((ref.owner, ref.attribute), *tied))


@dataclass
class Shown:
    """What modules show, by the names of parameters in the model.

    Attributes:
        kind: what they show.
    """

    kind: type[ShownParameter] = ShownParameter
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
        """Hide all, and make parameters anew: what shards are may change."""
        self.hide()
        self._made.clear()

    def hide(self, names: Iterable[str] | None = None) -> None:
        """Let modules hold their shards again; by default all of them."""
        for name in list(self._now if names is None else names):
            if name not in self._now:
                continue
            shown, places = self._now.pop(name)
            self._left.discard(name)
            shard = behind(shown)
            for owner, attribute in places.at:
                if owner._parameters.get(attribute) is shown:
                    owner._parameters[attribute] = shard
            if isinstance(shown, ShownParameter):
                shown.let_go()

    def hide_left(self, names: Iterable[str]) -> None:
        """Let modules hold the shards of what forwards have left of these.

        Raises:
            UnsupportedError: somebody wrote to what was shown.
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
            shown = shown_dtensor(full, shard, places.ref.row, places.name)
        elif made is not None and made.fits(full, shard):
            made.show(full)
            shown = made
        else:
            shown = self._made[places.name] = self.kind.of(full, shard, places.name)
        for owner, attribute in places.at:
            owner._parameters[attribute] = shown
        self._now[places.name] = shown, places
