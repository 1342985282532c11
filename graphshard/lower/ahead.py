"""Gathers at the head of an executor, taken out of its lines, so that they can be started before it runs.

      (c,) = self.region_0([w])                         * (g,) = begun[0]([w])  # start gather embed
      g = all_gather(c)  # start gather embed             (m,) = self.region_1([x])
      (m,) = self.region_1([x])                           f = wait_tensor(g)  # wait gather embed
      f = wait_tensor(g)  # wait gather embed

    begun[0]: (c,) = self.region_0([w])
              g = all_gather(c)

These are the gathers that are started before anything is waited for, so full parameters that live at once are those
that do so anyway. A gather is one of them if it reads shards alone, and nothing else reads what is made on the way.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from graphshard.lower.lines import Begin, Call, Line, Operator, Return, Start, Take, Variable, Wait


@dataclass(frozen=True)
class Gather:
    """A gather, by itself.

    Attributes:
        bucket: the one of the plan that travels.
        sources: places of shards among the inputs of the executor; the code takes them in this order.
        start: lines that start it, and return `num_results` values that are on their way, and then what is sent.
        sent: lines that make what is sent, and nothing else.
    """

    bucket: str
    sources: tuple[int, ...]
    start: tuple[Line, ...]
    sent: tuple[Line, ...]
    num_results: int


def gathers_at_the_head(lines: Sequence[Line], shards: Collection[int]) -> tuple[list[Line], list[Gather]]:
    """The lines without the gathers at the head, and these; what lines free is to be found anew.

    Args:
        shards: places among the inputs of shards, or parts of them.
    """
    given = lines[0].results
    places = {given[place]: place for place in shards}
    made = {name: index for index, line in enumerate(lines) for name in line.results}
    readers: dict[Variable, set[int]] = {}
    for index, line in enumerate(lines):
        for name in line.reads:
            readers.setdefault(name, set()).add(index)
    end = next((index for index, line in enumerate(lines) if isinstance(line, Wait)), len(lines))
    gathers: list[Gather] = []
    found: dict[int, Line] = {}
    gone: set[int] = set()
    for index, line in enumerate(lines[:end]):
        if not isinstance(line, Start):
            continue
        before = _made_by(index, lines, made, frozenset(places))
        if before is None:
            continue
        on_the_way = {name for each in before for name in lines[each].results}
        if any(readers.get(name, set()) - {*before, index} for name in on_the_way):
            continue
        body = [lines[each] for each in sorted(before)]
        read = tuple(dict.fromkeys(name for each in (*body, line) for name in each.reads if name not in on_the_way))
        take = Take(results=read)
        start = (take, *body, line, Return(values=line.results + line.reads))
        sent = (take, *body, Return(values=line.reads))
        found[index] = Begin(results=line.results, inputs=read, number=len(gathers), where=line.bucket)
        sources = tuple(places[name] for name in read)
        gathers.append(Gather(line.bucket, sources, start, sent, len(line.results)))
        gone.update(before)
    return [found.get(index, line) for index, line in enumerate(lines) if index not in gone], gathers


def _made_by(
    index: int, lines: Sequence[Line], made: dict[Variable, int], shards: frozenset[Variable]
) -> frozenset[int] | None:
    """The lines that make what a line reads; None if they read more than shards, or communicate."""
    found: set[int] = set()
    left = list(lines[index].reads)
    while left:
        name = left.pop()
        if name in shards or made[name] in found:
            continue
        line = lines[made[name]]
        if not (isinstance(line, Call) or type(line) is Operator):
            return None
        found.add(made[name])
        left += line.reads
    return frozenset(found)
