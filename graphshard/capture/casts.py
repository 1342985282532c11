"""Cast inputs and outputs of units while they are traced, as FSDP2's hooks do."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from graphshard.ir.precision import Precision
from graphshard.ir.units import modules_of


def register_casts(module: nn.Module, units: Sequence[str], precision: Precision, stack: contextlib.ExitStack) -> None:
    """Until the stack is closed, the root and the units cast what their policies say."""
    for unit in ("", *units):
        policy = precision.of(unit)
        for owner in [module] if not unit else map(module.get_submodule, modules_of(unit)):
            if policy.param_dtype is not None and policy.cast_forward_inputs:
                cast_inputs = functools.partial(_cast_inputs, policy.param_dtype)
                handle = owner.register_forward_pre_hook(cast_inputs, with_kwargs=True, prepend=True)
                stack.callback(handle.remove)
            if policy.output_dtype is not None:
                handle = owner.register_forward_hook(functools.partial(_cast_output, policy.output_dtype))
                stack.callback(handle.remove)


def _cast_inputs(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return _cast((args, kwargs), dtype)


def _cast_output(dtype: torch.dtype, _: nn.Module, args: Any, output: Any) -> Any:
    return _cast(output, dtype)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(cast, tree)
