"""Ask the planner for a plan; the graph stays as it is, and the passes that follow apply the plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphshard.errors import PassError
from graphshard.ir.program import Planner, Program
from graphshard.passes.base import Pass


@dataclass(frozen=True)
class MakePlan(Pass):
    """Requires: a partitioned program without a plan.  Preserves: the graph.

    Attributes:
        planner: a function from a program to its plan. None leaves the choice to `compile`; a pipeline that runs
            without `compile` then plans unit by unit.
    """

    name: ClassVar[str] = "plan"
    runs: ClassVar = "partitioned"
    planner: Planner | None = None

    def rewrite(self, program: Program) -> int:
        if self.planner is None:
            raise PassError(f"{self.name}: it has no planner; give it one, such as MakePlan(graphshard.PlanByUnit())")
        before = program.plan
        program.plan = self.planner(program)
        return 0 if program.plan == before else max(1, len(program.plan.buckets))
