"""What a prediction says of a pipeline: its stages, what they wait for each other, and what each holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphshard.ir.text import format_bytes, format_seconds


@dataclass(frozen=True)
class StageCost:
    """A stage of a pipeline.

    Attributes:
        blocks: how many it has.
        forward_s, backward_s: of one microbatch in the middle of a step, without gathers and reductions.
        gathers_s, reductions_s: by how much longer the first forward and the last backward are.
        alive: microbatches that its rank holds at once, where that needs the most memory.
    """

    blocks: int
    forward_s: float
    backward_s: float
    gathers_s: float
    reductions_s: float
    alive: int


@dataclass(frozen=True)
class Pipelined:
    """A step of a pipeline. Rank i has every stage i + j * ranks.

    Attributes:
        schedule: "1f1b", "gpipe" or "interleaved".
        stages: in order.
        bubble_s: in which the slowest rank has nothing to do: it waits for other stages.
        model_comm_s: in which its compute waits for what the model itself communicates.
        sent_bytes, sending_s: of one microbatch from stage to stage, over the border where that takes longest.
        rank_s: by rank, seconds in which it is busy, with the optimizer.
        rank_bytes: by rank, the most memory.
    """

    schedule: str
    stages: tuple[StageCost, ...]
    bubble_s: float
    model_comm_s: float
    sent_bytes: int
    sending_s: float
    rank_s: tuple[float, ...]
    rank_bytes: tuple[int, ...]

    @property
    def slowest(self) -> int:
        """The rank that is busy longest."""
        return max(range(len(self.rank_s)), key=self.rank_s.__getitem__)

    @property
    def largest(self) -> int:
        """The rank that needs the most memory."""
        return max(range(len(self.rank_bytes)), key=self.rank_bytes.__getitem__)

    def __str__(self) -> str:
        counts = [stage.blocks for stage in self.stages]
        blocks = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else str(counts[0])
        slowest, largest = self.named(self.slowest), self.named(self.largest)
        least = min(self.rank_bytes)
        return (
            f"{self.schedule}, {len(counts)} stages of {blocks} blocks; bubble {format_seconds(self.bubble_s)}; "
            f"slowest {slowest}; most memory {format_bytes(self.rank_bytes[self.largest])} in {largest}, least "
            f"{format_bytes(least)}; {format_bytes(self.sent_bytes)} sent in {format_seconds(self.sending_s)}"
        )

    def named(self, rank: int) -> str:
        """The stages of a rank: "stage 3", "stages 3 and 7"."""
        stages = list(map(str, range(rank, len(self.stages), len(self.rank_s))))
        return f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(stages[:-1])} and {stages[-1]}"

    def memory_by_stage(self) -> Mapping[str, int]:
        """Bytes by the stages of a rank."""
        return {self.named(rank): size for rank, size in enumerate(self.rank_bytes)}
