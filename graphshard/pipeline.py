"""The order of compilation, on one screen."""

from __future__ import annotations

import logging
import time

from graphshard.errors import PassError
from graphshard.liveness import peak_gathered
from graphshard.partition import Partition
from graphshard.passes import (
    Bucketing,
    DropUnusedTangents,
    InsertCollectives,
    MixedPrecision,
    Pass,
    Reorder,
    ReshardAfterForward,
)
from graphshard.planner import Planner
from graphshard.printer import print_communication, print_program
from graphshard.program import Program, Stage

log = logging.getLogger(__name__)


def shard_passes() -> list[Pass]:
    """From the captured joint graph to separate forward and backward graphs."""
    return [
        InsertCollectives(),  # parameters become shards
        MixedPrecision(),  # storage dtype at the edges, so that gathers carry the compute dtype
        ReshardAfterForward(),  # what the partitioner must recompute or save
        Partition(),  # joint -> forward + backward
    ]


def schedule_passes() -> list[Pass]:
    """From separate graphs to scheduled ones; these follow the plan."""
    return [
        Bucketing(),  # which collectives travel together
        Reorder(),  # when each starts and is waited for
    ]


def shard_program(program: Program) -> None:
    """Shard and partition a captured program, in place."""
    for step in shard_passes():
        run_pass(step, program)


def schedule_program(program: Program, planner: Planner, used_tangents: frozenset[str] | None = None) -> None:
    """Plan and schedule a partitioned program, in place, for gradients through the given outputs.

    `used_tangents` of None takes the likely ones: scalar outputs if there are any, else all.
    """
    run_pass(DropUnusedTangents(used_tangents), program)
    start = time.perf_counter()
    program.plan = planner(program)
    record(program, "plan", len(program.plan.buckets), time.perf_counter() - start)
    for step in schedule_passes():
        run_pass(step, program)
    program.communication = print_communication(program)
    program.peak_gathered = {name: peak_gathered(phase, program.params) for name, phase in program.phases.items()}


def run_pass(step: Pass, program: Program) -> None:
    """requires -> rewrite -> lint -> ensures, recorded in the history."""
    start = time.perf_counter()
    step.requires(program)
    rewrites = step.rewrite(program)
    for name, phase in program.phases.items():
        try:
            phase.module.graph.lint()
        except RuntimeError as error:
            raise PassError(f"{step.name} left a broken {name} graph: {error}") from error
    step.ensures(program)
    record(program, step.name, rewrites, time.perf_counter() - start)


def record(program: Program, name: str, rewrites: int, seconds: float) -> None:
    """Keep the program's text as a stage of its history."""
    program.history.append(Stage(name, rewrites, seconds, print_program(program)))
    log.info("%s: %d rewrites in %.2f s", name, rewrites, seconds)
