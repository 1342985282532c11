"""The command `graphshard`: look at dumps, predict steps, measure machines, check and finish exported files.

A subcommand imports the module that runs it when it runs, so `graphshard --help` and `--version` do not wait for torch.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import itertools
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from graphshard.cost.profile import builtin_profiles
from graphshard.errors import ArgumentError, GraphshardError, visible

# The values of `graphshard.lower.backends.Backend` and of `graphshard.schedule.stages`, which import torch.
BACKENDS = ("inductor", "eager")
SCHEDULES = ("1f1b", "gpipe", "interleaved")
_STAGE = "a stage of a dump (dump/08-plan.txt, .json, or dump/08)"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run the subcommand and return the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    args.words = parser.words
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


class Parser(argparse.ArgumentParser):
    """argparse's parser, which also suggests the word that was meant. Errors print the subcommand's own usage."""

    words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # as argparse calls it
        """Parse all words: no other parser knows the rest."""
        self.words = sys.argv[1:] if args is None else list(args)
        found, unknown = super().parse_known_args(self.words, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Add suggestions for unknown options to any error: `--mehs 8` is first of all a missing `--mesh`."""
        known = [name for action in self._actions for name in action.option_strings]
        for word in itertools.takewhile(lambda word: word != "--", self.words):
            name = word.partition("=")[0]
            if name.startswith("-") and not any(option.startswith(name) for option in known):
                message += _suggestion(name, known)
        super().error(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            raise argparse.ArgumentError(
                action, error.message + _suggestion(str(value), action.choices or ())
            ) from None


def _suggestion(given: str, known: Iterable[object]) -> str:
    close = difflib.get_close_matches(given[:100], map(str, known), 1)
    return f"; did you mean {close[0]!r} for {given!r}?" if close else ""


class _Version(argparse.Action):
    """Print the versions of graphshard, torch and Python, from the metadata of the installed packages."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib.metadata import version

        from graphshard.utils.text import own_version

        print(f"graphshard {own_version()}, torch {version('torch')}, Python {platform.python_version()}")
        parser.exit()


def _parser() -> Parser:
    parser = Parser(
        prog="graphshard",
        description="Look at what graphshard compiled, or predict what it would. A dump is written by "
        "graphshard.compile(..., dump=DIRECTORY) or GRAPHSHARD_DUMP=DIRECTORY.",
        epilog="exit status: 0 fine, 1 a difference or a broken rule, 2 wrong arguments or an unreadable file",
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="print the versions of graphshard, torch and Python"
    )
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], int], summary: str, description: str, epilog: str | None = None
    ) -> Callable[..., None]:
        """Add a subcommand; return a function that adds an argument to it by name, help and metavar."""
        added = commands.add_parser(name, help=summary, description=description, epilog=epilog)
        added.set_defaults(run=run)

        def add(flag: str, text: str, metavar: str | None = None, **settings: Any) -> None:
            named: dict[str, Any] = {} if metavar is None else {"metavar": metavar}
            added.add_argument(flag, help=text, **named, **settings)

        return add

    for add_commands in (_add_dump_commands, _add_explain, _add_bench, _add_machine_commands):
        add_commands(command)
    return parser


_AddCommand = Callable[..., Callable[..., None]]


def _later(module: str, function: str) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        return int(getattr(importlib.import_module(module), function)(args))

    return run


def _add_dump_commands(command: _AddCommand) -> None:
    show = command(
        "show",
        _show,
        "print a stage, the summary of a dump, or what an exported file holds",
        "Print a stage of a dump, the summary of a dump, a list of the dumps below a directory, or what a file of "
        "graphshard.export holds.",
    )
    show("path", f"{_STAGE}, a directory, or a .gshard file", "PATH")
    show("--graph", "the scheduled graphs of a .gshard file", action="store_true")
    diff = command(
        "diff",
        _diff,
        "compare two stages",
        "Print the unified difference of two stages. Values keep their numbers from stage to stage, so it shows what "
        "was inserted, erased or moved.",
        "exit status: 0 equal, 1 different, 2 trouble",
    )
    diff("a", _STAGE, "A")
    diff("b", "another; may be left out with --previous", "B", nargs="?")
    diff("--previous", "compare A with the stage before it", action="store_true")
    repro = command(
        "repro",
        _later("graphshard.debug._repro", "run_repro"),
        "run one pass on a stage",
        "Reload a dumped stage and run the next pass on it alone: one process, no process group, no weights.",
        "exit status: 0 the pass ran and the rules hold, 1 it broke a rule or raised an error, 2 wrong arguments",
    )
    repro("stage", "a stage of a dump: dump/08-plan.json, its .txt, or dump/08", "STAGE")
    repro(
        "--pass",
        "run this pass, by its name in the default pipeline or as package.module:ClassName; by default the one that "
        "ran on the stage next",
        "NAME",
        dest="step",
    )
    when = "when to check the rules (default: each)"
    repro("--verify", when, choices=("off", "ends", "each"), default="each")
    whole = "the whole text; repeated blocks are folded otherwise"
    registered = "import MODULE first, because it registers operators of the program"
    for add, full in ((show, whole), (diff, whole), (repro, "compare whole texts instead of folded ones")):
        add("--full", full, action="store_true")
        add("--import", registered, "MODULE", dest="imports", action="append", default=[])


def _show(args: argparse.Namespace) -> int:
    if args.graph and args.path.endswith((".gshard", ".gscache")):
        return _later("graphshard.cli._file_commands", "show")(args)
    if args.graph:
        raise ArgumentError("--graph is for files of graphshard.export, which end in .gshard")
    return _later("graphshard.debug.show", "run_show")(args)


def _diff(args: argparse.Namespace) -> int:
    if args.previous == (args.b is not None):
        raise ArgumentError("give two stages, or one and --previous")
    return _later("graphshard.debug.show", "run_diff")(args)


def _add_explain(command: _AddCommand) -> None:
    add = command(
        "explain",
        _explain,
        "predict the training step of a model on a mesh that need not exist",
        "Predict the training step of a model on a mesh and a machine that need not be here: time, exposed "
        "communication, memory, what limits it and what would help. Several meshes, machines, networks or batches give "
        "one table. Progress is written to stderr.",
        "The factory is a function or class without required arguments, as module:name or file.py:name. It is called "
        "on the meta device and returns the model, or the model and a tuple of its inputs. Otherwise inputs are int64 "
        "tensors of the shapes that --batch gives.",
    )
    several, flag = {"nargs": "+", "default": []}, {"action": "store_true"}
    add("factory", "what makes the model", "MODULE:FACTORY", nargs="?")
    add("--hf", "config.json of a causal language model of Hugging Face, instead of a factory", "FILE")
    add(
        "--mesh",
        "ranks, such as 8, shard=8, or 4,8 (replicate, shard); several for a table; by names pp=4,dp=16, and with "
        "--parallelize dp=16,tp=8",
        "SIZE",
        nargs="+",
        required=True,
    )
    add("--parallelize", "of (model, mesh): makes the model for axes tp, cp and ep", "MODULE:FUNCTION")
    add("--global-batch", "sequences of all ranks in a step, in microbatches of --batch", "N", type=int)
    add("--degrees", "to try for --mesh RANKS: pp=1,2,4 tp=1,8", "AXIS=SIZES", **several)
    add("--pipeline", "of an axis pp (default 1f1b)", nargs="+", default=["1f1b"], choices=SCHEDULES)
    add("--stages-per-rank", "of --pipeline interleaved (default 2)", "N", type=int, default=2)
    add("--best", "of a table the best few by time per token, and why", "N", type=int)
    add("--workers", "processes that predict a table (default: by its length)", "N", type=int)
    add("--batch", "shape of the inputs of one rank, such as 1,4096", "B,S", **several)
    add("--inputs", "how many inputs of that shape (default 1)", "N", type=int, default=1)
    add("--hardware", f"{', '.join(builtin_profiles())}, or a file", "NAME", nargs="+", default=["h100"])
    add("--network", '"isolated", "in-training" or "no-rails"', "MODEL", nargs="+", default=["isolated"])
    add("--param-dtype", "of mp_policy, such as bfloat16", "DTYPE")
    add("--reduce-dtype", "of mp_policy, such as float32", "DTYPE")
    add("--reduce", "how gradients are summed: exchange, auto, or as FSDP2 does", choices=("exchange", "auto"))
    add("--reshard", "reshard_after_forward: default, always, never, or ranks", "WHEN", default="default")
    add("--units", "modules whose parameters are gathered together: 'layers.*'", "PATTERN", nargs="+")
    saved = '"none", "full", "auto", a share from 0 to 1, or operators to save: aten.mm.default,...'
    add("--activation", saved, "SAVED", nargs="+")
    add("--offload", "parameters, gradients and optimizer state on the host", **flag)
    add("--backend", "eager runs each operator by itself", choices=BACKENDS, default="inductor")
    add("--dynamic", "dims of all inputs that one program serves", "DIM", type=int, **several)
    add("--optimizer-states", "2 for Adam (default), 0 for plain SGD", "N", type=int, default=2)
    add("--foreach", "the optimizer runs an operation at a time, as torch's does by default", **flag)
    add("--clip-norm", "gradients are clipped to it", "NORM", type=float)
    add("--accumulate", "microbatches of --batch in a step (default 1)", "N", type=int, default=1)
    add("--tokens", "of the whole training, such as 2e12: days and GPU hours", "N", type=float)
    add("--price", "of one GPU for an hour: what the training costs", "MONEY", type=float)
    add("--memory-limit", "that the schedule may take", "BYTES", type=int)
    add("--what-if", "what would be faster, fit, and scale: all, or batch, hardware, ...", "KIND", nargs="*")
    add("--ranks", "numbers of ranks that --what-if scales to", "N", type=int, nargs="+")
    add("--measured", "times of regions from graphshard.profiling.save_measured; a GPU's with --device", "FILE")
    add("--device", "capture for a GPU, which need not be here, or for a CPU (default)", choices=("cpu", "cuda"))
    add("--symbols", "formulas in dims of the inputs: batch=0 seq=1", "NAME=DIM", **several)
    add("--every-block", "capture all blocks, also where many are equal", **flag)
    add("--json", "write all numbers", "FILE")
    add("--html", "write the report, of a single prediction; with --what-if a page of answers", "FILE")
    add("--trace", "write the timeline for ui.perfetto.dev, of a single prediction", "FILE")


def _explain(args: argparse.Namespace) -> int:
    from graphshard.utils.progress import progress

    with progress("graphshard explain", lines=True) as show:
        show("import")
        from graphshard.cli import _explain_command

        found = _explain_command.predict(args, show)
    return _explain_command.output(args, found)


def _add_bench(command: _AddCommand) -> None:
    add = command(
        "bench",
        _later("graphshard.cli._bench_command", "run"),
        "train a model with graphshard and with FSDP2, in turns",
        "Train a model with FSDP2, FSDP2 with compiled blocks, and graphshard, on the same ranks and in turns. Print "
        "one Markdown table: step time, throughput, peak memory, exposed communication, the first step with empty "
        "caches, and whether losses are equal. Under torchrun its ranks are used; alone, local ranks are started.",
        "The factory is a function or class without required arguments, as module:name or file.py:name. It returns the "
        "model, whose forward returns the loss, or the model and a tuple of its inputs.",
    )
    add("factory", "what makes the model", "MODULE:FACTORY", nargs="?")
    add("--hf", "config.json of a causal language model of Hugging Face, instead of a factory", "FILE")
    add("--against", "what graphshard is compared with", choices=("fsdp2",), default="fsdp2")
    also = "more variants: graphshard's compile_step and backend eager, FSDP2 compiled whole"
    add("--also", also, nargs="+", choices=("compile-step", "eager", "whole"), default=())
    add("--batch", "shape of the tokens of one rank, such as 1,4096, if the factory returns no inputs", "B,S")
    add("--inputs", "how many inputs of that shape (default 1)", "N", type=int, default=1)
    add("--ranks", "local ranks to start without torchrun (default: every GPU, or 2 on a CPU)", type=int)
    add("--device", "default: cuda where there is one", choices=("cpu", "cuda"))
    add("--steps", "measured steps of each variant (default 20)", "N", type=int, default=20)
    add("--no-first", "leave out first steps, which start new processes", action="store_false", dest="first")
    add("--backend", "of graphshard", choices=BACKENDS, default="inductor")
    add("--param-dtype", "of mp_policy, such as bfloat16", "DTYPE")
    add("--reduce-dtype", "of mp_policy, such as float32", "DTYPE")
    add("--reshard", "reshard_after_forward: default, always, never, or ranks", "WHEN", default="default")
    add("--units", "modules whose parameters are gathered together: 'layers.*'", "PATTERN", nargs="+")
    add("--json", "write all numbers", "FILE")


def _add_machine_commands(command: _AddCommand) -> None:
    calibrate = command(
        "calibrate",
        _later("graphshard.predict._calibrate", "run"),
        "measure this machine and write its profile",
        "Measure matrix multiplication, attention, memory, kernel launches and collectives, and write a profile for "
        "graphshard explain --hardware FILE. Under torchrun the live ranks are measured; alone, local ranks are "
        "started.",
    )
    calibrate("--out", "the profile to write", "FILE", required=True)
    calibrate("--name", "name of the machine in tables (default: the file's)")
    calibrate("--device", "default: cuda where there is one", choices=("cpu", "cuda"))
    local = "local ranks to start without torchrun (default: every GPU, or 2 on a CPU; 1: no links)"
    calibrate("--ranks", local, type=int)
    verify = command(
        "verify",
        _later("graphshard.cli._file_commands", "verify"),
        "check a .gshard file without executing it",
        "Check every byte of an artifact against its checksums, read every program, plan and region, and compare "
        "regions with their keys. Nothing of it is executed.",
    )
    finish = command(
        "finish",
        _later("graphshard.cli._file_commands", "finish"),
        "compile the regions of a .gshard file",
        "Compile the regions of an artifact that was exported without their code (on a machine without such a device, "
        "or with compile_regions=False), on a machine like those that will load it. The file is replaced when all is "
        "done.",
    )
    for add in (verify, finish):
        add("file", "a file that graphshard.export wrote", "FILE")
        add("--trust", "PEM of the public key that must have signed it", "KEY")
    finish("--threads", "threads of each rank that CPU code is compiled for", "N", type=int)
    finish("--sign", "PEM of an ed25519 private key to sign the file with", "KEY")
    cache = command(
        "cache",
        _cache,
        "list or remove what earlier launches have compiled",
        "List the programs that graphshard.compile has kept for the next launch, or remove all of them. They are kept "
        "in ~/.cache/graphshard, or where GRAPHSHARD_CACHE says.",
    )
    cache("action", "list or clear", "ACTION", choices=("list", "clear"))
    cache("--dir", "instead of the usual place", "DIRECTORY")


def _cache(args: argparse.Namespace) -> int:
    """List or clear the cache, without importing torch."""
    from rich.table import Table

    from graphshard.store.cache_directory import clear, directory_of, entries, limit_of
    from graphshard.utils.argument_validation import path_of
    from graphshard.utils.text import format_bytes, plain_table, say

    directory = directory_of(True if args.dir is None else path_of("--dir", args.dir, "a directory"))
    assert directory is not None
    if args.action == "clear":
        count, size = clear(directory)
        say(f"{directory}: removed {count} programs, {format_bytes(size)}")
        return 0
    found = entries(directory)
    table = Table("model", "inputs", "mesh", "backend", "torch", "size", "last used", box=None, pad_edge=False)
    for entry in found:
        label = {name: visible(str(value)) for name, value in entry.label.items()}
        row = (label.get(name, "?") for name in ("label", "inputs", "mesh", "backend", "torch"))
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        table.add_row(*row, format_bytes(entry.size), used)
    if found:
        say(plain_table(table))
    total = format_bytes(sum(entry.size for entry in found))
    say(f"{directory}: {len(found)} programs, {total} of {format_bytes(limit_of())}")
    return 0
