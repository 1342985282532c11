"""Make the plan that costs say is best: the planner that weighs, beside the one that follows FSDP2's order."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from graphshard.cost import Costs
from graphshard.errors import ArgumentError
from graphshard.graph import collectives
from graphshard.passes.keep_gathered import keep_gathered
from graphshard.plan import Bucket, Event, Plan, Prediction
from graphshard.planner import account
from graphshard.program import Program
from graphshard.schedule.build import Built, Constraints, Settings, build, to_buckets
from graphshard.schedule.problem import InfeasibleError, Schedule
from graphshard.schedule.solve import Solver


@dataclass(frozen=True)
class PlanByCost:
    """Buckets and launch positions with the shortest predicted step under a memory limit.

    The costs come from a profile file, never from what this rank measures while it plans: all ranks must make the
    same plan.

    Attributes:
        costs: of compute, collectives and copies.
        memory_limit: bytes that shards, optimizer state, gathered parameters, gradients and saved values may take at
            any time; None does not limit them.
        constraints: what the user fixes.
        exact_reductions: gradients are reduced in FSDP2's buckets and packed in its order, which keeps its bits where
            the sum depends on the place in the buffer, as on gloo. None does so on CPUs.
        pack_below: bytes of a shard below which a tensor may be packed with others.
        optimizer_states: tensors that the optimizer keeps for each parameter: 2 for Adam.
    """

    costs: Costs
    memory_limit: int | None = None
    constraints: Constraints = field(default_factory=Constraints)
    exact_reductions: bool | None = None
    pack_below: int = 64 * 1024
    optimizer_states: int = 2

    def __post_init__(self) -> None:
        if self.memory_limit is not None and self.memory_limit <= 0:
            raise ArgumentError(f"memory_limit must be a positive number of bytes, got {self.memory_limit}.")

    def __call__(self, program: Program) -> Plan:
        """Plan a partitioned program.

        Raises:
            InfeasibleError: no plan fits in the memory limit; the message has the least bytes that one needs.
        """
        exact = program.device.type == "cpu" if self.exact_reductions is None else self.exact_reductions
        settings = Settings(self.constraints, exact, self.pack_below, self.optimizer_states)
        self._check_units(program)
        solver = Solver(math.inf if self.memory_limit is None else self.memory_limit)
        built = build(program, self.costs, settings)
        solution = solver(built.problem)
        bound, kept = solution.lower_bound, built.kept(solution.schedule.kept)
        if kept:
            # Positions, and what is alive, are those of the graph in which they stay gathered.
            settings = replace(settings, constraints=replace(self.constraints, keep=False))
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
            solution.step_seconds, bound, solution.peak, profile.name, profile.hash, self.costs.network
        )
        return replace(_plan(program, built, solution.schedule, self.pack_below), kept=kept, prediction=prediction)

    def _check_units(self, program: Program) -> None:
        lists = (self.constraints.forward_prefetch, self.constraints.backward_prefetch)
        named = {name for ahead in lists for unit, units in ahead.items() for name in (unit, *units)}
        unknown = sorted(named - set(program.params.units))
        if unknown:
            raise ArgumentError(
                f"prefetch names {unknown[0]!r}, which is no unit with parameters. The units are "
                f"{', '.join(map(repr, program.params.units[:8]))}."
            )


def _plan(program: Program, built: Built, schedule: Schedule, pack_below: int) -> Plan:
    buckets: list[Bucket] = []
    events: dict[str, tuple[Event, ...]] = {}
    gathered: dict[str, int] = {}
    for chain, placement in zip(built.problem.chains, schedule.placements):
        if chain.name not in program.phases:
            continue
        phase, mapped = program.phases[chain.name], built.maps[chain.name]
        made, placed = to_buckets(chain.name, chain, mapped, placement, program.axis, pack_below)
        of_row = {(c.kind, c.params[0]): c for c in collectives(phase)}
        groups = [(bucket, [of_row[bucket.kind, name] for name in bucket.members]) for bucket in made]
        buckets += made
        events[chain.name] = tuple(placed)
        gathered[chain.name] = account(phase, groups, placed, program.params)
    return Plan(tuple(buckets), events, gathered)
