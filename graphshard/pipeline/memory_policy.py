"""Memory policy of `activation="auto"`: what is saved, offloaded, recomputed or gathered again under one limit.

    values of units    dearest per byte first    v7 v3 v3' v1 | v5 v2 ...
                                                 saved        | recomputed
    each border        partition -> plan under the limit, which keeps gathered what fits -> seconds of a step

Saved values leave less memory for gathered parameters and for prefetch. So each border (`shares`) is planned as if it
were given, and the shortest predicted step wins. The order follows the knapsack's relaxation: no other values of the
same bytes take less to recompute, as the costs of operators add up.

* **Peaks grow along the order**, as more is saved, and compute falls. So the last border that fits is found by halving,
  and none after it is planned. Quarters of the bytes before it are planned, then, by halving, borders around the best;
  but none whose least step time, with any memory, is as long as the best so far. Quarters of all bytes are planned,
  too, as these are what a user would try.
* **The bound** comes from the first border that does not fit, with any memory for gathered parameters. Borders that fit
  save less, and so compute no less.
* **With few borders all are planned** (`exact`), with more the same number: a plan of a deep model takes seconds.
* **Offloading comes after that, on GPUs.** Quarters of the saved bytes are sent to the host (`OffloadActivations`); for
  each the border is searched in the same way, unless the step is already as short as if all were saved with any memory.
  That is the bound where offloading is a choice.
* **Ranks**: the first rank decides, as it plans (`AgreedPlanner`).
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
from graphshard.schedule.planner import PlanByCost
from graphshard.schedule.rank_consistent_planner import AgreedPlanner, within

log = logging.getLogger(__name__)

# With this number of borders, or fewer, all are planned.
EXACT = 12
# Number of plans that share the planner's budget of steps.
_PLANS = 9
# Number of borders at which the least memory is evaluated if neither the first nor the last one fits.
_GRID = 9
# Borders are not distinguished if they differ by less than this fraction of the limit.
_FINE = 1 / 256
# Fractions of the saved values that may be offloaded, and the number of borders planned for each.
_OFFLOADED, _FEW = (0.25, 0.5, 0.75, 1.0), 4
# A step that is longer than the bound by at most this fraction is short enough.
_ENOUGH = 0.005
# Number of partitioned programs that are held for their plans.
_HELD = 3

# Runs passes over a program.
Run = Callable[[tuple[Pass, ...], Program], None]
# A decision in plain data, as ranks exchange it: "share", "offloaded", "bound", and names of saved operators in "kept".
_Decision = dict[str, Any]


def decide(passes: tuple[Pass, ...], program: Program, run: Run) -> tuple[Pass, ...]:
    """Replace the first pass, `ActivationCheckpointing("auto")`, by the best policy, and set `program.bound`.

    Raises:
        ArgumentError: the passes have no planner with a memory limit.
        InfeasibleError: no choice fits in the limit; it has the least bytes that any choice needs.
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
    # One budget for the searches of all plans; the plan that follows has all of it.
    searching = replace(by_cost, steps=by_cost.steps // _PLANS)
    even = even_pieces(program.mesh, program.all_params)

    def search(limit: int) -> _Decision:
        try:
            found = best(program, passes[1:at], replace(searching, memory_limit=limit), run)
        except InfeasibleError as error:
            return {"error": str(error), "smallest": error.smallest}
        return found if even or found["share"] == 1 else {**found, "kept": _kept(program, found["share"])}

    def decided(limit: int) -> _Decision:
        # Ranks that run programs of files may be alone at another size.
        found = search(limit) if agreed is None or agreed.from_files else agreed.share(program, lambda: search(limit))
        if "error" in found:
            raise InfeasibleError(found["error"], found["smallest"])
        return found

    def chosen(found: _Decision) -> tuple[Pass, ...]:
        away = (OffloadActivations(found["offloaded"]),) if found["offloaded"] else ()
        policy = tuple(found["kept"]) if "kept" in found else found["share"]
        return (ActivationCheckpointing(policy), *passes[1:at], *away)

    def peak(found: _Decision) -> int:
        """Return the bytes of the rank that takes most."""
        assert agreed is not None
        copy = program.clone()
        run(chosen(found), copy)
        try:
            prediction = replace(agreed, planner=searching, known={})(copy).prediction
        except InfeasibleError as error:
            return error.smallest
        assert prediction is not None, "a plan by cost has a prediction"
        return prediction.peak_bytes

    limit = by_cost.memory_limit
    if agreed is None:
        found = decided(limit)
    elif even:
        found = agreed.decide_once(program, lambda: decided(limit))
    else:
        found = agreed.decide_once(program, lambda: within(limit, decided, peak))
    program.bound = found["bound"]
    return (*chosen(found), *passes[at:])


def same_share(passes: tuple[Pass, ...], program: Program) -> tuple[Pass, ...]:
    """Let all ranks save the values that the first rank chooses for a share, if pieces differ in size.

    The same share could be other values on another rank, and recomputed gathers are collectives.
    """
    step = passes[0]
    agreed = next((s.planner for s in passes if isinstance(s, MakePlan) and isinstance(s.planner, AgreedPlanner)), None)
    assert isinstance(step, ActivationCheckpointing)
    share = step.policy
    if agreed is None or even_pieces(program.mesh, program.all_params) or "joint" not in program.phases:
        return passes
    if not isinstance(share, (int, float)) or share in (0, 1):
        return passes
    found = agreed.decide_once(program, lambda: agreed.share(program, lambda: {"kept": _kept(program, share)}))
    return (ActivationCheckpointing(tuple(found["kept"])), *passes[1:])


def _kept(program: Program, share: float) -> list[str]:
    return sorted(within_share(ranked(program), share))


def best(program: Program, between: tuple[Pass, ...], planner: PlanByCost, run: Run) -> _Decision:
    """Return the share to save, the fraction of it to offload, and a lower bound of the step in seconds.

    Raise InfeasibleError if no choice fits.
    """
    may_offload = planner.costs.profile.device != "cpu" and OffloadActivations.name not in [p.name for p in between]
    plain = PolicySearch(program, between, planner, run)
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
class PolicySearch:
    """Search for the best border.

    Attributes:
        program: the joint graph.
        between: passes after `activation-checkpointing` and before the plan.
        exact: with this number of borders, or fewer, all are planned.
        shares: the borders, as shares of the bytes that can be saved.
    """

    program: Program
    between: tuple[Pass, ...]
    planner: PlanByCost
    run: Run
    exact: int = EXACT
    shares: tuple[float, ...] = field(init=False)
    _sizes: dict[str, int] = field(init=False)
    _partitioned: dict[int, Program] = field(default_factory=dict, init=False)
    _least: dict[int, tuple[int, float]] = field(default_factory=dict, init=False)
    _planned: dict[int, Prediction] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._sizes = ranked(self.program)
        total = sum(self._sizes.values())
        sums = (size / total for size in itertools.accumulate(self._sizes.values()) if 0 < size < total)
        self.shares = tuple(dict.fromkeys((0.0, *sums, 1.0)))

    def best(self) -> tuple[float, float]:
        """Return the share to save, and a lower bound of the step in seconds; raise InfeasibleError if none fits."""
        last = len(self.shares) - 1
        most = self._last_that_fits()
        for index in itertools.islice(self._candidates(most), self.exact):
            self.planned(index)
        best = self._shortest()
        found = self.planned(best)
        log.info(
            "of %d borders %d were planned: %.0f%% of the values that can be recomputed are saved, predicted step "
            "%.3f ms, peak %d bytes",
            *(last + 1, len(self._planned), 100 * self.shares[best], 1e3 * found.step_seconds, found.peak_bytes),
        )
        return self.shares[best], self.least(min(most + 1, last))[1]

    def least(self, index: int) -> tuple[int, float]:
        """Return the least bytes that a border needs, and the least seconds that it takes with any memory."""
        if index not in self._least:
            self._least[index] = self.planner.least(self._program_at(index))
        return self._least[index]

    def planned(self, index: int) -> Prediction:
        """Plan at a border that fits; return the prediction."""
        if index not in self._planned:
            prediction = self.planner(self._program_at(index)).prediction
            assert prediction is not None, "a plan by cost has a prediction"
            self._planned[index] = prediction
        return self._planned[index]

    def _program_at(self, index: int) -> Program:
        """Return the program at a border, as the planner reads it."""
        if index not in self._partitioned:
            copy = self.program.clone()
            if index + 1 < len(self.shares):
                mark(copy, within_share(self._sizes, self.shares[index]))
            self.run(self.between, copy)
            self._partitioned = {**dict(list(self._partitioned.items())[-_HELD:]), index: copy}
        return self._partitioned[index]

    def _fits(self, index: int) -> bool:
        limit = self.planner.memory_limit
        return limit is None or self.least(index)[0] <= limit

    def _last_that_fits(self) -> int:
        last = len(self.shares) - 1
        if self._fits(last):
            return last
        if len(self.shares) <= self.exact:
            fit = list(filter(self._fits, range(last)))
            return fit[-1] if fit else self._refuse(range(last + 1))
        fitting, above = 0, last
        if not self._fits(0):
            # Values of the last units exist at once when they are recomputed, so saving a few may cost no memory.
            grid = sorted({*range(self.exact), *(self._near(step / (_GRID - 1)) for step in range(_GRID))})
            fit = list(filter(self._fits, grid))
            fitting = fit[-1] if fit else self._refuse(grid)
            above = next((index for index in grid if index > fitting), last)
        limit = self.planner.memory_limit or 0
        while above - fitting > 1 and abs(self.least(fitting)[0] - self.least(above)[0]) > _FINE * limit:
            middle = self._between(fitting, above, limit)
            if self._fits(middle):
                fitting = middle
            else:
                above = middle
        return fitting

    def _between(self, fitting: int, above: int, limit: int) -> int:
        """Interpolate the border that meets the limit, not too near the ends."""
        low, high = self.least(fitting)[0], self.least(above)[0]
        part = min(max((limit - low) / max(1, high - low), 0.1), 0.9)
        share = self.shares[fitting] + part * (self.shares[above] - self.shares[fitting])
        return min(max(self._near(share), fitting + 1), above - 1)

    def _near(self, share: float) -> int:
        return min(range(len(self.shares)), key=lambda index: abs(self.shares[index] - share))

    def _candidates(self, most: int) -> Iterator[int]:
        """Yield the borders to plan, the last that fits first."""
        if len(self.shares) <= self.exact:
            yield from (index for index in range(most, -1, -1) if self._fits(index))
            return
        yield most
        for whole in (1.0, self.shares[most]):  # the shares that a user would try, and shares of what fits
            quarters = (self._near(part * whole) for part in (0.75, 0.5, 0.25, 0.0))
            yield from filter(self._promises, (index for index in quarters if index <= most))
        width = most // 8
        while width > 0:
            best = self._shortest()
            yield from filter(self._promises, (i for i in (best - width, best + width) if 0 <= i <= most))
            width //= 2

    def _promises(self, index: int) -> bool:
        """Return whether a border may be better than the best so far."""
        shortest = self._planned[self._shortest()].step_seconds
        return index not in self._planned and self._fits(index) and self.least(index)[1] < shortest

    def _shortest(self) -> int:
        """Return the best border so far; of equal ones that at which more is saved."""
        return min(sorted(self._planned, reverse=True), key=lambda index: self._planned[index].step_seconds)

    def _refuse(self, borders: Iterable[int]) -> NoReturn:
        """Raise the planner's error at the border that needs least."""
        index = min(borders, key=lambda index: self.least(index)[0])
        try:
            self.planner(self._program_at(index))
        except InfeasibleError as error:
            raise InfeasibleError(
                f'{error} That is with activation={self.shares[index]:.3g}; no choice of activation="auto" takes less.',
                error.smallest,
            ) from None
        raise AssertionError("the planner fits where its least does not")
