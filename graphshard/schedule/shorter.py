"""A problem with fewer of many equal blocks, which says whether a search of all of them pays.

    items    embedding | 0 | 1 | 2 | 3 ... N-4 | N-3 | N-2 | N-1 | head
    shorter  embedding | 0 | 1 | 2 |             N-3 | N-2 | N-1 | head

What a schedule gains over another is something at the ends, and something for each block, as long as its buckets span
no more blocks than are left. If it gains g in the shorter one, which has a share s of the blocks, it gains g / s in all
at the most. Bytes that are alive are those of the blocks that are left, so a limit of memory is as tight.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from graphshard.schedule.problem import Chain, Problem, Transfer

# Blocks that are left, half of them at either end.
BLOCKS = 6
# Items of a block that are looked for at the most.
_LONGEST = 64


@dataclass(frozen=True)
class Shorter:
    """A problem with fewer blocks.

    Attributes:
        share: of the blocks that it has, in the chain that has the least of them.
        gone: by chain how many it has not.
    """

    problem: Problem
    share: float
    gone: dict[str, int]


def shorter(problem: Problem) -> Shorter | None:
    """The problem with fewer blocks; None if it has not twice as many, or a choice what stays gathered."""
    if problem.keepable:
        return None
    found = [_shorter(chain) for chain in problem.chains if chain.gathers or chain.reductions]
    gone = {chain.name: blocks for chain, blocks in found if blocks}
    if not gone:
        return None
    share = min(BLOCKS / (BLOCKS + blocks) for blocks in gone.values())
    return Shorter(replace(problem, chains=tuple(chain for chain, _ in found)), share, gone)


def _shorter(chain: Chain) -> tuple[Chain, int]:
    """A chain with fewer blocks, and how many are gone."""
    first, length, blocks = _blocks(chain)
    if blocks < 2 * BLOCKS or chain.own:
        return chain, 0
    start, gone = first + BLOCKS // 2 * length, (blocks - BLOCKS) * length
    end = start + gone

    def moved(position: int) -> int:
        return position - gone if position >= end else position

    gathers = [replace(g, at=moved(g.at), last=moved(g.last)) for g in chain.gathers if not start <= g.at < end]
    reductions = [replace(r, at=moved(r.at)) for r in chain.reductions if not start < r.at <= end]
    made = replace(
        chain,
        seconds=(*chain.seconds[:start], *chain.seconds[end:]),
        base=(*chain.base[:start], *chain.base[end:]),
        # What a block that is gone read last of the one before it, the next one that is left reads in its place.
        gathers=tuple(replace(g, last=max(g.at, min(g.last, len(chain.seconds) - gone - 1))) for g in gathers),
        reductions=tuple(reductions),
    )
    return made, blocks - BLOCKS


def _blocks(chain: Chain) -> tuple[int, int, int]:
    """First item, items of a block, and number of blocks of the longest run of equal ones."""
    known: dict[Hashable, int] = {}
    kinds = np.array([known.setdefault(fact, len(known)) for fact in _facts(chain)])
    best, most = (0, len(kinds), 1), 0
    for length in range(1, min(_LONGEST, len(kinds) // 2) + 1):
        differ = np.flatnonzero(kinds[length:] != kinds[:-length])
        cuts = np.concatenate(([-1], differ, [len(kinds) - length]))
        at = int(np.diff(cuts).argmax())
        first, run = int(cuts[at]) + 1, int(cuts[at + 1] - cuts[at]) - 1
        blocks = run // length + 1
        if (blocks - 1) * length > most:
            best, most = (first, length, blocks), (blocks - 1) * length
    return best


def _facts(chain: Chain) -> list[Hashable]:
    """What is to be equal of each item: its seconds, and what it waits for and releases."""
    gathers: list[list[Hashable]] = [[] for _ in chain.seconds]
    reductions: list[list[Hashable]] = [[] for _ in chain.seconds]
    for gather in chain.gathers:
        gathers[gather.at].append((*_about(gather), gather.last - gather.at))
    for reduction in chain.reductions:
        reductions[reduction.at - 1].append(_about(reduction))
    return [
        (seconds, tuple(before), tuple(behind)) for seconds, before, behind in zip(chain.seconds, gathers, reductions)
    ]


def _about(transfer: Transfer) -> Sequence[Hashable]:
    sizes = transfer.num_bytes, transfer.num_tensors, transfer.num_small, transfer.small_bytes
    return (*sizes, transfer.packed, transfer.start is None, transfer.way)
