"""Programs that an earlier launch has compiled, and what looks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn

from graphshard.frontend.signature import Signature
from graphshard.ir.program import Program
from graphshard.lower.regions import RegionCall
from graphshard.pipeline.pipeline import Partitioned
from graphshard.runtime.step import BackwardFactory

if TYPE_CHECKING:
    from graphshard.module.executables import Installed


class Kept(NamedTuple):
    """A program that was compiled before: by an earlier launch, or by `graphshard.export`.

    Attributes:
        partitioned: makes where another backward of it begins; None if it has none.
        compiled: its regions, by key.
        of_file: it is from a file of `export`.
        make_backward: makes its other backwards, where that is not done from `partitioned`.
    """

    program: Program
    partitioned: Callable[[], Partitioned] | None
    compiled: dict[str, RegionCall]
    of_file: bool = False
    make_backward: BackwardFactory | None = None


class FoundProgram(Exception):
    """A traced program is in the cache or in a file, so that no pass need run."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self.kept = kept


class EqualProgram(Exception):
    """A trace equals that of a program that is installed, so that only its guards are new."""

    def __init__(self, installed: Installed, traced: Program) -> None:
        super().__init__()
        self.installed, self.traced = installed, traced


class Search(Protocol):
    """For a program that may have been kept."""

    def find(self) -> Kept | None:
        """The program, if there is one that was made of the same."""

    def keep(self, program: Program, partitioned: Partitioned | None) -> None:
        """Keep what was captured, when it is lowered."""


class Cache(Protocol):
    """Programs of earlier launches."""

    def search(
        self,
        maker: Any,
        module: nn.Module,
        signature: Signature,
        tensors: Sequence[torch.Tensor],
        program: Program,
    ) -> Search | None:
        """Return what looks for the program of a call; None if it cannot be kept.

        Args:
            program: of the trace, before passes.
        """
