"""Planner by cost: a program in, the plan with the shortest predicted step out."""

from __future__ import annotations

import functools
import heapq
import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from graphshard.cost.costs import Costs
from graphshard.errors import ArgumentError, InfeasibleError
from graphshard.ir.collective_regions import is_scalar
from graphshard.ir.plan import EXCHANGE_RANKS, Bucket, CollectiveKind, Event, Plan, Prediction
from graphshard.ir.program import Program
from graphshard.ir.repeats import BlocksDifferError
from graphshard.passes.keep_gathered import keep_gathered
from graphshard.schedule._solver import STEPS, Solution, Solver, fsdp2_solution, smallest_of
from graphshard.schedule.axis_links import axes_of, on_one_link
from graphshard.schedule.bounds import lower_bound
from graphshard.schedule.build_problem import Built, Constraints, PhaseMap, Settings, build
from graphshard.schedule.fsdp2_order import PlanByUnit, plan_scalars
from graphshard.schedule.graph_facts import collectives_of, within_one_plan
from graphshard.schedule.problem import Chain, Placement, Problem, Schedule
from graphshard.schedule.template_schedule import planned_in_short

log = logging.getLogger(__name__)

# More than FSDP2's order takes by so much is no difference that predictions show (they are within 5 %). Where the peak
# leaves no room for buckets that are a little larger, steps that wait for the link are up to a quarter longer.
_ABOUT = 1.01


@dataclass(frozen=True)
class PlanByCost:
    """Planner of buckets and launch positions with the shortest predicted step under a memory limit.

    The costs come from a profile file, never from what this rank measures while it plans: all ranks must make the
    same plan.

    Attributes:
        costs: of compute, collectives and copies, on the mesh of the program.
        memory_limit: bytes that shards, optimizer state, gathered parameters, gradients and saved values may take at
            any time; None does not limit them.
        constraints: what the user fixes.
        exact_reductions: gradients are reduced in FSDP2's buckets and packed in its order, which keeps its bits where
            the sum depends on the place in the buffer, as on gloo. None does so on CPUs.
        pack_below: bytes of a shard below which a tensor may be packed with others; None is what the profile says, and
            on CPUs, where each tensor of a coalesced collective takes long, the bytes that are copied in that time.
        optimizer_states: tensors that the optimizer keeps for each parameter: 2 for Adam.
        worth, worth_seconds: share of the step, and seconds for each unit, that must be gained before the plan departs
            from FSDP2's order, one unit ahead, and again before it departs from its buckets; without a memory limit
            about what that order takes is the limit then. 0 and 0 look for the shortest step only.
        any_order: a reduction may be an exchange and a sum in the order of ranks wherever that is cheaper, though its
            bits differ from a reduce-scatter's. Between two ranks of gloo they are the same.
        steps: what a search may take, about a microsecond each: equal on all machines, so that all find the same plan.
            Where it ends a search, the best plan so far is taken, and its prediction says so (`stopped`).
    """

    costs: Costs
    memory_limit: int | None = None
    constraints: Constraints = field(default_factory=Constraints)
    exact_reductions: bool | None = None
    pack_below: int | None = None
    optimizer_states: int = 2
    worth: float = 0.0
    worth_seconds: float = 0.0
    any_order: bool = False
    steps: int = STEPS

    def __post_init__(self) -> None:
        if self.memory_limit is not None and self.memory_limit <= 0:
            raise ArgumentError(f"memory_limit must be a positive number of bytes, got {self.memory_limit}.")
        if self.steps < 0:
            raise ArgumentError(f"steps must not be negative, got {self.steps}. 0 searches nothing.")

    @within_one_plan()
    def __call__(self, program: Program) -> Plan:
        """Plan a partitioned program.

        Raises:
            InfeasibleError: no plan fits in the memory limit; the message has the least bytes that one needs.
        """
        self._check_units(program)
        return planned_in_short(program, self._best)

    def _check_units(self, program: Program) -> None:
        lists = (self.constraints.forward_prefetch, self.constraints.backward_prefetch)
        named = {name for ahead in lists for unit, units in ahead.items() for name in (unit, *units)}
        unknown = sorted(named - set(program.all_params.units))
        if unknown:
            raise ArgumentError(
                f"prefetch names {unknown[0]!r}, which is no unit with parameters. The units are "
                f"{', '.join(map(repr, program.params.units[:8]))}."
            )

    def _best(self, program: Program) -> Plan:
        sent = (c for phase in program.phases.values() for c in collectives_of(phase))
        if program.few is not None and any(is_scalar(program, each) for each in sent):
            raise BlocksDifferError("gradients of scalars are not reduced with their blocks")
        here = self._on(program)
        if not all(on_one_link(here.costs, axes_of(program, phase)) for phase in program.phases.values()):
            return self._unplanned(program)
        settings = here._settings(program)
        search = here._worthwhile if self.worth or self.worth_seconds else here._shortest
        found = search(program, settings)
        return found if program.bound is None else _above(found, program.bound)

    def _on(self, program: Program) -> PlanByCost:
        # Which ranks share a node is the program's mesh to say.
        return replace(self, costs=replace(self.costs, mesh=program.mesh))

    @within_one_plan()
    def least(self, program: Program) -> tuple[int, float]:
        """Return the least bytes in which a partitioned program runs, and the least seconds with any memory."""
        here = self._on(program)
        settings = here._settings(program)
        attempts = dict.fromkeys((settings, settings.by_units))
        problems = [build(program, here.costs, attempt).problem for attempt in attempts]
        return min(map(smallest_of, problems)), lower_bound(problems[0])

    def _unplanned(self, program: Program) -> Plan:
        """Plan by units where transfers of a kind cost as on several links.

        Raises:
            ArgumentError: a memory limit was given.
        """
        why = "collectives of experts run over other links than those of other parameters, or in other legs"
        if self.memory_limit is not None:
            raise ArgumentError(
                f"memory_limit={self.memory_limit} cannot be kept: {why}, which is not planned by cost. Leave it out."
            )
        log.info("%s: planned by unit, not by cost", why)
        return PlanByUnit()(program)

    def _settings(self, program: Program) -> Settings:
        on_cpu = program.device.type == "cpu"
        exact = on_cpu if self.exact_reductions is None else self.exact_reductions
        pack_below = self.pack_below
        if pack_below is None:
            profile = self.costs.profile
            copied = profile.inside["gather"].tensor_seconds * profile.memory_bandwidth / 2 / program.mesh.shard.size
            pack_below = int(max(profile.pack_below, copied) if on_cpu else profile.pack_below)
        # Under a limit it took 4 % more than was predicted on a mesh with a tensor axis.
        same_bits = on_cpu and program.mesh.shard.size == EXCHANGE_RANKS and self.memory_limit is None
        exchange = same_bits or self.any_order
        return Settings(self.constraints, exact, exchange, pack_below, self.optimizer_states)

    def _shortest(self, program: Program, settings: Settings) -> Plan:
        """Return the best plan of all, or of those by units: a search may be better at fewer buckets."""
        found: dict[Settings, Plan] = {}
        refused: list[InfeasibleError] = []
        built = {attempt: build(program, self.costs, attempt) for attempt in (settings, settings.by_units)}
        for attempt in built:
            try:
                found[attempt] = self._planned(program, built[attempt], attempt, Solver(self._limit, steps=self.steps))
            except InfeasibleError as error:
                refused.append(error)
        if not found:
            raise min(refused, key=lambda error: error.smallest)
        predicted = {attempt: _predicted(plan) for attempt, plan in found.items()}
        shortest = min(found, key=lambda attempt: predicted[attempt].step_seconds)
        bound = lower_bound(built[settings].problem, limit=self._limit)
        if settings in found:
            bound = predicted[settings].lower_bound
        return _above(found[shortest], bound, stopped=any(each.stopped for each in predicted.values()))

    def _worthwhile(self, program: Program, settings: Settings) -> Plan:
        """Return FSDP2's order, or the best of its buckets, or the best of all, each if it gains enough."""
        by_units = settings.by_units
        ahead = functools.partial(fsdp2_solution, limit=0 if self.memory_limit is None else self.memory_limit)
        built = {attempt: build(program, self.costs, attempt) for attempt in (by_units, settings)}
        best = self._planned(program, built[by_units], by_units, ahead)
        predicted = _predicted(best)
        # Without a limit it is about what FSDP2's order takes.
        limit = self._limit if self.memory_limit is not None else _ABOUT * predicted.peak_bytes
        bound_by_units, stopped = predicted.lower_bound, False
        bound = min(bound_by_units, lower_bound(built[settings].problem, limit=limit))
        fits = predicted.peak_bytes <= limit
        change = self.worth_seconds * len(program.all_params.units)
        refused: list[InfeasibleError] = []
        for attempt in built:
            seconds = predicted.step_seconds
            below = min(seconds / (1 + self.worth), seconds - change) if fits else math.inf
            if bound >= below:
                break
            solver = Solver(limit, exact_kept=0, steps=self.steps, below=below)
            try:
                found = self._planned(program, built[attempt], attempt, solver)
            except InfeasibleError as error:
                refused.append(error)
                continue
            stopped |= _predicted(found).stopped
            if attempt == settings:  # what is proven of all plans there, or by any of units
                bound = max(bound, min(_predicted(found).lower_bound, bound_by_units))
            if _predicted(found).step_seconds < below:
                best, predicted, fits = found, _predicted(found), True
        if not fits:
            raise min(refused, key=lambda error: error.smallest)
        return _above(best, bound, stopped=stopped)

    @property
    def _limit(self) -> float:
        return math.inf if self.memory_limit is None else self.memory_limit

    def _planned(
        self, program: Program, built: Built, settings: Settings, solver: Callable[[Problem], Solution]
    ) -> Plan:
        solution = solver(built.problem)
        bound, kept = solution.lower_bound, built.kept(solution.schedule.kept)
        if kept:
            # Positions and memory refer to the graph in which they stay gathered.
            settings = replace(settings, constraints=replace(settings.constraints, keep=False))
            keeping = replace(program, phases={name: phase.clone() for name, phase in program.phases.items()})
            keep_gathered(keeping, kept)
            try:
                built = build(keeping, self.costs, settings)
                program, solution = keeping, solver(built.problem)
            except InfeasibleError:  # it fitted by a hair's breadth
                kept, built = (), build(program, self.costs, settings)
                solution = solver(built.problem)
        profile, found = self.costs.profile, (solution.step_seconds, bound, solution.peak)
        prediction = Prediction(*found, profile.name, profile.hash, self.costs.network, solution.stopped)
        plan = self._plan(program, built, solution.schedule, settings)
        return replace(plan, kept=kept, prediction=prediction)

    def _plan(self, program: Program, built: Built, schedule: Schedule, settings: Settings) -> Plan:
        axis = program.mesh.shard

        def exchange(num_bytes: int, num_tensors: int, *, averages: bool) -> bool:
            cost = self.costs.collective("reduce", num_bytes, num_tensors, axis, averages=averages)
            return settings.exchange and bool(self.costs.exchange(num_bytes, axis, num_tensors) < cost)

        buckets: list[Bucket] = []
        events: dict[str, tuple[Event, ...]] = {}
        for chain, placement in zip(built.problem.chains, schedule.placements):
            if chain.name in program.phases:
                made, placed = _to_buckets(chain, built.maps[chain.name], placement, settings.pack_below, exchange)
                scalars, of_scalars = plan_scalars(program, chain.name, [event.at for event in placed])
                buckets += [*made, *scalars]
                events[chain.name] = tuple(heapq.merge(placed, of_scalars, key=lambda event: event.at))
        return Plan(tuple(buckets), events)


def _predicted(plan: Plan) -> Prediction:
    assert plan.prediction is not None, "a plan by cost has a prediction"
    return plan.prediction


def _above(plan: Plan, bound: float, *, stopped: bool | None = None) -> Plan:
    """Return the plan with another lower bound, and whether a search ended at its budget."""
    given = _predicted(plan)
    stopped = given.stopped if stopped is None else stopped
    return replace(plan, prediction=replace(given, lower_bound=min(bound, given.step_seconds), stopped=stopped))


def _to_buckets(
    chain: Chain, mapped: PhaseMap, placement: Placement, pack_below: float, exchange: Callable[..., bool]
) -> tuple[list[Bucket], list[Event]]:
    """Return a placement as the plan's buckets and events; a reduction with two legs is two buckets.

    `exchange` returns whether a reduction of a number of bytes and tensors is cheaper as all-to-all.
    """
    first: list[Bucket] = []
    second: list[Bucket] = []  # the same where there is one leg
    taken: Counter[str] = Counter()

    def named(kind: CollectiveKind, where: str) -> str:
        name = f"{kind} {where}"
        taken[name] += 1
        return f"{name} {taken[name]}" if taken[name] > 1 else name

    for bucket in placement.buckets:
        atoms = mapped.atoms[bucket.kind][bucket.first : bucket.end]
        transfers = chain.members(bucket)
        rows = [row for atom in atoms for row in atom.rows]
        exact = all(t.num_small == t.num_tensors for t in transfers)
        small = [row.name for row in rows if exact or row.piece_bytes(bucket.kind) < pack_below]
        packed = tuple(small) if bucket.packed else ()
        units = list(dict.fromkeys(atom.unit or "(root)" for atom in atoms))
        where = f"{' to '.join(dict.fromkeys((units[0], units[-1])))} in {chain.name}"
        axes = mapped.axes.of(rows[0])
        kind = axes.reduction if bucket.kind == "reduce" else bucket.kind
        num_bytes = sum(t.num_bytes for t in transfers)
        sent = num_bytes, len(rows) - len(packed) + bool(packed)
        may_exchange = kind == "reduce" and not rows[0].expert and not axes.in_order
        made = Bucket(
            name=named(kind, where),
            kind=kind,
            phase=chain.name,
            params=tuple(row.name for row in rows if row.name not in packed),
            packed=packed,
            axis=axes.axis(kind).name,
            num_bytes=num_bytes,
            exchanged=may_exchange and exchange(*sent, averages=axes.averages),
        )
        first.append(made)
        second.append(made)
        if kind == "reduce" and axes.replicas is not None:
            shards = sum(row.sent_bytes("all_reduce") for row in rows)
            axis, name = axes.replicas.name, named("all_reduce", where)
            second[-1] = replace(made, name=name, kind="all_reduce", axis=axis, num_bytes=shards, exchanged=False)
    events: list[Event] = []
    for event in placement.events:
        at = mapped.cuts[event.at]
        if event.action == "start":
            events.append(Event("start", first[event.bucket].name, at))
        elif event.action == "continue":
            events += [Event("wait", first[event.bucket].name, at), Event("start", second[event.bucket].name, at)]
        else:
            events.append(Event("wait", second[event.bucket].name, at))
    return list(dict.fromkeys((*first, *second))), events
