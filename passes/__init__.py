"""The passes, one per file; `pipeline/pipeline.py` has their order.

    insert_collectives           parameters become shards; all-gathers and reduce-scatters appear
    mixed_precision              shards are stored in their dtype; casts before gathers and around reductions
    reshard_after_forward        what backward gathers again, and what it keeps
    activation_checkpointing     what units save for backward, and what backward recomputes
    partition                    the joint graph becomes forward and backward
    drop_unused_tangents         outputs that never receive a gradient cost nothing in backward
    offload_parameters           parameters and gradients live on the host
    offload_activations          saved values live on the host until backward needs them (opt-in)
    regather_in_subgroup         backward gathers again among fewer ranks
    overlap_model_collectives    the model's own collectives overlap compute that does not need them
    coalesce_model_collectives   collectives that remain synchronous share launches
    make_plan                    which collectives travel together, and when
    keep_gathered                what the plan keeps gathered is handed from forward to backward
    accumulate_gradients         gradients of microbatches are added up, and reduced later
    bucket                       collectives are merged into the plan's buckets
    reorder                      collectives start and are waited for where the plan says
    to_device                    a program captured on the CPU becomes one for GPUs

Opt-in passes that change numbers are in `contrib/`:

    chunked_loss                 the loss over a vocabulary, some rows of logits at a time
    vocab_sharded_loss           the loss over a vocabulary, some words at a time, without the whole head
    chunked_reduce_scatter       the gradient of such a head is reduced chunk by chunk
    embedding_row_exchange       rows of embeddings are exchanged, instead of tables gathered
    async_tensor_parallel        products overlap the gathers or reduce-scatters next to them, in chunks
    float8_all_gather            parameters travel in float8

A pass sees the program, the plan, the parameter table, costs and the graph helpers; never capture, lowering or runtime.

* **A second mesh axis is a second stage of the same reduction**: `reduce_scatter` and its wait, then `all_reduce` and
  its wait. Each is a bucket of the plan with the same members. The all-reduce of a packed bucket reads the reduced
  buffer. In `PlanByUnit` it starts at the wait of its reduce-scatter, and overlaps the next unit's backward.
* **Backward is pruned for the gradients that arrive.** The likely set (scalar outputs if there are any) is lowered at
  capture. Another set is lowered when it first arrives, from the partitioned backward.
* **Microbatches are variants of the backward**, made from the partitioned graph when they first run.
  `accumulate_gradients` removes the reduction (its operators are marked where they are inserted) and returns the sum
  under another slot. All share one forward, so microbatches can be interleaved at will.
* **An int for `reshard_after_forward`** keeps a chunk of the gathered buffer, and backward gathers it among neighbors.
  `own_chunk` is the only operator whose value depends on the rank; the graph names the axis, as a collective does.
* **Keeping a gathered parameter is decided after partition**, by handing the value over instead of partitioning again.
  The plan is then made again on that graph, as views of a gathered value become compute there.
* **Saved values are offloaded unit by unit**, so that regions are cut between units and nowhere else. Backwards for
  other tangents are made of the partitioned graph, which does not know about it: `Program.on_host` names the values.
* **Random operators draw again from a saved generator state**, with AOTAutograd's operators for it
  (`run_and_save_rng_state`, `run_with_rng_state`). Each operator has one state: 5056 bytes on the CPU, 16 on CUDA.
* **A share of activation memory** is a knapsack by seconds per byte over what the partitioner would save. It is not
  torch's `activation_memory_budget`, which counts parameters as activations, and at 0 recomputes through everything.
"""

if __name__ == "passes":
    raise ImportError("import graphshard.passes: the top-level directory passes/ is not a package by itself")

from graphshard.passes.accumulate_gradients import AccumulateGradients
from graphshard.passes.activation_checkpointing import ActivationCheckpointing
from graphshard.passes.base import Pass
from graphshard.passes.bucket import Bucketing
from graphshard.passes.coalesce_model_collectives import CoalesceModelCollectives
from graphshard.passes.contrib.async_tensor_parallel import AsyncTensorParallel
from graphshard.passes.contrib.chunked_loss import ChunkedLoss
from graphshard.passes.contrib.chunked_reduce_scatter import ChunkedReduceScatter
from graphshard.passes.contrib.embedding_row_exchange import EmbeddingRowExchange
from graphshard.passes.contrib.float8_all_gather import Float8AllGather
from graphshard.passes.contrib.vocab_sharded_loss import VocabShardedLoss
from graphshard.passes.drop_unused_tangents import DropUnusedTangents
from graphshard.passes.insert_collectives import InsertCollectives
from graphshard.passes.keep_gathered import KeepGathered
from graphshard.passes.make_plan import MakePlan
from graphshard.passes.mixed_precision import MixedPrecision
from graphshard.passes.offload_activations import OffloadActivations
from graphshard.passes.offload_parameters import OffloadParameters
from graphshard.passes.overlap_model_collectives import OverlapModelCollectives
from graphshard.passes.partition import Partition
from graphshard.passes.regather_in_subgroup import RegatherInSubgroup
from graphshard.passes.reorder import Reorder
from graphshard.passes.reshard_after_forward import ReshardAfterForward
from graphshard.passes.to_device import ToDevice

__all__ = sorted(name for name, value in globals().items() if isinstance(value, type) and issubclass(value, Pass))
