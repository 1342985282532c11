"""The code of one call of a module of an exported program, line by line."""

from __future__ import annotations

import keyword
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from graphshard.ir.errors import UnsupportedError
from graphshard.ir.text import brief

# Modules of functions that are arithmetic of sizes.
ARITHMETIC = (operator, math)
_FRAME = re.compile(r'File "([^"]*)", line (\d+)')
_OF_TORCH = re.compile(r"(^|(site|dist)-packages/)torch/")


@dataclass
class CallCode:
    """Code of one call.

    Attributes:
        inputs: the values and parameters that it is given, in order.
        outputs: the values that it returns.
        lines: the body, without the line of `def`.
        places: where in the user's code each line comes from.
    """

    inputs: list[Node]
    outputs: list[Node]
    lines: list[str]
    places: list[str]

    @property
    def text(self) -> str:
        """The function that is to be compiled."""
        return self._function(self.lines or ["pass"])

    @property
    def commented(self) -> str:
        """The function with the lines of the user's code."""
        lines = [f"{line}  # {place}" if place else line for line, place in zip(self.lines, self.places)]
        return self._function(lines or ["pass"])

    def _function(self, lines: Sequence[str]) -> str:
        names = "".join(f", x{i}" for i in range(len(self.inputs)))
        return "\n".join([f"def call(self{names}):", *(f"    {line}" for line in lines), ""])


class CallWriter:
    """Writes the code of one call.

    Args:
        path: name of the module that is called.
        names: all names of the parameter, buffer or constant that an input of the graph is, by the name of the input.
        resolved: returns the value that a node stands for.
    """

    def __init__(self, path: str, names: Mapping[str, Sequence[str]], resolved: Callable[[Any], Any]) -> None:
        self._path, self._names, self._resolved = path, names, resolved
        self.inputs: list[Node] = []
        self.lines: list[str] = []
        self.places: list[str] = []
        self._named: dict[Node, str] = {}
        self._counts: Counter[str] = Counter()
        self._indent = 0

    def write(self, node: Node) -> None:
        args = [self.text(value) for value in node.args]
        args += [f"{name}={self.text(value)}" for name, value in node.kwargs.items()]
        self._line(f"{self._new(node, _short(node.target))} = {_function(node.target)}({', '.join(args)})", node)

    def call(self, path: str, number: int, code: CallCode) -> None:
        """Write the call of a submodule."""
        args = [self.text(value) for value in code.inputs] + ([f"call={number}"] if number else [])
        name = re.sub(r"\W", "_", path.removeprefix(f"{self._path}." if self._path else ""))
        results = ", ".join(self._new(node, f"of_{name}") for node in code.outputs)
        called = f"{self._attribute(path)}({', '.join(args)})"
        self._line(f"{results} = {called}" if results else called)

    def enter(self, context: str) -> None:
        self._line(f"with {context}:")
        self._indent += 1
        self._line("pass")

    def leave(self) -> None:
        self._indent -= 1

    def finish(self, results: Sequence[Any]) -> None:
        """Write what the call returns: one value, or several as a tuple."""
        texts = list(map(self.text, results))
        if self._path == "" or len(texts) > 1:
            self._line(f"return ({''.join(f'{text}, ' for text in texts)})")
        elif texts:
            self._line(f"return {texts[0]}")

    def text(self, value: Any) -> str:
        """Return an argument as code."""
        value = self._resolved(value)
        if isinstance(value, Node):
            return self._name(value)
        if isinstance(value, (list, tuple)):
            inside = ", ".join(map(self.text, value))
            return f"[{inside}]" if isinstance(value, list) else f"({inside},)" if inside else "()"
        if isinstance(value, slice):
            return f"slice({self.text(value.start)}, {self.text(value.stop)}, {self.text(value.step)})"
        return literal(value)

    def _name(self, node: Node) -> str:
        if node in self._named:
            return self._named[node]
        if node.op == "placeholder" and (path := self._state(node)) is not None:
            return self._attribute(path)
        if node not in self.inputs:
            self.inputs.append(node)
        return f"x{self.inputs.index(node)}"

    def _state(self, node: Node) -> str | None:
        """The name of a parameter within this module; None for others, which are passed in."""
        prefix = f"{self._path}." if self._path else ""
        return next((name for name in self._names.get(node.name, ()) if name.startswith(prefix)), None)

    def _attribute(self, path: str) -> str:
        text = "self"
        for part in path.removeprefix(f"{self._path}." if self._path else "").split("."):
            text = f"{text}.{part}" if is_name(part) else f"getattr({text}, {part!r})"
        return text

    def _new(self, node: Node, base: str) -> str:
        name = self._named[node] = f"{base}_{self._counts[base]}"
        self._counts[base] += 1
        return name

    def _line(self, text: str, node: Node | None = None) -> None:
        self.lines.append("    " * self._indent + text)
        self.places.append("" if node is None else place_of(node).removeprefix(" at "))


def literal(value: Any) -> str:
    """Return a constant as code."""
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if value is None or type(value) in (bool, int, float, complex, str):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    raise UnsupportedError(
        f"model: the program has the constant {brief(value)}, which cannot be written as code. Compile the module that "
        "was exported instead."
    )


def is_name(text: str) -> bool:
    """Return whether a text can be a name in Python code."""
    return text.isidentifier() and not keyword.iskeyword(text)


def place_of(node: Node) -> str:
    """Where in the user's code an operator was called, as the end of a message; "" where that is not known."""
    return place_in(node.meta.get("stack_trace"))


def place_in(stack: str | None) -> str:
    """Return the innermost place in the user's code of a stack trace, as `place_of` does."""
    lines = [line.strip() for line in (stack or "").splitlines()]
    for index in range(len(lines) - 1, -1, -1):
        frame = _FRAME.match(lines[index])
        if frame is not None and not _OF_TORCH.search(frame[1]):
            source = lines[index + 1] if index + 1 < len(lines) else ""
            return f" at {frame[1]}:{frame[2]}: {source}"
    return ""


def _short(target: Any) -> str:
    name = target._schema.name.rpartition("::")[2] if isinstance(target, OpOverload) else target.__name__
    return name.strip("_") or "value"


def _function(target: Any) -> str:
    if isinstance(target, OpOverload):
        return f"torch.ops.{target}"
    home = next((module.__name__ for module in ARITHMETIC if target in vars(module).values()), "torch")
    return f"{home}.{target.__name__}"
