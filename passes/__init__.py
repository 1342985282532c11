"""The passes, one per file. `pipeline/pipeline.py` runs them in the order that fits one screen.

    activation_checkpointing  what units save for backward, and what is computed again
    insert_collectives      parameters become shards; all-gathers and reduce-scatters appear
    mixed_precision         shards are stored in their own dtype; casts before gathers and around reductions
    reshard_after_forward   what backward gathers again, and what it keeps
    drop_unused_tangents    outputs that never receive a gradient cost nothing in backward
    regather_in_group       backward gathers again among fewer ranks
    gather_in_float8        parameters travel in eight bits (opt-in, inexact)
    make_plan               which collectives travel together, and when
    keep_gathered           what the plan keeps gathered is handed from forward to backward
    accumulate_gradients    gradients of microbatches are added up, and reduced later
    bucket                  collectives travel together, as the plan says
    reorder                 collectives start and are waited for where the plan says
    to_device               a program captured on the CPU becomes one for GPUs

A pass sees the program, the plan, the parameter table and the graph helpers; never capture, lowering or runtime.
"""

if __name__ == "passes":
    raise ImportError("import graphshard.passes: the top-level directory passes/ is not a package of its own")

from graphshard.passes.accumulate_gradients import AccumulateGradients
from graphshard.passes.activation_checkpointing import ActivationCheckpointing
from graphshard.passes.base import Pass
from graphshard.passes.bucket import Bucketing
from graphshard.passes.drop_unused_tangents import DropUnusedTangents
from graphshard.passes.gather_in_float8 import GatherInFloat8
from graphshard.passes.insert_collectives import InsertCollectives
from graphshard.passes.keep_gathered import KeepGathered
from graphshard.passes.make_plan import MakePlan
from graphshard.passes.mixed_precision import MixedPrecision
from graphshard.passes.offload import Offload
from graphshard.passes.regather_in_group import RegatherInGroup
from graphshard.passes.reorder import Reorder
from graphshard.passes.reshard_after_forward import ReshardAfterForward
from graphshard.passes.to_device import ToDevice

__all__ = [
    "AccumulateGradients",
    "ActivationCheckpointing",
    "Bucketing",
    "DropUnusedTangents",
    "GatherInFloat8",
    "InsertCollectives",
    "KeepGathered",
    "MakePlan",
    "MixedPrecision",
    "Offload",
    "Pass",
    "RegatherInGroup",
    "Reorder",
    "ReshardAfterForward",
    "ToDevice",
]
