"""Chains and plans of all of many equal blocks, for a program that has few of them (`Program.few`).

    program of few -> chain of few -> chain of all -> plan of all -> plan of few -> buckets and order of few

A chain has few numbers for each block, so the chain of all blocks is made, and searches see the whole. Passes apply the
plan to the few blocks if it treats all of them alike, which is checked by unfolding what was folded.
"""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch.fx import Node

from graphshard.cost.kernels import num_bytes
from graphshard.ir.expand_repeats import RepeatExpansion
from graphshard.ir.graph import is_view
from graphshard.ir.instantiate_blocks import instantiate_all_blocks
from graphshard.ir.param_table import ParamSpec, ParamTable
from graphshard.ir.plan import Bucket, CollectiveKind, Event, Plan
from graphshard.ir.program import LASTING, Phase, Planner, Program, Slot
from graphshard.ir.repeated_block_matcher import in_order, window_starts
from graphshard.ir.repeats import TEMPLATE, BlocksDifferError, RepeatedBlocks
from graphshard.schedule.graph_facts import layout_of
from graphshard.schedule.problem import Chain, Transfer

log = logging.getLogger(__name__)

# Runs of buckets of one kind in a phase, if the kinds follow each other.
_KINDS = 3


def unfolding_of(program: Program, phase_name: str) -> RepeatExpansion:
    """Return where the groups are among the compute of a phase."""
    assert program.few is not None
    repeats, descending = program.few.repeats, phase_name == "backward"
    begins = window_starts(layout_of(program.phases[phase_name]).compute, repeats)
    in_order(begins, repeats, descending=descending)
    return RepeatExpansion(repeats, descending, {group: begins[group] for group in repeats.captured})


@dataclass(frozen=True)
class Part:
    """A transfer, with the unit and the names of its parameters."""

    transfer: Transfer
    unit: str
    params: tuple[str, ...]

    @property
    def at(self) -> int:
        return self.transfer.at

    def rows(self, params: ParamTable) -> tuple[ParamSpec, ...]:
        """Return its parameters."""
        return tuple(params[name] for name in self.params)


@dataclass(frozen=True)
class Unfolded:
    """The chain of all blocks, the positions of its items, and its transfers."""

    chain: Chain
    cuts: tuple[int, ...]
    gathers: tuple[Part, ...]
    reductions: tuple[Part, ...]


def unfolded_chain(
    chain: Chain, cuts: Sequence[int], gathers: Iterable[Part], reductions: Iterable[Part], program: Program
) -> Unfolded:
    """Return the chain of all blocks.

    Args:
        chain: of few blocks.
        cuts: positions of its items, and the end.
        gathers, reductions: its transfers.

    Raises:
        BlocksDifferError: the blocks differ.
    """
    if chain.fixed:
        raise BlocksDifferError("the model communicates")
    among = unfolding_of(program, chain.name)
    items = _items(chain, cuts, among)
    found = [tuple(items.unfold(part) if part else ()) for part in (list(gathers), list(reductions))]
    whole = replace(
        chain,
        seconds=tuple(items.spread(chain.seconds)),
        base=tuple(_base(chain.base, items, _bytes_of_group(program, chain.name, among))),
        gathers=tuple(part.transfer for part in found[0]),
        reductions=tuple(part.transfer for part in found[1]),
    )
    return Unfolded(whole, tuple(_cuts(cuts, items, among)), *found)


def _items(chain: Chain, cuts: Sequence[int], among: RepeatExpansion) -> RepeatExpansion:
    """Return where the groups are among the items of a chain.

    A window begins with the first item of its group. Where items are cut inside of groups, as at reductions alone, the
    last item of the group before may be as different as that group is: then windows begin with that item.
    """

    def items(bisect: Callable[[Sequence[int], int], int], back: int) -> RepeatExpansion:
        begins = {group: bisect(cuts, begin) - back for group, begin in among.begins.items()}
        return replace(among, begins=begins, end=len(chain.seconds) - 1)

    found = items(bisect_left, 0)
    try:
        found.spread(chain.seconds)
    except BlocksDifferError:
        return items(bisect_right, 1)
    return found


def _cuts(cuts: Sequence[int], items: RepeatExpansion, among: RepeatExpansion) -> Iterable[int]:
    for group in items.order:
        begin, length = items.begins[group], items.length
        window = [cut - among.begins[group] for cut in cuts[begin : begin + length]]
        if group == items.order[0]:
            yield from cuts[: items.begins[items.order[1]]]
        elif group == items.order[-1]:
            yield from map(among.place, cuts[begin:])
        else:
            if group == TEMPLATE or group == items.order[1]:
                template = window
            if window != template:
                raise BlocksDifferError("parameters of blocks are needed elsewhere")
            copies = (among.begin(other) + cut for other in items.missing for cut in template)
            if items.descending and group == TEMPLATE:
                yield from copies
            yield from (among.begin(group) + cut for cut in window)
            if not items.descending and group == TEMPLATE:
                yield from copies


def _base(base: Sequence[int], items: RepeatExpansion, of_group: int) -> Iterable[int]:
    """Yield bytes alive by item, which grow evenly from block to block.

    Args:
        of_group: bytes of the inputs of a group, which are alive before it.
    """
    windows = [base[items.begins[g] : items.begins[g] + items.length] for g in items.inner]
    growth = {b - a for one, other in itertools.pairwise(windows) for a, b in zip(one, other, strict=True)}
    if len(growth) != 1:
        raise BlocksDifferError("memory does not grow evenly from block to block")
    by, before = growth.pop(), of_group * len(items.missing)
    first, last = items.begins[items.inner[0]], items.begins[items.inner[-1]] + items.length
    yield from (n + before for n in base[:first])
    for index in range(len(items.inner) + len(items.missing)):
        yield from (n + before + index * by for n in windows[0])
    yield from (n + before + by * len(items.missing) for n in base[last:])


def _bytes_of_group(program: Program, phase_name: str, among: RepeatExpansion) -> int:
    """Return the bytes of the inputs of one of the equal groups, and of inputs that only other phases have."""
    assert program.few is not None
    phase, total = program.phases[phase_name], 0
    index = layout_of(phase).index
    for node, slot in _inputs(phase, program.few):
        if slot.kind not in LASTING:
            stack, last = [node], -1
            while stack:
                for user in stack.pop().users:
                    last = max(last, index.get(user, -1))
                    if user not in index or is_view(user):  # or it gathers a piece
                        stack.append(user)
            if last < among.begins[among.inner[0]]:
                raise BlocksDifferError(f"{node} is not read by a block")
        total += num_bytes(node)
    own = set(phase.inputs)
    beside = {
        slot: num_bytes(node)
        for other in program.phases.values()
        for node, slot in _inputs(other, program.few)
        if slot.kind in LASTING and slot not in own
    }
    return total + sum(beside.values())


def _inputs(phase: Phase, few: RepeatedBlocks) -> Iterator[tuple[Node, Slot]]:
    """Yield the inputs of the group of which the groups left out are copies."""
    for node, slot in phase.slot_of().items():
        if few.is_of_template(slot.name, saved=slot.kind == "saved" and slot.of is None):
            yield node, slot


Of = tuple[CollectiveKind, str, str]


def unfolded_positions(at: dict[Of, int], end: int, program: Program, phase_name: str) -> tuple[dict[Of, int], int]:
    """Return where collectives are needed or ready among the compute of all blocks, and its end.

    Args:
        at: the same of few blocks, by kind, axis and first parameter.

    Raises:
        BlocksDifferError: windows of blocks differ.
    """
    assert program.few is not None
    among, repeats = unfolding_of(program, phase_name), program.few.repeats
    found: dict[Of, int] = {}
    for (kind, axis, param), position in at.items():
        place = repeats.place_of(param)
        if place is None or place[0] in (0, repeats.groups - 1):
            found[kind, axis, param] = among.place(position)
            continue
        groups = [place[0], *(repeats.missing if place[0] == TEMPLATE else ())]
        begin = among.begins[place[0]]
        found |= {(kind, axis, repeats.name_at(g, param)): among.begin(g) + position - begin for g in groups}
    return found, among.place(end)


# --- plans -------------------------------------------------------------------------------------------------------


def planned_in_short(program: Program, of_few: Planner, of_all: Planner) -> Plan:
    """Return the plan of all blocks, made with `of_few` of few blocks, or with `of_all` where few do not tell it."""
    if program.few is None:
        return of_all(program)
    try:
        return of_few(program)
    except BlocksDifferError as error:
        log.info("planned for every block: %s", error)
        return of_all(instantiate_all_blocks(program))


def unfolded_plan(plan: Plan, program: Program) -> Plan:
    """Return the plan of all blocks for the plan of few.

    Raises:
        BlocksDifferError: it treats blocks differently.
    """
    return _moved(plan, program, fold=False)


def folded_plan(plan: Plan, program: Program) -> Plan:
    """Return the plan of few blocks for the plan of all.

    Raises:
        BlocksDifferError: it treats blocks differently.
    """
    found = _moved(plan, program, fold=True)
    again = unfolded_plan(found, program)
    if again != plan:
        raise BlocksDifferError("the plan treats blocks differently")
    return found


def _moved(plan: Plan, program: Program, *, fold: bool) -> Plan:
    assert program.few is not None
    buckets: list[Bucket] = []
    events: dict[str, tuple[Event, ...]] = {}
    for name in program.phases:
        among = unfolding_of(program, name)
        if name == "backward":  # where two reductions are under way after the first group
            among = replace(among, ends=2)
        of_phase = [bucket for bucket in plan.buckets if bucket.phase == name]
        buckets += _buckets(of_phase, replace(among, begins={}), fold=fold)
        given = plan.events.get(name, ())
        events[name] = tuple(among.fold(given) if fold else among.unfold(given))
    return replace(plan, buckets=tuple(buckets), events=events)


def unfolded_buckets(buckets: list[Bucket], program: Program, phase_name: str) -> list[Bucket]:
    """Return the buckets of a phase of all blocks."""
    return _buckets(buckets, replace(unfolding_of(program, phase_name), begins={}, ends=2), fold=False)


def _buckets(buckets: list[Bucket], by_name: RepeatExpansion, *, fold: bool) -> list[Bucket]:
    found: list[Bucket] = []
    for part in _parts(buckets):
        if any(map(by_name.few.named_groups, part)):
            part = by_name.fold(part) if fold else by_name.unfold(part)
        found += part
    return found


def _parts(buckets: list[Bucket]) -> list[list[Bucket]]:
    """Return the buckets by kind, if the kinds follow each other; else all as they are."""
    parts = [list(part) for _, part in itertools.groupby(buckets, lambda bucket: bucket.kind)]
    return parts if len(parts) <= _KINDS else [buckets]
