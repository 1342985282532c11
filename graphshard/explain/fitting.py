"""The largest batch and the smallest mesh that fit into memory: guessed from a straight line, and then predicted.

Memory grows with the batch in a straight line, and with the share of the state that a rank has: a + b / ranks. Two
predictions give the line. A third one, at what should fit just so, is the answer, or corrects the line.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from graphshard.explain.answers import Outcome
from graphshard.ir.mesh import MOST_RANKS

# Predictions until the answer is what is known to fit; and how many times the batch is tried at most.
_TRIES, _TIMES = 6, 1024


@dataclass(frozen=True)
class Found:
    """What fits, or why it is not known."""

    outcome: Outcome | None
    why: str = ""


def largest(at: Callable[[int], Outcome | str], batch: int) -> Found:
    """The largest batch that fits.

    Args:
        at: predicts a batch, or says why it cannot be.
        batch: to begin with.
    """
    most = batch * _TIMES
    known: dict[int, Outcome] = {}
    fits, too_many, guess = 0, most + 1, batch
    for _ in range(_TRIES):
        found = at(guess)
        if isinstance(found, str):
            return Found(known.get(fits), f"batch {guess}: {found}")
        known[guess] = found
        if found.fits:
            fits = max(fits, guess)
        else:
            too_many = min(too_many, guess)
        if too_many - fits == 1:
            break
        if len(known) == 1:
            guess = 2 * batch if found.fits else batch // 2
            continue
        line = _line(known, room=found.memory_capacity_bytes)
        guess = min(max(line, fits), too_many - 1)  # between what is known
        if guess == fits:  # the next one would not fit, by the line
            too_many = fits + 1
            break
    if not fits:
        return Found(None, "" if too_many == 1 else f"batch {too_many} does not fit")
    if fits == most:
        return Found(known[fits], f"more than {most} were not tried")
    return Found(known[fits], "" if too_many - fits == 1 else f"up to {too_many - 1} may fit, which were not tried")


def _line(known: dict[int, Outcome], *, room: float) -> int:
    """The largest batch that fits by the line through the two predictions that are closest to the room."""
    near = sorted(known, key=lambda batch: abs(known[batch].peak_memory_bytes - room))[:2]
    low, high = sorted(near)
    slope = (known[high].peak_memory_bytes - known[low].peak_memory_bytes) / (high - low)
    if slope <= 0:
        return max(known) * _TIMES
    return math.floor(low + (room - known[low].peak_memory_bytes) / slope)


def smallest(at: Callable[[int], Outcome | str], ranks: int) -> Found:
    """The smallest number of ranks that fits, by halves or doubles of the given one.

    Args:
        at: predicts a number of ranks, or says why it cannot be.
        ranks: to begin with.
    """
    found = at(ranks)
    if isinstance(found, str):
        return Found(None, found)
    if found.fits:
        halves = [ranks >> power for power in range(1, ranks.bit_length()) if ranks % (1 << power) == 0]
        # Of those that fit by the line from the smallest on: the first is the answer, if the line is right.
        for count in reversed([half for half in halves if _held(found, half) <= found.memory_capacity_bytes]):
            fewer = at(count)
            if not isinstance(fewer, str) and fewer.fits:
                return Found(fewer)
        return Found(found)
    for _ in range(_TRIES):
        count = _enough(found)
        if count > MOST_RANKS:
            break
        found = at(count)
        if isinstance(found, str) or found.fits:
            return Found(None, found) if isinstance(found, str) else Found(found)
    return Found(None)


def _held(known: Outcome, ranks: int) -> float:
    """What a rank holds on so many, by the line."""
    return known.peak_memory_bytes + known.state_bytes * (known.num_ranks / ranks - 1)


def _enough(known: Outcome) -> int:
    """A power of two times the ranks, on which it fits by the line; more than there may be, if that is nowhere."""
    room = known.memory_capacity_bytes - (known.peak_memory_bytes - known.state_bytes)
    if room <= 0:
        return MOST_RANKS + 1
    return int(known.num_ranks * 2 ** max(1, math.ceil(math.log2(known.state_bytes / room))))
