"""Dataclasses as plain data for JSON, by the types of their fields.

No code lists the fields: one that is added to a class is written and read, and one whose type has no place in a file is
an error. Reading is strict: every field is there and no other, a text is no number and no list.
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
    """Inverse of `write`.

    Args:
        data: what JSON holds.
        kind: a dataclass.
        converter: of more types than those of JSON.

    Raises:
        ArgumentError: nothing of this class is written so; the message begins with the place of the fault.
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
    """A dataclass as plain data; equal ones give equal data."""
    return _PLAIN.unstructure(value)


def typed(value: Any, kind: type[T]) -> T:
    """The value, if it is of this very type: True is no int.

    Raises:
        ArgumentError: it is of another.
    """
    if type(value) is not kind:
        raise ArgumentError(f"{str(value)[:60]!r} is no {kind.__name__}")
    return value


def new_converter(overrides: Overrides | None = None, otherwise: Callable[[type], Any] | None = None) -> Converter:
    """A strict converter of dataclasses, lists, tuples, sets, dicts, numbers and texts.

    Args:
        overrides: by class and field.
        otherwise: what is written for a value of any other class, as cattrs asks for it; None is the value itself.
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
    """Reads a dataclass of a dict that has its fields, all of them and no others."""
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
    """What is wrong first, and where: "buckets[0].num_bytes"."""
    if isinstance(error, (ClassValidationError, IterableValidationError)):
        for inner, note in error.group_exceptions()[0]:
            step = f"[{note.index!r}]" if isinstance(note, IterableValidationNote) else f".{note.name}"
            return _first_fault(inner, f"{place}{step}")
        return _first_fault(error.exceptions[0], place)
    return place, error


def _read_number(data: Any, _: Any) -> float:
    """Whole numbers stay such; those that JSON has no word for are `{"float": "inf"}`."""
    if isinstance(data, dict) and data.keys() == {"float"} and data["float"] in ("inf", "-inf", "nan"):
        return float(data["float"])
    return cast(float, data) if type(data) is int else typed(data, float)


def _write_number(value: float) -> Any:
    return value if not isinstance(value, float) or math.isfinite(value) else {"float": str(value)}


def _read_literal(data: Any, kind: Any) -> Any:
    if not any(type(data) is type(item) and data == item for item in get_args(kind)):  # True is no 1
        raise ArgumentError(f"{str(data)[:60]!r} is none of {', '.join(map(str, get_args(kind)))}")
    return data


def _is_literal(kind: Any) -> bool:
    return get_origin(kind) is Literal


def _checked(origin: type, make: Callable[[Any, Converter], _Reader]) -> Callable[[Any, Converter], _Reader]:
    """A way to read a container, for data of one type: the library would take a text for a list."""

    def factory(kind: Any, converter: Converter) -> _Reader:
        read_items = make(kind, converter)
        return lambda data, _: read_items(typed(data, origin), kind)

    return factory


def _row_reader(kind: Any, converter: Converter) -> _Reader:
    """Reads a tuple with a type for each place."""
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


def _is_row(kind: Any) -> bool:
    return get_origin(kind) is tuple and Ellipsis not in get_args(kind)


def _is_tuple(kind: Any) -> bool:
    return get_origin(kind) is tuple and Ellipsis in get_args(kind)


def _is_list(kind: Any) -> bool:
    return get_origin(kind) in (list, Sequence)


_CONTAINERS: tuple[tuple[Callable[[Any], bool], type, Callable[[Any, Converter], _Reader]], ...] = (
    (_is_row, list, _row_reader),
    (_is_tuple, list, homogenous_tuple_structure_factory),
    (_is_list, list, list_structure_factory),
    (is_any_set, list, _set_reader),
    (is_mapping, dict, mapping_structure_factory),
)
_PLAIN = new_converter()
