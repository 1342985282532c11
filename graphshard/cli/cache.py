"""The subcommand `graphshard cache`: what is kept for the next launch. It imports no torch."""

from __future__ import annotations

import argparse
import time

from rich.table import Table

from graphshard.cache import entries
from graphshard.errors import visible
from graphshard.ir.given import path_of
from graphshard.ir.terminal import plain_table, say
from graphshard.ir.text import format_bytes


def run(args: argparse.Namespace) -> int:
    """`graphshard cache list` and `graphshard cache clear`.

    Raises:
        ArgumentError: the directory is none, or GRAPHSHARD_CACHE_LIMIT is no size.
    """
    chosen = True if args.dir is None else path_of("--dir", args.dir, "a directory")
    directory = entries.directory_of(chosen)
    assert directory is not None
    if args.action == "clear":
        count, size = entries.clear(directory)
        say(f"{directory}: removed {count} programs, {format_bytes(size)}")
        return 0
    found = list(entries.entries(directory))
    table = Table("model", "inputs", "mesh", "backend", "torch", "size", "last used", box=None, pad_edge=False)
    for entry in found:
        facts = {name: visible(str(value)) for name, value in entry.facts.items()}
        inputs = ", ".join(visible(str(text)) for text in entry.facts.get("inputs", ()))
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        row = (facts.get("label", "?"), inputs, *(facts.get(name, "?") for name in ("mesh", "backend", "torch")))
        table.add_row(*row, format_bytes(entry.size), used)
    if found:
        say(plain_table(table))
    total = format_bytes(sum(entry.size for entry in found))
    say(f"{directory}: {len(found)} programs, {total} of {format_bytes(entries.limit_of())}")
    return 0
