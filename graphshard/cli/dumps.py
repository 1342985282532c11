"""The subcommands that look at dumps: `graphshard show` and `diff`."""

from __future__ import annotations

import argparse

from graphshard.debug.repro import import_all
from graphshard.debug.show import show_path
from graphshard.debug.stage_files import StageFile, print_diff
from graphshard.errors import ArgumentError
from graphshard.ir.given import path_of


def show(args: argparse.Namespace) -> int:
    """`graphshard show PATH` of a stage, a dump, or a directory with dumps."""
    import_all(args.imports)
    show_path(path_of("PATH", args.path, "a stage of a dump, a directory, or a .gshard file"), full=args.full)
    return 0


def diff(args: argparse.Namespace) -> int:
    """`graphshard diff A B`, or A and the stage before it; status 1 if they differ."""
    import_all(args.imports)
    a = StageFile.at(args.a)
    if args.previous:
        before = a.neighbor(-1)
        if before is None:
            raise ArgumentError(f"{a.path} has no stage before it")
        a, b = before, a
    else:
        b = StageFile.at(args.b)
    return int(print_diff(a.text(full=args.full), b.text(full=args.full), str(a.path), str(b.path)))
