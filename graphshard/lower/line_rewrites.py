"""Rewrites of an executor's lines; frees are recomputed when code is made of the result (`Executor.function`).

`hand_over_gradients` calls the consumer of a gradient where it has arrived, while others are on their way:

      s = wait_tensor(r)  # wait reduce layers.1        s = wait_tensor(r)  # wait reduce layers.1
                                                      * arrived(0, [s])  # update layers.1
      (y,) = self.region_2([g])                         (y,) = self.region_2([g])
      return (s, y)                                     return (None, y)

`take_out_gathers` lets the gathers at the head be started before the executor runs:

      (c,) = self.region_0([w])                       * (g,) = begun[0]([w])  # start gather embed
      g = all_gather(c)  # start gather embed           (m,) = self.region_1([x])
      (m,) = self.region_1([x])                         f = wait_tensor(g)  # wait gather embed
      f = wait_tensor(g)  # wait gather embed

`take_out_runs` replaces runs of regions by what launches them all at once, such as a CUDA graph:

      g = all_gather(w)  # start gather layers.1        g = all_gather(w)  # start gather layers.1
      (y,) = self.region_0([x, f])                    * (z,) = replays[0]([x, f])  # layers.0
      a = view(y, [8]);  y = None                       f = wait_tensor(g)  # wait gather layers.1
      (z,) = self.region_1([a])
      f = wait_tensor(g)  # wait gather layers.1
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from graphshard.lower.executor import (
    Arrive,
    Begin,
    CallLine,
    Line,
    Operator,
    Replay,
    Return,
    Start,
    Take,
    Variable,
    WaitLine,
)
from graphshard.torch_compat.torch_ops import OpOverload

# --- gradients ---------------------------------------------------------------------------------------------------

# For each group of gradients their places among what the executor returns.
Groups = list[tuple[int, ...]]


class Taken(NamedTuple):
    """A gradient to hand over.

    Attributes:
        place: among the results of the executor.
        sources: places among its inputs of what shares memory with the parameter's shard.
        gathered: whether regions compute with the gathered parameter, and not with the shard.
    """

    place: int
    sources: tuple[int, ...]
    gathered: bool = True


def _apart(groups: Groups) -> Sequence[int]:
    return [1] * len(groups)


def hand_over_gradients(
    lines: Sequence[Line], taken: Sequence[Taken], join: Callable[[Groups], Sequence[int]] = _apart
) -> tuple[list[Line], Groups]:
    """Insert lines that hand gradients over, instead of returning them; gradients of a bucket together.

    `join` is given the groups before the last launch, and the others but the last one, which nothing hides. It returns
    how many of them at a time wait for the last of them.

    The consumer of a gradient may write to the parameter's shard. So it is called after the last line that may read the
    shard, such as the wait for what gathers it again. What is waited for shares memory with nothing, and views do not
    leave a region; a parameter that is not gathered goes into regions itself, whose results may share its memory.
    A result that is returned twice, or that no line makes, is returned as before.
    """
    end = lines[-1]
    assert isinstance(end, Return)
    values = list(end.values)
    counts = Counter(value for value in values if isinstance(value, Variable))
    chosen = [t for t in taken if isinstance(values[t.place], Variable) and counts[values[t.place]] == 1]
    body, made = lines[:-1], _makers(lines)
    due: dict[int, list[int]] = {}
    for one, last_read in zip(chosen, _last_reads(lines, chosen)):
        after = min(max(made[values[one.place]], last_read), len(body) - 1)
        due.setdefault(_after_launch(body, after), []).append(one.place)
    launched = max((index for index, line in enumerate(body) if isinstance(line, Start)), default=0)
    order = sorted(due)[:-1]
    for joined in ([i for i in order if i < launched], [i for i in order if i >= launched]):
        remaining = iter(joined)
        for count in join([tuple(due[index]) for index in joined]):
            *others, last = itertools.islice(remaining, count)
            due[last] = [place for index in (*others, last) for place in due.pop(index)]
    found: list[Line] = []
    groups: Groups = []
    bucket = ""
    for index, line in enumerate(body):
        found.append(line)
        bucket = line.bucket if isinstance(line, WaitLine) else bucket
        if index in due:
            given = tuple(values[place] for place in due[index])
            found.append(Arrive(number=len(groups), inputs=given, where=bucket))
            groups.append(tuple(due[index]))
    gone = {place for group in groups for place in group}
    left = tuple(None if place in gone else value for place, value in enumerate(values))
    return [*found, Return(values=left)], groups


def _makers(lines: Sequence[Line]) -> dict[Variable, int]:
    return {name: index for index, line in enumerate(lines) for name in line.results}


def _last_reads(lines: Sequence[Line], taken: Sequence[Taken]) -> list[int]:
    """Find for each gradient the last line that may read its parameter's shard; 0 if none does."""
    names = lines[0].results
    shared: dict[Variable, frozenset[int]] = {}
    not_gathered = frozenset(number for number, one in enumerate(taken) if not one.gathered)
    for number, one in enumerate(taken):
        for source in one.sources:
            shared[names[source]] = shared.get(names[source], frozenset()) | {number}
    last = [0] * len(taken)
    for index, line in enumerate(lines):
        read = frozenset[int]().union(*(shared[name] for name in line.reads if name in shared))
        for number in read:
            last[number] = index
        if isinstance(line, CallLine):
            read &= not_gathered
        if read and not isinstance(line, WaitLine):
            shared.update((name, read) for name in line.results)
    return last


def _after_launch(lines: Sequence[Line], index: int) -> int:
    """Find the line after which to hand over what has arrived at `index`.

    The other tensors of the bucket come first, and the launch of a reduction whose gradients are only to be packed.
    """
    bucket = next((line.bucket for line in reversed(lines[: index + 1]) if isinstance(line, WaitLine)), "")
    end = index
    for number in range(index + 1, len(lines)):
        line = lines[number]
        if isinstance(line, Start):
            return number
        packs = isinstance(line, CallLine) and not line.where
        of_bucket = isinstance(line, WaitLine) and line.bucket == bucket
        if not (packs or of_bucket or type(line) is Operator):
            break
        if end == number - 1 and not packs:
            end = number
    return end


# --- gathers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FirstGather:
    """A gather that was taken out.

    Attributes:
        sources: places of shards among the inputs of the executor; the code takes them in this order.
        start: lines that start it, and return `num_results` values that are on their way, and then what is sent.
        sent: lines that make what is sent, and nothing else.
    """

    sources: tuple[int, ...]
    start: tuple[Line, ...]
    sent: tuple[Line, ...]
    num_results: int


def take_out_gathers(lines: Sequence[Line], shards: Collection[int]) -> tuple[list[Line], list[FirstGather]]:
    """Take out the gathers that are started before the first wait, so no more parameters are gathered at a time.

    A gather is taken out if it reads only inputs at places of shards, and nothing else reads intermediate values.
    """
    places = {lines[0].results[place]: place for place in shards}
    made = _makers(lines)
    readers: dict[Variable, set[int]] = {}
    for index, line in enumerate(lines):
        for name in line.reads:
            readers.setdefault(name, set()).add(index)
    end = next((index for index, line in enumerate(lines) if isinstance(line, WaitLine)), len(lines))
    gathers: list[FirstGather] = []
    begins: dict[int, Line] = {}
    gone: set[int] = set()
    for index, line in enumerate(lines[:end]):
        before = _makers_from_shards(line, lines, made, places) if isinstance(line, Start) else None
        if before is None:
            continue
        body = [lines[each] for each in sorted(before)]
        intermediate = {name for each in body for name in each.results}
        if any(readers.get(name, set()) - {*before, index} for name in intermediate):
            continue
        read = tuple(dict.fromkeys(name for each in (*body, line) for name in each.reads if name not in intermediate))
        start = (Take(results=read), *body, line, Return(values=line.results + line.reads))
        sent = (Take(results=read), *body, Return(values=line.reads))
        assert isinstance(line, Start)
        begins[index] = Begin(results=line.results, inputs=read, number=len(gathers), where=line.bucket)
        gathers.append(FirstGather(tuple(places[name] for name in read), start, sent, len(line.results)))
        gone |= before
    return [begins.get(index, line) for index, line in enumerate(lines) if index not in gone], gathers


def _makers_from_shards(
    line: Line, lines: Sequence[Line], made: dict[Variable, int], shards: Collection[Variable]
) -> set[int] | None:
    """Find the lines that make what a line reads; None if they read more than shards, or communicate."""
    found: set[int] = set()
    left = list(line.reads)
    while left:
        name = left.pop()
        if name in shards or made[name] in found:
            continue
        maker = lines[made[name]]
        if not (isinstance(maker, CallLine) or type(maker) is Operator):
            return None
        found.add(made[name])
        left += maker.reads
    return found


# --- runs of regions ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Lines that are launched together: regions, and views and sizes between them.

    Attributes:
        lines: a separate function, from inputs to results; what only the run reads does not leave it.
        where: the modules that they compute.
        lasting: for each input, whether it is one of the executor's, which may be at the same place in every step.
    """

    lines: tuple[Line, ...]
    where: str
    lasting: tuple[bool, ...]


# Of lines from a region to a region, the values read after them, and the executor's inputs, the ranges to be runs.
Choose = Callable[[Sequence[Line], Set[Variable], Set[Variable]], Sequence[range]]


def take_out_runs(
    lines: Sequence[Line], wants: Callable[[CallLine], bool], choose: Choose
) -> tuple[list[Line], list[Run]]:
    """Replace runs of regions by single lines: `wants` says which regions may be part, and `choose` which are."""
    found: list[Line] = []
    runs: list[Run] = []
    own = frozenset(name for line in lines if isinstance(line, Take) for name in line.results)

    def fits(line: Line) -> bool:
        return wants(line) if isinstance(line, CallLine) else type(line) is Operator and _is_view(line.target)

    start = 0
    for is_stretch, group in itertools.groupby(range(len(lines)), lambda index: fits(lines[index])):
        stretch = list(group)
        calls = [index for index in stretch if is_stretch and isinstance(lines[index], CallLine)]
        if calls:
            first, after = calls[0], calls[-1] + 1
            kept = {name for line in lines[after:] for name in line.reads}
            for chosen in choose(lines[first:after], kept, own):
                begin, until = first + chosen.start, first + chosen.stop
                line, run = _run(len(runs), lines[begin:until], lines[until:], own)
                found += [*lines[start:begin], line]
                runs.append(run)
                start = until
    return found + list(lines[start:]), runs


def _is_view(target: Any) -> bool:
    """Return whether an operator between regions computes nothing, or a size."""
    if not isinstance(target, OpOverload):
        return target is operator.getitem
    shares = any(result.alias_info is not None for result in target._schema.returns)
    return target.namespace == "aten" and shares and not target._schema.is_mutable


def _run(number: int, body: Sequence[Line], after: Sequence[Line], own: frozenset[Variable]) -> tuple[Replay, Run]:
    made = list(dict.fromkeys(name for line in body for name in line.results))
    inputs = tuple(dict.fromkeys(name for line in body for name in line.reads if name not in made))
    read = {name for line in after for name in line.reads}
    results = tuple(name for name in made if name in read)
    where = ", ".join(dict.fromkeys(line.where for line in body if isinstance(line, CallLine) and line.where))
    lines = (Take(results=inputs), *body, Return(values=results))
    line = Replay(number=number, results=results, inputs=inputs, where=where)
    return line, Run(lines, where, tuple(name in own for name in inputs))
