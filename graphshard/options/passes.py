"""What the options of `compile` do to the passes: activation checkpointing, offloading, regathering, and the planner.

Where the user's passes name no planner, costs of the machine decide. FSDP2's order, one unit ahead, stays unless
another one is predicted to gain what it is worth: others split blocks where equal blocks would share their compiled
regions, which costs compilation and fusion that no cost model sees. `activation="auto"` takes the shortest step: where
candidates were held to FSDP2's order, some to it and some not, a single policy could be shorter.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from graphshard.cost.builtin import builtin_profiles
from graphshard.cost.costs import Costs
from graphshard.cost.profile import Hardware, Profile, load_profile
from graphshard.ir.errors import ArgumentError, UnsupportedError
from graphshard.ir.mesh import Mesh
from graphshard.options.options import Activation, Options
from graphshard.passes import (
    ActivationCheckpointing,
    GatherInFloat8,
    KeepGathered,
    MakePlan,
    Offload,
    Pass,
    RegatherInGroup,
    ReshardAfterForward,
)
from graphshard.pipeline.pipeline import Pipeline
from graphshard.schedule.build import Constraints
from graphshard.schedule.by_cost import PlanByCost
from graphshard.schedule.by_unit import PlanByUnit

log = logging.getLogger(__name__)

# Share of a step, and seconds for each unit, that must be gained to depart from FSDP2's order: a millisecond pays for
# the ten seconds in which a unit of its own is compiled after 10000 steps.
WORTH = 0.02
WORTH_SECONDS = 1e-3

VARIABLE = "GRAPHSHARD_HARDWARE"

Direction = Literal["forward", "backward"]


def pipeline_of(options: Options, mesh: Mesh, costs: Costs | None, *, optimizer_states: int = 2) -> Pipeline:
    """The passes that make a program with these options.

    Args:
        mesh: what the program is for.
        costs: of the machine that plans are made for; None plans unit by unit.
        optimizer_states: tensors that the optimizer keeps for each parameter.

    Raises:
        ArgumentError: there is a memory limit, and the passes' own planner or no costs to keep it with.
    """
    pipeline = with_activation(options.passes or Pipeline(), options.activation)
    if mesh.regather is not None:
        pipeline = with_regather(pipeline)
    auto = options.activation == "auto"
    pipeline = with_planner(
        pipeline,
        costs,
        memory_limit=options.memory_limit,
        units_given=options.units is not None,
        keep=auto,
        optimizer_states=optimizer_states,
    )
    if auto and KeepGathered.name not in [step.name for step in pipeline]:
        pipeline = pipeline.insert(KeepGathered(), after=MakePlan.name)
    return with_offload(pipeline) if isinstance(options.offload_policy, CPUOffloadPolicy) else pipeline


def profile_here(device: torch.device, hardware: Hardware | None) -> Profile | None:
    """The profile to plan with: as given, by GRAPHSHARD_HARDWARE, or of a known device; None for an unknown GPU.

    Raises:
        ArgumentError: there is no such profile.
    """
    named = hardware if hardware is not None else os.environ.get(VARIABLE) or None
    if named is not None:
        return load_profile(named)
    if device.type == "cpu":
        return load_profile("cpu-gloo")
    title = torch.cuda.get_device_name(device).lower()
    known = next((name for name in builtin_profiles() if name in title), None)
    if known is None:
        log.warning(
            "no hardware profile of %s: collectives are planned unit by unit. `torchrun ... -m graphshard calibrate "
            "--out FILE` measures one; pass it as hardware= or in %s.",
            title,
            VARIABLE,
        )
    return None if known is None else load_profile(known)


def with_planner(
    pipeline: Pipeline,
    costs: Costs | None,
    *,
    memory_limit: int | None,
    units_given: bool,
    keep: bool = False,
    optimizer_states: int = 2,
) -> Pipeline:
    """The pipeline with a planner, unless it has one.

    Args:
        costs: None plans unit by unit, without costs.
        memory_limit: bytes; see `PlanByCost`.
        units_given: the user has named the units, so that nothing is split or joined.
        keep: parameters may stay gathered between forward and backward, and the shortest step is looked for.
        optimizer_states: tensors that the optimizer keeps for each parameter.

    Raises:
        ArgumentError: there is a memory limit, and the passes' own planner or no costs to keep it with.
    """
    if any(isinstance(step, GatherInFloat8) for step in pipeline):  # its gathers are not of the sizes that costs know
        costs = None
    index = next((i for i, step in enumerate(pipeline) if type(step) is MakePlan and step.planner is None), None)
    if index is None or costs is None:
        if memory_limit is not None:
            why = (
                "no hardware profile of this device is known: measure one with `graphshard calibrate` and pass it as "
                "hardware="
                if costs is None
                else "passes has a planner of its own: give the limit to that"
            )
            raise ArgumentError(f"memory_limit={memory_limit} cannot be kept, as {why}.")
        return pipeline
    planner = PlanByCost(
        costs,
        memory_limit,
        Constraints(units=units_given, keep=keep),
        optimizer_states=optimizer_states,
        worth=0.0 if keep else WORTH,
        worth_seconds=0.0 if keep else WORTH_SECONDS,
    )
    passes = list(pipeline)
    passes[index] = replace(passes[index], planner=planner)  # type: ignore[call-arg]
    return Pipeline(tuple(passes))


def with_prefetch(pipeline: Pipeline, direction: Direction, unit: str, following: tuple[str, ...]) -> Pipeline:
    """The pipeline with a plan unit by unit in which these units are gathered when one has arrived, and not the next.

    Raises:
        UnsupportedError: a planner of the user's decides that, or a limit of memory.
    """
    lists = dict(getattr(_planner_by_unit(pipeline), f"{direction}_prefetch"), **{unit: following})
    return planned_by_unit(pipeline, f"set_modules_to_{direction}_prefetch", **{f"{direction}_prefetch": lists})


def planned_by_unit(pipeline: Pipeline, setter: str, **choices: Any) -> Pipeline:
    """The pipeline with a plan unit by unit, and these fields of the planner.

    Args:
        setter: the method that was called, for the error.

    Raises:
        UnsupportedError: a planner of the user's makes the plan, or one that keeps a limit of memory.
    """
    index, plan = next(((i, p) for i, p in enumerate(pipeline) if isinstance(p, MakePlan)), (0, None))
    given, planner = plan.planner if plan is not None else None, _planner_by_unit(pipeline)
    free = given is None or isinstance(given, PlanByUnit) or (isinstance(given, PlanByCost) and not given.memory_limit)
    if plan is None or not free:
        who = "memory_limit" if isinstance(given, PlanByCost) else "a planner in passes="
        raise UnsupportedError(f"{setter}: {who} decides when collectives start and what they hold. Leave it out.")
    passes = list(pipeline)
    passes[index] = replace(plan, planner=replace(planner, **choices))
    return Pipeline(tuple(passes))


def _planner_by_unit(pipeline: Pipeline) -> PlanByUnit:
    """The planner of a pipeline, if it plans unit by unit, or a new one."""
    planners = [step.planner for step in pipeline if isinstance(step, MakePlan)]
    return next((planner for planner in planners if isinstance(planner, PlanByUnit)), PlanByUnit())


def with_offload(pipeline: Pipeline) -> Pipeline:
    """With `offload` before the plan is made, unless the user put it somewhere; backward copies what it needs again."""
    default, offloaded = ReshardAfterForward(), ReshardAfterForward(offloaded=True)
    pipeline = pipeline.replace(default.name, offloaded) if default in tuple(pipeline) else pipeline
    return _before_plan(pipeline, Offload())


def with_regather(pipeline: Pipeline) -> Pipeline:
    """With `regather-in-group` before the plan is made, unless the user put it somewhere."""
    return _before_plan(pipeline, RegatherInGroup())


def _before_plan(pipeline: Pipeline, new: Pass) -> Pipeline:
    names = [step.name for step in pipeline]
    return pipeline if new.name in names or "plan" not in names else pipeline.insert(new, before="plan")


def with_activation(pipeline: Pipeline, activation: Activation | None) -> Pipeline:
    """The pipeline with this policy of activation checkpointing in front."""
    if activation is None:
        return pipeline
    if isinstance(activation, (int, float)):
        return Pipeline((ActivationCheckpointing(float(activation)), *pipeline))
    if activation == "full" or activation == "auto":
        return Pipeline((ActivationCheckpointing(activation), *pipeline))
    return Pipeline((ActivationCheckpointing(tuple(sorted(activation, key=str))), *pipeline))
