"""The plan: which collectives travel together, when each starts and when it is waited for.

A plan is plain data. It is made by a planner (such as `schedule/by_unit.py`), applied by the passes `bucket` and
`reorder`, goes through JSON unchanged, and two ranks that made the same plan have the same hash.

Time in a plan is a position in the compute order of a phase: the number of compute nodes that run before the
event. The compute order is the captured order without the collectives and the casts, copies and views that
belong to them (`layout.CollectiveRegions`), so a position means the same before and after bucketing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Literal

from graphshard.errors import ArgumentError
from graphshard.ir.plain import read, write
from graphshard.utils.text import brief

CollectiveKind = Literal["gather", "reduce", "all_reduce"]


# With how many ranks an exchange (`Bucket.exchanged`) has the bits of a reduce-scatter.
EXCHANGE_RANKS = 2
# Bytes of a shard below which it may travel with others in one buffer, where no profile says it (`Profile.pack_below`).
SMALL = 64 * 1024


@dataclass(frozen=True)
class Bucket:
    """Collectives of one kind that are launched as one.

    Attributes:
        name: unique within a plan, such as "gather layers.0 (forward)".
        kind: all-gather of parameters, reduce-scatter of gradients, or all-reduce of their shards over replicas.
        phase: "forward" or "backward".
        params: parameter names that travel as they are (coalesced, no copy).
        packed: parameter names that travel in one flat buffer (one copy in, one out).
        axis: name of the mesh axis.
        num_bytes: bytes of the full (unsharded) tensors; of the shards for an all-reduce.
        exchanged: a reduction of one tensor that is sent as all-to-all and summed by each rank.
    """

    name: str
    kind: CollectiveKind
    phase: str
    params: tuple[str, ...]
    packed: tuple[str, ...]
    axis: str
    num_bytes: int
    exchanged: bool = False

    @property
    def members(self) -> tuple[str, ...]:
        return self.packed + self.params


@dataclass(frozen=True)
class Event:
    """A bucket's collective is started, or waited for, after `at` compute nodes of its phase."""

    action: Literal["start", "wait"]
    bucket: str
    at: int


@dataclass(frozen=True)
class Prediction:
    """What the plan is expected to do, on which machine.

    Attributes:
        step_seconds: of forward, backward and optimizer.
        lower_bound: seconds that no plan with the same compute and the same constraints beats.
        peak_bytes: most bytes alive at once.
        profile, profile_hash: the hardware profile whose numbers were used.
        network: which of the profile's models of the network.
        stopped: the search for a shorter plan ended at its budget of steps, before all were ruled out.
    """

    step_seconds: float
    lower_bound: float
    peak_bytes: int
    profile: str
    profile_hash: str
    network: str
    stopped: bool = False

    @property
    def gap(self) -> float:
        """How much longer than the bound, as a fraction of it."""
        return self.step_seconds / self.lower_bound - 1 if self.lower_bound else 0.0


@dataclass(frozen=True)
class Plan:
    """What a planner decides.

    Attributes:
        buckets: which collectives travel together.
        events: per phase, in the order in which every rank executes them.
        gathered_bytes: per phase, the most bytes of gathered parameters that the events let live at once.
        kept: parameters that stay gathered between forward and backward, beside those that the user keeps.
        prediction: what a planner that weighs costs expects; None from one that does not.
    """

    buckets: tuple[Bucket, ...] = ()
    events: dict[str, tuple[Event, ...]] = field(default_factory=dict)
    gathered_bytes: dict[str, int] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    prediction: Prediction | None = None

    def bucket(self, name: str) -> Bucket:
        return next(b for b in self.buckets if b.name == name)

    def to_json(self) -> str:
        """Serialise; keys are sorted, so equal plans give equal text."""
        return json.dumps(write(self), indent=1, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Inverse of `to_json`.

        Raises:
            ArgumentError: the text is no plan.
        """
        try:
            data = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise ArgumentError(
                f"a plan must be JSON, got {brief(text)}: {error}. Write it with Plan.to_json."
            ) from None
        try:
            return read(data, Plan)
        except ArgumentError as error:
            raise ArgumentError(f"no plan that Plan.to_json wrote, {brief(text)}: {error}") from None

    @property
    def hash(self) -> str:
        """Hex digest of the plan's JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()
