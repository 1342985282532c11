"""What the model itself communicates: it takes the link and holds compute up, and no schedule moves it.

compute    item 0 |        | item 1          at once: item 1 starts with a collective, and waits for it
channel      a..a   own.own                  it has queued behind a gather that was launched before
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphshard.cost.scalars import slowed


@dataclass(frozen=True)
class Own:
    """A collective of the model's own.

    Attributes:
        at: the item that it starts with.
        until: the item that waits for it; `at` itself if it runs at once.
        seconds: on its channel.
        channel: index of that.
        name: what it is.
    """

    at: int
    until: int
    seconds: float
    channel: int = 0
    name: str = ""

    @property
    def at_once(self) -> bool:
        """Whether compute waits for it where it starts."""
        return self.until == self.at


@dataclass
class Clocks:
    """When compute and the channels have come to where they are; `flying` are ends by index of what has not ended."""

    compute: float
    channels: list[float]
    flying: dict[int, float]

    def settle(self, index: int) -> None:
        """Compute waits for one that was started."""
        self.compute = max(self.compute, self.flying.pop(index))

    def start(self, index: int, own: Own, contention: float) -> tuple[float, float]:
        """Launch one, and wait if it runs at once; when it begins and ends."""
        begin = max(self.compute, self.channels[own.channel])
        seconds = own.seconds
        if own.at_once:  # like compute, it is slower beside what others send
            seconds = slowed(seconds, self.channels[1 - own.channel] - begin, contention)
        end = self.channels[own.channel] = self.flying[index] = begin + seconds
        if own.at_once:
            self.settle(index)
        return begin, end


def pass_own(
    starting: Sequence[tuple[int, Own]],
    waited: Sequence[int],
    contention: float,
    compute: float,
    channels: Sequence[float],
    flying: Sequence[tuple[int, float]] = (),
) -> tuple[float, tuple[float, float], tuple[tuple[int, float], ...]]:
    """Clocks behind what the model communicates at the begin of an item, see `Chain.own_of`."""
    clocks = Clocks(compute, list(channels), dict(flying))
    for index in waited:
        clocks.settle(index)
    for index, own in starting:
        clocks.start(index, own, contention)
    return clocks.compute, (clocks.channels[0], clocks.channels[1]), tuple(clocks.flying.items())
