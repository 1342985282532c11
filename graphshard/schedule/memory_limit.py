"""Plans under a limit of memory: one that all ranks are within, and what a plan of another size takes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from graphshard.errors import InfeasibleError
from graphshard.ir.plan import Plan
from graphshard.ir.program import Program
from graphshard.passes.keep_gathered import keep_gathered
from graphshard.schedule.by_cost import PlanByCost
from graphshard.schedule.peak import peak_of
from graphshard.utils.text import format_bytes

log = logging.getLogger(__name__)

T = TypeVar("T")

# How often the first rank plans with less memory, as another rank takes too much, before it plans with the least.
_ATTEMPTS = 4


def within(limit: int, find: Callable[[int], T], peak: Callable[[T], int]) -> T:
    """What is found for a limit of the first rank with which every rank is within `limit`.

    Args:
        find: what it is; raises `InfeasibleError`, with the least for which there is one.
        peak: bytes of the rank that takes most.

    Raises:
        InfeasibleError: even with the least on the first rank another one takes more; it has the bytes of that.
    """
    at = limit
    for attempt in range(_ATTEMPTS):
        try:
            found = find(at)
        except InfeasibleError as error:
            return _with_least(limit, find, peak, error)
        if (most := peak(found)) <= limit:
            return found
        at = max(1, at - (most - limit)) if attempt < _ATTEMPTS - 2 else 1
    raise AssertionError("nothing fits in a byte")


def _with_least(limit: int, find: Callable[[int], T], peak: Callable[[T], int], refused: InfeasibleError) -> T:
    found = find(refused.smallest)
    most = peak(found)
    if most <= limit:
        return found
    if most <= refused.smallest:
        raise refused
    raise InfeasibleError(
        f"no schedule fits in a memory_limit of {limit:,} bytes. The least possible is {most:,} bytes: pieces of "
        "parameters have different sizes on ranks of an axis along which the model communicates, and one of these "
        f"takes that where the first rank takes {refused.smallest:,}. Cut dims that the size of the axis divides, or "
        "use smaller units, a smaller batch, more ranks, or activation checkpointing.",
        most,
    )


def keeping(program: Program, kept: Sequence[str]) -> Program:
    """Return the program with parameters kept gathered from forward to backward."""
    if not kept:
        return program
    program = replace(program, phases={name: phase.clone() for name, phase in program.phases.items()})
    keep_gathered(program, kept)
    return program


def peak_with(plan: Plan, program: Program, planner: PlanByCost) -> int:
    """Return the bytes that a program takes with a plan, as predicted."""
    return int(peak_of(plan, keeping(program, plan.kept), planner.costs, planner.optimizer_states))


def told_if_over(plan: Plan, program: Program, planner: PlanByCost) -> Plan:
    """Return a plan that was made for another size; log if this size takes more memory with it than the limit."""
    limit = planner.memory_limit
    if limit is not None and program.few is None and (peak := peak_with(plan, program, planner)) > limit:
        log.warning(
            "%s takes %s with the plan of an earlier size, as predicted, and memory_limit is %s. Pass the largest "
            "inputs first (example_inputs= of graphshard.compile), so that the plan is made for them.",
            *(program.title, format_bytes(peak), format_bytes(limit)),
        )
    return plan
