"""Guards of blocks that were left out of a trace: what is said of the block that they are copies of."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

from graphshard.ir.repeats import TEMPLATE, Repeats
from graphshard.torch_compat.dynamo import ChainedSource, Guard, Source


def guards_of_blocks(guards: Sequence[Guard], repeats: Repeats, sizes: dict[Source, Any]) -> list[Guard]:
    """Return what guards say of the block that those left out are copies of, said of each of these.

    Args:
        sizes: sizes and strides of tensors, by source; the blocks' are added.
    """
    found = []
    of_template = [guard for guard in guards if _is_inside(guard.originating_source, repeats)]
    for group in repeats.missing:
        moved = _Moved(repeats, group)
        for guard in of_template:
            source, create = moved.source(guard.originating_source), guard.create_fn
            if isinstance(create, functools.partial):
                named = {name: moved.source(each) for name, each in create.keywords.items()}
                create = functools.partial(create.func, *map(moved.source, create.args), **named)
            if guard.originating_source in sizes:
                sizes[source] = sizes[guard.originating_source]
            found.append(Guard(source, create))
    return found


class _Moved:
    """Sources in a block of the template, as they are in a block of another group."""

    def __init__(self, repeats: Repeats, group: int) -> None:
        self._repeats, self._group = repeats, group
        self._known: dict[int, Any] = {}  # by the id of a source, which its guard holds

    def source(self, source: Any) -> Any:
        """Return a source in the other group; itself if it is not in a block of the template."""
        if not isinstance(source, ChainedSource):
            return source
        found = self._known.get(id(source))
        if found is None:
            found = self._known[id(source)] = self._moved(source)
        return found

    def _moved(self, source: Any) -> Any:
        base = self.source(source.base)
        if base is not source.base:
            return dataclasses.replace(source, base=base)
        place = _place_in_template(source, self._repeats)
        if place is None:
            return source
        return dataclasses.replace(source, index=self._repeats.name_at(self._group, place).rpartition(".")[2])


def _is_inside(source: Any, repeats: Repeats) -> bool:
    """Return whether a source is in a block of the template."""
    while isinstance(source, ChainedSource):
        if _place_in_template(source, repeats) is not None:
            return True
        source = source.base
    return False


def _place_in_template(source: Any, repeats: Repeats) -> str | None:
    """Return the name of the template's block that a source is; None if it is something else."""
    index = getattr(source, "index", None)
    if not (isinstance(index, str) and index.isdigit()) or _path_of(source.base) != repeats.path:
        return None
    name = f"{repeats.path}.{index}"
    place = repeats.place_of(name)
    return name if place is not None and place[0] == TEMPLATE else None


def _path_of(source: Source) -> str:
    """Return the name of the module whose submodules a source holds, such as "layers"."""
    return ".".join(re.findall(r"_modules(?:'\])?\['([^']+)'\]", str(source.name)))
