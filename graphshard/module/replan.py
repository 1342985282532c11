"""Choices for which a model is planned again, unit by unit: what is gathered ahead, and what the user runs."""

from __future__ import annotations

from collections.abc import Collection

import torch.distributed as dist

from graphshard.ir.distributed_internals import process_group
from graphshard.ir.errors import UnsupportedError
from graphshard.module.runner import Runner
from graphshard.options.passes import Direction, planned_by_unit, with_prefetch
from graphshard.pipeline.pipeline import Pipeline
from graphshard.runtime.custom import Custom


def prefetch(runner: Runner, direction: Direction, unit: str, following: tuple[str, ...]) -> None:
    """Let the gathers of these units start when that of a unit has arrived.

    Raises:
        UnsupportedError: somebody else decides when gathers start; so for the others below.
    """
    pipeline = _pipeline_of(runner, f"set_modules_to_{direction}_prefetch")
    runner.begin_again(with_prefetch(pipeline, direction, unit, following))
    runner.prefetched[direction, unit] = following


def limit_reductions(runner: Runner, units: Collection[str], most: int) -> None:
    """Let the gradients of so many units be on their way at once; of several choices the largest counts."""
    name = "set_reduce_scatter_max_input_buffers"
    chosen = {**runner.reductions_under_way, **dict.fromkeys(units, most)}
    pipeline = _pipeline_of(runner, name)
    runner.begin_again(planned_by_unit(pipeline, name, reductions_under_way=max(chosen.values(), default=1)))
    runner.reductions_under_way = chosen


def customize(runner: Runner, setter: str, chosen: Custom) -> None:
    """Let the user run collectives of units; each bucket is then one unit's.

    Args:
        setter: the method that was called.
    """
    if runner.tracer.spec.experts is not None:
        raise UnsupportedError(
            f"{setter}: parameters of this model lie on two meshes, as those of experts do, and units have collectives "
            "in two process groups. Leave it out."
        )
    pipeline = _pipeline_of(runner, setter)
    runner.begin_again(planned_by_unit(pipeline, setter))
    runner.custom.update(chosen)


def separate(runner: Runner, units: Collection[str], *, enable: bool) -> None:
    """Reduce gradients of units in a process group of their own, or in that of the gathers.

    All ranks that have shards of the model call this together: the first call makes the group.
    """
    name = "set_separate_reduce_scatter_group"
    customize(runner, name, Custom())
    if enable and not runner.custom.group and runner.tracer.spec.mesh.shard.size > 1:
        shards = process_group(runner.groups[runner.tracer.spec.mesh.shard.name])
        if runner.agreement.peers is not None:
            runner.agreement.peers.agree(name, lambda first, theirs, mine: f"{theirs} is called on rank {first}")
        group = dist.new_group(dist.get_process_group_ranks(shards), use_local_synchronization=True)
        runner.custom.group = str(group.group_name)
        if runner.agreement.peers is not None:
            runner.agreement.peers.groups.add(runner.custom.group)
    runner.custom.separate.difference_update(units)
    if enable and runner.custom.group:
        runner.custom.separate.update(units)


def take_over_plan(runner: Runner, old: Runner, names: dict[str, str]) -> None:
    """Plan with what was chosen for a part of the model, whose units have other names now."""
    for (direction, unit), following in old.prefetched.items():
        prefetch(runner, direction, names[unit], tuple(names[name] for name in following))
    for unit, most in old.reductions_under_way.items():
        limit_reductions(runner, [names[unit]], most)
    if not old.custom.is_empty:
        customize(runner, "fully_shard", old.custom.renamed(names))


def _pipeline_of(runner: Runner, setter: str) -> Pipeline:
    if runner.sealed:
        raise UnsupportedError(f"{setter}: a loaded file has its plan. Use compile.")
    return runner.tracer.pipeline
