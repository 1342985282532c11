"""Text for people: bytes, seconds and counts with three digits, values in messages, and output for a terminal."""

from __future__ import annotations

import inspect
import io
import reprlib
from collections.abc import Iterable
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from graphshard.errors import visible

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

# Attribute of a compiled module's class: the class that it was made from.
MADE_OF = "graphshard_made_of"


def users_class(owner: object) -> Any:
    """Return the class of an object, or the class that a compiled module had before it was compiled."""
    return vars(type(owner)).get(MADE_OF, type(owner))


# Characters of a value, and of a path, in a message.
_LIMIT, _PATH_LIMIT = 80, 400


def format_bytes(num_bytes: float) -> str:
    """Format bytes with three digits and a binary unit: `1.50 MiB`."""
    if num_bytes < 0:
        return f"-{format_bytes(-num_bytes)}"
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):  # noqa: B007
        num_bytes /= 1024
        if num_bytes < 999.5:
            break
    return f"{_three_digits(num_bytes)} {unit}"


def format_seconds(seconds: float) -> str:
    """Format seconds with three digits and a unit: `12.3 ms`."""
    if seconds == 0:
        return "0"
    factor, unit = (1e6, "us") if seconds < 0.9995e-3 else (1e3, "ms") if seconds < 0.9995 else (1, "s")
    return f"{_three_digits(seconds * factor)} {unit}"


def format_count(count: int) -> str:
    """Format a count, with three digits if it is large: `8.03 billion`."""
    for size, word in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if count >= 0.9995 * size:
            return f"{_three_digits(count / size)} {word}"
    return f"{count:,}"


def format_amount(value: float) -> str:
    """Format a number with three digits, or all digits before the point: `0.0123`, `12.3`, `12,345`."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return _three_digits(value) if value >= 1 else f"{value:.3g}"


def _three_digits(value: float) -> str:
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def brief(value: object) -> str:
    """Describe any value in one line of at most 80 characters, a path in 400."""
    try:
        text = visible(_BRIEF.repr(value), lines=False)
    except Exception:  # an integer with more digits than Python prints, or a `__repr__` that fails
        text = f"a {type(value).__name__}"
    limit = _PATH_LIMIT if isinstance(value, PurePath) else _LIMIT
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


class _Brief(reprlib.Repr):
    """Shortened repr of plain data; only the class name of other objects, whose repr may be of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxlong = 60
        self.maxother = _LIMIT

    def repr_instance(self, x: Any, level: int) -> str:
        import torch  # takes seconds, and arguments of a command line are text

        if isinstance(x, torch.Tensor):
            return f"a {type(x).__name__} of shape {list(x.shape)}"
        if isinstance(x, PurePath):
            return repr(str(x))
        if x is None or isinstance(x, (bool, float, complex, bytes, torch.dtype, torch.device)):
            return super().repr_instance(x, level)
        if inspect.isclass(x) or inspect.isroutine(x):
            return f"the {'class' if inspect.isclass(x) else 'function'} {x.__name__}"
        return f"a {users_class(x).__name__}"


_BRIEF = _Brief()


def say(*lines: object, end: str = "\n") -> None:
    """Print lines, with escaped control characters."""
    print(*(visible(str(line)) for line in lines), sep="\n", end=end)


def styled(text: object, style: str = "") -> Text:
    """Return a text for rich without markup."""
    from rich.text import Text  # `graphshard --help` does not wait for rich

    return Text(visible(str(text)), style)


def new_table(headings: Iterable[str], numbers: Iterable[str] = ()) -> Table:
    """Return a table with columns of text, and then of numbers, which are aligned on the right."""
    from rich.table import Table

    table = Table(*headings, box=None)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def html_table(title: str, table: Table, lines: Iterable[str] = ()) -> str:
    """Return a titled table, and a list of lines below it, as HTML for notebooks."""
    from markupsafe import Markup  # jinja2 depends on it

    def row(tag: str, cells: Iterable[object]) -> Markup:
        return Markup("<tr>{}</tr>").format(Markup("").join(Markup(f"<{tag}>{{}}</{tag}>").format(c) for c in cells))

    head = row("th", (column.header for column in table.columns)) if table.show_header else Markup("")
    body = Markup("").join(row("td", cells) for cells in zip(*(column.cells for column in table.columns)))
    items = Markup("").join(Markup("<li>{}</li>").format(visible(line)) for line in lines)
    below = Markup("<ul>{}</ul>").format(items) if items else Markup("")
    return str(Markup("<p><b>{}</b></p><table>{}{}</table>{}").format(visible(title), head, body, below))


def plain_table(table: Table) -> str:
    """Return a table as text, as wide as it needs to be and without colors, so that it reads the same in a file."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=1000, color_system=None)
    console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


def own_version() -> str:
    """Return the installed version; "not installed" for a checkout that is only on the path."""
    from importlib.metadata import PackageNotFoundError, version  # reads files

    try:
        return version("graphshard")
    except PackageNotFoundError:
        return "not installed"
