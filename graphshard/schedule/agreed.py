"""Plans that are the same on all ranks, though their inputs, and so their costs, may differ.

The first rank of the mesh plans, the others take its plan, if it fits their program: it has the same collectives at the
same positions in as long a compute. A program of which a plan is known takes that, so that a rank may capture another
size alone, such as a last batch that is smaller.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from graphshard.ir.errors import InfeasibleError
from graphshard.ir.layout import Layout, collectives
from graphshard.ir.plan import Plan
from graphshard.ir.program import Program
from graphshard.schedule.by_cost import PlanByCost
from graphshard.schedule.by_unit import first_use, last_input

# A program and what makes plain data for it; the result is that of the first rank.
Share = Callable[[Program, Callable[[], dict[str, Any]]], dict[str, Any]]


@dataclass
class AgreedPlanner:
    """A planner that makes the plan of the mesh's first rank.

    Attributes:
        planner: what plans on that rank.
        share: what the first rank makes for a program (plain data), on all ranks, which call it together.
        known: plans by what they fit.
    """

    planner: PlanByCost
    share: Share
    known: dict[str, Plan] = field(default_factory=dict)

    def __call__(self, program: Program) -> Plan:
        """The plan; raises `InfeasibleError` on all ranks if the first rank finds none within the limit."""
        mine = outline(program)
        # Under a limit of memory other sizes may need another plan.
        if mine in self.known and self.planner.memory_limit is None:
            return self.known[mine]

        def make() -> dict[str, Any]:
            try:
                return {"outline": mine, "plan": self.planner(program).to_json()}
            except InfeasibleError as error:
                return {"error": str(error), "smallest": error.smallest}

        made = self.share(program, make)
        if "error" in made:
            raise InfeasibleError(made["error"], made["smallest"])
        plan = Plan.from_json(made["plan"]) if made["outline"] == mine else self.planner(program)
        self.known[mine] = plan
        return plan


def outline(program: Program) -> str:
    """What a plan must fit: each phase's collectives, where they are needed or ready, and the length of its compute."""
    found = {}
    for name, phase in program.phases.items():
        layout = Layout.of(phase)
        place = {"gather": first_use, "reduce": last_input, "all_reduce": last_input}
        sent = [
            (c.kind, c.params[0], str(program.params[c.params[0]].sent_dtype(c.kind)), place[c.kind]([c], layout))
            for c in collectives(phase)
        ]
        found[name] = [len(layout.compute), sent]
    return json.dumps(found)
