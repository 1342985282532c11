"""How what is at a place of a module is looked up, and changed."""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from graphshard.capture.entry import Entry
from graphshard.capture.environment import variable
from graphshard.capture.outer import descriptor, getter, names_of, slots_of
from graphshard.capture.torch_settings import setting
from graphshard.ir.classes import users_class
from graphshard.ir.state import MISSING, Path, Place, StepKind


class LookUp(NamedTuple):
    """A call that finds something: `get(key, MISSING)`, and where that is a container, steps into it."""

    get: Callable[[Any, Any], Any]
    key: Any
    rest: Path = ()

    def now(self) -> Any:
        """What is there; MISSING if nothing is. An entry counts as what it stands in for."""
        value = self.get(self.key, MISSING)
        for kind, key in self.rest:
            value = _item(value, key) if kind == "item" else _attributes(value, kind, key)(key, MISSING)
        return value.replaced if type(value) is Entry else value


def look_up(root: nn.Module, place: Place) -> LookUp:
    """The way to a place, up to the first container: another may take its place, while objects are compared.

    Raises:
        AttributeError: there is no such module or object.
    """
    owner: Any = root.get_submodule(place.module)
    if not place.path:
        return LookUp(lambda _, __: owner, "")
    first = next((i for i, (kind, _) in enumerate(place.path) if kind in ("item", "tensor")), len(place.path))
    for kind, key in place.path[: first - 1]:
        owner = _attributes(owner, kind, key)(key, MISSING)
    kind, key = place.path[first - 1]
    return LookUp(_attributes(owner, kind, key), key, place.path[first:])


def owner_of(root: nn.Module, place: Place) -> Any:
    """What holds what is at a place."""
    return look_up(root, Place(place.module, place.path[:-1])).now()


def _attributes(owner: Any, kind: StepKind, key: Any) -> Callable[[Any, Any], Any]:
    """What looks an attribute up."""
    if kind == "environment":
        return variable
    if kind == "setting":
        return setting
    if kind == "imported":
        return sys.modules.get
    if kind == "context":
        return getter(owner, kind, key)
    if kind == "tensor":
        return getattr(owner, "__dict__", {}).get
    if kind == "names":
        return lambda _, __: names_of(owner)
    if kind == "descriptor":
        return functools.partial(descriptor, users_class(owner))
    if kind == "type":
        return lambda _, __: users_class(owner)
    if isinstance(owner, types.FunctionType) and kind in ("cell", "global", "default"):
        return getter(owner, kind, key)
    if isinstance(owner, (type, types.ModuleType)) or key in slots_of(type(owner)):
        return functools.partial(getattr, owner)
    if isinstance(owner, (types.MethodType, functools.partial, property)):
        return functools.partial(getattr, owner)
    if kind == "value":
        return lambda number, default: next(itertools.islice(owner.values(), number, None), default)
    if kind == "class":
        return functools.partial(getattr, users_class(owner))
    attributes: dict[str, Any] = getattr(owner, "__dict__", {})  # an object with nothing but slots has no others
    if not isinstance(owner, nn.Module) or key == "forward":
        return attributes.get
    holders = [*(attributes[name] for name in ("_parameters", "_buffers", "_modules")), attributes]
    found = next((held for held in holders if key in held), None)
    if found is None:  # it may come to any of them later
        return lambda name, default: next((held[name] for held in holders if name in held), default)
    return found.get


def _item(value: Any, key: Any) -> Any:
    try:
        return value[key]
    except (IndexError, KeyError, TypeError):
        return MISSING
