"""Programs of a file, as a runner sees them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from torch import nn

from graphshard.frontend.signature import Signature
from graphshard.ir.graph_break import GraphBreak
from graphshard.ir.program import Program
from graphshard.module.kept_program import Kept


class Library(Protocol):
    """Programs that need not be compiled, because a file has them."""

    @property
    def entries(self) -> Collection[str]:
        """Names of what there are programs of; "" is the model."""

    def check_same(self, module: nn.Module, runner: Any) -> None:
        """Check that the other ranks have read the same programs; all ranks call this together."""

    def find(self, runner: Any, module: nn.Module, traced: Program) -> Kept | None:
        """Return the program of a trace, ready to be installed; None if the file has none.

        Args:
            runner: of the module that was traced, the model or an entry of it.
            traced: before passes.
        """

    def missing(self, runner: Any, call: Signature, traced: Program) -> Exception:
        """Return the error for a call for which there is no program.

        Args:
            call: its signature, with all inputs.
            traced: its program, before passes.
        """

    def untraceable(self, runner: Any, call: Signature, error: GraphBreak) -> Exception:
        """Return the error for a call that cannot be traced whole, so that no program can be for it."""
