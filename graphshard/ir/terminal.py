"""What is printed. Texts of files, names of modules and paths may hold what a terminal obeys: it is shown instead."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table
from rich.text import Text

from graphshard.errors import visible


def say(*lines: object, end: str = "\n") -> None:
    """Print lines."""
    print(*(visible(str(line)) for line in lines), sep="\n", end=end)


def styled(text: object, style: str = "") -> Text:
    """A text for rich, which takes nothing in it for markup."""
    return Text(visible(str(text)), style)


def plain_table(table: Table) -> str:
    """A table as wide as it needs to be, without colours, so that it reads the same in a file."""
    console = Console(file=io.StringIO(), width=1000, color_system=None)
    console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())
