"""The command `graphshard`: look at dumps, predict steps, measure machines.

A subcommand is a function that adds its parser and one that runs; it returns the exit status. Wrong arguments and
unreadable files are one line on stderr and exit status 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from graphshard.cli import artifact as artifact_command
from graphshard.cli import explain as explain_command
from graphshard.debug import repro
from graphshard.debug.show import show_path
from graphshard.debug.stage_files import StageFile, print_diff
from graphshard.ir.errors import ArgumentError, GraphshardError
from graphshard.ir.given import path_of
from graphshard.ir.text import visible
from graphshard.measure import calibrate

_PATH_HELP = "a stage of a dump (dump/06-plan.txt, .json, or dump/06)"
_FULL_HELP = "the whole text; repeated blocks are folded otherwise"


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="graphshard",
        description="Look at what graphshard compiled, or predict what it would. A dump is written by "
        "graphshard.compile(..., dump=DIRECTORY) or GRAPHSHARD_DUMP=DIRECTORY.",
        epilog="exit status: 0 fine, 1 a difference or a broken rule, 2 wrong arguments or an unreadable file",
    )
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for add in _COMMANDS:
        add(commands)
    return parser


Commands = argparse._SubParsersAction  # argparse gives no other name to what add_subparsers returns


def _add_show(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "show",
        help="print a stage, the summary of a dump, or what an exported file holds",
        description="Print a stage of a dump, the summary of a dump, a list of the dumps below a directory, or what a "
        "file of graphshard.export holds.",
    )
    parser.add_argument("path", metavar="PATH", help=f"{_PATH_HELP}, a directory, or a .gshard file")
    parser.add_argument("--graph", action="store_true", help="the scheduled graphs of a .gshard file")
    parser.add_argument("--full", action="store_true", help=_FULL_HELP)
    parser.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="MODULE", help=repro.IMPORT_HELP
    )
    parser.set_defaults(run=_show)


def _show(args: argparse.Namespace) -> int:
    repro.import_all(args.imports)
    path = path_of("PATH", args.path, "a stage of a dump, a directory, or a .gshard file")
    if args.path.endswith(artifact_command.ENDING):
        artifact_command.show(path, graph=args.graph, full=args.full)
    elif args.graph:
        raise ArgumentError("--graph is for files of graphshard.export, which end in .gshard")
    else:
        show_path(path, full=args.full)
    return 0


def _add_diff(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "diff",
        help="compare two stages",
        description="Print the unified difference of two stages. Values keep their numbers from stage to stage, so it "
        "shows what was inserted, erased or moved.",
        epilog="exit status: 0 equal, 1 different, 2 trouble",
    )
    parser.add_argument("a", metavar="A", help=_PATH_HELP)
    parser.add_argument("b", metavar="B", nargs="?", help="another; may be left out with --previous")
    parser.add_argument("--previous", action="store_true", help="compare A with the stage before it")
    parser.add_argument("--full", action="store_true", help=_FULL_HELP)
    parser.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="MODULE", help=repro.IMPORT_HELP
    )
    parser.set_defaults(run=_diff)


def _diff(args: argparse.Namespace) -> int:
    if args.previous == (args.b is not None):
        raise ArgumentError("give two stages, or one and --previous")
    repro.import_all(args.imports)
    a = StageFile.at(args.a)
    if args.previous:
        before = a.neighbor(-1)
        if before is None:
            raise ArgumentError(f"{a.path} has no stage before it")
        a, b = before, a
    else:
        b = StageFile.at(args.b)
    return int(print_diff(a.text(full=args.full), b.text(full=args.full), str(a.path), str(b.path)))


def _add_repro(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "repro", help="run one pass on a stage", description=repro.DESCRIPTION, epilog=repro.EPILOG
    )
    repro.add_arguments(parser)
    parser.set_defaults(run=repro.run)


def _add_explain(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "explain",
        help="predict the training step of a model on a mesh that need not exist",
        description=explain_command.DESCRIPTION,
        epilog=explain_command.EPILOG,
    )
    explain_command.add_arguments(parser)
    parser.set_defaults(run=explain_command.run)


def _add_calibrate(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "calibrate", help="measure this machine and write its profile", description=calibrate.DESCRIPTION
    )
    calibrate.add_arguments(parser)
    parser.set_defaults(run=calibrate.run)


def _add_verify(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "verify", help="check a .gshard file without executing it", description=artifact_command.VERIFY
    )
    artifact_command.add_file(parser)
    parser.set_defaults(run=artifact_command.verify)


def _add_finish(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "finish", help="compile the regions of a .gshard file", description=artifact_command.FINISH
    )
    artifact_command.add_finish(parser)
    parser.set_defaults(run=artifact_command.finish)


_COMMANDS: tuple[Callable[[Commands[argparse.ArgumentParser]], None], ...] = (
    *(_add_show, _add_diff, _add_repro),
    *(_add_explain, _add_calibrate),
    *(_add_verify, _add_finish),
)
