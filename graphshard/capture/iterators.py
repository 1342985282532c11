"""Iterators that forward finds: each call would take the next item, and a program has that of the capture."""

from __future__ import annotations

from typing import NoReturn

from graphshard.capture.untraceable import Untraceable
from graphshard.ir.state import Place


class NoNext:
    """Stands in for an iterator of Python's own while forward is traced."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def __iter__(self) -> NoNext:
        return self

    def __next__(self) -> NoReturn:
        raise Untraceable("iterator", f"the iterator {self._place}")
