"""What a program reads and leaves on modules, as plain JSON.

{"Place": ["layers.0", ["attribute", "p"]]}          by its class and its fields, in order
{"Counted": [{"Computed": ["add", [{"Number": ...}, 1]]}]}
{"structure": "..."}                                  of a container that forward makes
[..]                                                  a tuple
1, "text", {"dtype": "float32"}                       as in codec/values.py
"""

from __future__ import annotations

import functools
import itertools
import types
from dataclasses import fields
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from torch.utils import _pytree as pytree

from graphshard.codec.structures import decode_structure, describe_structure
from graphshard.codec.values import Decoder, encode
from graphshard.ir import state
from graphshard.ir.errors import ArgumentError
from graphshard.ir.plain import typed
from graphshard.ir.text import brief

T = TypeVar("T")

# By name, those that are written here and not by the types of their fields: they hold one another in several ways.
CLASSES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(state.Place, state.Read, state.Number, state.Computed, state.Condition, state.Write, state.ModuleState),
        *(state.Constant, state.Result, state.Given, state.Old, state.Counted, state.Made),
    )
}
# Objects of this process.
_LEFT_OUT = {"witness"}


def write_state(value: Any) -> Any:
    """A ModuleState, or a part of one, as plain data."""
    kind = type(value)
    if kind is tuple:
        return [write_state(item) for item in value]
    if CLASSES.get(kind.__name__) is kind:
        return {kind.__name__: [write_state(getattr(value, name)) for name in _names(kind)]}
    if isinstance(value, pytree.TreeSpec):
        return {"structure": describe_structure(value)}
    return encode(value)


def read_state(data: Any, kind: type[T]) -> T:
    """Inverse of `write_state`.

    Raises:
        ArgumentError: nothing of this class is written so.
        ArtifactError: a structure has a class that this process lacks.
    """
    found = _read(data)
    if not isinstance(found, kind):
        raise ArgumentError(f"{str(data)[:60]} is no {kind.__name__}")
    return found


def _read(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(map(_read, data))
    if isinstance(data, dict) and len(data) == 1:
        ((name, content),) = data.items()
        if name == "structure":
            return decode_structure(content, "attributes")
        if name in CLASSES:
            kind = CLASSES[name]
            values, names = typed(content, list), _names(kind)
            if len(values) != len(names):
                raise ArgumentError(f"{name} has {len(values)} fields instead of {len(names)}")
            made = kind(**{field: _read(value) for field, value in zip(names, values)})
            for field, hint in _hints(kind).items():
                if field in names and not _is_a(getattr(made, field), hint):
                    raise ArgumentError(f"{field} of a {name} is {brief(getattr(made, field))}")
            return made
    return Decoder().value(data)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _is_a(value: Any, hint: Any) -> bool:
    """Whether a value is of a type as fields of these classes have them."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return value in parts
    if origin in (Union, types.UnionType):
        return any(_is_a(value, part) for part in parts)
    if origin is tuple:
        if not isinstance(value, tuple) or (Ellipsis not in parts and len(value) != len(parts)):
            return False
        wanted = itertools.repeat(parts[0]) if Ellipsis in parts else parts
        return all(_is_a(item, part) for item, part in zip(value, wanted))
    return type(value) is hint if hint in (int, float, str, bool) else isinstance(value, hint)


def _names(kind: type) -> list[str]:
    return [field.name for field in fields(kind) if field.name not in _LEFT_OUT]
