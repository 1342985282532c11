"""Whether each submodule is in training, asked at every call: the tree is walked again only if it has changed."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import nn

_training: Callable[[dict[str, Any]], bool] = operator.itemgetter("training")


class Modes:
    """The modes of a module and its submodules, in the order of `modules()`."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self._look()

    def now(self) -> tuple[bool, ...]:
        """The modes as they are now."""
        # Each of these dicts is that of a module which is still there: if it was exchanged, that is seen above it.
        if any(self._empty) or any(tuple(now.values()) != children for now, children in self._children):
            self._look()
        return tuple(map(_training, self._attributes))

    def _look(self) -> None:
        modules = list(self.root.modules())
        self._empty = [m._modules for m in modules if not m._modules]
        self._children = [(m._modules, tuple(m._modules.values())) for m in modules if m._modules]
        # A class may have the mode itself, for all its objects.
        self._attributes = [vars(m) if "training" in vars(m) else _OfClass(m) for m in modules]


class _OfClass(dict[str, Any]):
    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getitem__(self, name: str) -> Any:
        return getattr(self._module, name)
