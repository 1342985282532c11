"""Contents of collections and objects, changed around methods that a class of the user's has for that.

class Scaled(dict):                  what forward has left there, or is given there, is meant as it is:
    def __setitem__(self, key, value): super().__setitem__(key, value * 2)
"""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

from torch import nn

from graphshard.capture.outer import attributes_of, slots_of

# The first that something is an object of changes it; an OrderedDict keeps its order besides.
_BASES: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)


def contents_of(content: Any) -> Any:
    """Contents as a plain dict, set or list."""
    if isinstance(content, dict):
        return dict(content)
    return set(content) if isinstance(content, set) else list(content)


def put_item(owner: Any, key: Any, value: Any) -> None:
    """Put an item into a dict, list or deque, and where the dict has it as an attribute, too, as a ModelOutput does."""
    _mirror(owner, key, value)
    _base(owner).__setitem__(owner, key, value)


def delete_item(owner: Any, key: Any) -> None:
    """Take an item away."""
    _base(owner).__delitem__(owner, key)


def extend(owner: Any, values: Iterable[Any]) -> None:
    """Append to a list or deque."""
    _base(owner).extend(owner, values)


def refill(owner: Any, content: Any) -> None:
    """Let a collection have other contents."""
    base = _base(owner)
    if isinstance(owner, dict):
        for key, value in content.items():
            _mirror(owner, key, value)
        base.clear(owner)
        for key, value in content.items():
            base.__setitem__(owner, key, value)
    else:
        base.clear(owner)
        (base.update if isinstance(owner, set) else base.extend)(owner, content)


def set_attribute(owner: Any, name: str, value: Any) -> None:
    """Give an object, module, class or function an attribute; of a module a buffer, if it has one of that name."""
    if isinstance(owner, (type, types.ModuleType, types.FunctionType)):
        setattr(owner, name, value)
    elif isinstance(owner, nn.Module) and name in attributes_of(owner)["_buffers"]:
        attributes_of(owner)["_buffers"][name] = value
    elif name in slots_of(type(owner)) or not hasattr(owner, "__dict__"):
        object.__setattr__(owner, name, value)
    else:
        attributes_of(owner)[name] = value


def delete_attribute(owner: Any, name: str) -> None:
    """Take an attribute away."""
    if isinstance(owner, (type, types.ModuleType, types.FunctionType)):
        delattr(owner, name)
    elif name in slots_of(type(owner)) or not hasattr(owner, "__dict__"):
        object.__delattr__(owner, name)
    else:
        del attributes_of(owner)[name]


def _mirror(owner: Any, key: Any, value: Any) -> None:
    attributes = getattr(owner, "__dict__", {})
    if isinstance(owner, dict) and key in attributes and attributes[key] is dict.get(owner, key):
        attributes[key] = value


def _base(owner: Any) -> Any:
    return next(base for base in _BASES if isinstance(owner, base))
