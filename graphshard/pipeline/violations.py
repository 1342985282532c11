"""What a rule finds wrong with a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch.fx import Node

from graphshard.ir.program import Program


@dataclass(frozen=True)
class Violation:
    """What is wrong, and the node or the lines of code at which it shows, if there are any."""

    message: str
    node: Node | None = None
    excerpt: str = ""


Rule = Callable[[Program, str], Iterator[Violation]]
