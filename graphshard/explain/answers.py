"""Answers about a predicted step, as numbers: what `graphshard.what_if` finds out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphshard.explain.explanation import Explanation
from graphshard.explain.grid import seconds_by_part
from graphshard.explain.training import TrainingCost
from graphshard.ir.text import format_bytes

# Shares of a step below which a difference is not worth a word, and how many parts have one.
_NEGLIGIBLE, _PARTS = 0.001, 3


@dataclass(frozen=True)
class Outcome:
    """A predicted step in short; what is not explained here is as in `Explanation`.

    Attributes:
        batch: sequences of one rank in a microbatch; None if inputs have no batch.
        step_tokens: of all ranks, in a step.
        state_bytes: at the peak, what a rank holds less of if there are more.
    """

    mesh: dict[str, int]
    hardware: str
    network: str
    batch: int | None
    microbatches: int
    step_tokens: int
    step_time_s: float
    tokens_per_second_per_gpu: float
    mfu: float
    exposed_comm_s: float
    peak_memory_bytes: int
    state_bytes: int
    memory_capacity_bytes: float
    num_ranks: int
    cost: TrainingCost | None

    @property
    def fits(self) -> bool:
        """Whether a GPU has so much memory."""
        return self.peak_memory_bytes <= self.memory_capacity_bytes

    @property
    def memory(self) -> str:
        """Of how much there is, in words."""
        return f"{format_bytes(self.peak_memory_bytes)} of {format_bytes(self.memory_capacity_bytes)}"


@dataclass(frozen=True)
class Answer:
    """What a change would do.

    Attributes:
        about: the kind of change.
        change: what is changed.
        gain: of tokens per second per GPU, as a share: 0.1 is ten per cent more.
        outcome: the step with the change.
        reason: which parts of the time per token get longer and shorter.
    """

    about: str
    change: str
    gain: float
    outcome: Outcome
    reason: str


@dataclass(frozen=True)
class Scaled:
    """The step on another number of ranks; `efficiency` is of tokens per second per GPU, beside the given mesh."""

    ranks: int
    outcome: Outcome
    efficiency: float


@dataclass(frozen=True)
class Fit:
    """What fits into memory.

    Attributes:
        what: "the largest batch", the same with another policy of activations, or "the smallest mesh".
        outcome: the step with it; None if nothing fits or it is not known.
        why: there is none, or it may not be the last one.
    """

    what: str
    outcome: Outcome | None
    why: str


@dataclass(frozen=True)
class Answers:
    """A predicted step, and answers about it.

    Attributes:
        base: the step as it is.
        here: the same in short.
        changes: what each would do: those that fit by their gain, then those that do not.
        fits: the largest batch of a rank, and the fewest ranks, by halves or doubles.
        scaling: the same step on more and fewer ranks.
        left_out: what could not be predicted, and why.
    """

    base: Explanation
    here: Outcome
    changes: tuple[Answer, ...]
    fits: tuple[Fit, ...]
    scaling: tuple[Scaled, ...]
    left_out: tuple[str, ...]


def outcome_of(found: Explanation, batch: int | None) -> Outcome:
    """A prediction in short."""
    held = ("shards", "optimizer state", "gradients of earlier microbatches")
    return Outcome(
        mesh=found.mesh,
        hardware=found.hardware,
        network=found.network,
        batch=batch,
        microbatches=found.microbatches,
        step_tokens=found.step_tokens,
        step_time_s=found.step_time_s,
        tokens_per_second_per_gpu=found.tokens_per_second_per_gpu,
        mfu=found.mfu,
        exposed_comm_s=found.exposed_comm_s,
        peak_memory_bytes=found.peak_memory_bytes,
        state_bytes=sum(found.memory.get(what, 0) for what in held),
        memory_capacity_bytes=found.memory_capacity_bytes,
        num_ranks=found.num_ranks,
        cost=found.cost,
    )


def reason_of(base: Explanation, found: Explanation, *, gain: float, note: str = "", price: float | None = None) -> str:
    """What of the time per token changes, as shares of it, the largest first.

    Args:
        gain: of tokens per second per GPU.
        note: what else it does.
        price: of one of the base's GPUs for an hour, if the change is another GPU.
    """
    before, after = seconds_by_part(base), seconds_by_part(found)
    ranks, whole = found.num_ranks / base.num_ranks, base.seconds_per_token
    shares = {what: (after[what] * ranks - before[what]) / whole for what in before}
    told = sorted((what for what in shares if abs(shares[what]) >= _NEGLIGIBLE), key=lambda what: -abs(shares[what]))
    parts = [f"{what} {shares[what]:+.1%}" for what in told[:_PARTS]]
    words = [f"per token {', '.join(parts)}" if parts else "per token nothing changes by 0.1%"]
    if note:
        words.append(note)
    if found.step_tokens != base.step_tokens:
        words.append(f"{found.step_tokens / base.step_tokens:g} times the tokens in a step")
    if price is not None:
        words.append(f"the same money per token at {price * (1 + gain):,.2f} for a GPU hour")
    return "; ".join(words)


def shown_mesh(mesh: Mapping[str, int]) -> str:
    """Axes and sizes: "replicate 8, shard 8"."""
    return ", ".join(f"{name} {size}" for name, size in mesh.items())
