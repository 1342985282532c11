"""What `graphshard.schedule_graph` returns: the graph, and what is predicted of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.fx import GraphModule

from graphshard.foreign.groups import Group
from graphshard.utils.text import format_bytes, format_seconds


@dataclass(frozen=True)
class GraphBucket:
    """Collectives that start as one.

    Attributes:
        kind: gather, reduce (reduce-scatter), all_reduce or all_to_all.
        group: name of their process group.
        link: name of what carries them; buckets on the same link queue.
        members: names of their launches in the graph that was given.
        num_bytes: of the full tensors.
        start: predicted seconds from the beginning to when it is on its link.
        seconds: predicted, on the link.
        exposed: predicted seconds in which compute waits for it.
    """

    kind: str
    group: str
    link: str
    members: tuple[str, ...]
    num_bytes: int
    start: float
    seconds: float
    exposed: float


@dataclass(frozen=True)
class ScheduledGraph:
    """A rescheduled graph and what is predicted of it, in seconds and bytes; `print` shows a table of the buckets.

    Attributes:
        module: the graph, which takes and returns what the given one does.
        seconds_before, seconds_after: of one run.
        exposed_before, exposed_after: in which compute waits for collectives.
        lower_bound: seconds that no other order of the collectives, and no other buckets, take less than, within the
            limit of memory: where one of them by itself does not fit, it does not start. That several together may not
            fit is not in it.
        peak_before, peak_after: most bytes alive at once, inputs included, estimated from the order of nodes.
        buckets: in the order of their starts.
        groups: by name, as they were counted with.
    """

    module: GraphModule
    seconds_before: float
    seconds_after: float
    exposed_before: float
    exposed_after: float
    lower_bound: float
    peak_before: int
    peak_after: int
    buckets: tuple[GraphBucket, ...]
    groups: Mapping[str, Group] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """How much longer than the bound, as a fraction of it."""
        return self.seconds_after / self.lower_bound - 1 if self.lower_bound else 0.0

    def __str__(self) -> str:
        lines = [
            f"predicted {format_seconds(self.seconds_before)} -> {format_seconds(self.seconds_after)}, bound "
            f"{format_seconds(self.lower_bound)}",
            f"exposed   {format_seconds(self.exposed_before)} -> {format_seconds(self.exposed_after)}",
            f"memory    {format_bytes(self.peak_before)} -> {format_bytes(self.peak_after)}",
        ]
        rows = [("bucket", "group", "link", "collectives", "bytes", "seconds", "exposed")]
        rows += [
            (
                *(bucket.kind, bucket.group, bucket.link, str(len(bucket.members))),
                *(format_bytes(bucket.num_bytes), format_seconds(bucket.seconds), format_seconds(bucket.exposed)),
            )
            for bucket in self.buckets
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, "", *table] if self.buckets else lines)
