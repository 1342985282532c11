"""Tiny models and the way to a program at any stage, without a process group.

    program = captured(Blocks(2), (torch.randn(2, 4),))     the joint graph
    through(program, "partition")                           forward and backward
    through(program, "reorder")                             scheduled
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.fx import Node

from graphshard.capture import CaptureSpec, capture
from graphshard.params import build_table
from graphshard.pipeline import record, run_pass, schedule_passes, shard_passes
from graphshard.planner import PlanByUnit
from graphshard.program import Axis, Phase, Program
from graphshard.units import find_units

COALESCED = PlanByUnit(pack_gathers_below=0, pack_reductions_below=0)
PACKED = PlanByUnit(pack_gathers_below=math.inf, pack_reductions_below=math.inf)


class Blocks(nn.Module):
    """`depth` linear layers with a ReLU each; every layer is a unit."""

    def __init__(self, depth: int = 2, width: int = 4, *, bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=bias) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.sum()


class Tied(nn.Module):
    """A language model in small: `head.weight` is `embed.weight`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens)).sum()


def captured(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    world_size: int = 2,
    units: Sequence[str] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | None = None,
    grad: bool = True,
) -> Program:
    """What `graphshard.compile(model, mesh, ...)` captures for `model(*args, **kwargs)` on the CPU."""
    policy = mp_policy or MixedPrecisionPolicy()
    names = find_units(model, units)
    table = build_table(
        model,
        num_shards=world_size,
        units=names,
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype,
        reshard_after_forward=reshard_after_forward,
    )
    axis = Axis("shard", world_size)
    spec = CaptureSpec(table, names, axis, torch.device("cpu"), policy, type(model))
    return capture(model, tuple(args), dict(kwargs or {}), spec, grad=grad)


def through(program: Program, last: str, *, planner: PlanByUnit = COALESCED) -> Program:
    """Run the passes of the pipeline that the program has not seen yet, up to and with the one named `last`."""
    seen = {stage.name for stage in program.history}
    for step in [*shard_passes(), *schedule_passes()]:
        if step.name == "bucket" and "plan" not in seen:
            program.plan = planner(program)
            record(program, "plan", len(program.plan.buckets), 0.0)
        if step.name not in seen:
            run_pass(step, program)
        if step.name == last:
            return program
    raise ValueError(f"the pipeline has no pass {last!r}")


def targets(phase: Phase) -> list[str]:
    """The operators of a phase in order, by name: `["mm", "relu", ...]`."""
    return [_name(node) for node in phase.module.graph.nodes if node.op == "call_function"]


def count(phase: Phase, name: str) -> int:
    """How often a phase calls an operator."""
    return targets(phase).count(name)


def result(phase: Phase, label: str) -> Any:
    """The value a phase returns as `label`, such as "grad:layers.0.weight"."""
    return phase.results[[str(slot) for slot in phase.outputs].index(label)]


def _name(node: Node) -> str:
    target = node.target
    return target._opname if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))
