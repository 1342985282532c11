"""How many microbatches a step of a mesh has, if all its ranks together are to process a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from graphshard.errors import BatchError
from graphshard.explain.training import Training
from graphshard.ir.mesh import CONTEXT, PIPELINE, TENSOR
from graphshard.torch_compat.operators import pytree


def microbatches_of(sizes: Mapping[str, int], inputs: Any, training: Training) -> int:
    """Forwards and backwards of a step.

    Args:
        sizes: of the mesh, by axis.
        inputs: of one rank's call; the first dim of the first tensor is the batch.
        training: says how many there are, or how many sequences all ranks process in a step.

    Raises:
        BatchError: the mesh is larger than the batch, or does not divide it.
    """
    global_batch = training.global_batch
    if global_batch is None:
        return training.accumulate
    leaves = pytree.tree_leaves(inputs)
    batch = next((int(leaf.shape[0]) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 1)
    # Ranks of a tensor axis and stages have the same inputs, those of a context axis parts of the same sequences.
    ranks = math.prod(size for name, size in sizes.items() if name not in (*TENSOR, *CONTEXT, *PIPELINE))
    together = batch * ranks
    mesh = ", ".join(f"{name} {size}" for name, size in sizes.items())
    if together > global_batch:
        raise BatchError(
            f"mesh {mesh} is larger than the batch: {ranks} ranks with inputs of their own, {batch} each, have "
            f"{together}, and global_batch is {global_batch}. Give fewer data ranks, smaller inputs or a larger batch."
        )
    if global_batch % together:
        raise BatchError(
            f"mesh {mesh} does not divide the batch: {ranks} ranks with inputs of their own, {batch} each, have "
            f"{together}, and global_batch is {global_batch}. Give a multiple of {together}."
        )
    return global_batch // together
