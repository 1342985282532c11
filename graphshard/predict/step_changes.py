"""Changes of a training step, one thing at a time: the questions of `what_if`.

    batch        batch 2 per rank                           activation   activation="full"
    mesh         replicate 8, shard 8                       offload      state on the host
    ...

A change is a whole `Case` that differs in one field. Whether a change is sensible (replicas need several nodes, another
network needs a network) is decided here; whether it fits and its gain are predicted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from graphshard.cost.profile import Profile, builtin_profiles, load_profile
from graphshard.errors import ArgumentError
from graphshard.ir.mesh import CONTEXT, EXPERT, PIPELINE, TENSOR, MeshLike
from graphshard.options.options import Options
from graphshard.predict.explanation import shown_mesh
from graphshard.predict.symbolic_cost import Inputs, resized
from graphshard.predict.training_config import Training, batch_of
from graphshard.utils.text import brief

# How many times more microbatches are tried.
_MORE = 4
# Axes that are not of data, and so do not grow with the ranks.
_FIXED = (*TENSOR, *CONTEXT, *EXPERT, *PIPELINE)


@dataclass(frozen=True)
class Case:
    """Everything that a prediction depends on, except the model."""

    inputs: Inputs
    mesh: MeshLike
    profile: Profile
    network: str
    options: Options
    training: Training

    @property
    def batch(self) -> int | None:
        """Sequences of one rank; None if the inputs have no batch."""
        return batch_of(self.inputs)

    def with_batch(self, batch: int) -> Case:
        return replace(self, inputs=resized(self.inputs, {"batch": 0}, {"batch": self.batch or 0}, {"batch": batch}))

    def with_options(self, **options: Any) -> Case:
        return replace(self, options=replace(self.options, **options))

    def with_training(self, **training: Any) -> Case:
        return replace(self, training=replace(self.training, **training))

    def with_sizes(self, sizes: Sequence[int]) -> Case:
        """Return the case with other mesh sizes on the same axes."""
        mesh = dict(zip(self.mesh, sizes)) if isinstance(self.mesh, Mapping) else tuple(sizes)
        return replace(self, mesh=mesh)

    def with_ranks(self, ranks: int) -> Case | None:
        """Grow or shrink the outermost axis of data to that many ranks; None if there is no such mesh."""
        axes = _axes_of(self.mesh)
        if axes is None:
            return None
        rest = math.prod(size for name, size in axes if name in _FIXED)
        data = [index for index, (name, _) in enumerate(axes) if name not in _FIXED]
        if ranks % rest or not data:
            return None
        left, sizes = ranks // rest, [size for _, size in axes]
        for index in reversed(data[1:]):
            sizes[index] = min(sizes[index], left)
            if left % sizes[index]:
                return None
            left //= sizes[index]
        sizes[data[0]] = left
        return self.with_sizes(sizes)

    def is_like(self, other: Case) -> bool:
        """Return whether it is the same prediction; options, training and profile are compared by identity."""
        same = self.options is other.options and self.training is other.training and self.profile is other.profile
        return same and (self.batch, str(self.mesh), self.network) == (other.batch, str(other.mesh), other.network)


@dataclass(frozen=True)
class Change:
    """A case to try, of a kind of `ABOUT`; `note` is a side effect."""

    about: str
    name: str
    case: Case
    note: str = ""


def _axes_of(mesh: MeshLike) -> list[tuple[str, int]] | None:
    """Return names, "" if there are none, and sizes of a mesh that need not exist; None for a DeviceMesh."""
    if isinstance(mesh, DeviceMesh):
        return None
    if isinstance(mesh, Mapping):
        return list(mesh.items())
    return [("", size) for size in ([mesh] if isinstance(mesh, int) else mesh)]


# A kind of change yields names and cases.
_Variants = Iterator[tuple[str, Case]]


def _batch(case: Case) -> _Variants:
    if case.batch is None:
        return
    for batch in (2 * case.batch, case.batch // 2):
        if batch and (batch > case.batch or case.batch % 2 == 0):
            yield f"batch {batch} per rank", case.with_batch(batch)


def _accumulate(case: Case) -> _Variants:
    if case.training.global_batch is None:
        count = case.training.accumulate
        yield f"accumulate {_MORE * count} microbatches", case.with_training(accumulate=_MORE * count)
        if count > 1:
            yield "accumulate nothing", case.with_training(accumulate=1)


def _mesh(case: Case) -> _Variants:
    axes, node = _axes_of(case.mesh), case.profile.ranks_per_node
    if axes is None:
        return
    names, sizes = [name for name, _ in axes], [size for _, size in axes]
    cut = [index for index, name in enumerate(names) if name in (*TENSOR, *PIPELINE)]
    if cut:
        others = [index for index in range(len(names)) if names[index] not in _FIXED]
        for inner, factor in itertools.product(cut, (2, 0.5)):
            size, outer = sizes[inner] * factor, sizes[others[0]] / factor if others else 0.5
            near = size <= node or names[inner] in PIPELINE
            if size >= 1 and size % 1 == 0 and outer >= 1 and outer % 1 == 0 and near:
                new = list(sizes)
                new[inner], new[others[0]] = int(size), int(outer)
                yield f"mesh {shown_mesh(dict(zip(names, new)))}", case.with_sizes(new)
    elif len(sizes) == 1 and sizes[0] > node and sizes[0] % node == 0 and node > 1:
        replicas = sizes[0] // node
        yield f"mesh replicate {replicas}, shard {node}", replace(case, mesh=(replicas, node))
    elif len(sizes) == 2 and sizes[0] > 1:
        yield f"mesh shard {math.prod(sizes)}", replace(case, mesh=(math.prod(sizes),))


def _reshard(case: Case) -> _Variants:
    now, axes, node = case.options.reshard_after_forward, _axes_of(case.mesh), case.profile.ranks_per_node
    if any(name in PIPELINE for name, _ in axes or ()):
        return  # stages are gathered once
    if now is not False and now != 1:
        yield "reshard_after_forward=False", case.with_options(reshard_after_forward=False)
    if now is None or now is True:
        if axes and len(axes) == 1 and node > 1 and axes[0][1] > node and axes[0][1] % node == 0:
            yield f"reshard_after_forward={node}", case.with_options(reshard_after_forward=node)
    else:
        yield "reshard_after_forward=True", case.with_options(reshard_after_forward=True)


def _activation(case: Case) -> _Variants:
    if case.options.activation is None:
        yield 'activation="full"', case.with_options(activation="full")
    else:
        yield "activation=None", case.with_options(activation=None)


def _offload(case: Case) -> _Variants:
    if isinstance(case.options.offload_policy, CPUOffloadPolicy):
        yield "nothing on the host", case.with_options(offload_policy=None)
    else:
        yield "state on the host", case.with_options(offload_policy=CPUOffloadPolicy())


def _network(case: Case) -> _Variants:
    axes = _axes_of(case.mesh)
    ranks = case.mesh.size() if isinstance(case.mesh, DeviceMesh) else math.prod(size for _, size in axes or ())
    if ranks > case.profile.ranks_per_node:
        for name in case.profile.outside:
            if name != case.network:
                yield f"network {name}", replace(case, network=name)


def _hardware(case: Case) -> _Variants:
    for name in builtin_profiles():
        profile = load_profile(name)
        alike = profile.device == case.profile.device and case.network in profile.outside
        if alike and profile.hash != case.profile.hash:  # the price is of another GPU
            yield f"hardware {name}", replace(case, profile=profile).with_training(price=None)


def _precision(case: Case) -> _Variants:
    policy, low = case.options.mp_policy, torch.bfloat16
    if policy is None or (isinstance(policy, MixedPrecisionPolicy) and policy.param_dtype is None):
        mixed = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
        yield "parameters in bfloat16", case.with_options(mp_policy=mixed)
    elif isinstance(policy, MixedPrecisionPolicy) and policy.reduce_dtype == torch.float32:
        reduced = MixedPrecisionPolicy(policy.param_dtype, low, policy.output_dtype, policy.cast_forward_inputs)
        yield "gradients reduced in bfloat16", case.with_options(mp_policy=reduced)


def _optimizer(case: Case) -> _Variants:
    if case.training.foreach:
        yield "a fused optimizer", case.with_training(foreach=False)


def _backend(case: Case) -> _Variants:
    if case.options.backend == "eager":
        yield 'backend="inductor"', case.with_options(backend="inductor")


# Kinds of changes. Changes of costs alone, which take no time, come last.
ABOUT: dict[str, Callable[[Case], _Variants]] = {
    "batch": _batch,
    "mesh": _mesh,
    "reshard": _reshard,
    "activation": _activation,
    "offload": _offload,
    "precision": _precision,
    "backend": _backend,
    "accumulate": _accumulate,
    "optimizer": _optimizer,
    "network": _network,
    "hardware": _hardware,
}
_NOTES = {"precision": "other rounding"}


def check_about(given: object, argument: str = "changes") -> list[str]:
    """Return the requested kinds of changes; None is all of them."""
    if given is None:
        return list(ABOUT)
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ArgumentError(f'{argument} must be a list such as ["batch", "hardware"], got {brief(given)}.')
    for name in given:
        if not isinstance(name, str) or name not in ABOUT:
            close = get_close_matches(str(name)[:100], ABOUT, 1)
            hint = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(ABOUT)}."
            raise ArgumentError(f"{argument} has {brief(name)}, which is no kind of change. {hint}")
    return list(dict.fromkeys(given))


def changes_of(case: Case, about: Sequence[str]) -> list[Change]:
    """Return all changes of these kinds."""
    return [Change(name, what, other, _NOTES.get(name, "")) for name in about for what, other in ABOUT[name](case)]
