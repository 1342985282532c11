"""Plans that are the same on all ranks, though their inputs, and so their costs, may differ.

The first rank of the mesh plans, the others take its plan, if their programs have the same collectives. A program whose
collectives have a plan takes that, so that a rank may capture another size alone, such as a last batch that is smaller.
Sizes are constants for Python, so a program of another size may also compute something else between its collectives.
The plan is fitted to that: buckets and the order of events, which ranks must share, stay, and positions move.

Where parameters are in pieces of different sizes on a tensor or expert axis, the first rank has the largest piece of
each, and its plan is for all. A rank with smaller ones may yet need more: what it sends to ranks of the axis is padded.
So under a limit of memory each says what it takes with the plan, and the first rank plans with less until all fit.

    limit 1000      first rank 990, another 1030        30 too much
    limit  970      first rank 960, another 1000        the plan
"""

from __future__ import annotations

import itertools
import json
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from graphshard.errors import ArgumentError, InfeasibleError
from graphshard.ir.collective_regions import Collective, CollectiveRegions
from graphshard.ir.instantiate_blocks import instantiate_all_blocks
from graphshard.ir.mesh import Mesh
from graphshard.ir.param_table import ParamSpec, even_pieces
from graphshard.ir.plan import Bucket, CollectiveKind, Event, Plan
from graphshard.ir.program import Phase, Program
from graphshard.ir.repeats import TEMPLATE, BlocksDifferError
from graphshard.passes import MakePlan, Pass
from graphshard.schedule.by_cost import PlanByCost
from graphshard.schedule.by_unit import PlanByUnit, first_use, gathered_of, last_input
from graphshard.schedule.few import planned_in_short, unfolded_positions
from graphshard.schedule.known import collectives_of, layout_of, within_one_plan
from graphshard.schedule.memory_limit import keeping, peak_with, told_if_over, within
from graphshard.schedule.ways import own_collectives

log = logging.getLogger(__name__)

T = TypeVar("T")

# A program and what makes plain data for it; the result is that of the first rank.
Share = Callable[[Program, Callable[[], dict[str, Any]]], dict[str, Any]]

# The largest of the numbers that ranks call it with, together.
Most = Callable[[int], int]

# Said by a rank whose program the first rank's plan does not serve: more bytes than any takes.
_NO_PLAN = 1 << 62

# What a plan was made for, by phase: the length of its compute, and by collective where it is needed or ready.
Outline = Mapping[str, tuple[int, Mapping[str, int]]]


@dataclass
class AgreedPlanner:
    """A planner that makes the plan of the mesh's first rank.

    Attributes:
        planner: what plans on that rank.
        share: what the first rank makes for a program (plain data), on all ranks, which call it together.
        most: the largest number of all ranks.
        known: plans, and what they were made for, by the collectives that they serve.
        decided: what the first rank decided before the plan, by the parameters that are trained.
    """

    planner: PlanByCost
    share: Share
    most: Most = int
    known: dict[str, tuple[Plan, Outline]] = field(default_factory=dict)
    decided: dict[str, dict[str, Any]] = field(default_factory=dict)

    def decide_once(self, program: Program, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what the ranks decided together for the first program that trains these parameters.

        One rank may meet another size alone, so later ones are not decided anew.
        """
        trained = json.dumps(sorted(slot.name for slot in program.phases["joint"].outputs if slot.kind == "grad"))
        if trained not in self.decided:
            self.decided[trained] = decide()
        return self.decided[trained]

    @within_one_plan()
    def __call__(self, program: Program) -> Plan:
        """The plan; raises `InfeasibleError` on all ranks if the first rank finds none within the limit.

        So it does if none is found with which ranks that have smaller pieces of parameters are within it, too.
        """
        if even_pieces(program.mesh, program.all_params):
            return planned_in_short(program, self._plan, self._plan)
        program = program if program.few is None else instantiate_all_blocks(program)
        limit, mine = self.planner.memory_limit, communication(program)
        if limit is None or mine in self.known:
            return told_if_over(self._of_pieces(program), program, self.planner)
        found, peak = within(limit, lambda at: self._fitting(program, at), lambda found: found[1])
        assert found.prediction is not None, "a plan by cost has a prediction"
        found = replace(found, prediction=replace(found.prediction, peak_bytes=peak))
        self.known[mine] = found, outline(program, found.kept)
        return found

    def _plan(self, program: Program) -> Plan:
        """Return the first rank's plan for the first program that communicates so, moved to this one.

        One rank may meet another size alone, and ranks meet different sizes in one step, so there is one plan for all
        sizes, also under a limit of memory.
        """
        mine = communication(program)
        if mine not in self.known:
            self.known[mine] = self._shared(program, mine, self.planner) or self._own(program)
            return fit(*self.known[mine], program) or self.planner(program)
        plan = fit(*self.known[mine], program) or self.planner(program)
        return told_if_over(plan, program, self.planner)

    def _own(self, program: Program) -> tuple[Plan, Outline]:
        """A plan of this rank's: the check that follows says what differs."""
        plan = self.planner(program)
        return plan, outline(program, plan.kept)

    def _of_pieces(self, program: Program) -> Plan:
        """The first rank's plan, or by units where it does not serve all ranks: torch may compute a size in a way of
        its own, and gather other parameters again."""
        mine = communication(program)
        if mine not in self.known:
            shared = self._shared(program, mine, self.planner)
            if self.most(int(shared is None or fit(*shared, program) is None)):
                log.info(
                    "ranks that have pieces of different sizes communicate otherwise: planned by unit, not by cost"
                )
                plan = PlanByUnit()(program)
                shared = plan, outline(program)
            assert shared is not None
            self.known[mine] = shared
        return fit(*self.known[mine], program) or PlanByUnit()(program)

    def _fitting(self, program: Program, limit: int) -> tuple[Plan, int]:
        """The first rank's plan under a limit, and bytes of the rank that takes most with it.

        Raises:
            ArgumentError: it does not serve all ranks.
        """
        planner = replace(self.planner, memory_limit=limit)
        shared = self._shared(program, communication(program), planner)
        plan, peak = None if shared is None else fit(*shared, program), _NO_PLAN
        if plan is not None:
            assert plan.prediction is not None, "a plan by cost has a prediction"
            peak = max(peak_with(plan, program, self.planner), plan.prediction.peak_bytes)
        most = self.most(peak)
        if plan is None or most == _NO_PLAN:
            row = next(row for row in program.all_params if not row.has_even_pieces(program.mesh))
            raise ArgumentError(
                f"memory_limit={self.planner.memory_limit} cannot be kept: {row.name} is in pieces of different sizes "
                f"on {' and '.join(row.split.axes if row.split else ())}, and with these sizes ranks gather or reduce "
                "other parameters, or in another order, so that no plan is for all. Leave it out, or cut dims that the "
                "size of the axis divides."
            )
        return plan, most

    def _shared(self, program: Program, mine: str, planner: PlanByCost) -> tuple[Plan, Outline] | None:
        """The first rank's plan, and what it was made for; None if this program communicates otherwise."""

        def make() -> dict[str, Any]:
            try:
                plan = planner(program)
            except InfeasibleError as error:
                return {"error": str(error), "smallest": error.smallest}
            return {"communication": mine, "outline": outline(program, plan.kept), "plan": plan.to_json()}

        made = self.share(program, make)
        if "error" in made:
            raise InfeasibleError(made["error"], made["smallest"])
        if made["communication"] != mine:
            return None
        return Plan.from_json(made["plan"]), made["outline"]


def agreed(passes: Iterable[Pass], share: Share, most: Most = int) -> tuple[Pass, ...]:
    """The passes; one that asks a planner by cost takes the first rank's plan."""
    return tuple(
        replace(step, planner=AgreedPlanner(step.planner, share, most))
        if isinstance(step, MakePlan) and isinstance(step.planner, PlanByCost)
        else step
        for step in passes
    )


def communication(program: Program) -> str:
    """What programs that share a plan have in common: each phase's collectives, and what they send.

    The shapes, too: parameters of other sizes may not fit in memory as the plan counts on. Of pieces that differ in
    size, those of the whole.
    """
    found = {}
    for name, phase in program.phases.items():
        sent = [
            (c.kind, param, c.axis, _sent(program.all_params[param], c.kind, program.mesh))
            for c, param in _of_all(program, phase)
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


def _sent(row: ParamSpec, kind: CollectiveKind, mesh: Mesh) -> str:
    if row.split is not None and not row.has_even_pieces(mesh):
        return f"{row.sent_dtype(kind)} {row.split.shape} {' and '.join(map(str, row.split.cuts))}"
    return f"{row.sent_dtype(kind)} {row.padded_shape}"


def outline(program: Program, kept: Sequence[str] = ()) -> dict[str, tuple[int, dict[str, int]]]:
    """What a plan for a program, in which parameters are kept gathered, has positions in."""
    found = {}
    for name, phase in keeping(program, kept).phases.items():
        layout = layout_of(phase)
        at = {
            (c.kind, c.axis, c.params[0]): (first_use if c.kind == "gather" else last_input)([c], layout)
            for c in collectives_of(phase)
        }
        end = len(layout.compute)
        if program.few is not None:
            at, end = unfolded_positions(at, end, program, name)
        positions = {f"{kind} {axis} {param}": position for (kind, axis, param), position in at.items()}
        found[name] = end, positions | _own_positions(layout)
    return found


def _own_positions(layout: CollectiveRegions) -> dict[str, int]:
    """Where the model's own collectives begin and end: what a plan has before one, or behind it, is so on all ranks."""
    found: dict[str, int] = {}
    for index, sent in enumerate(own_collectives(layout)):
        found |= {f"before own {index}": sent.at, f"after own {index}": sent.at + 1, f"own {index}": sent.until}
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
        if program.few is not None:
            return plan
        moved = plan  # what is kept from forward to backward may be another: it is not among the positions
    else:
        events = {}
        for name, given in plan.events.items():
            placed = _fit_events(given, plan, made_for[name], wanted[name])
            if placed is None:
                return None
            events[name] = placed
        if program.few is not None:
            raise BlocksDifferError("ranks have graphs of other sizes")
        moved = replace(plan, events=events)
    return replace(moved, gathered_bytes=gathered_of(moved, keeping(program, plan.kept)))


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
        if name in wanted[1]:  # a program of another size may communicate more often itself
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
