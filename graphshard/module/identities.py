"""What is one object: tensors that a call is given and that modules hold, and lists, dicts and sets in attributes.

if self.last is x: ...            a program is for calls that are given that tensor, or for those that are not
if self.a is self.b: ...          a program holds while two attributes are one list, or while they are two
self.mask.add_(1); x = x + y      the same where y is that buffer: what is written is read
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from graphshard.capture.witness import Items, OfType
from graphshard.ir.tracing_internals import memory_of
from graphshard.module.places import LookUp
from graphshard.runtime.apart import span_of

_MUTABLE = (list, dict, set, deque)


class Held(NamedTuple):
    """A tensor that is given to a program: what finds it, and where it is, as text."""

    found: LookUp
    text: str


class Identities:
    """Which objects were one when a program was captured.

    Args:
        same: tensors of modules that were inputs of the call, too, with the number of the input.
        held: other tensors of modules that the program is given.
        contents: finds what has contents, with the witness of each.
    """

    def __init__(
        self, same: Sequence[tuple[int, Held]], held: Sequence[Held], contents: Sequence[tuple[LookUp, Any]]
    ) -> None:
        self._same, self._held = same, held
        self._buffers: dict[str, torch.Tensor] = {}
        self._memory: frozenset[int] = frozenset()
        self._ids: frozenset[int] = frozenset()
        self._tied: list[int] | None = None
        self._untied = False
        self._contents = [(found, witness) for found, witness in contents if isinstance(witness, (Items, OfType))]
        self._pattern = self._of_contents()

    def buffers_are(self, buffers: Iterable[tuple[str, torch.Tensor | None]]) -> None:
        """The module has other buffers than before."""
        # They are kept, so that no other tensor has their identity.
        self._buffers = {name: buffer for name, buffer in buffers if buffer is not None}
        ids = list(map(id, self._buffers.values()))
        self._memory = frozenset(memory_of(b) for b in self._buffers.values() if _has_memory(b))
        self._ids = frozenset(ids)
        pattern = _pattern(ids)
        self._tied = pattern if self._tied is None else self._tied
        self._untied = pattern != self._tied

    def changes(self, given: Sequence[torch.Tensor] | None) -> Iterator[str]:
        """What is not as it was, in words.

        Args:
            given: the tensors of a call; None where there is none.
        """
        if self._contents and self._of_contents() != self._pattern:
            yield "lists, dicts or sets that were one object are several, or the other way round"
        if self._untied:
            yield "buffers that were one tensor are several, or the other way round"
        if given is None or not (self._same or self._held or self._ids):
            return
        known, ids = set[int](), set(map(id, given))
        for number, (found, text) in self._same:
            tensor = found.now()
            known.add(id(tensor))
            if number >= len(given) or tensor is not given[number]:
                yield f"input {number} was the tensor {text} and is another"
        ids -= known
        if not ids.isdisjoint(self._ids):
            yield "an input is a buffer of the module, and was none"
        for found, text in self._held:
            key = id(found.now())
            if key in ids or key in known or key in self._ids:
                yield f"{text} is a tensor that the program is given besides, and was another"
            known.add(key)

    def near_buffers(self, given: Sequence[torch.Tensor]) -> Iterator[tuple[int, str]]:
        """Inputs, by number, that share memory with a buffer and are no buffers themselves, with its name."""
        for number, tensor in enumerate(given if self._memory else ()):
            if _has_memory(tensor) and memory_of(tensor) in self._memory and id(tensor) not in self._ids:
                begin, end = span_of(tensor)
                for name, buffer in self._buffers.items():
                    first, last = span_of(buffer)
                    if first < end and begin < last:
                        yield number, name

    def _of_contents(self) -> list[int]:
        """Of each that may be changed in place the number of the first that is the very same."""
        ids: list[int] = []
        for found, witness in self._contents:
            _add(ids, witness, found.now())
        return _pattern(ids)


def _has_memory(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided


def _pattern(ids: list[int]) -> list[int]:
    """Of each the place of the first that is equal; nothing where all are different."""
    return [] if len(set(ids)) == len(ids) else list(map(ids.index, ids))


def _add(ids: list[int], witness: Any, value: Any) -> None:
    """Add the identities of what may be changed in place, of a value and in it."""
    if isinstance(value, _MUTABLE):
        ids.append(id(value))
    if isinstance(witness, Items) and len(witness.items) == len(value):
        for inner, item in zip(witness.items, value.values() if isinstance(value, dict) else value):
            if isinstance(inner, (Items, OfType)):
                _add(ids, inner, item)
