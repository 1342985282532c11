"""Commands in the manual: graphshard's are run, of others the arguments are checked.

Commands that start ranks or measure take minutes, and most have tests. The usual error in a manual is a removed script
or option, so the script is started and stopped after it has parsed its arguments.
"""

from __future__ import annotations

import argparse
import functools
import glob
import os
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

from torch.distributed.run import get_args_parser

from graphshard.cli.main import main

ROOT = Path(__file__).parents[2]
# Commands that measure this machine, or need another one.
PARSED_ONLY = ("bench", "calibrate", "finish")
_SUBSTITUTION = re.compile(r"\$\([^)]*\)")


def commands_of(block: str) -> Iterator[list[str]]:
    """Yield the commands of a block as lists of words, without comments and environment settings."""
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(_SUBSTITUTION.sub("substituted", line), comments=True)
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            command, words = words[:end], words[end + 1 :]
            while "=" in command[0]:
                del command[0]
            yield command


def run_command(command: Sequence[str]) -> None:
    """Run a command or check its arguments, in the current directory."""
    program, *arguments = command
    assert program in CHECKS, f"nothing checks {' '.join(command)!r}"
    CHECKS[program](arguments)


def _graphshard(arguments: list[str]) -> None:
    words = [name for word in arguments for name in (sorted(glob.glob(word)) or [word])]
    if words[0] in PARSED_ONLY:
        _parsed(functools.partial(main, words))
        return
    status = main(words)
    # As in diff(1): 1 means different.
    assert status in ((0, 1) if words[0] == "diff" else (0,)), f"graphshard {shlex.join(words)}: exit status {status}"


def _torchrun(arguments: list[str]) -> None:
    found = get_args_parser().parse_args(arguments)
    _python([*(["-m"] if found.module else []), found.training_script, *found.training_script_args])


def _sbatch(arguments: list[str]) -> None:
    """Check a batch file of the repository, and the torchrun command that it runs."""
    index = next(index for index, word in enumerate(arguments) if word.endswith(".sbatch"))
    assert (ROOT / arguments[index]).is_file()
    _python(arguments[index + 1 :])


def _python(arguments: list[str]) -> None:
    """Start a script of the repository, or a module, and stop it after it has parsed its arguments."""
    path: list[str] = []
    if arguments[0] == "-m":
        arguments = arguments[1:]
        run = functools.partial(_module, arguments[0])
    else:
        script = str(ROOT / arguments[0])
        run = functools.partial(runpy.run_path, script, run_name="__main__")
        path = [os.path.dirname(script)]  # like Python: scripts import their siblings
    with mock.patch.object(sys, "argv", arguments), mock.patch.object(sys, "path", [*path, *sys.path]):
        _parsed(run)


def _module(name: str) -> None:
    """Run a module as a program; runpy warns if a test has imported it."""
    imported = sys.modules.pop(name, None)
    try:
        runpy.run_module(name, run_name="__main__")
    finally:
        if imported is not None:
            sys.modules[name] = imported


class _Parsed(Exception):
    """Raised if the arguments are valid."""


def _parsed(run: Callable[[], object]) -> None:
    """Call a function that first parses arguments, and stop there."""
    parse = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, *given: object) -> None:
        parse(self, *given)  # raises SystemExit if they are wrong
        raise _Parsed

    with mock.patch.object(argparse.ArgumentParser, "parse_args", stop):
        try:
            run()
        except _Parsed:
            return
    raise AssertionError("it did not parse its arguments with argparse")


def _pip(arguments: list[str]) -> None:
    """Check `install -e .` or `install -e '.[extra]'` against the extras in pyproject."""
    *install, project = arguments
    assert install == ["install", "-e"], arguments
    extra = project.removeprefix(".").strip("[]")
    assert not extra or f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text(), f"there is no extra {extra!r}"


def _without_arguments(arguments: list[str]) -> None:
    """Check that `pytest` has no arguments; this test is a part of it."""
    assert not arguments, arguments


def _on_a_gpu(arguments: list[str]) -> None:
    """Check `tests/gpu/run.sh`, which starts a module."""
    assert "-m benchmarks.gpu " in (ROOT / "tests/gpu/run.sh").read_text()
    _python(["-m", "benchmarks.gpu", *arguments])


def _mkdocs(arguments: list[str]) -> None:
    assert arguments in (["serve"], ["build", "--strict"]), arguments
    assert (ROOT / "mkdocs.yml").is_file()


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "graphshard": _graphshard,
    "torchrun": _torchrun,
    "sbatch": _sbatch,
    "python": _python,
    "pip": _pip,
    "pytest": _without_arguments,
    "mkdocs": _mkdocs,
    "tests/gpu/run.sh": _on_a_gpu,
}
