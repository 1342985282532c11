"""Plans that are the same on all ranks, though their inputs, and so their costs, may differ.

The first rank of the mesh plans, the others take its plan, if their programs have the same collectives. A program whose
collectives have a plan takes that, so that a rank may capture another size alone, such as a last batch that is smaller.
Sizes are constants for Python, so a program of another size may also compute something else between its collectives.
The plan is fitted to that: buckets and the order of events, which ranks must share, stay, and positions move.
"""

from __future__ import annotations

import itertools
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from graphshard.ir.errors import InfeasibleError
from graphshard.ir.layout import Collective
from graphshard.ir.params import ParamRow
from graphshard.ir.plan import Bucket, CollectiveKind, Event, Plan
from graphshard.ir.program import Phase, Program
from graphshard.ir.repeats import TEMPLATE, Uneven
from graphshard.passes.keep_gathered import keep_gathered
from graphshard.schedule.by_cost import PlanByCost
from graphshard.schedule.by_unit import first_use, gathered_of, last_input
from graphshard.schedule.few import planned_in_short, unfolded_positions
from graphshard.schedule.known import collectives_of, layout_of, within_one_plan

# A program and what makes plain data for it; the result is that of the first rank.
Share = Callable[[Program, Callable[[], dict[str, Any]]], dict[str, Any]]

# What a plan was made for, by phase: the length of its compute, and by collective where it is needed or ready.
Outline = Mapping[str, tuple[int, Mapping[str, int]]]


@dataclass
class AgreedPlanner:
    """A planner that makes the plan of the mesh's first rank.

    Attributes:
        planner: what plans on that rank.
        share: what the first rank makes for a program (plain data), on all ranks, which call it together.
        known: plans, and what they were made for, by the collectives that they serve.
    """

    planner: PlanByCost
    share: Share
    known: dict[str, tuple[Plan, Outline]] = field(default_factory=dict)

    @within_one_plan()
    def __call__(self, program: Program) -> Plan:
        """The plan; raises `InfeasibleError` on all ranks if the first rank finds none within the limit."""
        return planned_in_short(program, self._plan, self._plan)

    def _plan(self, program: Program) -> Plan:
        mine = communication(program)
        # Under a limit of memory other sizes may need another plan.
        if mine not in self.known or self.planner.memory_limit is not None:
            self.known[mine] = self._shared(program, mine)
        return fit(*self.known[mine], program) or self.planner(program)

    def _shared(self, program: Program, mine: str) -> tuple[Plan, Outline]:
        """The first rank's plan, if it serves this program; otherwise the check that follows says what differs."""

        def make() -> dict[str, Any]:
            try:
                plan = self.planner(program)
            except InfeasibleError as error:
                return {"error": str(error), "smallest": error.smallest}
            return {"communication": mine, "outline": outline(program, plan.kept), "plan": plan.to_json()}

        made = self.share(program, make)
        if "error" in made:
            raise InfeasibleError(made["error"], made["smallest"])
        if made["communication"] == mine:
            return Plan.from_json(made["plan"]), made["outline"]
        plan = self.planner(program)
        return plan, outline(program, plan.kept)


def communication(program: Program) -> str:
    """What programs that share a plan have in common: each phase's collectives, and what they send.

    The shapes, too: parameters of other sizes may not fit in memory as the plan counts on.
    """
    found = {}
    for name, phase in program.phases.items():
        sent = [
            (c.kind, param, c.axis, _sent(program.all_params[param], c.kind)) for c, param in _of_all(program, phase)
        ]
        found[name] = sorted(sent)
    return json.dumps(found)


def _of_all(program: Program, phase: Phase) -> Iterator[tuple[Collective, str]]:
    """The collectives of a phase with their first parameter; those of blocks that are left out with theirs."""
    for collective in collectives_of(phase):
        param = collective.params[0]
        yield collective, param
        place = program.few and program.few.repeats.place_of(param)
        if program.few and place and place[0] == TEMPLATE:
            repeats = program.few.repeats
            yield from ((collective, repeats.name_at(group, param)) for group in repeats.missing)


def _sent(row: ParamRow, kind: CollectiveKind) -> str:
    return f"{row.sent_dtype(kind)} {row.padded_shape}"


def outline(program: Program, kept: Sequence[str] = ()) -> dict[str, tuple[int, dict[str, int]]]:
    """What a plan for a program, in which parameters are kept gathered, has positions in."""
    found = {}
    for name, phase in _keeping(program, kept).phases.items():
        layout = layout_of(phase)
        at = {
            (c.kind, c.axis, c.params[0]): (first_use if c.kind == "gather" else last_input)([c], layout)
            for c in collectives_of(phase)
        }
        end = len(layout.compute)
        if program.few is not None:
            at, end = unfolded_positions(at, end, program, name)
        found[name] = end, {f"{kind} {axis} {param}": position for (kind, axis, param), position in at.items()}
    return found


def fit(plan: Plan, made_for: Outline, program: Program) -> Plan | None:
    """The plan with its positions moved to where a program with the same collectives needs them.

    Args:
        made_for: the outline that the plan was made for.

    Returns:
        None if no positions would do, as the program needs its parameters in another order.
    """
    wanted = outline(program, plan.kept)
    if {name: tuple(part) for name, part in made_for.items()} == wanted:
        return plan
    events = {}
    for name, given in plan.events.items():
        placed = _fit_events(given, plan, made_for[name], wanted[name])
        if placed is None:
            return None
        events[name] = placed
    if program.few is not None:
        raise Uneven("ranks have graphs of other sizes")
    moved = replace(plan, events=events)
    return replace(moved, gathered_bytes=gathered_of(moved, _keeping(program, plan.kept)))


def _keeping(program: Program, kept: Sequence[str]) -> Program:
    if not kept:
        return program
    program = replace(program, phases={name: phase.clone() for name, phase in program.phases.items()})
    keep_gathered(program, kept)
    return program


def _fit_events(
    events: Sequence[Event], plan: Plan, made_for: tuple[int, Mapping[str, int]], wanted: tuple[int, Mapping[str, int]]
) -> tuple[Event, ...] | None:
    """Events in the same order, as close to where they were as what they need allows."""
    buckets = {bucket.name: bucket for bucket in plan.buckets}
    length, at = wanted

    def positions(bucket: Bucket) -> list[int]:
        return [at[f"{bucket.kind} {bucket.axis} {member}"] for member in bucket.members]

    earliest, latest = [], []
    for event in events:
        bucket = buckets[event.bucket]
        gather = bucket.kind == "gather"
        earliest.append(max(positions(bucket)) if event.action == "start" and not gather else 0)
        latest.append(min(positions(bucket)) if event.action == "wait" and gather else length)
    lower = list(itertools.accumulate(earliest, max))
    upper = list(itertools.accumulate(reversed(latest), min))[::-1]
    if any(low > high for low, high in zip(lower, upper, strict=True)):
        return None
    moved = _moves(made_for, wanted)
    return tuple(
        replace(event, at=min(max(moved(event.at), low), high))
        for event, low, high in zip(events, lower, upper, strict=True)
    )


def _moves(made_for: tuple[int, Mapping[str, int]], wanted: tuple[int, Mapping[str, int]]) -> Callable[[int], int]:
    """A map of positions that keeps their order: from where collectives were to where they are, evenly in between."""
    to = {0: 0}
    for name, before in sorted(made_for[1].items(), key=lambda item: item[1]):
        to[before] = max(to.get(before, 0), wanted[1][name])
    to[made_for[0]] = wanted[0]
    old = sorted(to)
    new = list(itertools.accumulate((to[position] for position in old), max))

    def move(position: int) -> int:
        index = bisect_right(old, position) - 1
        if index + 1 == len(old):
            return new[index]
        share = (position - old[index]) / (old[index + 1] - old[index])
        return new[index] + int(share * (new[index + 1] - new[index]))

    return move
