"""Lists that forward only appends to, such as features that a hook collects over calls: one program for any length.

Dynamo guards the length of a list, and its bytecode writes all entries:

    features[:] = [features[0], features[1], new]        a program for each length
    features[:] = [*features, new]                       of an `AppendOnlyList`

A list is one if a trace does nothing but append to it. What reads its entries or its length is noticed, and the list is
traced as any other.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from graphshard.guards.unguarded_state import read
from graphshard.torch_compat.dynamo import (
    ConstantVariable,
    Guard,
    GuardBuilder,
    ListVariable,
    SideEffects,
    create_instruction,
)
from graphshard.torch_compat.torch_ops import replaced

log = logging.getLogger(__name__)
T = TypeVar("T")


class AppendOnlyList(ListVariable):
    """Dynamo's variable of a list that was there before the call.

    `added` are the new entries; `read` gets its source if something needs the others.
    """

    def __init__(self, items: list[Any], read: set[str], added: list[Any] | None = None, **kwargs: Any) -> None:
        self.read, self.added = read, [] if added is None else added
        super().__init__(items, **kwargs)

    @property
    def items(self) -> list[Any]:
        """All entries, which an append does not need."""
        self.read.add(getattr(self.source, "name", ""))
        return [*self.__dict__["items"], *self.added]

    @items.setter
    def items(self, items: list[Any]) -> None:
        self.__dict__["items"] = items

    def as_python_constant(self) -> Any:
        """Say that the list is no constant; code that is written for it asks."""
        raise NotImplementedError

    def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Append, or do what any list does."""
        if name != "append" or len(args) != 1 or kwargs:
            return super().call_method(tx, name, args, kwargs)
        tx.output.side_effects.mutation(self)
        self.added.append(args[0])
        return ConstantVariable.create(None)

    def reconstruct(self, codegen: Any) -> None:
        """Write code that makes the list with the new entries."""
        codegen.append_output(create_instruction("BUILD_LIST", arg=0))
        codegen(self.source)
        codegen.append_output(create_instruction("LIST_EXTEND", arg=1))
        codegen.foreach(self.added)
        codegen.append_output(create_instruction("BUILD_LIST", arg=len(self.added)))
        codegen.append_output(create_instruction("LIST_EXTEND", arg=1))


def lists_among(changed: Iterable[Any], values: Mapping[str, Any]) -> frozenset[str]:
    """Return the sources, among what a trace has changed, of lists that had entries before."""
    found = read((source for source in changed if isinstance(source, str)), values)
    return frozenset(source for source, value in found if type(value) is list and value)


def trace_lists(sources: Collection[str], trace: Callable[[], T]) -> T | None:
    """Return a trace in which lists with these sources are append-only ones; None if it fails, or reads one."""
    if not sources:
        return None
    with _append_only_lists(sources) as are_read:
        try:
            found = trace()
        except Exception:
            log.debug("lists are not traced as append-only ones", exc_info=True)
            return None
    return None if are_read else found


def without_length(guard: Guard, sources: Collection[str]) -> Guard:
    """Return a guard that lets lists with these sources grow, instead of one of their length."""
    if guard.create_fn_name() != "SEQUENCE_LENGTH" or str(guard.name) not in sources:
        return guard
    return guard.originating_source.make_guard(GuardBuilder.TYPE_MATCH)


@contextlib.contextmanager
def _append_only_lists(sources: Collection[str]) -> Iterator[set[str]]:
    """Trace lists with these sources as append-only ones in the block; yield the sources that are read."""

    def as_append_only(track: Callable[..., Any]) -> Callable[..., Any]:
        def track_list(effects: SideEffects, item: Any, variable: Any, *args: Any, **kwargs: Any) -> Any:
            if type(variable) is ListVariable and getattr(variable.source, "name", "") in sources:
                variable = AppendOnlyList(variable.items, are_read, source=variable.source)
            return track(effects, item, variable, *args, **kwargs)

        return track_list

    are_read: set[str] = set()
    with replaced(SideEffects, "track_mutable", as_append_only(SideEffects.track_mutable)):
        yield are_read
