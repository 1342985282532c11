"""Ways to forge data: at every place of it, what is missing, of another type, huge, no number, or nested deeply."""

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

# By name, what takes the place of a value.
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


def places(data: Any, path: Path = ()) -> Iterator[Path]:
    """Every place in plain data, of equal ones the first: `nodes[0].name` stands for `nodes[1].name`."""
    seen = set()
    for found in _all_places(data, path):
        kind = re.sub(r"layers\.\d|\d+", "0", str(found))
        if kind not in seen:
            seen.add(kind)
            yield found


def _all_places(data: Any, path: Path) -> Iterator[Path]:
    yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from _all_places(value, (*path, key))


def forged(data: Any, path: Path, make: Callable[[Any], Any] | None) -> Any:
    """A copy of plain data with something else at a place, or nothing for None."""
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
    """Forged copies, each with a name: every place is dropped, or replaced in turn by one of the others.

    Args:
        at: the place within which that is done.
    """
    names = list(FORGERIES)
    within = functools.reduce(operator.getitem, at, data)
    for index, path in enumerate(list(places(within, at))[::stride]):
        yield f"{path}: missing", forged(data, path, None)
        for name in (names[index % len(names)], names[(index * 2 + 3) % len(names)]):
            yield f"{path}: {name}", forged(data, path, FORGERIES[name])
