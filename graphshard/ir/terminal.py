"""What is printed. Texts of files, names of modules and paths may hold what a terminal obeys: it is shown instead."""

from __future__ import annotations

from rich.text import Text

from graphshard.ir.text import visible


def say(*lines: object, end: str = "\n") -> None:
    """Print lines."""
    print(*(visible(str(line)) for line in lines), sep="\n", end=end)


def styled(text: object, style: str = "") -> Text:
    """A text for rich, which takes nothing in it for markup."""
    return Text(visible(str(text)), style)
