"""How a model is trained, beyond its program: the optimizer's step, microbatches, tokens and price.

A new argument of this kind is a field here and the same key of `TrainingArguments`; then `explain`, `explain_grid` and
`what_if` take it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypedDict

import torch

from graphshard.cost.costs import Costs
from graphshard.cost.scalars import Scalar
from graphshard.errors import ArgumentError, BatchError
from graphshard.ir.mesh import CONTEXT, PIPELINE, TENSOR, Mesh
from graphshard.options.options import OptionArguments, Options
from graphshard.schedule.stages import PIPELINE_SCHEDULES, PipelineSchedule
from graphshard.torch_compat.torch_ops import pytree
from graphshard.utils.argument_validation import check_bool, check_choice, check_count, check_number
from graphshard.utils.text import format_amount

# Upper limits of the counts, far above any use.
_MOST_STATES, _MOST_MICROBATCHES, _MOST_STAGES = 1000, 1_000_000, 1000
# The norm of all gradients, in float32.
_NORM_BYTES = 4.0


@dataclass(frozen=True, kw_only=True)
class Training:
    """Arguments of `explain` about the training; its docstring describes the fields."""

    optimizer_states: int = 2
    foreach: bool = False
    clip_norm: float | None = None
    accumulate: int = 1
    global_batch: int | None = None
    tokens: float | None = None
    price: float | None = None
    pipeline: PipelineSchedule = "1f1b"
    stages_per_rank: int = 2

    def __post_init__(self) -> None:
        states = "number of tensors such as 2 for Adam"
        check_count("optimizer_states", self.optimizer_states, least=0, most=_MOST_STATES, what=states)
        check_bool("foreach", self.foreach)
        if self.clip_norm is not None:
            check_number("clip_norm", self.clip_norm, positive=True)
        check_count("accumulate", self.accumulate, most=_MOST_MICROBATCHES, what="number of microbatches such as 8")
        if self.global_batch is not None:
            check_count("global_batch", self.global_batch, what="number of sequences of a step such as 1024")
            if self.accumulate > 1:
                raise ArgumentError(
                    f"accumulate={self.accumulate} and global_batch={self.global_batch} both say how many microbatches "
                    "a step has. Give one of them."
                )
        if self.tokens is not None:
            check_number("tokens", self.tokens, positive=True, example="2e12, of the whole training")
        if self.price is not None:
            check_number("price", self.price, positive=True, example="2.50, of one GPU for an hour")
            if self.tokens is None:
                raise ArgumentError(
                    f"price={self.price} is of a GPU hour, and tokens, which say how many hours there are, are not "
                    "given. Give tokens such as 2e12."
                )
        check_choice("pipeline", self.pipeline, PIPELINE_SCHEDULES)
        check_count("stages_per_rank", self.stages_per_rank, most=_MOST_STAGES, what="number of stages such as 2")

    def update_seconds(self, costs: Costs, mesh: Mesh, trained: Scalar) -> Scalar:
        """Return the seconds of clipping and of the optimizer, for bytes of shards of trained parameters."""
        seconds = costs.optimizer(trained, self.optimizer_states, foreach=self.foreach)
        if self.clip_norm is not None:
            seconds += costs.clipping(trained) + costs.collective("all_reduce", _NORM_BYTES, 1, mesh.shard)
        return seconds

    def temporary_bytes(self, trained: int) -> int:
        """Return the bytes allocated while the optimizer runs: `foreach` Adam has the roots of its second moments."""
        return trained if self.foreach and self.optimizer_states > 1 else 0

    def num_microbatches(self, sizes: Mapping[str, int], inputs: Any) -> int:
        """Return the forwards and backwards of a step on a mesh; raise BatchError if the batch cannot be divided."""
        if self.global_batch is None:
            return self.accumulate
        batch = batch_of(inputs) or 1
        # Ranks of a tensor axis and stages have the same inputs, ranks of a context axis parts of the same sequences.
        ranks = math.prod(size for name, size in sizes.items() if name not in (*TENSOR, *CONTEXT, *PIPELINE))
        together = batch * ranks
        if together <= self.global_batch and self.global_batch % together == 0:
            return self.global_batch // together
        mesh = ", ".join(f"{name} {size}" for name, size in sizes.items())
        larger = together > self.global_batch
        raise BatchError(
            f"mesh {mesh} {'is larger than' if larger else 'does not divide'} the batch: {ranks} ranks with inputs of "
            f"their own, {batch} each, have {together}, and global_batch is {self.global_batch}. Give "
            + ("fewer data ranks, smaller inputs or a larger batch." if larger else f"a multiple of {together}.")
        )


def batch_of(inputs: Any) -> int | None:
    """Return the first dim of the first tensor of some inputs; None if no tensor has dims."""
    leaves = pytree.tree_leaves(inputs)
    return next((int(leaf.shape[0]) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), None)


class TrainingArguments(TypedDict, total=False):
    """The fields of `Training` as keyword arguments."""

    optimizer_states: int
    foreach: bool
    clip_norm: float | None
    accumulate: int
    global_batch: int | None
    tokens: float | None
    price: float | None
    pipeline: PipelineSchedule
    stages_per_rank: int


class ExplainArguments(OptionArguments, TrainingArguments, total=False):
    """Keyword arguments that `explain` shares with `compile`, and those about the training."""


def split_arguments(given: Mapping[str, Any]) -> tuple[Options, Training]:
    """Split `ExplainArguments` into options and training."""
    names = {field.name for field in fields(Training)}
    training = Training(**{name: value for name, value in given.items() if name in names})
    return Options(**{name: value for name, value in given.items() if name not in names}), training


@dataclass(frozen=True)
class TrainingCost:
    """Cost of a training on some number of tokens, at the predicted step, without anything between steps.

    `price` is of one GPU for an hour. `range` is of the predicted step, relative to it: from the tenth to the ninetieth
    percentile.
    """

    tokens: float
    steps: float
    days: float
    gpu_hours: float
    price: float | None
    money: float | None
    range: tuple[float, float]

    def between(self, value: float) -> str:
        """Return the range of a number that is proportional to the step: "10 to 12"; "" without a range."""
        low, high = self.range
        return f"{format_amount(value * low)} to {format_amount(value * high)}" if low < high else ""

    @property
    def days_in_words(self) -> str:
        """Days with their range."""
        between = self.between(self.days)
        return f"{format_amount(self.days)} days{f' ({between})' if between else ''}"

    def __str__(self) -> str:
        money = "" if self.money is None else f", {format_amount(self.money)} at {self.price:,.2f} for each"
        return (
            f"{self.tokens:.3g} tokens in {self.steps:,.0f} steps, {self.days_in_words}, "
            f"{format_amount(self.gpu_hours)} GPU hours{money}"
        )
