"""The subcommands: their arguments, and what runs them, which is imported when it runs. `--help` waits for no torch.

A subcommand is a function that adds its parser, and one that runs and returns the exit status.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from graphshard.cli.parser import Parser
from graphshard.cost.builtin import builtin_profiles
from graphshard.errors import ArgumentError

Commands = argparse._SubParsersAction  # argparse gives no other name to what add_subparsers returns

# Values of `graphshard.lower.backends.Backend`.
BACKENDS = ("inductor", "eager")
# As `graphshard.schedule.stages` has them.
SCHEDULES = ("1f1b", "gpipe", "interleaved")
_STAGE = "a stage of a dump (dump/08-plan.txt, .json, or dump/08)"
_FULL = "the whole text; repeated blocks are folded otherwise"
_ARTIFACT = "a file that graphshard.export wrote"


def _add_show(commands: Commands[Parser]) -> None:
    parser = commands.add_parser(
        "show",
        help="print a stage, the summary of a dump, or what an exported file holds",
        description="Print a stage of a dump, the summary of a dump, a list of the dumps below a directory, or what a "
        "file of graphshard.export holds.",
    )
    parser.add_argument("path", metavar="PATH", help=f"{_STAGE}, a directory, or a .gshard file")
    parser.add_argument("--graph", action="store_true", help="the scheduled graphs of a .gshard file")
    parser.add_argument("--full", action="store_true", help=_FULL)
    _add_import(parser)
    parser.set_defaults(run=_show)


def _show(args: argparse.Namespace) -> int:
    if args.path.endswith(".gshard"):
        from graphshard.cli import artifact

        return artifact.show(args)
    if args.graph:
        raise ArgumentError("--graph is for files of graphshard.export, which end in .gshard")
    from graphshard.cli import dumps

    return dumps.show(args)


def _add_diff(commands: Commands[Parser]) -> None:
    parser = commands.add_parser(
        "diff",
        help="compare two stages",
        description="Print the unified difference of two stages. Values keep their numbers from stage to stage, so it "
        "shows what was inserted, erased or moved.",
        epilog="exit status: 0 equal, 1 different, 2 trouble",
    )
    parser.add_argument("a", metavar="A", help=_STAGE)
    parser.add_argument("b", metavar="B", nargs="?", help="another; may be left out with --previous")
    parser.add_argument("--previous", action="store_true", help="compare A with the stage before it")
    parser.add_argument("--full", action="store_true", help=_FULL)
    _add_import(parser)
    parser.set_defaults(run=_diff)


def _diff(args: argparse.Namespace) -> int:
    if args.previous == (args.b is not None):
        raise ArgumentError("give two stages, or one and --previous")
    from graphshard.cli import dumps

    return dumps.diff(args)


def _add_repro(commands: Commands[Parser]) -> None:
    parser = commands.add_parser(
        "repro",
        help="run one pass on a stage",
        description="Reload a dumped stage and run the next pass on it alone: one process, no process group, no "
        "weights.",
        epilog="exit status: 0 the pass ran and the rules hold, 1 it broke a rule or raised an error, 2 wrong "
        "arguments",
    )
    parser.add_argument("stage", metavar="STAGE", help="a stage of a dump: dump/08-plan.json, its .txt, or dump/08")
    parser.add_argument(
        "--pass",
        dest="step",
        metavar="NAME",
        help="run this pass, by its name in the default pipeline or as package.module:ClassName; "
        "by default the one that ran on the stage next",
    )
    parser.add_argument(
        "--verify", choices=("off", "ends", "each"), default="each", help="when to check the rules (default: each)"
    )
    parser.add_argument("--full", action="store_true", help="compare whole texts instead of folded ones")
    _add_import(parser)
    parser.set_defaults(run=_repro)


def _repro(args: argparse.Namespace) -> int:
    from graphshard.debug import repro

    return repro.run(args)


def _add_import(parser: Parser) -> None:
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="import MODULE first, because it registers operators of the program",
    )


def _add_explain(commands: Commands[Parser]) -> None:
    parser = commands.add_parser(
        "explain",
        help="predict the training step of a model on a mesh that need not exist",
        description="Predict the training step of a model on a mesh and a machine that need not be here: time, exposed "
        "communication, memory, what limits it and what would help. Several meshes, machines, networks or batches give "
        "one table. What is being done is said on stderr.",
        epilog="The factory is a function or class without required arguments, as module:name or file.py:name. It is "
        "called on the meta device and returns the model, or the model and a tuple of its inputs. Otherwise inputs are "
        "int64 tensors of the shapes that --batch gives.",
    )
    _add_explain_options(parser)
    parser.set_defaults(run=_explain)


def _add_explain_options(parser: Parser) -> None:
    add = parser.add_argument
    add("factory", metavar="MODULE:FACTORY", help="what makes the model")
    add(
        "--mesh",
        nargs="+",
        required=True,
        metavar="SIZE",
        help="ranks, such as 8, shard=8, or 4,8 (replicate, shard); several for a table; by names pp=4,dp=16, "
        "and with --parallelize dp=16,tp=8",
    )
    add("--parallelize", metavar="MODULE:FUNCTION", help="of (model, mesh): makes the model for axes tp, cp and ep")
    add("--global-batch", type=int, metavar="N", help="sequences of all ranks in a step, in microbatches of --batch")
    add("--degrees", nargs="+", default=[], metavar="AXIS=SIZES", help="to try for --mesh RANKS: pp=1,2,4 tp=1,8")
    add("--pipeline", nargs="+", default=["1f1b"], choices=SCHEDULES, help="of an axis pp (default 1f1b)")
    add("--stages-per-rank", type=int, default=2, metavar="N", help="of --pipeline interleaved (default 2)")
    add("--best", type=int, metavar="N", help="of a table the best few by time per token, and why")
    add(
        "--workers",
        type=int,
        metavar="N",
        help="processes that predict a table (default: by its length)",
    )
    add("--batch", nargs="+", default=[], metavar="B,S", help="shape of the inputs of one rank, such as 1,4096")
    add("--inputs", type=int, default=1, metavar="N", help="how many inputs of that shape (default 1)")
    add("--hardware", nargs="+", default=["h100"], metavar="NAME", help=f"{', '.join(builtin_profiles())}, or a file")
    add("--network", nargs="+", default=["isolated"], metavar="MODEL", help='"isolated", "in-training" or "no-rails"')
    add("--param-dtype", metavar="DTYPE", help="of mp_policy, such as bfloat16")
    add("--reduce-dtype", metavar="DTYPE", help="of mp_policy, such as float32")
    add("--reshard", default="default", metavar="WHEN", help="reshard_after_forward: default, always, never, or ranks")
    add("--units", nargs="+", metavar="PATTERN", help="modules whose parameters are gathered together: 'layers.*'")
    add(
        "--activation",
        nargs="+",
        metavar="SAVED",
        help='"none", "full", "auto", a share from 0 to 1, or operators to save: aten.mm.default,...',
    )
    add("--offload", action="store_true", help="parameters, gradients and optimizer state on the host")
    add("--backend", choices=BACKENDS, default="inductor", help="eager runs each operator by itself")
    add("--dynamic", type=int, nargs="+", default=[], metavar="DIM", help="dims of all inputs that one program serves")
    add("--optimizer-states", type=int, default=2, metavar="N", help="2 for Adam (default), 0 for plain SGD")
    add("--foreach", action="store_true", help="the optimizer runs an operation at a time, as torch's does by default")
    add("--clip-norm", type=float, metavar="NORM", help="gradients are clipped to it")
    add("--accumulate", type=int, default=1, metavar="N", help="microbatches of --batch in a step (default 1)")
    add("--tokens", type=float, metavar="N", help="of the whole training, such as 2e12: days and GPU hours")
    add("--price", type=float, metavar="MONEY", help="of one GPU for an hour: what the training costs")
    add("--memory-limit", type=int, metavar="BYTES", help="that the schedule may take")
    add(
        "--what-if",
        nargs="*",
        metavar="KIND",
        help="what would be faster, fit, and scale: all, or batch, hardware, ...",
    )
    add("--ranks", type=int, nargs="+", metavar="N", help="numbers of ranks that --what-if scales to")
    add("--measured", metavar="FILE", help="times of regions from graphshard.save_measured; a GPU's with --device")
    add("--device", choices=("cpu", "cuda"), help="capture for a GPU, which need not be here, or for a CPU (default)")
    add("--symbols", nargs="+", default=[], metavar="NAME=DIM", help="formulas in dims of the inputs: batch=0 seq=1")
    add("--every-block", action="store_true", help="capture all blocks, also where many are equal")
    add("--json", metavar="FILE", help="write all numbers")
    add("--html", metavar="FILE", help="write the report, of a single prediction; with --what-if a page of answers")
    add("--trace", metavar="FILE", help="write the timeline for ui.perfetto.dev, of a single prediction")


def _explain(args: argparse.Namespace) -> int:
    from graphshard.ir.progress import progress

    with progress("graphshard explain", lines=True) as show:
        show("import")
        from graphshard.cli import explain

        found = explain.predict(args, show)
    return explain.output(args, found)


def _add_calibrate(commands: Commands[Parser]) -> None:
    parser = commands.add_parser(
        "calibrate",
        help="measure this machine and write its profile",
        description="Measure matrix multiplication, attention, memory, kernel launches and collectives, and write a "
        "profile for graphshard explain --hardware FILE. Under torchrun the live ranks are measured; alone, local "
        "ranks are started.",
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="the profile to write")
    parser.add_argument("--name", help="name of the machine in tables (default: the file's)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument(
        "--ranks",
        type=int,
        help="local ranks to start without torchrun (default: every GPU, or 2 on a CPU; 1: no links)",
    )
    parser.set_defaults(run=_calibrate)


def _calibrate(args: argparse.Namespace) -> int:
    from graphshard.measure import calibrate

    return calibrate.run(args)


def _add_verify(commands: Commands[Parser]) -> None:
    parser = commands.add_parser(
        "verify",
        help="check a .gshard file without executing it",
        description="Check every byte of an artifact against its checksums, read every program, plan and region, and "
        "compare regions with their keys. Nothing of it is executed.",
    )
    _add_artifact(parser)
    parser.set_defaults(run=_verify)


def _verify(args: argparse.Namespace) -> int:
    from graphshard.cli import artifact

    return artifact.verify(args)


def _add_finish(commands: Commands[Parser]) -> None:
    parser = commands.add_parser(
        "finish",
        help="compile the regions of a .gshard file",
        description="Compile the regions of an artifact that was exported without their code (on a machine without "
        "such a device, or with compile_regions=False), on a machine like those that will load it. The file is "
        "replaced when all is done.",
    )
    _add_artifact(parser)
    parser.add_argument("--threads", type=int, metavar="N", help="threads of each rank that CPU code is compiled for")
    parser.add_argument("--sign", metavar="KEY", help="PEM of an ed25519 private key to sign the file with")
    parser.set_defaults(run=_finish)


def _finish(args: argparse.Namespace) -> int:
    from graphshard.cli import artifact

    return artifact.finish(args)


def _add_artifact(parser: Parser) -> None:
    parser.add_argument("file", metavar="FILE", help=_ARTIFACT)
    parser.add_argument("--trust", metavar="KEY", help="PEM of the public key that must have signed it")


def _add_cache(commands: Commands[Parser]) -> None:
    parser = commands.add_parser(
        "cache",
        help="list or remove what earlier launches have compiled",
        description="List the programs that graphshard.compile has kept for the next launch, or remove all of them. "
        "They are kept in ~/.cache/graphshard, or where GRAPHSHARD_CACHE says.",
    )
    parser.add_argument("action", choices=("list", "clear"), metavar="ACTION", help="list or clear")
    parser.add_argument("--dir", metavar="DIRECTORY", help="instead of the usual place")
    parser.set_defaults(run=_cache)


def _cache(args: argparse.Namespace) -> int:
    from graphshard.cli import cache

    return cache.run(args)


COMMANDS: tuple[Callable[[Commands[Parser]], None], ...] = (
    *(_add_show, _add_diff, _add_repro),
    *(_add_explain, _add_calibrate),
    *(_add_verify, _add_finish, _add_cache),
)
