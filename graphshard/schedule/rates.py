"""A latency and a rate per byte that no bucket of a chain beats: what bounds reckon with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from graphshard.ir.plan import CollectiveKind
from graphshard.schedule.problem import Chain, Link, Rate, Transfer

# Sizes at which a cost is asked for a rate that is below it.
_SAMPLES = 64


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
