"""A compiled region as executors call it, and the release of those that no executor calls any more."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch.fx import GraphModule

from graphshard.ir.program import Program
from graphshard.lower.executor import Boxed
from graphshard.lower.kernels import GpuCode


class _Callers(weakref.WeakSet[GraphModule]):
    """Executors that are alive."""

    def __deepcopy__(self, _: Any) -> _Callers:
        return _Callers()


class RegionCall:
    """A compiled region; it takes a list of inputs and empties it, so that each can be freed at its last use.

    `within` is not None for one of dynamic sizes: those of the program it was compiled for. Compilation relies on what
    is known of them by then, and may find out more (that one is always 2, say), so other programs do not use it.

    `callers` are the executors that call it. One that is `kept`, as it is from a file, stays without any.

    Not a module: global module hooks, which debugging tools install, must not see regions.
    """

    def __init__(self, fn: Boxed, within: object = None, *, kept: bool = False) -> None:
        self.fn = fn
        self.within = within
        self.kept = kept
        self.callers = _Callers()

    @property
    def source(self) -> str:
        """Code of the generated kernels; "" for a region that runs operator by operator."""
        return str(getattr(self.fn, "source_code", ""))

    @property
    def codes(self) -> tuple[GpuCode, ...]:
        """What was compiled for GPUs where there was none, for each kind of them."""
        return tuple(getattr(self.fn, "codes", ()))

    @property
    def can_be_captured(self) -> bool:
        """Whether what it launches can be part of a CUDA graph."""
        return bool(getattr(self.fn, "can_be_captured", True))

    def __call__(self, inputs: list[Any]) -> Any:
        return self.fn(inputs)


def drop_regions(compiled: dict[str, RegionCall], programs: Iterable[Program]) -> None:
    """Remove the regions that only these programs call; the programs themselves can still run."""
    programs = list(programs)
    gone = {phase.module for program in programs for phase in program.phases.values()}
    for key in {key for program in programs for key in program.region_names.values()}:
        if key in compiled and not compiled[key].kept and gone.issuperset(compiled[key].callers):
            del compiled[key]
