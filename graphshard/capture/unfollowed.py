"""What forward may read of modules, and is an error where it changes it: nothing would change it at later calls.

a numpy array                    what is in it
class Cache(dict): ...           attributes of such a dict, list or set; what is in it is followed
"""

from __future__ import annotations

from typing import Any

from graphshard.capture.contents import contents_of
from graphshard.capture.outer import attributes_of
from graphshard.capture.untraceable import Located
from graphshard.capture.witness import same, witness_of
from graphshard.ir.state import MISSING, Place


class Unfollowed:
    """What was found of it, with what it was."""

    def __init__(self) -> None:
        self._arrays: list[tuple[Place, Any, Any]] = []
        self._collections: list[tuple[Place, Any, dict[str, Any]]] = []

    def add_array(self, place: Place, array: Any) -> None:
        """An array of other numbers than torch's."""
        self._arrays.append((place, array, witness_of(array)))

    def add_collection(self, place: Place, collection: Any) -> None:
        """A dict, list or set of a class that lets it have attributes."""
        self._collections.append((place, collection, dict(attributes_of(collection))))

    def check(self, label: str) -> None:
        """Raise Located if something has changed; `label` is what the module is called."""
        for place, array, before in self._arrays:
            if not same(before, array):
                raise Located(
                    f"graphshard cannot capture {label}.forward: it writes to {place.of(label)}, of "
                    f"{type(array).__name__}, which no program does. Keep a tensor there, or a list of numbers."
                )
        for place, collection, attributes in self._collections:
            now = attributes_of(collection)
            items = contents_of(collection) if isinstance(collection, dict) else ()
            for name in dict.fromkeys((*attributes, *now)):
                if name not in items and now.get(name, MISSING) is not attributes.get(name, MISSING):
                    raise Located(
                        f"graphshard cannot capture {label}.forward: it sets {place.of(label)}.{name}, an attribute of "
                        f"a {type(collection).__name__}, which no program does. Keep it on the module."
                    )
