"""A foreign graph without tensors: items of compute, and legs that may travel between two of them; and its clock.

    items       0 |   1   |  2  | 3 |  4          compute between positions at which something may start or is needed
    leg a       [---------> first=0, last=needed=2
    leg b               [---------------> ...

Several links, each with a queue of its own. A leg is a message of the graph; a bucket is several that start as one.
The clock is `graphshard.schedule.clock`, which the steps of programs run through, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from graphshard.schedule import clock


@dataclass(frozen=True)
class Leg:
    """A message as the search sees it; positions are those between items.

    Attributes:
        name: of its launch.
        wire: index of its group among the course's.
        kind: gather, reduce, all_reduce or all_to_all.
        key: legs with equal keys may travel together; None travels alone.
        num_bytes, num_tensors: that it costs.
        first, last: between which it may start.
        needed: at which it is waited for.
        not_before: at which it may be waited for.
        after: legs that must have arrived before it starts.
        packing: seconds of compute when it starts, for casts and copies.
        unpacking: seconds of compute when it has arrived.
        start, waited: where the graph has it.
    """

    name: str
    wire: int
    kind: str
    key: tuple[Any, ...] | None
    num_bytes: int
    num_tensors: int
    first: int
    last: int
    needed: int
    not_before: int
    after: tuple[int, ...]
    packing: float
    unpacking: float
    start: int
    waited: int


# Legs that start as one, at a position.
Bucket = tuple[int, tuple[int, ...]]
# Buckets in the order in which they start, which is that of their positions.
Itinerary = tuple[Bucket, ...]


@dataclass(frozen=True)
class Outcome:
    """What an itinerary takes.

    Attributes:
        seconds: of all.
        exposed: seconds in which compute waits.
        starts: by bucket, when it begins on its link, and when it ends.
        reached: by position, when compute comes to it.
        waits: by bucket, when compute comes to its first wait, and how long it waits there.
    """

    seconds: float
    exposed: float
    starts: tuple[tuple[float, float], ...]
    reached: tuple[float, ...]
    waits: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Course:
    """Items and legs, and what legs cost.

    Attributes:
        seconds: per item.
        legs: in the order of the graph.
        links: by wire, the name of its link.
        cost: seconds of a launch for (wire, kind, bytes, tensors).
        contention: share by which compute is slower while a link is busy.
        prompt: what is needed at the end alone is waited for as soon as it has started, as its input takes memory.
    """

    seconds: tuple[float, ...]
    legs: tuple[Leg, ...]
    links: tuple[str, ...]
    cost: Callable[[int, str, int, int], float]
    contention: float
    prompt: bool = False

    @cached_property
    def elapsed(self) -> tuple[float, ...]:
        """Seconds of compute before each position, without packing."""
        return (0.0, *itertools.accumulate(self.seconds))

    @property
    def end(self) -> int:
        """The position behind the last item."""
        return len(self.seconds)

    def bucket_seconds(self, legs: Sequence[int]) -> float:
        """Seconds of one launch of these."""
        first = self.legs[legs[0]]
        num_bytes = sum(self.legs[i].num_bytes for i in legs)
        return self.cost(first.wire, first.kind, num_bytes, sum(self.legs[i].num_tensors for i in legs))

    def window(self, legs: Sequence[int]) -> tuple[int, int]:
        """Between which positions a bucket may start; the first is behind the last if it cannot be."""
        return max(self.legs[i].first for i in legs), min(self.legs[i].last for i in legs)

    @cached_property
    def ancestors(self) -> tuple[frozenset[int], ...]:
        """By leg, those that it follows from without compute in between."""
        found: list[frozenset[int]] = []
        for leg in self.legs:
            found.append(frozenset(leg.after).union(*(found[i] for i in leg.after)))
        return tuple(found)

    @cached_property
    def classes(self) -> list[list[int]]:
        """Legs that may travel together as far as their keys say."""
        found: dict[object, list[int]] = {}
        for index, leg in enumerate(self.legs):
            found.setdefault(leg.key if leg.key is not None else index, []).append(index)
        return list(found.values())

    def may_join(self, legs: Sequence[int]) -> bool:
        """Whether legs may travel as one."""
        keys = {self.legs[i].key for i in legs}
        if len(legs) > 1 and (len(keys) > 1 or None in keys):
            return False
        first, last = self.window(legs)
        return first <= last and all(self.ancestors[i].isdisjoint(legs) for i in legs)

    def as_given(self) -> Itinerary:
        """What the graph does."""
        return tuple((leg.start, (index,)) for index, leg in enumerate(self.legs))


def run(course: Course, itinerary: Itinerary, *, as_given: bool = False) -> Outcome | None:
    """Run an itinerary through the clock; None if a leg would start before one that it is made of.

    Args:
        as_given: wait where the graph does, not where something needs it.
    """
    return _Run(course, itinerary, as_given).outcome()


class _Run:
    def __init__(self, course: Course, itinerary: Itinerary, as_given: bool) -> None:
        self.course, self.itinerary = course, itinerary
        self.events: list[clock.Event] = []
        self.launched: dict[int, int] = {}  # event by leg
        self.bucket_of: dict[int, int] = {}
        self.waited: set[int] = set()
        self.reached: list[int] = []  # number of events before each position
        due: dict[int, list[int]] = {}
        for index, leg in enumerate(course.legs):
            due.setdefault(leg.waited if as_given else leg.needed, []).append(index)
        self.due = due

    def outcome(self) -> Outcome | None:
        """All items and events, in order."""
        course, upcoming = self.course, 0
        for position in range(course.end + 1):
            self.reached.append(len(self.events))
            while upcoming < len(self.itinerary) and self.itinerary[upcoming][0] <= position:
                if not self._launch(upcoming):
                    return None
                upcoming += 1
            for leg in self.due.get(position, ()):
                if leg not in self.launched:
                    return None
                self._wait(leg)
            if position < course.end:
                self._compute("", position, course.seconds[position])
        return self._times()

    def _launch(self, number: int) -> bool:
        course, legs = self.course, self.itinerary[number][1]
        for earlier in dict.fromkeys(earlier for leg in legs for earlier in course.legs[leg].after):
            if earlier not in self.launched:
                return False
            self._wait(earlier)
        self._compute("packing", number, sum(course.legs[leg].packing for leg in legs))
        first = course.legs[legs[0]]
        for leg in legs:
            self.launched[leg], self.bucket_of[leg] = len(self.events), number
        seconds, link = course.bucket_seconds(legs), course.links[first.wire]
        self.events.append(clock.Launch(str(number), "", 0, None, "gather", link, first.num_bytes, seconds))
        for leg in legs if course.prompt else ():
            if course.legs[leg].needed == course.end and self.itinerary[number][0] >= course.legs[leg].not_before:
                self._wait(leg)
        return True

    def _wait(self, leg: int) -> None:
        if leg not in self.waited:
            self.waited.add(leg)
            self.events.append(clock.Wait(str(self.bucket_of[leg]), "", 0, None, self.launched[leg]))
            self._compute("unpacking", leg, self.course.legs[leg].unpacking)

    def _compute(self, name: str, order: int, seconds: float) -> None:
        if seconds > 0:
            self.events.append(clock.Call(name, "", order, None, "", seconds, True))

    def _times(self) -> Outcome:
        times = clock.run(self.events, self.course.contention)
        compute = [0.0]  # when compute is done with so many events
        starts: dict[str, tuple[float, float]] = {}
        waits: dict[str, tuple[float, float]] = {}
        exposed = 0.0
        for event, begin, end in zip(self.events, times.begins, times.ends, strict=True):
            if isinstance(event, clock.Launch):
                starts[event.name] = begin, end
            elif isinstance(event, clock.Wait):
                held = end - begin
                exposed += held
                if event.name not in waits or held > 0:
                    waits[event.name] = begin, held
            compute.append(compute[-1] if isinstance(event, clock.Launch) else end)
        numbers = [str(number) for number in range(len(self.itinerary))]
        return Outcome(
            compute[-1],
            exposed,
            tuple(starts[number] for number in numbers),
            tuple(compute[count] for count in self.reached),
            tuple(waits[number] for number in numbers),
        )
