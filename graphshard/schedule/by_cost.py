"""Make the plan that costs say is best: the planner that weighs, beside the one that follows FSDP2's order."""

from __future__ import annotations

import functools
import heapq
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from graphshard.cost.costs import Costs
from graphshard.errors import ArgumentError, InfeasibleError
from graphshard.ir.instantiate_blocks import instantiate_all_blocks
from graphshard.ir.plan import EXCHANGE_RANKS, Bucket, Event, Plan, Prediction
from graphshard.ir.program import Program
from graphshard.ir.repeats import BlocksDifferError
from graphshard.passes.keep_gathered import keep_gathered
from graphshard.schedule.bounds import lower_bound
from graphshard.schedule.buckets import to_buckets
from graphshard.schedule.build import Built, Constraints, Settings, build
from graphshard.schedule.by_unit import PlanByUnit, gathered_of, is_scalar, plan_scalars
from graphshard.schedule.few import folded_plan, planned_in_short
from graphshard.schedule.known import collectives_of, within_one_plan
from graphshard.schedule.problem import Problem, Schedule
from graphshard.schedule.shorter import shorter
from graphshard.schedule.solve import STEPS, Solution, Solver, one_ahead, smallest_of
from graphshard.schedule.ways import on_one_link, ways_of

log = logging.getLogger(__name__)

# So many times the bound or less, a search of few blocks says whether one of all pays. Where latencies take longer than
# that, buckets of many blocks may gain what few blocks do not show.
_CLOSE = 1.1
# Of what FSDP2's order takes, as much more is no difference that predictions show (they are within 5 %). Where the peak
# leaves no room for buckets that are larger by little, steps that wait for the link are up to a quarter longer.
_ABOUT = 1.01


@dataclass(frozen=True)
class _Planned:
    """A plan and its prediction."""

    plan: Plan
    prediction: Prediction

    @property
    def seconds(self) -> float:
        return self.prediction.step_seconds

    @property
    def bound(self) -> float:
        return self.prediction.lower_bound

    def above(self, bound: float, stopped: bool) -> _Planned:
        """With another lower bound, and whether a search ended at its budget."""
        prediction = replace(self.prediction, lower_bound=bound, stopped=stopped)
        return _Planned(replace(self.plan, prediction=prediction), prediction)


@dataclass(frozen=True)
class PlanByCost:
    """Buckets and launch positions with the shortest predicted step under a memory limit.

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
            on CPUs, where each tensor of a coalesced collective takes long, as many as are copied in that time.
        optimizer_states: tensors that the optimizer keeps for each parameter: 2 for Adam.
        worth, worth_seconds: share of the step, and seconds for each unit, that must be gained before the plan departs
            from FSDP2's order, one unit ahead, and again before it departs from its buckets; without a memory limit
            about what that order takes is the limit then. 0 and 0 look for the shortest step only.
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
        return planned_in_short(program, self._of_few, self._best)

    def _of_few(self, program: Program) -> Plan:
        """The schedule is that of all blocks, and memory of parameters that of few, if it treats them alike."""
        if any(is_scalar(program, c) for phase in program.phases.values() for c in collectives_of(phase)):
            raise BlocksDifferError("gradients of scalars are not reduced with their blocks")
        plan = self._best(program)
        try:
            return replace(plan, gathered_bytes=gathered_of(folded_plan(plan, program), program))
        except BlocksDifferError:
            return replace(plan, gathered_bytes=gathered_of(plan, instantiate_all_blocks(program)))

    def _best(self, program: Program) -> Plan:
        # Which ranks share a node is the program's mesh to say.
        here = replace(self, costs=replace(self.costs, mesh=program.mesh))
        if not all(on_one_link(here.costs, ways_of(program, phase)) for phase in program.phases.values()):
            return self._unplanned(program)
        settings = here._settings(program)
        search = here._worthwhile if self.worth or self.worth_seconds else here._shortest
        found = search(program, settings)
        if program.bound is None:
            return found.plan
        return found.above(min(program.bound, found.seconds), found.prediction.stopped).plan

    @within_one_plan()
    def least(self, program: Program) -> tuple[int, float]:
        """The least bytes in which a partitioned program runs, and seconds that it takes with any memory at least."""
        here = replace(self, costs=replace(self.costs, mesh=program.mesh))
        settings = here._settings(program)
        together = replace(settings, constraints=replace(self.constraints, units=True))
        problems = [build(program, here.costs, attempt).problem for attempt in dict.fromkeys((settings, together))]
        return min(map(smallest_of, problems)), lower_bound(problems[0])

    def _unplanned(self, program: Program) -> Plan:
        """The plan by units, where transfers of a kind cost as on several links.

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
        # On two ranks only is an exchange's order of summation the same. Under a limit it took 4 % more than was
        # predicted on a mesh with a tensor axis.
        exchange = on_cpu and program.mesh.shard.size == EXCHANGE_RANKS and self.memory_limit is None
        return Settings(self.constraints, exact, exchange, pack_below, self.optimizer_states)

    def _shortest(self, program: Program, settings: Settings) -> _Planned:
        """The best plan of all, or of those in which units travel together: a search may be better at fewer buckets."""
        together = replace(settings, constraints=replace(self.constraints, units=True))
        found: dict[Settings, _Planned] = {}
        refused: list[InfeasibleError] = []
        built = {attempt: build(program, self.costs, attempt) for attempt in (settings, together)}
        for attempt in built:
            try:
                found[attempt] = self._planned(program, built[attempt], attempt, Solver(self._limit, steps=self.steps))
            except InfeasibleError as error:
                refused.append(error)
        if not found:
            raise _least_of(refused)
        shortest = min(found.values(), key=lambda planned: planned.seconds)
        bound = found[settings].bound if settings in found else lower_bound(built[settings].problem, limit=self._limit)
        stopped = any(planned.prediction.stopped for planned in found.values())
        return shortest.above(min(bound, shortest.seconds), stopped)

    def _worthwhile(self, program: Program, settings: Settings) -> _Planned:
        """FSDP2's order, or the best of its buckets, or the best of all, if that beats what comes before by enough."""
        together = replace(settings, constraints=replace(self.constraints, units=True))
        ahead = functools.partial(one_ahead, limit=0 if self.memory_limit is None else self.memory_limit)
        built = {attempt: build(program, self.costs, attempt) for attempt in (together, settings)}
        best = self._planned(program, built[together], together, ahead)
        # Without a limit it is about what FSDP2's order takes.
        limit = self._limit if self.memory_limit is not None else _ABOUT * best.prediction.peak_bytes
        problems, first = {attempt: each.problem for attempt, each in built.items()}, best.seconds
        bound = min(best.bound, lower_bound(problems[settings], limit=limit))
        fits = best.prediction.peak_bytes <= limit
        together_bound, stopped = best.bound, False
        change = self.worth_seconds * len(program.all_params.units)
        refused: list[InfeasibleError] = []
        for attempt in built:
            below = min(best.seconds / (1 + self.worth), best.seconds - change) if fits else math.inf
            if bound >= below:
                break
            solver = Solver(limit, exact_kept=0, steps=self.steps, below=below)
            try:
                close = fits and best.seconds <= _CLOSE * bound
                if close and not _may_gain(problems[attempt], problems[together], first - below, solver):
                    continue
                found = self._planned(program, built[attempt], attempt, solver)
            except InfeasibleError as error:
                refused.append(error)
                continue
            stopped |= found.prediction.stopped
            if attempt == settings:  # what is proven of all plans there, or by any of units
                bound = max(bound, min(found.bound, together_bound))
            if found.seconds < below:
                best, fits = found, True
        if not fits:
            raise _least_of(refused)
        return best.above(min(bound, best.seconds), stopped)

    @property
    def _limit(self) -> float:
        return math.inf if self.memory_limit is None else self.memory_limit

    def _planned(
        self, program: Program, built: Built, settings: Settings, solver: Callable[[Problem], Solution]
    ) -> _Planned:
        solution = solver(built.problem)
        bound, kept = solution.lower_bound, built.kept(solution.schedule.kept)
        if kept:
            # Positions, and what is alive, are those of the graph in which they stay gathered.
            settings = replace(settings, constraints=replace(settings.constraints, keep=False))
            keeping = replace(program, phases={name: phase.clone() for name, phase in program.phases.items()})
            keep_gathered(keeping, kept)
            try:
                built = build(keeping, self.costs, settings)
                program, solution = keeping, solver(built.problem)
            except InfeasibleError:  # it fitted by a hair's breadth
                kept, built = (), build(program, self.costs, settings)
                solution = solver(built.problem)
        profile = self.costs.profile
        prediction = Prediction(
            solution.step_seconds,
            bound,
            solution.peak,
            profile.name,
            profile.hash,
            self.costs.network,
            solution.stopped,
        )
        plan = self._plan(program, built, solution.schedule, settings)
        return _Planned(replace(plan, kept=kept, prediction=prediction), prediction)

    def _plan(self, program: Program, built: Built, schedule: Schedule, settings: Settings) -> Plan:
        axis = program.mesh.shard

        def exchange(num_bytes: int) -> bool:
            cost = self.costs.collective("reduce", num_bytes, 1, axis)
            return settings.exchange and bool(self.costs.exchange(num_bytes, axis) < cost)

        buckets: list[Bucket] = []
        events: dict[str, tuple[Event, ...]] = {}
        for chain, placement in zip(built.problem.chains, schedule.placements):
            if chain.name not in program.phases:
                continue
            mapped = built.maps[chain.name]
            made, placed = to_buckets(chain.name, chain, mapped, placement, settings.pack_below, exchange)
            scalars, theirs = plan_scalars(program, chain.name, [event.at for event in placed])
            buckets += [*made, *scalars]
            placed = list(heapq.merge(placed, theirs, key=lambda event: event.at))
            events[chain.name] = tuple(placed)
        plan = Plan(tuple(buckets), events)
        return plan if program.few is not None else replace(plan, gathered_bytes=gathered_of(plan, program))

    def _check_units(self, program: Program) -> None:
        lists = (self.constraints.forward_prefetch, self.constraints.backward_prefetch)
        named = {name for ahead in lists for unit, units in ahead.items() for name in (unit, *units)}
        unknown = sorted(named - set(program.all_params.units))
        if unknown:
            raise ArgumentError(
                f"prefetch names {unknown[0]!r}, which is no unit with parameters. The units are "
                f"{', '.join(map(repr, program.params.units[:8]))}."
            )


def _may_gain(problem: Problem, together: Problem, seconds: float, solver: Solver) -> bool:
    """Whether a search may gain so many seconds on FSDP2's order, as far as a problem with fewer blocks says.

    Args:
        together: the problem in which units travel together.
    """
    short, ahead = shorter(problem), shorter(together)
    if short is None or ahead is None or short.gone != ahead.gone:
        return True
    below = one_ahead(ahead.problem).step_seconds - short.share * seconds
    return replace(solver, below=below, exact_transfers=0)(short.problem).step_seconds < below


def _least_of(refused: list[InfeasibleError]) -> InfeasibleError:
    """Of what no plan fits in, the error with the least bytes that one needs."""
    return min(refused, key=lambda error: error.smallest)
