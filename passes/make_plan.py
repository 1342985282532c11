"""Ask the planner for a plan; the graph stays as it is, the passes that follow apply the plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphshard.ir.errors import PassError
from graphshard.ir.program import Program
from graphshard.passes.base import Pass
from graphshard.schedule.by_unit import PlanByUnit, Planner


@dataclass(frozen=True)
class MakePlan(Pass):
    """Requires: a partitioned program without a plan.  Preserves: the graph.

    Attributes:
        planner: a function from a program to its plan. None is for `compile` to choose, and unit by unit elsewhere.
    """

    name: ClassVar[str] = "plan"
    planner: Planner | None = None

    def requires(self, program: Program) -> None:
        if "joint" in program.phases:
            raise PassError(f"{self.name}: the program is not partitioned yet; plan after partition")

    def rewrite(self, program: Program) -> int:
        before = program.plan
        program.plan = (self.planner or PlanByUnit())(program)
        return 0 if program.plan == before else max(1, len(program.plan.buckets))
