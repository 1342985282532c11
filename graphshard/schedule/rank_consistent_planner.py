"""Plans that are the same on all ranks, though their inputs, and so their costs, may differ.

The first rank of the mesh plans, and the others take its plan if their programs have the same collectives. A program
whose collectives have a plan takes that, so that a rank may capture another size alone, such as a smaller last batch.
Sizes are constants for Python, so a program of another size may also compute something else between its collectives.
The plan is fitted to that: buckets and the order of events, which ranks must share, stay, and positions move.

Where parameters are in pieces of different sizes on a tensor or expert axis, the first rank has the largest piece of
each, and its plan is for all. A rank with smaller ones may yet need more: what it sends to ranks of the axis is padded.
So under a memory limit each rank says what it takes with the plan, and the first rank plans with less until all fit.

    limit 1000      first rank 990, another 1030        30 too much
    limit  970      first rank 960, another 1000        the plan
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch.fx import Node

from graphshard.cost.costs import Costs
from graphshard.errors import ArgumentError, InfeasibleError
from graphshard.ir.collective_regions import Collective, CollectiveRegions, is_scalar, last_use
from graphshard.ir.instantiate_blocks import instantiate_all_blocks
from graphshard.ir.mesh import Mesh
from graphshard.ir.param_table import ParamSpec, even_pieces
from graphshard.ir.plan import CollectiveKind, Event, Plan
from graphshard.ir.program import Phase, Planner, Program
from graphshard.ir.repeats import TEMPLATE, BlocksDifferError
from graphshard.passes import MakePlan, Pass
from graphshard.passes.keep_gathered import keep_gathered
from graphshard.schedule._program_memory import base_bytes, lasting_beside, saved_memory
from graphshard.schedule.axis_links import model_collectives
from graphshard.schedule.build_problem import Left, host_copies, seconds_between
from graphshard.schedule.fsdp2_order import PlanByUnit, first_use, last_input
from graphshard.schedule.graph_facts import collectives_of, layout_of, within_one_plan
from graphshard.schedule.planner import PlanByCost
from graphshard.schedule.problem import Action, Bucketed, Chain, Link, Occurrence, Placement, Rate, Transfer
from graphshard.schedule.simulator import ChainRun
from graphshard.schedule.template_schedule import planned_in_short, unfolded_positions
from graphshard.utils.text import format_bytes

log = logging.getLogger(__name__)

T = TypeVar("T")

# A program and a function that makes plain data for it; returns the data of the first rank.
Share = Callable[[Program, Callable[[], dict[str, Any]]], dict[str, Any]]

# Returns the largest of the numbers that ranks call it with, together.
Most = Callable[[int], int]

# Reported by a rank whose program the first rank's plan does not serve: more bytes than any takes.
_NO_PLAN = 1 << 62

# How often the first rank plans with less memory, as another rank takes too much, before it plans with the least.
_ATTEMPTS = 4

# Program that a plan was made for, by phase: length of its compute, and by collective where it is needed or ready.
Outline = Mapping[str, tuple[int, Mapping[str, int]]]


@dataclass
class AgreedPlanner:
    """A planner that makes the plan of the mesh's first rank."""

    planner: PlanByCost  # plans on that rank
    share: Share  # returns the data that the first rank makes for a program, on all ranks, which call it together
    most: Most = int  # the largest number of all ranks
    # Plans and the outlines they were made for, by the collectives that they serve.
    known: dict[str, tuple[Plan, Outline]] = field(default_factory=dict)
    # Decisions of the first rank before the plan, by the parameters that are trained.
    decided: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Plans of programs that all ranks have found in files, which nobody has planned in this job.
    from_files: list[Plan] = field(default_factory=list)

    def decide_once(self, program: Program, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what the ranks decided together for the first program that trains these parameters.

        One rank may meet another size alone, so later programs are not decided again.
        """
        trained = json.dumps(sorted(slot.name for slot in program.phases["joint"].outputs if slot.kind == "grad"))
        if trained not in self.decided:
            self.decided[trained] = decide()
        return self.decided[trained]

    @within_one_plan()
    def __call__(self, program: Program) -> Plan:
        """Return the plan.

        Raises:
            InfeasibleError: on all ranks, if the first rank finds no plan within the limit, or none with which ranks
                that have smaller pieces of parameters are within it, too.
        """
        if even_pieces(program.mesh, program.all_params):
            return planned_in_short(program, functools.partial(self._of_first_rank, fallback=self.planner))
        program = program if program.few is None else instantiate_all_blocks(program)
        limit, mine = self.planner.memory_limit, communication(program)
        if limit is None or mine in self.known:
            return self._of_first_rank(program, PlanByUnit(), together=True)
        found, peak = within(limit, lambda at: self._fitting(program, at), lambda found: found[1])
        assert found.prediction is not None, "a plan by cost has a prediction"
        found = replace(found, prediction=replace(found.prediction, peak_bytes=peak))
        self.known[mine] = found, outline(program, found.kept)
        return found

    def _of_first_rank(self, program: Program, fallback: Planner, *, together: bool = False) -> Plan:
        """Return the first rank's plan for the first program that communicates so, moved to this one.

        One rank may meet another size alone, and ranks meet different sizes in one step, so there is one plan for all
        sizes, also under a memory limit.

        Args:
            fallback: plans where that plan does not serve; the check that follows says how this rank's program differs.
            together: all ranks fall back if one does, as torch may compute a size in another way, and gather other
                parameters again.
        """
        mine = communication(program)
        first = mine not in self.known and not self._found_in_file(program, mine)
        if first:
            shared = self._shared(program, mine, self.planner)
            if together and self.most(int(shared is None or fit(*shared, program) is None)):
                log.info("ranks with pieces of different sizes communicate differently: planned by unit, not by cost")
                shared = None
            if shared is None:
                plan = fallback(program)
                shared = plan, outline(program, plan.kept)
            self.known[mine] = shared
        plan = fit(*self.known[mine], program) or fallback(program)
        return plan if first else _warn_if_over(plan, program, self.planner)

    def _found_in_file(self, program: Program, mine: str) -> bool:
        """Return whether a plan from a file serves the program, and know it then: this rank may be alone here.

        The file does not say where the program of that plan needed its collectives. It differs in sizes only, so its
        operators are taken to be as many as here, and positions that this program cannot keep are moved.

        Raises:
            BlocksDifferError: it does, but the program has few blocks.
        """
        for plan in self.from_files:
            wanted = outline(program, plan.kept)
            if {name: _served(plan, name) for name in plan.events} != {
                name: {key for key in at if "own " not in key} for name, (_, at) in wanted.items()
            }:
                continue
            if program.few is not None:
                raise BlocksDifferError("its plan is of a program from a file")
            placed = {name: _fit_events(given, plan, wanted[name], wanted[name]) for name, given in plan.events.items()}
            events = {name: found for name, found in placed.items() if found is not None}
            if len(events) == len(placed):
                self.known[mine] = replace(plan, events=events), wanted
                return True
        return False

    def _fitting(self, program: Program, limit: int) -> tuple[Plan, int]:
        """Return the first rank's plan under a limit, and bytes of the rank that takes most with it.

        Raises:
            ArgumentError: it does not serve all ranks.
        """
        planner = replace(self.planner, memory_limit=limit)
        shared = self._shared(program, communication(program), planner)
        plan, peak = None if shared is None else fit(*shared, program), _NO_PLAN
        if plan is not None:
            assert plan.prediction is not None, "a plan by cost has a prediction"
            peak = max(_peak_with(plan, program, self.planner), plan.prediction.peak_bytes)
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
        """Return the first rank's plan, and the outline it was made for; None if this program differs."""

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


def _served(plan: Plan, phase: str) -> set[str]:
    """Return the collectives that a plan has in a phase, as `outline` names them."""
    buckets = [bucket for bucket in plan.buckets if bucket.phase == phase]
    return {f"{bucket.kind} {bucket.axis} {member}" for bucket in buckets for member in bucket.members}


def agreed(passes: Iterable[Pass], share: Share, most: Most = int) -> tuple[Pass, ...]:
    """Return the passes; one that asks a planner by cost takes the first rank's plan."""
    return tuple(
        replace(step, planner=AgreedPlanner(step.planner, share, most))
        if isinstance(step, MakePlan) and isinstance(step.planner, PlanByCost)
        else step
        for step in passes
    )


def communication(program: Program) -> str:
    """Return what programs that share a plan have in common: each phase's collectives, and what they send.

    The shapes, too: parameters of other sizes may not fit in memory as the plan counts on. For pieces that differ in
    size, the shapes of the whole.
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
    """Yield the collectives of a phase with their first parameter, and the collectives of blocks that are left out."""
    for collective in collectives_of(phase):
        param = collective.params[0]
        yield collective, param
        if program.few is not None and (repeats := program.few.repeats).group_of(param) == TEMPLATE:
            yield from ((collective, repeats.name_at(group, param)) for group in repeats.missing)


def _sent(row: ParamSpec, kind: CollectiveKind, mesh: Mesh) -> str:
    if row.split is not None and not row.has_even_pieces(mesh):
        return f"{row.sent_dtype(kind)} {row.split.shape} {' and '.join(map(str, row.split.cuts))}"
    return f"{row.sent_dtype(kind)} {row.padded_shape}"


def outline(program: Program, kept: Sequence[str] = ()) -> dict[str, tuple[int, dict[str, int]]]:
    """Return the positions that a plan for a program, in which parameters are kept gathered, refers to."""
    found = {}
    for name, phase in _keeping(program, kept).phases.items():
        layout = layout_of(phase)
        at, end = [], len(layout.compute)
        for c in collectives_of(phase):
            position = (first_use if c.kind == "gather" else last_input)([c], layout)
            at.append(Event("start", f"{c.kind} {c.axis} {c.params[0]}", position))
        if program.few is not None:
            at, end = unfolded_positions(at, end, program, name)
        found[name] = end, {event.bucket: event.at for event in at} | _own_positions(layout)
    return found


def _own_positions(layout: CollectiveRegions) -> dict[str, int]:
    """Return where the model's own collectives are; planned events stay on the same side of each on every rank."""
    found: dict[str, int] = {}
    for index, sent in enumerate(model_collectives(layout)):
        found |= {f"before own {index}": sent.at, f"after own {index}": sent.at + 1, f"own {index}": sent.until}
    return found


def fit(plan: Plan, made_for: Outline, program: Program) -> Plan | None:
    """Return the plan with its positions moved from an outline to where a program with the same collectives needs them.

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
        raise BlocksDifferError("ranks have graphs of other sizes")
    return replace(plan, events=events)


def _fit_events(
    events: Sequence[Event], plan: Plan, made_for: tuple[int, Mapping[str, int]], wanted: tuple[int, Mapping[str, int]]
) -> tuple[Event, ...] | None:
    """Return events in the same order, as close to where they were as their buckets allow."""
    buckets = {bucket.name: bucket for bucket in plan.buckets}
    length, at = wanted
    earliest, latest = [], []
    for event in events:
        bucket = buckets[event.bucket]
        positions = [at[f"{bucket.kind} {bucket.axis} {member}"] for member in bucket.members]
        gather = bucket.kind == "gather"
        earliest.append(max(positions) if event.action == "start" and not gather else 0)
        latest.append(min(positions) if event.action == "wait" and gather else length)
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
    """Return a monotonic map of positions: from where collectives were to where they are, evenly in between."""
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


# --- memory ------------------------------------------------------------------------------------------------------


def within(limit: int, find: Callable[[int], T], peak: Callable[[T], int]) -> T:
    """Return what is found for a limit of the first rank with which every rank is within `limit`.

    `peak` returns the bytes of the rank that takes most.

    Raises:
        InfeasibleError: even with the least on the first rank another one takes more; it has the bytes of that.
    """
    at = limit
    for attempt in range(_ATTEMPTS):
        try:
            found = find(at)
        except InfeasibleError as error:
            refused = error
            break
        if (most := peak(found)) <= limit:
            return found
        at = max(1, at - (most - limit)) if attempt < _ATTEMPTS - 2 else 1
    else:
        raise AssertionError("nothing fits in a byte")
    found = find(refused.smallest)
    most = peak(found)
    if most <= limit:
        return found
    if most <= refused.smallest:
        raise refused
    raise InfeasibleError(
        f"no schedule fits in a memory_limit of {limit:,} bytes. The least possible is {most:,} bytes: pieces of "
        "parameters have different sizes on ranks of an axis along which the model communicates, and one of these "
        f"takes that where the first rank takes {refused.smallest:,}. Cut dims that the size of the axis divides, or "
        "use smaller units, a smaller batch, more ranks, or activation checkpointing.",
        most,
    )


def _keeping(program: Program, kept: Sequence[str]) -> Program:
    """Return the program with parameters kept gathered from forward to backward."""
    if not kept:
        return program
    program = replace(program, phases={name: phase.clone() for name, phase in program.phases.items()})
    keep_gathered(program, kept)
    return program


def _peak_with(plan: Plan, program: Program, planner: PlanByCost) -> int:
    return peak_of(plan, _keeping(program, plan.kept), planner.costs, planner.optimizer_states)


def _warn_if_over(plan: Plan, program: Program, planner: PlanByCost) -> Plan:
    """Return a plan that was made for another size; log if this size takes more memory with it than the limit."""
    limit = planner.memory_limit
    if limit is not None and program.few is None and (peak := _peak_with(plan, program, planner)) > limit:
        log.warning(
            "%s takes %s with the plan of an earlier size, as predicted, and memory_limit is %s. Pass the largest "
            "inputs first (example_inputs= of graphshard.compile), so that the plan is made for them.",
            *(program.title, format_bytes(peak), format_bytes(limit)),
        )
    return plan


def peak_of(plan: Plan, program: Program, costs: Costs, optimizer_states: int) -> int:
    """Return the most bytes alive in forward and backward that follow a plan, counted from operator to operator.

    A plan's own prediction is for the program that it was made for, and counts from one place where something is
    needed or ready to the next one. The program is partitioned, of all blocks, and has gathered what the plan keeps.
    """
    state = optimizer_states * sum(row.shard_bytes(row.dtype) for row in program.params if row.trainable)
    most = 0
    left: Left = ()
    for name in program.phases:
        peak, left = _peak_of_phase(plan, program, name, costs, left)
        most = max(most, peak)
    return int(state + most)


def _peak_of_phase(plan: Plan, program: Program, name: str, costs: Costs, left: Left) -> tuple[int, Left]:
    """Return the most bytes alive in a phase of which each operator is an item, and the copies that it leaves."""
    phase = program.phases[name]
    graph, layout = phase.module.graph, layout_of(phase)
    end = max(len(layout.compute), 1)
    position = {**layout.index, graph.output_node(): len(layout.compute)}
    of = {(c.kind, c.axis, c.params[0]): c for c in collectives_of(phase) if not is_scalar(program, c)}
    buckets = {b.name: b for b in plan.buckets if b.phase == name and (b.kind, b.axis, b.members[0]) in of}
    reduced = {param for b in buckets.values() if b.kind == "reduce" for param in b.members}
    second = {b.name for b in buckets.values() if b.kind == "all_reduce" and b.members[0] in reduced}
    gathers: list[Transfer] = []
    reductions: list[Transfer] = []
    placed: list[Bucketed] = []
    numbers: dict[str, int] = {}  # by bucket, and of a reduction by its first parameter
    events: list[Occurrence] = []
    # By launch of a reduction where it is started, and the bytes of its gradient, which are the plan's from there.
    started: dict[Node, int] = {}
    sent: dict[Node, int] = {}
    for event in plan.events[name]:
        if event.bucket not in buckets:
            continue
        bucket = buckets[event.bucket]
        if bucket.name in second:
            action: Action = "continue" if event.action == "start" else "wait"
            events.append(Occurrence(action, numbers[bucket.members[0]], event.at))
        elif event.action == "wait":
            if bucket.kind == "gather" or not second:  # a first leg ends where the second one starts
                events.append(Occurrence("wait", numbers[bucket.name], event.at))
        else:
            kind: CollectiveKind = "gather" if bucket.kind == "gather" else "reduce"
            transfers = gathers if kind == "gather" else reductions
            numbers[bucket.name] = len(placed)
            events.append(Occurrence("start", len(placed), event.at))
            placed.append(Bucketed(kind, len(transfers), len(transfers) + len(bucket.members), bool(bucket.packed)))
            for param in bucket.members:
                member = of[bucket.kind, bucket.axis, param]
                size = program.params[member.params[0]].sent_bytes(member.kind)
                at, last = max(event.at, 1), -1
                if kind == "gather":  # all that counts is where it dies
                    last = max(first_use([member], layout), last_use(member.waits, layout, position))
                    at, last = 0, min(last, end - 1)
                else:
                    numbers.setdefault(param, numbers[bucket.name])
                    started[member.node], sent[member.node] = at, size
                small = size if param in bucket.packed else 0
                transfers.append(Transfer(param, size, at, last, num_small=int(small > 0), small_bytes=small))
    cuts = range(end + 1)
    seconds = [seconds_between(graph, layout, *item, costs) for item in itertools.pairwise(cuts)]
    copies = host_copies(layout, cuts, seconds, costs, left)
    launches = [c for c in of.values() if c.node in started]
    alive = base_bytes(phase, layout, cuts, launches, started, sent, copies.until, saved_memory(program))
    beside = lasting_beside(program, phase)
    base = tuple(beside + a + b for a, b in zip(alive, copies.beside))
    free = Rate(0.0, 0.0)
    link = Link(free, free, lambda _: 0.0, program.mesh.shard.size, all_reduce=free if second else None)
    chain = Chain(name, tuple(seconds), base, tuple(gathers), tuple(reductions))
    return ChainRun(chain, link, Placement(tuple(placed), tuple(events))).peak, copies.left
