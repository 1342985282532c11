"""Latencies and rates per byte that no bucket of a chain beats: what bounds reckon with."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from graphshard.ir.plan import CollectiveKind
from graphshard.schedule.problem import Chain, Link, Rate, Transfer

# Sizes at which a cost is asked for a rate that is below it.
_SAMPLES = 64
# Slopes that differ by less, as a fraction, are one line.
_SLOPES = 1e-9
# Halvings of an interval in which a slope changes.
_HALVINGS = 12
# By so much, as a fraction, lines are lowered, as their rounding is not that of the cost.
_ROUNDING = 1e-10


def at_once(transfers: Sequence[Transfer]) -> list[tuple[int, int]]:
    """Position and bytes of what is needed, or ready, at the same position: splitting that gains nothing."""
    groups = itertools.groupby(transfers, key=lambda t: t.at)
    return [(at, sum(t.num_bytes for t in group)) for at, group in groups]


def rate_below(chain: Chain, link: Link, kind: CollectiveKind) -> Rate:
    """What no bucket of a chain beats, if those that are needed at once travel together."""
    sizes = [num_bytes for _, num_bytes in at_once(chain.transfers(kind))] or [0]
    return _below(link.gather if kind == "gather" else link.reduce, min(sizes), sum(sizes))


def _below(cost: Callable[[int, int], float], smallest: int, largest: int) -> Rate:
    """The chord of a cost over the sizes in between, lowered where the cost sags below it.

    Costs of links are concave, the rate gets better with the size; then nothing sags.
    """
    if isinstance(cost, Rate):
        return Rate(cost.latency, cost.per_byte)
    low = cost(smallest, 1)
    if largest <= smallest:
        return Rate(low, 0.0)
    # Between its ends a concave cost lies above its chord. The chord's latency is higher than that of an empty message,
    # so bounds with many buckets are tighter.
    per_byte = (cost(largest, 1) - low) / (largest - smallest)
    growth = (largest / max(smallest, 1)) ** (1 / _SAMPLES)
    sizes = {round(max(smallest, 1) * growth**i) for i in range(_SAMPLES)}
    return Rate(min(cost(size, 1) - size * per_byte for size in {smallest, *sizes}), per_byte)


def lines_below(transfers: Sequence[Transfer], link: Link, kind: CollectiveKind) -> list[Rate]:
    """Rates the least of which is no more than the cost of any bucket of these transfers, and close to it."""
    ways = sorted({transfer.way for transfer in transfers}) or [0]
    return [line for way in ways for line in _lines([t for t in transfers if t.way == way], link.of(way), kind)]


def _lines(transfers: Sequence[Transfer], link: Link, kind: CollectiveKind) -> tuple[Rate, ...]:
    """The same of transfers with one way."""
    sizes = [t.num_bytes for t in transfers] or [0]
    return _lines_between(link.gather if kind == "gather" else link.reduce, min(sizes), sum(sizes))


@functools.lru_cache(maxsize=64)  # bounds of a problem ask hundreds of times
def _lines_between(cost: Callable[[int, int], float], smallest: int, largest: int) -> tuple[Rate, ...]:
    """Rates the least of which is no more than a cost of so many bytes, and close to it.

    Costs of links are the least of several rates, or any other concave function: the latter lies above its chords, and
    below their continuations.
    """
    single = _below(cost, smallest, largest)
    smallest = max(smallest, 1)
    if isinstance(cost, Rate) or largest <= smallest:
        return (single,)
    growth = (largest / smallest) ** (1 / _SAMPLES)
    samples = sorted({round(smallest * growth**i) for i in range(_SAMPLES + 1)} | {largest})
    for _ in range(_HALVINGS):
        slopes = _slopes(cost, samples)
        # Next to where a slope changes, by more than rounding, chords are cut in two.
        bends = [i for i, (a, b) in enumerate(itertools.pairwise(slopes), 1) if a - b > _SLOPES * a]
        samples = sorted({*samples, *((samples[i + j] + samples[i + j - 1]) // 2 for i in bends for j in (0, 1))})
    slopes = _slopes(cost, samples)
    if any(b - a > _SLOPES * a for a, b in itertools.pairwise(slopes)):  # not concave
        return (single,)
    # A chord that continues the one before is the same line.
    first = [0, *(i for i, (a, b) in enumerate(itertools.pairwise(slopes), 1) if a - b > _SLOPES * a)]
    down = 1 - _ROUNDING
    return tuple(Rate((cost(samples[i], 1) - samples[i] * slopes[i]) * down, slopes[i] * down) for i in first)


def tensor_below(transfers: Sequence[Transfer], link: Link, kind: CollectiveKind) -> float:
    """Seconds that every tensor of a bucket beyond the first takes at the least, whatever else is in it."""
    ways = sorted({transfer.way for transfer in transfers})
    if ways not in ([], [0]):
        apart = ([replace(t, way=0) for t in transfers if t.way == way] for way in ways)
        return min(tensor_below(these, link.of(way), kind) for way, these in zip(ways, apart))
    cost = link.gather if kind == "gather" else link.reduce
    if isinstance(cost, Rate):
        return cost.per_tensor
    most = max(2, sum(t.num_tensors for t in transfers))
    sizes = [t.num_bytes for t in transfers] or [0]
    return min(
        (cost(size, num) - cost(size, 1)) / (num - 1) * (1 - _ROUNDING)
        for size in (min(sizes), max(sizes), sum(sizes))
        for num in {2, min(8, most), most}
    )


def _slopes(cost: Callable[[int, int], float], sizes: Sequence[int]) -> list[float]:
    return [(cost(b, 1) - cost(a, 1)) / (b - a) for a, b in itertools.pairwise(sizes)]
