"""Guards of equal blocks that were left out of a trace: those of the block that they are copies of."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

from torch._guards import ChainedSource, Guard, Source

from graphshard.ir.repeats import TEMPLATE, Repeats


def guards_of_blocks(guards: Sequence[Guard], repeats: Repeats, sizes: dict[Source, Any]) -> list[Guard]:
    """Return what guards say of the block that those left out are copies of, said of each of these.

    Args:
        sizes: sizes and strides of tensors, by source; those of the blocks are added.
    """
    found = []
    for group in repeats.missing:
        for guard in guards:
            source = _in_group(guard.originating_source, repeats, group)
            create = guard.create_fn
            if isinstance(create, functools.partial):
                args = [_in_group(each, repeats, group) for each in create.args]
                named = {name: _in_group(each, repeats, group) for name, each in create.keywords.items()}
                create = functools.partial(create.func, *args, **named)
            if source is not guard.originating_source:
                if guard.originating_source in sizes:
                    sizes[source] = sizes[guard.originating_source]
                found.append(Guard(source, create))
    return found


def _in_group(source: Any, repeats: Repeats, group: int) -> Any:
    """Return the source in a block of another group; itself if it is not in a block of the template."""
    if not isinstance(source, ChainedSource):
        return source
    chained: Any = source
    base = _in_group(source.base, repeats, group)
    if base is not source.base:
        return dataclasses.replace(chained, base=base)
    index = getattr(source, "index", None)
    if isinstance(index, str) and index.isdigit():
        path = _path_of(source.base)
        place = repeats.place_of(f"{repeats.path}.{index}") if path == repeats.path else None
        if place is not None and place[0] == TEMPLATE:
            name = repeats.name_at(group, f"{repeats.path}.{index}")
            return dataclasses.replace(chained, index=name.rpartition(".")[2])
    return source


def _path_of(source: Source) -> str:
    """Return the name of the module whose submodules a source holds, such as "layers"."""
    return ".".join(re.findall(r"_modules(?:'\])?\['([^']+)'\]", str(source.name)))
