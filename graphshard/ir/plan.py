"""Plans: buckets of collectives, and the positions where each starts and is waited for.

A plan is plain data. A planner (such as `schedule/fsdp2_order.py`) makes it, and the passes `bucket` and `reorder`
apply it. It round-trips through JSON, and equal plans of two ranks have equal hashes.

Time in a plan is a position: the number of compute nodes of the phase that run before the event. Collectives and their
casts, copies and views are not compute (`collective_regions.py`), so bucketing does not change positions.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Literal

from graphshard.errors import ArgumentError
from graphshard.utils.json_dataclasses import read, write
from graphshard.utils.text import brief, format_bytes, format_seconds, html_table, new_table, styled

CollectiveKind = Literal["gather", "reduce", "all_reduce"]


# Number of ranks at which an exchange (`Bucket.exchanged`) has the bits of a reduce-scatter.
EXCHANGE_RANKS = 2
# Default of `Profile.pack_below`: smaller shards may be packed into one buffer.
SMALL = 64 * 1024


@dataclass(frozen=True)
class Bucket:
    """Collectives of one kind that are launched together.

    Attributes:
        name: unique within a plan, such as "gather layers.0 (forward)".
        kind: all-gather of parameters, reduce-scatter of gradients, or all-reduce of their shards over replicas.
        phase: "forward" or "backward".
        params: names of parameters that are coalesced, without a copy.
        packed: names of parameters that are packed into one flat buffer (one copy in, one out).
        axis: name of the mesh axis.
        num_bytes: bytes of the unsharded tensors; for an all-reduce, of the shards.
        exchanged: a reduce-scatter of one tensor is done as an all-to-all and a local sum.
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

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that are sent, for readers: the flat buffer, and then each other parameter."""
        return (*((f"{len(self.packed)} packed parameters",) if self.packed else ()), *self.params)


@dataclass(frozen=True)
class Event:
    """Start of a bucket, or wait for it, after `at` compute nodes of its phase."""

    action: Literal["start", "wait"]
    bucket: str
    at: int


@dataclass(frozen=True)
class Prediction:
    """Predicted time and memory of a plan on a machine.

    Attributes:
        step_seconds: seconds of forward, backward and optimizer.
        lower_bound: lower bound in seconds over all plans with the same compute and constraints.
        peak_bytes: peak memory in bytes.
        profile, profile_hash: the hardware profile.
        network: name of the profile's network model.
        stopped: the search ended at its budget, so a shorter plan may exist.
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
        """Relative excess over the lower bound."""
        return self.step_seconds / self.lower_bound - 1 if self.lower_bound else 0.0


@dataclass(frozen=True)
class Plan:
    """Decisions of a planner.

    Attributes:
        buckets: collectives that are launched together.
        events: starts and waits by phase, in the order of execution on every rank.
        kept: parameters that stay gathered until backward, in addition to the ones that the user keeps.
        prediction: prediction of a planner with a cost model; else None.
    """

    buckets: tuple[Bucket, ...] = ()
    events: dict[str, tuple[Event, ...]] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    prediction: Prediction | None = None

    def bucket(self, name: str) -> Bucket:
        return next(b for b in self.buckets if b.name == name)

    def to_json(self) -> str:
        """Serialize; keys are sorted, so equal plans give equal text."""
        return json.dumps(write(self), indent=1, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Parse the text of `to_json`.

        Raises:
            ArgumentError: the text is not a plan.
        """
        try:
            data = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            advice = "Write it with Plan.to_json."
            raise ArgumentError(f"a plan must be JSON, got {brief(text)}: {error}. {advice}") from None
        try:
            return read(data, Plan)
        except ArgumentError as error:
            raise ArgumentError(f"not a plan that Plan.to_json wrote, {brief(text)}: {error}") from None

    def _repr_html_(self) -> str:
        """Return the buckets as a table, for notebooks."""
        table = new_table(("bucket", "axis"), ("parameters", "size", "start", "wait"))
        at = {(event.action, event.bucket): str(event.at) for of in self.events.values() for event in of}
        for bucket in self.buckets:
            places = (at.get((action, bucket.name), "") for action in ("start", "wait"))
            numbers = str(len(bucket.members)), format_bytes(bucket.num_bytes)
            table.add_row(styled(bucket.name), styled(bucket.axis), *numbers, *places)
        lines = [f"kept gathered: {len(self.kept)} parameters"] if self.kept else []
        if (found := self.prediction) is not None:
            seconds, bound = format_seconds(found.step_seconds), format_seconds(found.lower_bound)
            lines.append(f"predicted for {found.profile}: {seconds}, no schedule beats {bound}")
        return html_table(f"Plan of {len(self.buckets)} buckets", table, lines)

    @property
    def hash(self) -> str:
        """Hex digest of the plan's JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()
