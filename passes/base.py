"""What a pass is: a frozen dataclass with a name, options as fields, and no other state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphshard.errors import PassError
from graphshard.ir.program import Program


@dataclass(frozen=True)
class Pass:
    """Rewrites a program in place and says how often.

    The pipeline calls `requires`, `rewrite`, checks the rules of `graphshard.pipeline.rules`, then calls `ensures`.
    `requires` and `ensures` raise `PassError` when the program is not as the pass needs or promises it.

    Attributes:
        name: what the pass is called in the pipeline, the history and in messages.
        exact: False says that the pass may change the numbers a program computes. No pass of the default pipeline
            may; a user who inserts such a pass opts in.
        establishes: names of the rules that hold from this pass on.
    """

    name: ClassVar[str]
    exact: ClassVar[bool] = True
    establishes: ClassVar[frozenset[str]] = frozenset()

    def requires(self, program: Program) -> None:
        """Check the program before the pass."""

    def rewrite(self, program: Program) -> int:
        """Rewrite the program; return the number of rewrites, 0 exactly for an unchanged program."""
        raise NotImplementedError

    def ensures(self, program: Program) -> None:
        """Check what only this pass knows about its result."""


def check_partitioned(step: Pass, program: Program) -> None:
    """Raise PassError for a program that is still a joint graph."""
    if "joint" in program.phases:
        raise PassError(f"{step.name}: the program is not partitioned yet; run this pass after partition")
