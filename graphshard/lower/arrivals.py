"""Hand gradients over where they have arrived, in the lines of an executor, while others are still on their way.

      s = wait_tensor(r)  # wait reduce layers.1        s = wait_tensor(r)  # wait reduce layers.1
                                                      * arrived(0, [s])  # update layers.1
      (y,) = self.region_2([g])                         (y,) = self.region_2([g])
      return (s, y)                                     return (None, y)

Whoever takes a gradient may write to the parameter's shard. So it is handed over behind the last line that may read the
shard, such as the wait for what gathers it again. What is waited for shares memory with nothing, and views do not leave
a region. A parameter that nobody gathers goes into regions itself; there nothing is taken for granted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from graphshard.lower.lines import Arrive, Call, Line, Operator, Return, Start, Variable, Wait

# Is given the number of a group and its gradients.
Arrived = Callable[[int, list[torch.Tensor]], Any]
# For each group the places of its gradients among what the executor returns.
Groups = list[tuple[int, ...]]


class Taken(NamedTuple):
    """A gradient to hand over.

    Attributes:
        place: among the results of the executor.
        sources: places among its inputs of what shares memory with the parameter's shard.
        gathered: whether regions compute with what was gathered of it, and not with the shard.
    """

    place: int
    sources: tuple[int, ...]
    gathered: bool = True


def with_arrivals(lines: Sequence[Line], taken: Sequence[Taken]) -> tuple[list[Line], Groups]:
    """The lines with others between them that hand gradients over; what lines free is to be found anew.

    A result that is returned twice, or none that a line makes, stays where it is. Gradients that one bucket brings are
    handed over together.
    """
    end = lines[-1]
    assert isinstance(end, Return)
    values = list(end.values)
    counts = Counter(value for value in values if isinstance(value, Variable))
    chosen = [t for t in taken if isinstance(values[t.place], Variable) and counts[values[t.place]] == 1]
    lines = _early(lines, [values[one.place] for one in chosen])
    body = lines[:-1]
    made = {name: index for index, line in enumerate(lines) for name in line.results}
    free_from = _last_reads(lines, chosen)
    due: dict[int, list[int]] = {}
    for one, free in zip(chosen, free_from):
        after = min(max(made[values[one.place]], free), len(body) - 1)
        due.setdefault(_behind_launch(body, after), []).append(one.place)
    found: list[Line] = []
    groups: Groups = []
    bucket = ""
    for index, line in enumerate(body):
        found.append(line)
        bucket = line.bucket if isinstance(line, Wait) else bucket
        if index in due:
            given = tuple(values[place] for place in due[index])
            found.append(Arrive(number=len(groups), values=given, where=bucket))
            groups.append(tuple(due[index]))
    for place in (place for group in groups for place in group):
        values[place] = None
    return [*found, Return(values=tuple(values))], groups


def _early(lines: Sequence[Line], values: Sequence[Variable]) -> list[Line]:
    """The lines with the operators that values are made by, such as views of a packed bucket, as early as can be.

    An executor has them where the values are first read, which is at its end.
    """
    made = {name: index for index, line in enumerate(lines) for name in line.results}
    early: set[int] = set()
    left = [made[value] for value in values]
    while left:
        index = left.pop()
        if type(lines[index]) is Operator and index not in early:
            early.add(index)
            left += [made[name] for name in lines[index].reads]
    behind: dict[int, list[Line]] = {}
    place = list(range(len(lines)))
    for index in sorted(early):
        place[index] = max((place[made[name]] for name in lines[index].reads), default=index)
        behind.setdefault(place[index], []).append(lines[index])
    found: list[Line] = []
    for index, line in enumerate(lines):
        found += [line] if index not in early else []
        found += behind.get(index, [])
    return found


def _last_reads(lines: Sequence[Line], taken: Sequence[Taken]) -> list[int]:
    """For each gradient the last line that may read its parameter's shard; 0 if none does."""
    names = lines[0].results
    shared: dict[Variable, frozenset[int]] = {}
    whole = frozenset(number for number, one in enumerate(taken) if not one.gathered)
    for number, one in enumerate(taken):
        for source in one.sources:
            shared[names[source]] = shared.get(names[source], frozenset()) | {number}
    last = [0] * len(taken)
    for index, line in enumerate(lines):
        read = frozenset[int]().union(*(shared[name] for name in line.reads if name in shared))
        for number in read:
            last[number] = index
        made_of = frozenset() if isinstance(line, Wait) else read & whole if isinstance(line, Call) else read
        if made_of:
            shared.update((name, made_of) for name in line.results)
    return last


def _behind_launch(lines: Sequence[Line], index: int) -> int:
    """Behind which line to hand over what has arrived at a given one: the bucket's others, and what is packed next.

    A reduction whose gradients are only to be packed is launched first, so that it is under way meanwhile.
    """
    bucket = next((line.bucket for line in reversed(lines[: index + 1]) if isinstance(line, Wait)), "")
    end = index
    for number in range(index + 1, len(lines)):
        line = lines[number]
        if isinstance(line, Start):
            return number
        packs = isinstance(line, Call) and not line.where
        of_bucket = isinstance(line, Wait) and line.bucket == bucket
        if not (packs or of_bucket or type(line) is Operator):
            break
        if end == number - 1 and not packs:
            end = number
    return end
