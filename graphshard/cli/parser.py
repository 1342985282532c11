"""The parser of the command: argparse's, which also asks "did you mean", and says versions without importing torch."""

from __future__ import annotations

import argparse
import difflib
import itertools
import platform
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Of the command or of a subcommand; what it does not know is an error with its own usage, and exit status 2."""

    _words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # as argparse calls it
        """Parse all of the words: there are none that another parser would know."""
        self._words = sys.argv[1:] if args is None else list(args)
        found, unknown = super().parse_known_args(self._words, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Also say which option was meant, whatever else is wrong: `--mehs 8` is first of all a missing `--mesh`."""
        known = [name for action in self._actions for name in action.option_strings]
        for word in itertools.takewhile(lambda word: word != "--", self._words):
            name = word.partition("=")[0]
            if name.startswith("-") and not any(option.startswith(name) for option in known):
                message += _meant(name, known)
        super().error(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Of a subcommand and of an option with choices."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            raise argparse.ArgumentError(action, error.message + _meant(str(value), action.choices or ())) from None


def _meant(given: str, known: Iterable[object]) -> str:
    """A question for an error, "" if nothing is like what was given."""
    close = difflib.get_close_matches(given[:100], map(str, known), 1)
    return f"; did you mean {close[0]!r} for {given!r}?" if close else ""


class Version(argparse.Action):
    """Prints the versions that matter and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        """torch's is that of the installed package."""
        from importlib.metadata import version  # it reads files

        from graphshard.ir.version import own_version

        print(f"graphshard {own_version()}, torch {version('torch')}, Python {platform.python_version()}")
        parser.exit()
