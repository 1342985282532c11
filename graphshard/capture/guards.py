"""Conditions that only guard an error, told from others by the code of the function that decides.

    if labels.max() >= self.vocab_size:       a trace does not know the value; where the condition holds,
        raise ValueError(...)                 every way through the function ends in an exception

Such a condition is taken not to hold while a forward is traced, and checked after each call.
"""

from __future__ import annotations

import dis
import linecache
import re
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from graphshard.capture.untraceable import is_users

# Between reading a value and jumping by it, newer versions of Python say that it is made a truth value.
_BETWEEN = ("TO_BOOL", "COMPARE_OP", "CACHE", "NOP", "COPY", "EXTENDED_ARG")
# What an error of torch.linalg's is, by the names of its classes.
_OF_TORCH = {"LinAlgError", "_LinAlgError", "RuntimeError", "Exception", "BaseException"}
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


def only_prints(frame: FrameType) -> bool:
    """Whether the line of a frame prints, logs or warns, and does nothing else with a text."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return re.match(r"(print|[\w.]*(log|warn)\w*(\.\w+)*|[\w.]+\.write)\(", line) is not None


def line_of(frame: FrameType) -> str:
    """Where a frame is: file, line, and the source of the line."""
    return source_of(frame.f_code.co_filename, frame.f_lineno)


def source_of(file: str, line: int) -> str:
    """A line by its file and number, with its source."""
    return f"{file}:{line}: {linecache.getline(file, line).strip()}"


def line_that_catches(frame: FrameType | None) -> str:
    """The line of the user's that runs now in a `try` whose `except` takes torch's errors; "" if there is none."""
    while frame is not None and frame.f_globals.get("__name__") != "graphshard.capture.flat":  # which calls forward
        if is_users(frame.f_code.co_filename) and _Ways(frame.f_code).catches(frame.f_lasti):
            return line_of(frame)
        frame = frame.f_back
    return ""


class _Ways:
    """The ways through a function's code."""

    def __init__(self, code: CodeType) -> None:
        self.steps = list(dis.get_instructions(code))
        self.places = {step.offset: index for index, step in enumerate(self.steps)}
        self._handlers = [(e.start, e.end, e.target) for e in getattr(dis.Bytecode(code), "exception_entries", ())]

    def catches(self, offset: int) -> bool:
        """Whether an `except` takes errors of torch's that are raised here; known from Python 3.11 on."""
        for target in (target for start, end, target in self._handlers if start <= offset < end):
            loaded: list[Any] = []
            for step in self.steps[self.places[target] :]:
                if step.opname == "CHECK_EXC_MATCH" and _OF_TORCH.intersection(loaded):
                    return True
                if step.opname in ("WITH_EXCEPT_START", "RERAISE"):
                    break
                if step.opname == "POP_EXCEPT":
                    return loaded == []
                loaded += [step.argval] if step.opname.startswith("LOAD_") else []
        return False

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
