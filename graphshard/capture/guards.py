"""Conditions that only guard an error, told from others by the code of the function that decides.

    if labels.max() >= self.vocab_size:       a trace does not know the value; where the condition holds,
        raise ValueError(...)                 every way through the function ends in an exception

Such a condition is taken not to hold while a forward is traced, and checked after each call.
"""

from __future__ import annotations

import dis
import linecache
from collections.abc import Iterator
from types import CodeType, FrameType

# Between reading a value and jumping by it, newer versions of Python say that it is made a truth value.
_BETWEEN = ("TO_BOOL", "COMPARE_OP", "CACHE", "NOP", "COPY", "EXTENDED_ARG")
_ALWAYS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE")


def expected_truth(frame: FrameType) -> bool | None:
    """The truth value with which a function goes on, if the other one can only lead to an exception; else None.

    Args:
        frame: of a function that just asks for the truth of a value.
    """
    ways = _Ways(frame.f_code)
    index = ways.places.get(frame.f_lasti)
    if index is None:
        return None
    while ways.steps[index].opname in _BETWEEN:
        index += 1
    step = ways.steps[index]
    if not step.opname.startswith("POP_JUMP") or "NONE" in step.opname:
        return None
    jumping, staying = ways.returns(ways.places[step.argval]), ways.returns(index + 1)
    jumps_if = "TRUE" in step.opname
    return None if jumping == staying else jumps_if == jumping


def line_of(frame: FrameType) -> str:
    """Where a frame is: file, line, and the source of the line."""
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{file}:{line}: {linecache.getline(file, line).strip()}"


class _Ways:
    """The ways through a function's code."""

    def __init__(self, code: CodeType) -> None:
        self.steps = list(dis.get_instructions(code))
        self.places = {step.offset: index for index, step in enumerate(self.steps)}
        self._handlers = [(e.start, e.end, e.target) for e in getattr(dis.Bytecode(code), "exception_entries", ())]

    def returns(self, start: int) -> bool:
        """Whether the function can return, or yield, from here; what it raises may be caught."""
        seen: set[int] = set()
        todo = [start]
        while todo:
            index = todo.pop()
            if index not in seen:
                seen.add(index)
                if self.steps[index].opname.startswith(("RETURN_", "YIELD_")):
                    return True
                todo += self._following(index)
        return False

    def _following(self, index: int) -> Iterator[int]:
        step = self.steps[index]
        if step.opname in ("RAISE_VARARGS", "RERAISE"):
            yield from (self.places[target] for start, end, target in self._handlers if start <= step.offset < end)
            return
        if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            yield self.places[step.argval]
        if step.opname not in _ALWAYS:
            yield index + 1
