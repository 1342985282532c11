"""A list that forward only appends to, followed while it is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn


class Growing:
    """Stands in for a list and takes what is appended to it; `refuse` is called, and raises, if it is looked at."""

    __slots__ = ("_kind", "_refuse", "items")
    __hash__: Any

    def __init__(self, kind: type, refuse: Callable[[], NoReturn]) -> None:
        self._kind, self._refuse = kind, refuse
        self.items: list[Any] = []

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self._kind

    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: Iterable[Any]) -> None:
        self.items.extend(items)

    def __iadd__(self, items: Iterable[Any]) -> Growing:
        self.items.extend(items)
        return self

    def __getattr__(self, name: str) -> Any:
        self._refuse()


def _looks(self: Growing, *_: Any) -> Any:
    self._refuse()


_LOOKS = ("reversed", "hash", "len", "iter", "getitem", "setitem", "delitem", "contains", "eq", "bool", "add", "repr")
for _name in (*_LOOKS, "radd", "mul"):
    setattr(Growing, f"__{_name}__", _looks)
