"""Hand gathered parameters from forward to backward, where the plan keeps them.

    forward    %w: f32[8, 4] = wait_tensor(%g)          %w: f32[8, 4] = wait_tensor(%g)
               return %y as output:0                  * return %y as output:0, %w as saved:w
    backward * %g = all_gather_into_tensor(%s)        * %w: f32[8, 4] = saved:w
             * %w = wait_tensor(%g)                     %dx = mm(%dy, %w)
               %dx = mm(%dy, %w)

`reshard_after_forward=False` does the same for a parameter; here the plan decides, which knows how much memory is left
after the graph was partitioned.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from graphshard.errors import PassError
from graphshard.ir.graph import erase_dead, fake
from graphshard.ir.program import Phase, Program, Slot
from graphshard.passes.base import Pass, full_parameter, gathers_of


@dataclass(frozen=True)
class KeepGathered(Pass):
    """Requires: a plan; one collective per parameter.  Preserves: numerics, the order of compute."""

    name: ClassVar[str] = "keep-gathered"
    runs: ClassVar = "planned"

    def requires(self, program: Program) -> None:
        super().requires(program)
        assert program.plan is not None
        unknown = set(program.plan.kept).difference(spec.name for spec in program.params)
        if unknown:
            raise PassError(f"{self.name}: the plan keeps {sorted(unknown)[:5]}, which the program does not have")
        if program.plan.kept and not {"forward", "backward"} <= set(program.phases):
            raise PassError(f"{self.name}: the plan keeps parameters for a backward that the program does not have")

    def rewrite(self, program: Program) -> int:
        return keep_gathered(program, program.plan.kept if program.plan else ())


def keep_gathered(program: Program, names: Collection[str]) -> int:
    """Hand these parameters from forward to backward; return how many backward gathered again."""
    if not names or "forward" not in program.phases:  # a backward for other tangents gathers again
        return 0
    forward, backward = program.phases["forward"], program.phases["backward"]
    kept, gathered_again = (_full_parameters(phase, program, names) for phase in (forward, backward))
    for name, again in gathered_again.items():
        slot = Slot("saved", name, of="gathered")
        forward.set_results([*forward.results, kept[name]])
        forward.outputs = (*forward.outputs, slot)
        given = backward.add_input(kept[name].name, slot, fake(again))
        if "nn_module_stack" in again.meta:
            given.meta["nn_module_stack"] = again.meta["nn_module_stack"]
        again.replace_all_uses_with(given)
    erase_dead(backward.module.graph)
    return len(gathered_again)


def _full_parameters(phase: Phase, program: Program, names: Collection[str]) -> dict[str, Node]:
    found: dict[str, Node] = {}
    for gather, spec in gathers_of(phase, program):
        full = full_parameter(gather, spec) if spec.name in names else None
        if full is not None:
            found[spec.name] = full
    return found
