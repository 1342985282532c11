"""Peak bytes of a plan on a program: for its own program at most the planned peak, and close to it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphshard.errors import InfeasibleError
from graphshard.ir.program import Program
from graphshard.passes.keep_gathered import keep_gathered
from graphshard.schedule.build_problem import Constraints
from graphshard.schedule.planner import PlanByCost
from graphshard.schedule.rank_consistent_planner import peak_of
from tests.helpers import Blocks, captured, copied, through
from tests.schedule.test_several_axes import PROGRAMS, _planner


def _counted(program: Program, planner: PlanByCost) -> tuple[int, int]:
    """Return the bytes, and the planned peak."""
    plan = planner(program)
    keeping = copied(program)
    keep_gathered(keeping, plan.kept)
    return peak_of(plan, keeping, planner.costs, planner.optimizer_states), plan.prediction.peak_bytes


@pytest.mark.parametrize("options", [{}, {"exact_reductions": True}, {"constraints": Constraints(keep=True)}], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.quick_cases(
    "replicas on other nodes-{}",
    "all between nodes-{'exact_reductions': True}",
    "replicas only-{}",
    "neighbors gather again-{}",
    "neighbors gather again-{'exact_reductions': True}",
)
def test_peak_of_the_planned_program(name: str, options: dict) -> None:
    program = PROGRAMS[name]
    planner = _planner(program, steps=2000, **options)
    with pytest.raises(InfeasibleError) as error:
        replace(planner, memory_limit=10)(program)
    free = planner(program).prediction.peak_bytes
    for limit in (error.value.smallest, free):
        counted, predicted = _counted(program, replace(planner, memory_limit=limit))
        assert 0.7 < counted / predicted <= 1


@pytest.mark.slow
def test_peak_grows_with_sizes() -> None:
    """The plan is from another program, like a rank's with other sizes."""
    small, large = (
        through(captured(Blocks(4, 16, bias=True), (torch.ones(rows, 16),)), "partition") for rows in (3, 300)
    )
    planner = _planner(small, steps=2000)
    plan = planner(small)
    few, many = (peak_of(plan, program, planner.costs, planner.optimizer_states) for program in (small, large))
    saved = 297 * 16 * 4 * 4  # of each block
    assert many - few > saved
