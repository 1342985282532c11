"""What a pass is: a frozen dataclass with a name, options as fields, and no other state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphshard.program import Program


@dataclass(frozen=True)
class Pass:
    """Rewrites a program in place and says how often.

    `requires` and `ensures` raise `PassError` when the program is not as the pass needs or promises it.
    """

    name: ClassVar[str]

    def requires(self, program: Program) -> None:
        """Check the program before the pass."""

    def rewrite(self, program: Program) -> int:
        """Rewrite the program; return the number of rewrites, 0 for an unchanged program."""
        raise NotImplementedError

    def ensures(self, program: Program) -> None:
        """Check the program after the pass."""
