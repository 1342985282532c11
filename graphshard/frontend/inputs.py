"""Inputs of a call as Dynamo is given them: on the device of the program, with the sizes that are to be dynamic."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.export.dynamic_shapes import _combine_args, _process_dynamic_shapes
from torch.utils import _pytree as pytree

from graphshard.frontend.dynamic_shapes import marks_of
from graphshard.ir.driver_internals import stands_in
from graphshard.ir.torch_internals import fake_tensor, new_fake_mode

_MARKS = ("_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices", "_dynamo_dynamic_range", "_dynamo_static_indices")


def stand_in_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> tuple[Any, Any]:
    """Return a call with fake tensors for those that are not on the device of the program; one tensor has one."""
    if not stands_in() and not any(_is_meta(leaf) for leaf in pytree.tree_leaves((args, kwargs))):
        return args, kwargs
    mode = new_fake_mode()
    made: dict[int, torch.Tensor] = {}

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made and (stands_in() or tensor.is_meta):
            fake = fake_tensor(mode, list(tensor.shape), list(tensor.stride()), tensor.dtype, device)
            made[id(tensor)] = fake.requires_grad_(tensor.requires_grad)
            fake.__dict__.update(marks_of(tensor))
        return made.get(id(tensor), tensor)

    changed: tuple[Any, Any] = pytree.tree_map_only(torch.Tensor, stand_in, (args, kwargs))
    return changed


@contextlib.contextmanager
def constraints_of(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], dims: Any
) -> Iterator[Any]:
    """Yield torch.export's constraints for dimensions that are to be dynamic; None if there are none.

    Hints such as `Dim.AUTO` are marks on the tensors, which are as before when the block ends.

    Args:
        dims: in torch.export's format, for every input.
    """
    if dims is None:
        yield None
        return
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    kept = [{mark: vars(tensor)[mark] for mark in _MARKS if mark in vars(tensor)} for tensor in tensors]
    try:
        yield _process_dynamic_shapes(_combine_args(forward, args, kwargs), dims)
    finally:
        for tensor, marks in zip(tensors, kept):
            for mark in _MARKS:
                vars(tensor).pop(mark, None)
            vars(tensor).update(marks)


def _is_meta(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_meta
