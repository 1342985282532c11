"""Fake tensors that a forward is traced with: they stand for the inputs of a call, parameters, buffers and attributes.

Each is where the program will run, and lies in memory as what it stands for does there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from graphshard.capture.dynamic_shapes import dynamic_dims
from graphshard.ir.driver_internals import stands_in
from graphshard.ir.params import ParamTable
from graphshard.ir.program import Slot
from graphshard.ir.strides import strides_without_gaps
from graphshard.ir.torch_internals import FakeTensorMode, fake_tensor
from graphshard.ir.tracing_internals import fakes_of_call

# What torch takes for an input where it makes fake ones of a call; of others no tensor depends on.
_KNOWN = (int, float, bool, str)


def fake_inputs(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    device: torch.device,
    fake_mode: FakeTensorMode,
    required: Collection[int] = (),
) -> tuple[list[torch.Tensor], Callable[[GraphModule], None]]:
    """Fake tensors for those of a call, and a check, after tracing, that the dynamic sizes among theirs stayed so.

    Args:
        required: those, by number, that require a gradient though they do not yet.
    """
    dynamic = dynamic_dims(module, args, kwargs, dynamic_shapes)
    leaves, structure = pytree.tree_flatten((args, kwargs))
    # Each leaf gets a fake of its own: a tensor passed twice must not tie two inputs of the graph.
    examples = FakeTensorMode()
    fakes = [
        _relabelled(_alike(leaf, examples, gaps=dynamic is None), device, examples)
        if isinstance(leaf, torch.Tensor)
        else (leaf if isinstance(leaf, _KNOWN) else None)
        for leaf in leaves
    ]
    fake_args, fake_kwargs = pytree.tree_unflatten(fakes, structure)
    fake_args, fake_kwargs, check_sizes = fakes_of_call(fake_mode, module, fake_args, fake_kwargs, dynamic)
    given = zip(pytree.tree_leaves((fake_args, fake_kwargs)), leaves, strict=True)
    tensors = [(fake, leaf) for fake, leaf in given if isinstance(leaf, torch.Tensor)]
    inputs = [
        fake.detach().requires_grad_(leaf.requires_grad or number in required)
        for number, (fake, leaf) in enumerate(tensors)
    ]
    return inputs, check_sizes


def _alike(tensor: torch.Tensor, fake_mode: FakeTensorMode, *, gaps: bool) -> torch.Tensor:
    """A fake tensor with memory of its own, in the strides of a tensor, or in those without the gaps of a slice."""
    strides = tensor.stride() if gaps else strides_without_gaps(tensor)
    return fake_tensor(fake_mode, list(tensor.shape), list(strides), tensor.dtype, tensor.device)


def _relabelled(fake: torch.Tensor, device: torch.device, fake_mode: FakeTensorMode) -> torch.Tensor:
    """A fake tensor where the program will run, if that is a GPU that is not here."""
    if not stands_in():
        return fake
    return fake_tensor(fake_mode, list(fake.shape), list(fake.stride()), fake.dtype, device)


def fake_state(
    slot: Slot, originals: dict[str, torch.Tensor], params: ParamTable, device: torch.device, fake_mode: FakeTensorMode
) -> torch.Tensor:
    """A full parameter in the compute dtype, or a buffer."""
    with fake_mode:
        if slot.kind == "param":
            row = params[slot.name]
            stride = row.stride_of(row.shape)
            full = torch.empty_strided(row.shape, stride, dtype=row.compute_dtype, device=device)
            full.requires_grad_(row.trainable)
            if row.trainable and row.grad_dtype != row.compute_dtype:
                full.grad_dtype = row.grad_dtype
            return full
        tensor = originals[slot.name]
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def fake_attribute(tensor: torch.Tensor, device: torch.device, fake_mode: FakeTensorMode) -> torch.Tensor:
    """A tensor that a module holds as a plain attribute."""
    where = device if tensor.is_meta or stands_in() else tensor.device
    with fake_mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=where)
        return made.requires_grad_(tensor.requires_grad)
