"""Studies of several settings that share what they have in common: a capture, and programs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from graphshard.explain.programs import is_local
from graphshard.explain.study import Study
from graphshard.explain.training import Training
from graphshard.options.options import Options

# Options that a capture depends on, and those that programs do besides, before and after the plan.
_CAPTURED = ("units", "mp_policy", "ignored_params", "shard_placement_fn", "dynamic_shapes", "verify")
_SHAPING = ("reshard_after_forward", "offload_policy", "activation", "passes")


def changed(study: Study, options: Options, training: Training, label: str = "") -> Study:
    """A study of the same model and inputs with other options, which does not repeat what they leave as it is."""
    other = replace(study, options=options, training=training, label=label)
    other._kernels = study._kernels
    before = study.options
    if _equal(before, options, _CAPTURED) and is_local(before) == is_local(options):
        other._subjects = study._subjects
        alike = options.activation != "auto" or (
            before.memory_limit == options.memory_limit and study.training == training
        )
        if alike and _equal(before, options, _SHAPING):
            other._before_plan, other._scheduled = study._before_plan, study._scheduled
            other._of_stages = study._of_stages
            other._known = study._known
    return other


def _equal(one: Options, other: Options, names: tuple[str, ...]) -> bool:
    return all(is_same(getattr(one, name), getattr(other, name)) for name in names)


def is_same(one: Any, other: Any) -> bool:
    """Whether two values of an argument are equal; tensors are the very same, as parameters to ignore."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)
