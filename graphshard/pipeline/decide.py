"""One decision for memory: what units save, what is offloaded, computed again or gathered again, under one limit.

    values of units    dearest per byte first    v7 v3 v3' v1 | v5 v2 ...
                                                 saved        | computed again
    each border        partition -> plan under the limit, which keeps gathered what fits -> seconds of a step

What is saved leaves less for gathered parameters, and for what is gathered ahead. So each border (`shares`) is planned
as if it were given, and the shortest predicted step is taken. The order is that of the knapsack's relaxation: no other
values of as many bytes take less to compute again, as the costs of operators add up.

* **Peaks grow along the order**, as more is saved, and compute falls. So the last border that fits is found by halving,
  and none behind it is planned. Before it quarters of the bytes are tried, and then, by halving, what is around the
  best; but none of which the step takes at least, with any memory, as long as the best so far. Quarters of all bytes
  are tried, too, as these are what a user would try.
* **The bound** is that of the first border that does not fit, with any memory for gathered parameters. What fits saves
  less, and so computes no less.
* **With few borders all are planned** (`exact`), with more as many: a plan of a deep model takes seconds.
* **Offloading comes after that, on GPUs.** Of what is saved, quarters of the bytes are sent to the host
  (`OffloadActivations`), for each of which the border is looked for in the same way, unless the step is as short
  already as if all were saved with any memory. That is the bound where offloading is a choice.
* **Ranks**: the first one decides, as it plans (`schedule/agreed.py`).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from graphshard.errors import ArgumentError, InfeasibleError
from graphshard.ir.param_table import even_pieces
from graphshard.ir.plan import Prediction
from graphshard.ir.program import Program
from graphshard.passes import ActivationCheckpointing, MakePlan, OffloadActivations, Pass
from graphshard.passes.activation_checkpointing import mark, ranked, within_share
from graphshard.schedule.agreed import AgreedPlanner
from graphshard.schedule.by_cost import PlanByCost
from graphshard.schedule.memory_limit import within

log = logging.getLogger(__name__)

# With so many borders, or fewer, all are planned.
EXACT = 12
# How many plans share the planner's budget of steps.
_PLANS = 9
# Borders at which the least memory is looked for, where neither the first nor the last one fits.
_GRID = 9
# Borders are not told apart where they save less than this part of the limit more.
_FINE = 1 / 256
# Parts of what is saved that may be offloaded; for each of them so many borders are planned. A step that is longer than
# the bound by no more than such a part is as short as it gets.
_OFFLOADED = (0.25, 0.5, 0.75, 1.0)
_FEW = 4
_ENOUGH = 0.005

# Partitioned programs that are held for their plans.
_HELD = 3

# Runs passes over a program.
Run = Callable[[tuple[Pass, ...], Program], None]


def decide(passes: tuple[Pass, ...], program: Program, run: Run) -> tuple[Pass, ...]:
    """Passes with what the first one, `ActivationCheckpointing("auto")`, is to be; `program.bound` is set.

    Raises:
        ArgumentError: the passes have no planner with a limit of memory.
        InfeasibleError: no choice fits in the limit; it has the least bytes that one needs.
    """
    at = next((index for index, step in enumerate(passes) if isinstance(step, MakePlan)), len(passes))
    planner = getattr(passes[at], "planner", None) if at < len(passes) else None
    agreed = planner if isinstance(planner, AgreedPlanner) else None
    by_cost = agreed.planner if agreed is not None else planner
    if not isinstance(by_cost, PlanByCost) or by_cost.memory_limit is None:
        raise ArgumentError(
            'activation="auto" is decided under a limit of memory, by costs. Give memory_limit= in bytes, and leave '
            "planners out of passes."
        )
    if "joint" not in program.phases:
        return (ActivationCheckpointing(1.0), *passes[1:])

    # One budget for the searches of all plans; the plan that follows has it for itself.
    searching = replace(by_cost, steps=by_cost.steps // _PLANS)
    share = agreed.share if agreed is not None else _alone
    even = even_pieces(program.mesh, program.all_params)

    def decided(limit: int) -> dict[str, Any]:
        def make() -> dict[str, Any]:
            try:
                made = best(program, passes[1:at], replace(searching, memory_limit=limit), run)
            except InfeasibleError as error:
                return {"error": str(error), "smallest": error.smallest}
            return made if even or made["share"] == 1 else {**made, **_by_name(program, made["share"])}

        made = share(program, make)
        if "error" in made:
            raise InfeasibleError(made["error"], made["smallest"])
        return made

    def chosen(made: dict[str, Any]) -> tuple[Pass, ...]:
        away = (OffloadActivations(made["offloaded"]),) if made["offloaded"] else ()
        policy = tuple(made["kept"]) if "kept" in made else made["share"]
        return (ActivationCheckpointing(policy), *passes[1:at], *away)

    limit = by_cost.memory_limit
    if agreed is None:
        made = decided(limit)
    elif even:
        made = agreed.decide_once(program, lambda: decided(limit))
    else:

        def peak(made: dict[str, Any]) -> int:
            """Of the rank that takes most."""
            copy = _copied(program)
            run(chosen(made), copy)
            agreeing = replace(agreed, planner=searching, known={})
            try:
                prediction = agreeing(copy).prediction
            except InfeasibleError as error:
                return error.smallest
            assert prediction is not None, "a plan by cost has a prediction"
            return prediction.peak_bytes

        made = agreed.decide_once(program, lambda: within(limit, decided, peak))
    program.bound = made["bound"]
    return (*chosen(made), *passes[at:])


def same_share(passes: tuple[Pass, ...], program: Program) -> tuple[Pass, ...]:
    """Passes whose first one saves a share of values; of pieces that differ in size the first rank's choice."""
    step = passes[0]
    agreed = next((s.planner for s in passes if isinstance(s, MakePlan) and isinstance(s.planner, AgreedPlanner)), None)
    assert isinstance(step, ActivationCheckpointing)
    share = step.policy
    if agreed is None or even_pieces(program.mesh, program.all_params) or "joint" not in program.phases:
        return passes
    if not isinstance(share, (int, float)) or share in (0, 1):
        return passes
    made = agreed.decide_once(program, lambda: agreed.share(program, lambda: _by_name(program, share)))
    return (ActivationCheckpointing(tuple(made["kept"])), *passes[1:])


def _by_name(program: Program, share: float) -> dict[str, Any]:
    """What is saved: of other sizes the same share may be other values, and what is computed again is sent again."""
    return {"kept": sorted(within_share(ranked(program), share))}


def _copied(program: Program) -> Program:
    phases = {name: phase.clone() for name, phase in program.phases.items()}
    return replace(program, phases=phases, history=[], established=set(program.established))


def _alone(program: Program, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    return make()


def best(program: Program, between: tuple[Pass, ...], planner: PlanByCost, run: Run) -> dict[str, float]:
    """The share to save, the part of it that is offloaded, and seconds that no choice takes less than.

    Raises:
        InfeasibleError: no choice fits.
    """
    may_offload = planner.costs.profile.device != "cpu" and OffloadActivations.name not in [p.name for p in between]
    plain = Search(program, between, planner, run)
    if not may_offload:
        share, bound = plain.best()
        return {"share": share, "offloaded": 0.0, "bound": bound}
    found: list[tuple[float, float, float]] = []
    refused: list[InfeasibleError] = []
    bound = plain.least(len(plain.shares) - 1)[1]
    for part in (0.0, *_OFFLOADED):
        away = replace(plain, between=(*between, OffloadActivations(part)), exact=_FEW) if part else plain
        try:
            share, _ = away.best()
        except InfeasibleError as error:
            refused.append(error)
            continue
        found.append((away.planned(away.shares.index(share)).step_seconds, part, share))
        if min(found)[0] <= bound * (1 + _ENOUGH):
            break
    if not found:
        raise min(refused, key=lambda error: error.smallest)
    _, part, share = min(found)
    return {"share": share, "offloaded": part, "bound": bound}


@dataclass
class Search:
    """For the best border.

    Attributes:
        program: the joint graph.
        between: passes behind `activation-checkpointing` and before the plan.
        planner: has a limit of memory.
        run: runs passes.
        exact: with at most so many borders all are planned.
    """

    program: Program
    between: tuple[Pass, ...]
    planner: PlanByCost
    run: Run
    exact: int = EXACT
    shares: tuple[float, ...] = field(init=False)
    _sizes: dict[str, int] = field(init=False)
    _found: dict[int, Program] = field(default_factory=dict, init=False)
    _least: dict[int, tuple[int, float]] = field(default_factory=dict, init=False)
    _planned: dict[int, Prediction] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._sizes = ranked(self.program)
        total = sum(self._sizes.values())
        sums = (size / total for size in itertools.accumulate(self._sizes.values()) if 0 < size < total)
        self.shares = tuple(dict.fromkeys((0.0, *sums, 1.0)))

    def best(self) -> tuple[float, float]:
        """The share to save, and seconds that no choice takes less than.

        Raises:
            InfeasibleError: none fits.
        """
        last = len(self.shares) - 1
        most = self._most()
        for index in itertools.islice(self._tried(most), self.exact):
            self.planned(index)
        best = self._shortest_at()
        found = self.planned(best)
        log.info(
            "of %d borders %d were planned: %.0f%% of what is not computed again otherwise is saved, predicted step "
            "%.3f ms, peak %d bytes",
            last + 1,
            len(self._planned),
            100 * self.shares[best],
            1e3 * found.step_seconds,
            found.peak_bytes,
        )
        return self.shares[best], self.least(min(most + 1, last))[1]

    def least(self, index: int) -> tuple[int, float]:
        """The least bytes that a border needs, and the least seconds that it takes with any memory."""
        if index not in self._least:
            self._least[index] = self.planner.least(self._partitioned(index))
        return self._least[index]

    def planned(self, index: int) -> Prediction:
        """What the plan at a border that fits is predicted to take."""
        if index not in self._planned:
            prediction = self.planner(self._partitioned(index)).prediction
            assert prediction is not None, "a plan by cost has a prediction"
            self._planned[index] = prediction
        return self._planned[index]

    def _partitioned(self, index: int) -> Program:
        """The program as the planner gets it."""
        if index not in self._found:
            copy = _copied(self.program)
            if index + 1 < len(self.shares):
                mark(copy, within_share(self._sizes, self.shares[index]))
            self.run(self.between, copy)
            self._found = {**dict(list(self._found.items())[-_HELD:]), index: copy}
        return self._found[index]

    def _fits(self, index: int) -> bool:
        limit = self.planner.memory_limit
        return limit is None or self.least(index)[0] <= limit

    def _most(self) -> int:
        """The last border that fits."""
        last = len(self.shares) - 1
        if self._fits(last):
            return last
        if len(self.shares) <= self.exact:
            fit = list(filter(self._fits, range(last)))
            return fit[-1] if fit else self._refuse(range(last + 1))
        fitting, above = 0, last
        if not self._fits(0):
            # What the last units save is there at once when they compute it again, so a few values may cost nothing.
            grid = sorted({*range(self.exact), *(self._near(step / (_GRID - 1)) for step in range(_GRID))})
            fit = list(filter(self._fits, grid))
            fitting = fit[-1] if fit else self._refuse(grid)
            above = next((index for index in grid if index > fitting), last)
        while above - fitting > 1 and self._differ(fitting, above):
            middle = self._between(fitting, above)
            if self._fits(middle):
                fitting = middle
            else:
                above = middle
        return fitting

    def _between(self, fitting: int, above: int) -> int:
        """The border at which, between two, the limit is met if bytes grow evenly; nearer the middle than the ends."""
        low, high, limit = self.least(fitting)[0], self.least(above)[0], self.planner.memory_limit or 0
        part = min(max((limit - low) / max(1, high - low), 0.1), 0.9)
        share = self.shares[fitting] + part * (self.shares[above] - self.shares[fitting])
        return min(max(self._near(share), fitting + 1), above - 1)

    def _near(self, share: float) -> int:
        return min(range(len(self.shares)), key=lambda index: abs(self.shares[index] - share))

    def _differ(self, index: int, other: int) -> bool:
        """Whether two borders save so much more or less that it is worth telling them apart."""
        return abs(self.least(index)[0] - self.least(other)[0]) > _FINE * (self.planner.memory_limit or 0)

    def _tried(self, most: int) -> Iterator[int]:
        """The borders to plan, the last that fits first."""
        if len(self.shares) <= self.exact:
            yield from (index for index in range(most, -1, -1) if self._fits(index))
            return
        yield most
        for whole in (1.0, self.shares[most]):  # single policies, and between what fits
            quarters = (self._near(part * whole) for part in (0.75, 0.5, 0.25, 0.0))
            yield from filter(self._promises, (index for index in quarters if index <= most))
        width = most // 8
        while width > 0:
            best = self._shortest_at()
            yield from filter(self._promises, (i for i in (best - width, best + width) if 0 <= i <= most))
            width //= 2

    def _promises(self, index: int) -> bool:
        return index not in self._planned and self._fits(index) and self.least(index)[1] < self._shortest()

    def _shortest_at(self) -> int:
        """The best border so far; of equal ones that at which more is saved."""
        return min(sorted(self._planned, reverse=True), key=lambda index: self._planned[index].step_seconds)

    def _shortest(self) -> float:
        return self._planned[self._shortest_at()].step_seconds

    def _refuse(self, borders: Iterable[int]) -> NoReturn:
        """Raise the planner's error at the border that needs least."""
        index = min(borders, key=lambda index: self.least(index)[0])
        try:
            self.planner(self._partitioned(index))
        except InfeasibleError as error:
            raise InfeasibleError(
                f'{error} That is with activation={self.shares[index]:.3g}; no choice of activation="auto" takes less.',
                error.smallest,
            ) from None
        raise AssertionError("the planner fits where its least does not")
