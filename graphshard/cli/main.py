"""The command `graphshard`: look at dumps, predict steps, measure machines, check and finish exported files."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from graphshard.cli.commands import COMMANDS
from graphshard.cli.parser import Parser, Version
from graphshard.errors import GraphshardError, visible


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run the subcommand, return the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not hasattr(args, "run"):
        parser.print_help()
        return 2
    try:
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except GraphshardError as error:
        print(f"graphshard {args.command}: {visible(' '.join(str(error).split()))}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> Parser:
    parser = Parser(
        prog="graphshard",
        description="Look at what graphshard compiled, or predict what it would. A dump is written by "
        "graphshard.compile(..., dump=DIRECTORY) or GRAPHSHARD_DUMP=DIRECTORY.",
        epilog="exit status: 0 fine, 1 a difference or a broken rule, 2 wrong arguments or an unreadable file",
    )
    parser.add_argument("--version", action=Version, nargs=0, help="print the versions of graphshard, torch and Python")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for add in COMMANDS:
        add(commands)
    return parser
