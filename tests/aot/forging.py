"""Forged data: at every position a value is missing, of another type, huge, NaN, or deeply nested."""

from __future__ import annotations

import copy
import functools
import json
import math
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

Path = tuple[Any, ...]
_DEEP: Any = json.loads("[" * 300 + "]" * 300)

# Replacement values by name.
FORGERIES: dict[str, Callable[[Any], Any]] = {
    "null": lambda _: None,
    "another type": lambda value: 7 if isinstance(value, (str, list, dict)) else [value],
    "a text": lambda value: f"{value}\x1b[31m" if isinstance(value, str) else "x",
    "huge": lambda value: 10**30 if isinstance(value, (int, float)) else "x" * 100_000,
    "negative": lambda value: -7 if isinstance(value, (int, float)) else {"a": 1},
    "no number": lambda value: {"float": "nan"} if isinstance(value, float) else math.pi,
    "deep": lambda _: _DEEP,
    "empty": lambda value: type(value)() if isinstance(value, (str, list, dict)) else [],
    "longer": lambda value: [*value, *value] if isinstance(value, list) else {"one": {"more": value}},
}


def positions(data: Any, path: Path = ()) -> Iterator[Path]:
    """Yield all positions in plain data, only the first of equal ones: `nodes[0].name` stands for `nodes[1].name`."""
    seen = set()
    for found in _all_positions(data, path):
        kind = re.sub(r"layers\.\d|\d+", "0", str(found))
        if kind not in seen:
            seen.add(kind)
            yield found


def _all_positions(data: Any, path: Path) -> Iterator[Path]:
    yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from _all_positions(value, (*path, key))


def forged(data: Any, path: Path, make: Callable[[Any], Any] | None) -> Any:
    """Copy plain data with a replaced value at a position, or without the value if `make` is None."""
    if not path:
        return make(data) if make is not None else {}
    result = copy.deepcopy(data)
    holder = result
    for key in path[:-1]:
        holder = holder[key]
    if make is None:
        del holder[path[-1]]
    else:
        holder[path[-1]] = make(holder[path[-1]])
    return result


def forgeries(data: Any, *, stride: int = 1, at: Path = ()) -> Iterator[tuple[str, Any]]:
    """Yield forged copies with names: every value is dropped or replaced in turn.

    Args:
        at: the position within which values are forged.
    """
    names = list(FORGERIES)
    within = functools.reduce(operator.getitem, at, data)
    for index, path in enumerate(list(positions(within, at))[::stride]):
        yield f"{path}: missing", forged(data, path, None)
        for name in (names[index % len(names)], names[(index * 2 + 3) % len(names)]):
            yield f"{path}: {name}", forged(data, path, FORGERIES[name])
