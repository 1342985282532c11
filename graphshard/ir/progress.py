"""A progress line on the terminal while graphshard captures and compiles; nothing anywhere else."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from graphshard.ir.text import visible


@contextlib.contextmanager
def progress(title: str) -> Iterator[Callable[[str], None]]:
    """Yields a function that shows what is being done; silent off a terminal and on ranks other than 0."""
    console = Console(stderr=True)
    if not console.is_terminal or os.environ.get("RANK", "0") != "0":
        yield lambda _: None
        return
    with Status(escape(visible(title)), console=console) as status:
        yield lambda text: status.update(escape(visible(f"{title}: {text}")))
