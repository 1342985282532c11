"""The passes, one per file. `pipeline/pipeline.py` runs them in the order that fits one screen.

    insert_collectives        parameters become shards; all-gathers and reduce-scatters appear
    mixed_precision           shards are stored in their own dtype; casts before gathers and around reductions
    reshard_after_forward     what backward gathers again, and what it keeps
    activation_checkpointing  what units save for backward, and what is computed again
    chunked_loss              the loss over a vocabulary, some rows of logits at a time (opt-in, inexact)
    pieced_loss               the loss over a vocabulary, some words at a time, by pieces of the head (opt-in, inexact)
    partition                 the joint graph becomes forward and backward
    drop_unused_tangents      outputs that never receive a gradient cost nothing in backward
    offload                   parameters and gradients live on the host
    offload_activations       what is saved for backward lives on the host meanwhile (opt-in)
    regather_in_group         backward gathers again among fewer ranks
    gather_in_float8          parameters travel in eight bits (opt-in, inexact)
    exchange_rows             rows of embeddings are exchanged, instead of tables gathered (opt-in, inexact)
    reduce_in_pieces          the gradient of such a head is reduced piece by piece (opt-in, inexact)
    overlap_collectives       what the model itself communicates runs beside compute that does not need it
    join_collectives          what of it runs at once travels together
    pipeline_matmuls          products and the gathers or reduce-scatters at them, in pieces (opt-in, inexact)
    make_plan                 which collectives travel together, and when
    keep_gathered             what the plan keeps gathered is handed from forward to backward
    accumulate_gradients      gradients of microbatches are added up, and reduced later
    bucket                    collectives travel together, as the plan says
    reorder                   collectives start and are waited for where the plan says
    to_device                 a program captured on the CPU becomes one for GPUs

A pass sees the program, the plan, the parameter table and the graph helpers; never capture, lowering or runtime.

* **A second mesh axis is a second leg of the same reduction**: `reduce_scatter` and its wait, then `all_reduce` and its
  wait. Each is a bucket of the plan with the same members. The all-reduce of a packed bucket takes the reduced buffer
  as it is. In `PlanByUnit` it starts where its reduce-scatter is waited for, and runs beside the next unit's backward.
* **Backward is pruned for the gradients that arrive.** The likely set (scalar outputs if there are any) is lowered at
  capture. Another set is lowered when it first arrives, from the partitioned backward.
* **Microbatches are variants of the backward**, made from the partitioned graph when they first run. The pass
  `accumulate_gradients` takes the reduction away again (its operators are marked where they are inserted) and returns
  the sum under another slot. The forward is the same for all of them, so microbatches can be interleaved at will. What
  is accumulated is one dictionary that all programs of the model share.
* **An int for `reshard_after_forward`** keeps a chunk of the gathered buffer, and backward gathers it among neighbours.
  `own_chunk` is the only operator whose value depends on the rank; the graph names the axis, as a collective does. The
  landing is the one of the full gather, so both phases read the same layout.
* **What stays gathered is decided after partition**, by a pass that hands the gathered value over, not by running the
  partitioner again. The plan is then made anew on that graph, as views of a gathered value become compute there.
* **Offloading is a pass on the partitioned graph.** Uploads go with the gather before theirs, which costs no events in
  plans.
* **What is saved is offloaded unit by unit**, so that regions are cut where units meet and nowhere else. Other
  backwards of the program are made of the partitioned graph, which does not know it: `Program.on_host` names what they
  must get back.
* **Random operators are drawn again from a saved generator state**, with the operators that AOTAutograd has for it
  (`run_and_save_rng_state`, `run_with_rng_state`). Each operator has one state: 5056 bytes on the CPU, 16 on CUDA.
* **A share of activation memory** is a knapsack by seconds per byte over what the partitioner would save. It is not
  torch's `activation_memory_budget`, which counts parameters as activations, and at 0 recomputes through everything.
"""

if __name__ == "passes":
    raise ImportError("import graphshard.passes: the top-level directory passes/ is not a package of its own")

from graphshard.passes.accumulate_gradients import AccumulateGradients
from graphshard.passes.activation_checkpointing import ActivationCheckpointing
from graphshard.passes.base import Pass
from graphshard.passes.bucket import Bucketing
from graphshard.passes.chunked_loss import ChunkedLoss
from graphshard.passes.drop_unused_tangents import DropUnusedTangents
from graphshard.passes.exchange_rows import ExchangeRows
from graphshard.passes.gather_in_float8 import GatherInFloat8
from graphshard.passes.insert_collectives import InsertCollectives
from graphshard.passes.join_collectives import JoinCollectives
from graphshard.passes.keep_gathered import KeepGathered
from graphshard.passes.make_plan import MakePlan
from graphshard.passes.mixed_precision import MixedPrecision
from graphshard.passes.offload import Offload
from graphshard.passes.offload_activations import OffloadActivations
from graphshard.passes.overlap_collectives import OverlapCollectives
from graphshard.passes.partition import Partition
from graphshard.passes.pieced_loss import PiecedLoss
from graphshard.passes.pipeline_matmuls import PipelineMatmuls
from graphshard.passes.reduce_in_pieces import ReduceInPieces
from graphshard.passes.regather_in_group import RegatherInGroup
from graphshard.passes.reorder import Reorder
from graphshard.passes.reshard_after_forward import ReshardAfterForward
from graphshard.passes.to_device import ToDevice

__all__ = [
    "AccumulateGradients",
    "ActivationCheckpointing",
    "Bucketing",
    "ChunkedLoss",
    "DropUnusedTangents",
    "ExchangeRows",
    "GatherInFloat8",
    "InsertCollectives",
    "JoinCollectives",
    "KeepGathered",
    "MakePlan",
    "MixedPrecision",
    "Offload",
    "OffloadActivations",
    "OverlapCollectives",
    "Partition",
    "Pass",
    "PiecedLoss",
    "PipelineMatmuls",
    "ReduceInPieces",
    "RegatherInGroup",
    "Reorder",
    "ReshardAfterForward",
    "ToDevice",
]
