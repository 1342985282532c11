"""Write every stage of a program to a directory, file by file, so that a crash leaves all stages up to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from graphshard.program import Program, Stage


@dataclass
class Dump:
    """The dump of one program."""

    directory: Path

    def stage(self, program: Program, stage: Stage) -> None:
        """Write a stage."""

    def failed(self, program: Program, name: str, error: Exception) -> None:
        """Write the error with which a pass ended."""
