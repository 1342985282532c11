"""What the ranks of one model have agreed on: a name for it, its plans, its collectives."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta

from torch.distributed.device_mesh import DeviceMesh

from graphshard.ir.program import Program
from graphshard.module.agree import check_agreement, model_tag
from graphshard.options.passes import agreeing
from graphshard.pipeline.pipeline import Pipeline

# How long a rank waits for the others to come as far as a new program: compilation takes different times.
TIMEOUT = timedelta(minutes=10)


@dataclass
class Agreement:
    """Of one runner; all its ranks ask in the same order.

    Attributes:
        mesh: None while exporting, when there is nobody to agree with.
    """

    mesh: DeviceMesh | None
    _tag: str | None = None
    _communication: set[tuple[str, ...]] = field(default_factory=set)
    _pipeline: Pipeline | None = None

    def check(self, program: Program) -> None:
        """Raise `DivergenceError` if another rank communicates otherwise; what was seen before is not asked."""
        lines = tuple(program.communication)
        if lines not in self._communication:
            assert self.mesh is not None
            check_agreement(program, self.mesh, f"{self.tag()}/{len(self._communication)}", TIMEOUT)
            self._communication.add(lines)

    def check_accumulation(self, program: Program) -> None:
        """As `check`, for a program of another backward that accumulates gradients over microbatches."""
        self.check(replace(program, reason="gradients of microbatches are accumulated in another way"))

    def pipeline(self, passes: Pipeline) -> Pipeline:
        """The passes, with a planner that plans alike on all ranks."""
        if self.mesh is None:
            return passes
        if self._pipeline is None:
            self._pipeline = agreeing(passes, self.mesh, self.tag, TIMEOUT)
        return self._pipeline

    def tag(self) -> str:
        """A name for the model that is the same on all ranks; taken at the first use, in the order of use."""
        if self._tag is None:
            assert self.mesh is not None
            self._tag = model_tag(self.mesh)
        return self._tag
