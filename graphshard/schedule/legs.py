"""What is certain of reductions with two legs, a reduce-scatter and the all-reduce of what it made.

A step with both legs takes no less than one with either of them alone: leaving out a collective makes no schedule
longer. If they share a channel, it takes no less than with reductions that are as long as both: of every reduction all
of that is work of the channel behind the position at which its gradients are ready.
"""

from __future__ import annotations

from collections.abc import Iterator

from graphshard.schedule.deadlines import jobs
from graphshard.schedule.problem import Chain, Link


def one_legged(chain: Chain, link: Link) -> Iterator[Link]:
    """Links without second legs on which no schedule takes longer."""
    yield link.first_legs
    if chain.reductions:
        same = link.channel("all_reduce") == link.channel("reduce")
        yield link.both_legs if same else link.second_legs


def least_tail(chain: Chain, link: Link) -> float:
    """Seconds until the last second leg has ended, at the least.

    Behind a gradient, and the gathers that it needs, comes its first leg, and then the second one of it, and of all
    that are ready later.
    """
    if link.all_reduce is None or not chain.reductions:
        return 0.0
    _, second = jobs(chain, link.second_legs)
    return second.shortest
