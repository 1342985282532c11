"""Facts of graphs for their scheduling problems, kept while the graphs do not change.

A study plans the same graphs for many machines, and each plan takes several problems of them. Layouts, kernels and
bytes depend on the graph only; seconds are the machine's. Nothing is kept outside of these context managers, as passes
change graphs in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch.fx import Graph

from graphshard.ir.collective_regions import Collective, CollectiveRegions, collectives
from graphshard.ir.program import Phase

T = TypeVar("T")


# Facts by graph.
Known = WeakKeyDictionary[Graph, dict[Hashable, Any]]
_KNOWN: ContextVar[Known | None] = ContextVar("_KNOWN", default=None)


@contextlib.contextmanager
def while_unchanged(known: Known) -> Iterator[None]:
    """Keep facts: within it the graphs that are planned do not change, and have not since `known` was last used."""
    token = _KNOWN.set(known)
    try:
        yield
    finally:
        _KNOWN.reset(token)


@contextlib.contextmanager
def within_one_plan() -> Iterator[None]:
    """Keep facts while one plan is made, as its graphs do not change; use the facts that are known already."""
    with contextlib.nullcontext() if _KNOWN.get() is not None else while_unchanged(Known()):
        yield


def remembered(graph: Graph, key: Hashable, find: Callable[[], T]) -> T:
    """Return a fact of a graph; find it again each time outside of `while_unchanged`."""
    known = _KNOWN.get()
    if known is None:
        return find()
    facts = known.setdefault(graph, {})
    if key not in facts:
        facts[key] = find()
    found: T = facts[key]
    return found


def layout_of(phase: Phase) -> CollectiveRegions:
    """Return the roles of a phase's nodes."""
    return remembered(phase.module.graph, "layout", lambda: CollectiveRegions.of(phase))


def collectives_of(phase: Phase) -> list[Collective]:
    """Return a phase's collectives in launch order."""
    return remembered(phase.module.graph, "collectives", lambda: collectives(phase))
