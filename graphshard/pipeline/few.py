"""From a scheduled program of few blocks, and from what is said of it, to that of all."""

from __future__ import annotations

from dataclasses import replace

from graphshard.ir.plan import Plan
from graphshard.ir.program import Program
from graphshard.ir.repeats import TEMPLATE, Repeats
from graphshard.ir.stamp import stamp
from graphshard.ir.unfold import Unfolding
from graphshard.lower.regions import list_calls


def stamped(program: Program, plan: Plan | None) -> Program:
    """The program of all blocks, made of an outlined one of few, which is used up.

    Args:
        plan: of all blocks.

    Raises:
        Uneven: blocks differ.
    """
    assert program.few is not None
    made = stamp(program, program.few.repeats, program.few.params, program.few.saved)
    made.plan = plan
    list_calls(made)
    return made


def unfold_summary(program: Program, gathered: dict[str, list[tuple[str, tuple[str, ...]]]]) -> None:
    """Unfold what a program communicates and saves, and the units that are gathered at once, in place.

    Raises:
        Uneven: blocks differ there.
    """
    assert program.few is not None
    repeats, lines = program.few.repeats, []
    for name in program.phases:
        unfolding = Unfolding(repeats, descending=name == "backward", ends=2 if name == "backward" else 1)
        sent = [line for line in program.communication if line.startswith(f"{name}: ")]
        lines += unfolding.unfold(sent) if any(map(unfolding.few.named_groups, sent)) else sent
        if gathered[name]:
            gathered[name] = unfolding.unfold(gathered[name], lambda entry: entry[0])
    program.communication = lines
    _unfold_saved(program, repeats)


def _unfold_saved(program: Program, repeats: Repeats) -> None:
    found = {row.unit: row for row in program.saved}
    for unit in program.all_params.units:
        place = repeats.place_of(unit)
        if place is not None and place[0] in repeats.missing:
            template = found.get(repeats.name_at(TEMPLATE, unit))
            if template is not None:
                found[unit] = replace(template, unit=unit)
    units = dict.fromkeys(("", *program.all_params.units))
    program.saved = tuple(found[unit] for unit in units if unit in found)
