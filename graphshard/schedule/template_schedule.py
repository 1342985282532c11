"""Chains and plans of all of many equal blocks, for a program that has few of them (`Program.few`).

    program of few -> chain of few -> chain of all -> plan of all -> plan of few -> buckets and order of few

A chain has few numbers for each block, so the chain of all blocks is made, and searches see the whole. Passes apply the
plan to the few blocks if it treats all of them alike, which is checked by unfolding what was folded.
"""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from graphshard.cost.kernels import num_bytes
from graphshard.ir.graph import is_view
from graphshard.ir.instantiate_blocks import instantiate_all_blocks
from graphshard.ir.plan import Bucket, CollectiveKind, Event, Plan
from graphshard.ir.program import LASTING, Planner, Program
from graphshard.ir.repeat_windows import RepeatExpansion, in_order, named_groups, window_starts
from graphshard.ir.repeats import BlocksDifferError
from graphshard.schedule.graph_facts import layout_of
from graphshard.schedule.problem import Chain, Transfer

log = logging.getLogger(__name__)

# Runs of buckets of one kind in a phase, if the kinds follow each other.
_KINDS = 3

# A transfer, with the unit and the names of its parameters.
Part = tuple[Transfer, str, tuple[str, ...]]


def unfolding_of(program: Program, phase_name: str) -> RepeatExpansion:
    """Return where the groups are among the compute of a phase."""
    assert program.few is not None
    repeats, descending = program.few.repeats, phase_name == "backward"
    begins = window_starts(layout_of(program.phases[phase_name]).compute, repeats)
    in_order(begins, repeats, descending=descending)
    return RepeatExpansion(repeats, descending, {group: begins[group] for group in repeats.captured})


def unfolded_chain(
    chain: Chain, cuts: Sequence[int], parts: Mapping[CollectiveKind, Sequence[Part]], program: Program
) -> tuple[Chain, tuple[int, ...], dict[CollectiveKind, list[Part]]]:
    """Return the chain of all blocks, with the positions of its items and its transfers by kind.

    Args:
        chain: of few blocks.
        cuts: positions of its items, and the end.
        parts: its transfers by kind.

    Raises:
        BlocksDifferError: the blocks differ.
    """
    if chain.fixed:
        raise BlocksDifferError("the model communicates")
    among = unfolding_of(program, chain.name)
    items = _items(chain, cuts, among)
    lengths = items.spread([b - a for a, b in itertools.pairwise(cuts)])
    of_all = tuple(itertools.accumulate(lengths, initial=cuts[0]))
    if of_all[-1] != among.place(cuts[-1]):
        raise BlocksDifferError("parameters of blocks are needed elsewhere")
    found = {kind: items.unfold(part, lambda part: part[0]) if part else [] for kind, part in parts.items()}
    whole = replace(
        chain,
        seconds=tuple(items.spread(chain.seconds)),
        base=tuple(_base(chain.base, items, _bytes_of_group(program, chain.name, among))),
        gathers=tuple(transfer for transfer, *_ in found["gather"]),
        reductions=tuple(transfer for transfer, *_ in found["reduce"]),
    )
    return whole, of_all, found


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
    few, phase, total = program.few, program.phases[phase_name], 0
    own, index = set(phase.inputs), layout_of(phase).index
    phases = (*program.phases.values(), phase)
    for slot, node in {slot: node for each in phases for node, slot in each.slot_of().items()}.items():
        is_alive = slot in own or slot.kind in LASTING
        if not is_alive or not few.is_of_template(slot.name, saved=slot.is_saved):
            continue
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
    return total


def unfolded_positions(at: Sequence[Event], end: int, program: Program, phase_name: str) -> tuple[list[Event], int]:
    """Return where collectives are needed or ready among the compute of all blocks, and its end.

    Raises:
        BlocksDifferError: windows of blocks differ.
    """
    among = unfolding_of(program, phase_name)
    return among.unfold(sorted(at, key=lambda event: event.at)), among.place(end)


# --- plans -------------------------------------------------------------------------------------------------------


def planned_in_short(program: Program, planner: Planner) -> Plan:
    """Return the plan of all blocks, made of few blocks, or of all where few do not tell it."""
    if program.few is None:
        return planner(program)
    try:
        return planner(program)
    except BlocksDifferError as error:
        log.info("planned for every block: %s", error)
        return planner(instantiate_all_blocks(program))


def folded_plan(plan: Plan, program: Program) -> Plan:
    """Return the plan of few blocks for the plan of all.

    Raises:
        BlocksDifferError: it treats blocks differently.
    """
    found = _moved(plan, program, fold=True)
    if unfolded_plan(found, program) != plan:
        raise BlocksDifferError("the plan treats blocks differently")
    return found


def unfolded_plan(plan: Plan, program: Program) -> Plan:
    """Return the plan of all blocks for the plan of few.

    Raises:
        BlocksDifferError: it treats blocks differently.
    """
    return _moved(plan, program, fold=False)


def _moved(plan: Plan, program: Program, *, fold: bool) -> Plan:
    buckets: list[Bucket] = []
    events: dict[str, tuple[Event, ...]] = {}
    for name in program.phases:
        # In backward two reductions are under way after the first group.
        among = replace(unfolding_of(program, name), ends=2 if name == "backward" else 1)
        by_name, by_position = (each.fold if fold else each.unfold for each in (replace(among, begins={}), among))
        events[name] = tuple(by_position(plan.events.get(name, ())))
        of_phase = [bucket for bucket in plan.buckets if bucket.phase == name]
        parts = [list(part) for _, part in itertools.groupby(of_phase, lambda bucket: bucket.kind)]
        for part in parts if len(parts) <= _KINDS else [of_phase]:
            names_groups = any(named_groups(bucket, among.repeats) for bucket in part)
            buckets += by_name(part) if names_groups else part
    return replace(plan, buckets=tuple(buckets), events=events)
