"""What ranks of a pipeline do in which order, and a stage as a program of its own: its seconds and its bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from graphshard.cost.costs import Costs
from graphshard.cost.kernels import num_bytes
from graphshard.cost.model_collectives import MODEL_KINDS
from graphshard.cost.multiplications import Scalar
from graphshard.errors import ArgumentError, InfeasibleError, StageError
from graphshard.explain.explanation import Explanation
from graphshard.explain.training import Training
from graphshard.ir.graph import base_of, is_alias
from graphshard.ir.mesh import Axis
from graphshard.ir.program import Program
from graphshard.options.options import Options
from graphshard.schedule.clock import Event, Launch, run
from graphshard.schedule.stages import StageSeconds, Turn, most_alive, rounds_of, turns_of

# Of a stage's memory what is there all the time.
STATE, GATHERED, ADDED = "optimizer state", "gathered parameters", "gradients of earlier microbatches"


@dataclass(frozen=True)
class Course:
    """Who does what in a pipeline, in which order.

    Attributes:
        axis: of the stages.
        training: says which schedule.
    """

    axis: Axis
    training: Training
    microbatches: int

    @property
    def per_rank(self) -> int:
        """Stages of a rank."""
        return self.training.stages_per_rank if self.training.pipeline == "interleaved" else 1

    @property
    def stages(self) -> int:
        """All of them."""
        return self.axis.size * self.per_rank

    def of_rank(self, rank: int) -> range:
        """The stages of a rank."""
        return range(rank, self.stages, self.axis.size)

    @cached_property
    def turns(self) -> list[list[Turn]]:
        """By rank."""
        given = self.axis.size, self.microbatches, self.per_rank
        return [turns_of(self.training.pipeline, rank, *given) for rank in range(self.axis.size)]

    def check(self, options: Options, symbols: Mapping[str, int] | None) -> None:
        """Raise ArgumentError for arguments that do not go with a pipeline."""
        ranks, name = self.axis.size, self.axis.name
        if symbols:
            raise ArgumentError(f"symbols: there are no formulas of a pipeline. Leave symbols, or {name}, out.")
        if options.reshard_after_forward not in (None, False):
            raise ArgumentError(
                f"reshard_after_forward={options.reshard_after_forward} on a mesh with {name}: parameters of a stage "
                "are gathered once a step, as with reshard_after_forward=False. Leave it out."
            )
        if options.activation == "auto":
            raise ArgumentError(
                f'activation="auto" on a mesh with {name}: stages save as units of the whole model do. Give "full", a '
                "share or operators."
            )
        if self.training.pipeline != "interleaved":
            return
        rounds = rounds_of(ranks, self.microbatches)
        if self.microbatches % rounds:
            raise StageError(
                f'pipeline="interleaved" on {name} {ranks} takes {self.microbatches} microbatches in {rounds} rounds, '
                f"and torch.distributed.pipelining wants rounds of one size. Give a multiple of {ranks} microbatches."
            )
        if options.memory_limit is not None:
            raise ArgumentError(
                'memory_limit with pipeline="interleaved": stages of a rank share its memory, and each is planned by '
                'itself. Leave memory_limit out, or take pipeline="1f1b".'
            )

    def room(self, limit: int, stage: int, program: Program) -> int:
        """Bytes of a limit that other microbatches leave to the one that runs in a stage.

        Raises:
            InfeasibleError: they leave none.
        """
        saved = saved_bytes(program)
        others = most_alive(self.turns[stage], {stage: saved}, {stage: 0})[0]
        others += added_bytes(program) if self.microbatches > 1 else 0
        if others >= limit:
            raise InfeasibleError(
                f"memory_limit={limit}: other microbatches alone hold {others} bytes in stage {stage}. Give more, "
                "fewer sequences in a microbatch, or more stages.",
                others + 1,
            )
        return limit - others


@dataclass(frozen=True)
class Stage:
    """A stage as a program, predicted alone for one microbatch.

    Attributes:
        blocks: how many it has.
        found: the prediction.
        saved: bytes that a microbatch leaves to its backward.
    """

    blocks: int
    found: Explanation
    saved: int

    @property
    def trained(self) -> int:
        """Bytes of the shards of trained parameters."""
        return self.found._program.params.trained_bytes

    def seconds(self, costs: Costs, microbatches: int, events: Sequence[Event] | None = None) -> StageSeconds:
        """What its turns take.

        Args:
            events: what its program does, with seconds by the same costs; None are those of the prediction.
        """
        events = self.found._timeline.events if events is None else events
        first, last = _phases(events, costs.profile.contention)
        forward, backward = _phases([_for_nothing(event) for event in events], costs.profile.contention)
        added = costs.addition(added_bytes(self.found._program)) if microbatches > 1 else 0.0
        return StageSeconds(first, forward, backward, last, added)

    def memory(self, microbatches: int, *, at_peak: bool) -> Counter[str]:
        """Bytes by what they are: at the peak of one microbatch's turns, or what is there all the time."""
        program, found = self.found._program, Counter[str]()
        if at_peak:
            for value in self.found._memory.alive:
                found[value.what] += value.num_bytes
        else:
            found["shards"] = self.found.memory["shards"]
            found[GATHERED] = gathered_bytes(program)
        found[STATE] = self.found.memory[STATE]
        found[ADDED] = added_bytes(program) if microbatches > 1 else 0
        return found


def added_bytes(program: Program) -> int:
    """Bytes of full gradients, in the dtype in which those of microbatches are added up."""
    return sum(row.sent_bytes("reduce") for row in program.params if row.trainable)


def gathered_bytes(program: Program) -> int:
    """Bytes of full parameters that are not the shards themselves."""
    made = (row for row in program.params if row.num_shards > 1 or row.dtype != row.compute_dtype)
    return sum(row.sent_bytes("gather") for row in made)


def saved_bytes(program: Program) -> int:
    """Bytes of what a microbatch leaves to its backward, but for full parameters."""
    phase = program.phases["forward"]
    results = zip(phase.results, phase.outputs, strict=True)
    saved = {base_of(value, is_alias) for value, slot in results if slot.kind == "saved" and not slot.is_full}
    return sum(map(num_bytes, saved))


def _phases(events: Sequence[Event], contention: Scalar) -> tuple[Scalar, Scalar]:
    """Seconds of forward and of backward."""
    ends: dict[str, Scalar] = {"forward": 0.0}
    for event, end in zip(events, run(events, contention).ends):
        if not isinstance(event, Launch):
            ends[event.phase] = end
    return ends["forward"], ends.get("backward", ends["forward"]) - ends["forward"]


def _for_nothing(event: Event) -> Event:
    """An event between the first and the last microbatch: parameters are there, and gradients stay."""
    return replace(event, seconds=0.0) if isinstance(event, Launch) and event.kind not in MODEL_KINDS else event
