"""Check of memory: a program reads all that it reads before it writes, so these share no memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn

from graphshard.ir.errors import InputError, UnsupportedError
from graphshard.ir.program import Program
from graphshard.ir.recomputed import is_in_checkpoint
from graphshard.ir.tracing_internals import memory_of
from graphshard.runtime.apart import span_of


class BufferMemory:
    """Check of each call of a traced program: what forward writes to shares no memory with a buffer, or is one.

    Args:
        names: of the program's inputs, as expressions that read them.
    """

    def __init__(self, program: Program, module: nn.Module, names: Sequence[str]) -> None:
        forward = program.phases["forward"]
        self._names, self._label = names, program.model
        self._written = {(slot.of, slot.name) for slot in forward.outputs if slot.kind == "mutation"}
        buffers = {slot.name for slot in forward.inputs if slot.kind == "buffer"}
        buffers |= {name for kind, name in self._written if kind == "buffer"}
        self._places: list[tuple[str, Mapping[str, Any], str]] = []
        for name in sorted(buffers - program.constants.keys()):
            prefix, _, attribute = name.rpartition(".")
            self._places.append((name, module.get_submodule(prefix)._buffers, attribute))
        self._found: list[Any] = []
        self._memory: dict[int, list[tuple[str, torch.Tensor]]] = {}

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Check the inputs of a call.

        Raises:
            InputError: two share memory, and forward writes to one of the two.
            UnsupportedError: backward would write a buffer again in eager mode.
        """
        written = next((name for kind, name in self._written if kind == "buffer"), None)
        if written is not None and is_in_checkpoint():
            raise UnsupportedError(
                f"{self._label} is called in a region of torch.utils.checkpoint and writes the buffer {written}, which "
                "eager mode does again in backward. Take the module that writes it, such as a BatchNorm, out of the "
                "checkpoint."
            )
        if not self._written or not self._places:
            return
        found = [held.get(key) for _, held, key in self._places]
        if len(found) != len(self._found) or any(now is not was for now, was in zip(found, self._found)):
            self._found, self._memory = found, {}
            for (name, *_), buffer in zip(self._places, found):
                if _is_plain(buffer):
                    for other in self._memory.setdefault(memory_of(buffer), []):
                        self._compare(("buffer", name, name, buffer), ("buffer", other[0], *other))
                    self._memory[memory_of(buffer)].append((name, buffer))
        for number, tensor in enumerate(tensors):
            if _is_plain(tensor):
                for name, buffer in self._memory.get(memory_of(tensor), ()):
                    source = self._names[number] if number < len(self._names) else str(number)
                    self._compare(("input", str(number), source, tensor), ("buffer", name, name, buffer))

    def _compare(self, one: tuple[str, str, str, torch.Tensor], other: tuple[str, str, str, torch.Tensor]) -> None:
        (begin, end), (first, last) = span_of(one[3]), span_of(other[3])
        if one[3] is other[3] or first >= end or begin >= last:
            return
        for kind, key, name, _ in (one, other):
            if (kind, key) in self._written:
                raise InputError(
                    f"{one[2]} and {other[2]} of {self._label} share memory, and forward writes to {name}: a program "
                    "reads both before it writes. Pass a copy, x.clone(), or take views in forward."
                )


def _is_plain(tensor: object) -> TypeGuard[torch.Tensor]:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_meta
