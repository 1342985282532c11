"""Dataclasses as plain data for JSON, by the types of their fields.

No code lists the fields: a new field is written and read, and one of a type that JSON cannot hold is an error. Reading
is strict: there are all fields and no others, and a string is not taken for a number or a list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

from cattrs import BaseValidationError, ClassValidationError, Converter, IterableValidationError, IterableValidationNote
from cattrs.cols import (
    homogenous_tuple_structure_factory,
    is_any_set,
    is_mapping,
    list_structure_factory,
    mapping_structure_factory,
)
from cattrs.fns import identity
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn

from graphshard.errors import ArgumentError, GraphshardError

T = TypeVar("T")
# By class and field: what `cattrs.override` makes, for a field that is not written as its type says.
Overrides = Mapping[type, Mapping[str, Any]]
_Reader = Callable[[Any, Any], Any]


def read(data: Any, kind: type[T], converter: Converter | None = None) -> T:
    """Return the dataclass that `write` made this data from.

    Args:
        converter: for types that JSON does not have.

    Raises:
        ArgumentError: `write` makes no such data of this class; the message begins with the place of the fault.
    """
    try:
        return (converter or _PLAIN).structure(data, kind)
    except BaseValidationError as error:
        place, fault = _first_fault(error)
        if isinstance(fault, GraphshardError) and not isinstance(fault, ArgumentError):
            raise fault from None
        text = str(fault) if isinstance(fault, ArgumentError) else f"{type(fault).__name__}: {fault}"
        raise ArgumentError(f"{place.removeprefix('.')}: {text}") from fault


def write(value: Any) -> Any:
    """Return a dataclass as plain data; equal dataclasses give equal data."""
    return _PLAIN.unstructure(value)


def typed(value: Any, kind: type[T]) -> T:
    """Return the value; raise ArgumentError unless it is of exactly this type: True is not an int."""
    if type(value) is not kind:
        raise ArgumentError(f"{str(value)[:60]!r} is no {kind.__name__}")
    return value


def new_converter(overrides: Overrides | None = None, otherwise: Callable[[type], Any] | None = None) -> Converter:
    """Return a strict converter of dataclasses, lists, tuples, sets, dicts, numbers and strings.

    Args:
        otherwise: cattrs' factory of writers for any other class; None writes the value itself.
    """
    given = overrides or {}
    converter = Converter(
        unstruct_collection_overrides={Sequence: list, tuple: list, Set: sorted},
        unstructure_fallback_factory=otherwise or (lambda _: identity),
    )
    for kind in (bool, int, str, type(None)):
        converter.register_structure_hook(kind, typed)
        converter.register_unstructure_hook(kind, identity)
    converter.register_structure_hook(float, _read_number)
    converter.register_unstructure_hook(float, _write_number)
    converter.register_structure_hook_func(_is_literal, _read_literal)
    converter.register_unstructure_hook_func(_is_literal, identity)
    for predicate, origin, make in _CONTAINERS:
        converter.register_structure_hook_factory(predicate, _checked(origin, make))
    converter.register_structure_hook_factory(is_dataclass, lambda kind: class_reader(kind, converter, given))
    converter.register_unstructure_hook_factory(
        is_dataclass, lambda kind: make_dict_unstructure_fn(kind, converter, **given.get(kind, {}))
    )
    return converter


def class_reader(kind: Any, converter: Converter, overrides: Overrides) -> _Reader:
    """Return a reader of a dataclass from a dict that has exactly its fields."""
    own = overrides.get(kind, {})
    read_fields = make_dict_structure_fn(kind, converter, **own)
    names = [(field.name in own and own[field.name].rename) or field.name for field in fields(kind)]

    def read_class(data: Any, _: Any) -> Any:
        found = typed(data, dict)
        for name in names:
            if name not in found:
                raise ArgumentError(f"{name!r} is missing")
        if len(found) > len(names):
            raise ArgumentError(f"{min(set(found) - set(names))!r} is no field of {kind.__name__}")
        return read_fields(found, kind)

    return read_class


def _first_fault(error: BaseException, place: str = "") -> tuple[str, BaseException]:
    """Return the place of the first fault, such as "buckets[0].num_bytes", and the fault."""
    if isinstance(error, (ClassValidationError, IterableValidationError)):
        for inner, note in error.group_exceptions()[0]:
            step = f"[{note.index!r}]" if isinstance(note, IterableValidationNote) else f".{note.name}"
            return _first_fault(inner, f"{place}{step}")
        return _first_fault(error.exceptions[0], place)
    return place, error


def _read_number(data: Any, _: Any) -> float:
    """Read a number: whole numbers stay int, and `{"float": "inf"}` is one that JSON cannot hold."""
    if isinstance(data, dict) and data.keys() == {"float"} and data["float"] in ("inf", "-inf", "nan"):
        return float(data["float"])
    return cast(float, data) if type(data) is int else typed(data, float)


def _read_literal(data: Any, kind: Any) -> Any:
    if not any(type(data) is type(item) and data == item for item in get_args(kind)):  # True is no 1
        raise ArgumentError(f"{str(data)[:60]!r} is none of {', '.join(map(str, get_args(kind)))}")
    return data


def _write_number(value: float) -> Any:
    return value if not isinstance(value, float) or math.isfinite(value) else {"float": str(value)}


def _is_literal(kind: Any) -> bool:
    return get_origin(kind) is Literal


def _checked(origin: type, make: Callable[[Any, Converter], _Reader]) -> Callable[[Any, Converter], _Reader]:
    """Return a factory of readers that check the type of the data: cattrs would take a string for a list."""

    def factory(kind: Any, converter: Converter) -> _Reader:
        read_items = make(kind, converter)
        return lambda data, _: read_items(typed(data, origin), kind)

    return factory


def _tuple_reader(kind: Any, converter: Converter) -> _Reader:
    """Return a reader of a tuple with one type for all items, or a type for each position."""
    if Ellipsis in get_args(kind):
        return homogenous_tuple_structure_factory(kind, converter)
    readers = [(converter.get_structure_hook(item), item) for item in get_args(kind)]

    def read_row(data: list[Any], _: Any) -> tuple[Any, ...]:
        if len(data) != len(readers):
            raise ArgumentError(f"{str(data)[:60]} has not {len(readers)} items")
        return tuple(read_item(item, wanted) for item, (read_item, wanted) in zip(data, readers))

    return read_row


def _set_reader(kind: Any, converter: Converter) -> _Reader:
    read_items = list_structure_factory(kind, converter)
    make = set if get_origin(kind) is set else frozenset
    return lambda data, _: make(read_items(data, kind))


_CONTAINERS: tuple[tuple[Callable[[Any], bool], type, Callable[[Any, Converter], _Reader]], ...] = (
    (lambda kind: get_origin(kind) is tuple, list, _tuple_reader),
    (lambda kind: get_origin(kind) in (list, Sequence), list, list_structure_factory),
    (is_any_set, list, _set_reader),
    (is_mapping, dict, mapping_structure_factory),
)
_PLAIN = new_converter()
