"""Attributes of classes that forward changes in ways that its code does not show.

    def count(cls): cls.calls += 1
    def forward(self, x): count(type(self)); ...         an error that names the attribute

What code names of classes is followed like any other variable (`reach.py`). This finds what is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from graphshard.capture.changes import Node
from graphshard.capture.outer import is_namespace
from graphshard.capture.untraceable import Located
from graphshard.capture.witness import PLAIN, is_container
from graphshard.ir.classes import users_class
from graphshard.ir.state import MISSING


class ClassSettings:
    """What the classes of a model's modules have now, but for code; and those of objects, when they are found.

    Args:
        root: the model.
    """

    def __init__(self, root: nn.Module) -> None:
        self._before: dict[type, dict[str, Any]] = {}
        for module in root.modules():
            self.add(users_class(module))

    def add(self, cls: type) -> None:
        """Another class whose objects forward has."""
        for base in cls.__mro__:
            if base not in self._before and is_namespace(base):
                self._before[base] = _settings(base)

    def check(self, label: str, nodes: Mapping[int, Node]) -> None:
        """Raise if one has changed that is not followed.

        Args:
            label: what the model is called.
            nodes: what is followed, by identity.

        Raises:
            Located: names the attribute.
        """
        for cls, name, _ in self._changed():
            if id(cls) not in nodes or name not in nodes[id(cls)].content:
                raise Located(
                    f"graphshard cannot capture {label}.forward: it sets {cls.__name__}.{name}, an attribute of a "
                    f"class, where that cannot be followed. Set it as type(self).{name}, or keep it on the module."
                )

    def restore(self) -> None:
        """Put back what has changed."""
        for cls, name, value in list(self._changed()):
            delattr(cls, name) if value is MISSING else setattr(cls, name, value)

    def _changed(self) -> list[tuple[type, str, Any]]:
        """Attributes that are not what they were, with what they were."""
        found = []
        for cls, before in self._before.items():
            now = _settings(cls)
            names = (name for name in {**before, **now} if now.get(name, MISSING) is not before.get(name, MISSING))
            found += [(cls, name, before.get(name, MISSING)) for name in names]
        return found


def _settings(cls: type) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(cls).items()
        if not name.startswith("__") and (isinstance(value, (*PLAIN, torch.Tensor)) or is_container(value))
    }
