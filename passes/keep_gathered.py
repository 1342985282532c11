"""Let backward read the gathered parameters that forward leaves behind, where the plan keeps them.

    forward    %w: f32[8, 4] = wait_tensor(%g)          %w: f32[8, 4] = wait_tensor(%g)
               return %y as output:0                  * return %y as output:0, %w as saved:w
    backward * %g = all_gather_into_tensor(%s)        * %w: f32[8, 4] = saved:w
             * %w = wait_tensor(%g)                     %dx = mm(%dy, %w)
               %dx = mm(%dy, %w)

This is what `reshard_after_forward=False` does for a parameter, decided after the graph was partitioned, when the plan
knows what the memory has room for.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from graphshard.errors import PassError
from graphshard.ir.graph import erase_dead, fake
from graphshard.ir.layout import collectives
from graphshard.ir.params import ParamRow
from graphshard.ir.program import Phase, Program, Slot
from graphshard.ir.transport import landing
from graphshard.passes.base import Pass


@dataclass(frozen=True)
class KeepGathered(Pass):
    """Requires: a plan; one collective per parameter.  Preserves: numerics, the order of compute."""

    name: ClassVar[str] = "keep-gathered"

    def requires(self, program: Program) -> None:
        if program.plan is None:
            raise PassError(f"{self.name}: the program has no plan; run a planner first")
        if program.plan.kept and not {"forward", "backward"} <= set(program.phases):
            raise PassError(f"{self.name}: the plan keeps parameters for a backward that the program does not have")

    def rewrite(self, program: Program) -> int:
        return keep_gathered(program, program.plan.kept if program.plan else ())


def keep_gathered(program: Program, names: Collection[str]) -> int:
    """Hand these parameters from forward to backward; how many backward gathered again."""
    kept = [program.params[name] for name in names]
    if not kept or "forward" not in program.phases:  # another backward, which gathers again
        return 0
    forward, backward = program.phases["forward"], program.phases["backward"]
    ours, theirs = (_gathered(phase, kept) for phase in (forward, backward))
    for name, again in theirs.items():
        _hand_over(forward, backward, Slot("saved", name, of="gathered"), ours[name], again)
    erase_dead(backward.module.graph)
    return len(theirs)


def _gathered(phase: Phase, rows: list[ParamRow]) -> dict[str, Node]:
    """The full parameters of a phase by name, as the model uses them."""
    wanted = {row.name: row for row in rows}
    found: dict[str, Node] = {}
    for collective in collectives(phase):
        if collective.kind == "gather" and collective.params[0] in wanted:
            (node,) = collective.waits
            for _ in landing(wanted[collective.params[0]]):
                (node,) = node.users
            found[collective.params[0]] = node
    return found


def _hand_over(forward: Phase, backward: Phase, slot: Slot, full: Node, again: Node) -> None:
    forward.set_results([*forward.results, full])
    forward.outputs = (*forward.outputs, slot)
    given = backward.add_input(full.name, slot, fake(again))
    given.meta.update({key: again.meta[key] for key in ("nn_module_stack",) if key in again.meta})
    again.replace_all_uses_with(given)
