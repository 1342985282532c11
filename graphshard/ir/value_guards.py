"""Values that a program takes for granted: those by which forward has decided, and that inputs and buffers determine.

if mask.any(): ...                  the program holds while `mask.any()` is what it was
start = int(self.pointer)           the program holds while the buffer has this value
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule


@dataclass(frozen=True)
class ValueGuard:
    """One of them.

    Attributes:
        expected: its text, see `text_of`.
        line: where forward asks, as "file:line: source".
    """

    expected: str
    line: str


@dataclass
class ValueGuards:
    """All of them.

    Attributes:
        module: computes them, in the order of `guards`, of these inputs, then of these buffers.
        inputs: tensors of the call, by number.
        buffers: by name.
    """

    module: GraphModule
    inputs: tuple[int, ...]
    buffers: tuple[str, ...]
    guards: tuple[ValueGuard, ...]


def text_of(value: Any) -> str:
    """Of a number, a truth value, or the numbers in a tensor."""
    return repr(value.tolist() if isinstance(value, torch.Tensor) else value)
