"""The predicted timeline as a graph: its critical path, the slack of each bucket, and what delays a wait.

    gather a ---> wait a ---> region_0 ---> wait b ---> region_1      program order
        `---------------> gather b -----------^                      queue of the link, data

A node is an event of the clock, by its index. An event begins when all those before it have ended: what compute does
before it, what was on its link before it, and, for a wait, what it waits for. So the longest way to the last event is
as long as the step.

Contention: calls take as long as on the timeline, where what runs beside them has slowed them down. On a machine with
contention, something longer also slows down the calls beside it, and calls get faster without it, which no edge says:
slack and gains leave that out. With it nothing that runs beside compute would have any slack.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from graphshard.schedule.clock import Event, Launch, Times, Wait

# Of the step: seconds below are rounding.
_ROUNDING = 1e-12

# A node before all events.
_BEGIN = -1


class TimelineDag:
    """What must end before what begins, and what follows from it; all seconds are of one step.

    Attributes:
        seconds: that each event takes; a wait takes none, it ends when what it waits for has. -1 is before all of them.
        end: the last event of compute, where the step ends.
    """

    def __init__(self, events: Sequence[Event], times: Times) -> None:
        self.seconds = {_BEGIN: 0.0}
        # Of each event: what compute does before it, and what it queues behind or waits for, if anything.
        self._order: list[int] = []
        self._other: list[int | None] = []
        here, on_link = _BEGIN, dict[str, int]()
        for index, event in enumerate(events):
            length = times.ends[index] - times.begins[index]
            self.seconds[index] = 0.0 if isinstance(event, Wait) else length
            self._order.append(here)
            if isinstance(event, Launch):
                self._other.append(on_link.get(event.link))
                on_link[event.link] = index
            else:
                self._other.append(event.launch if isinstance(event, Wait) else None)
                here = index
        self.end = here

    def _before(self, event: int) -> tuple[int, ...]:
        """What must end before an event begins, compute first."""
        other = self._other[event]
        return (self._order[event],) if other is None else (self._order[event], other)

    def ends(self, seconds: Mapping[int, float] | None = None) -> dict[int, float]:
        """When every event ends.

        Args:
            seconds: that some events take instead of their own.
        """
        seconds = {**self.seconds, **(seconds or {})}
        found = {_BEGIN: seconds[_BEGIN]}
        for event, (order, other) in enumerate(zip(self._order, self._other)):
            begin = found[order] if other is None else max(found[order], found[other])
            found[event] = begin + seconds[event]
        return found

    def step(self, seconds: Mapping[int, float] | None = None) -> float:
        """How long the step takes; `seconds` as for `ends`."""
        return self.ends(seconds)[self.end]

    @cached_property
    def critical_path(self) -> list[int]:
        """Events that follow each other without a gap from the begin of the step to its end."""
        return list(self._longest_way(self.end))[::-1]

    @cached_property
    def slack(self) -> dict[int, float]:
        """Seconds by which an event may end later, because it begins later or takes longer, and the step does not."""
        ends = self._ends
        latest = dict.fromkeys(ends, ends[self.end])
        for event in reversed(range(len(self._order))):
            begin = latest[event] - self.seconds[event]
            for before in self._before(event):
                latest[before] = min(latest[before], begin)
        rounding = _ROUNDING * ends[self.end]
        return {n: late - ends[n] if late - ends[n] > rounding else 0.0 for n, late in latest.items()}

    def gains(self, target: int) -> dict[int, float]:
        """By the events but for which another would end earlier: by how much, if one of them took no time."""
        behind = self._behind(target)
        # Indices are a topological order, so a way round an event has one edge that goes over its index.
        way = sorted(node for node in self._longest_way(target) if self.seconds[node])
        found, open_edges, edge = {}, list[tuple[float, int]](), 0
        for node in way:
            while edge < len(self._edges) and self._edges[edge][0] < node:
                before, after = self._edges[edge]
                if after in behind:
                    length = self._ends[before] + self.seconds[after] + behind[after]
                    heapq.heappush(open_edges, (-length, after))
                edge += 1
            while open_edges and open_edges[0][1] <= node:
                heapq.heappop(open_edges)
            round_it = -open_edges[0][0] if open_edges else 0.0
            found[node] = min(self.seconds[node], self._ends[target] - round_it)
        return self._without_rounding(found)

    def delays(self, wait: int) -> dict[int, float]:
        """What makes compute wait: by event, how much shorter the wait would be if that took no time."""
        before = self.gains(self._order[wait])
        return self._without_rounding({n: gain - before.get(n, 0.0) for n, gain in self.gains(wait).items()})

    @cached_property
    def _ends(self) -> dict[int, float]:
        return self.ends()

    @cached_property
    def _edges(self) -> list[tuple[int, int]]:
        """All pairs of events of which one must end before the other begins, in order."""
        return sorted((before, event) for event in range(len(self._order)) for before in self._before(event))

    def _longest_way(self, target: int) -> Iterator[int]:
        """Backwards from an event; where two ways are equally long, along compute."""
        while target != _BEGIN:
            yield target
            target = max(self._before(target), key=self._ends.__getitem__)

    def _behind(self, target: int) -> dict[int, float]:
        """By the events that another depends on: the longest way from their end to that one's."""
        found = {target: 0.0}
        for event in range(target, _BEGIN, -1):
            if event in found:
                length = found[event] + self.seconds[event]
                for before in self._before(event):
                    found[before] = max(found.get(before, 0.0), length)
        return found

    def _without_rounding(self, found: Mapping[int, float]) -> dict[int, float]:
        least = _ROUNDING * self._ends[self.end]
        return {node: seconds for node, seconds in found.items() if seconds > least}
