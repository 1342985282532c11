"""Which dimensions of a call's inputs are dynamic: `dynamic_shapes=` of compile, or marks on the tensors.

Torch fixes a dimension of size 0 or 1, whatever is asked for: such sizes broadcast and need different code. Such a
dimension is captured as what it is, and captured again as dynamic when it has another size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.export import Dim

from graphshard.errors import ArgumentError, InputError
from graphshard.torch_compat.dynamo import combine_args, process_dynamic_shapes
from graphshard.torch_compat.torch_ops import pytree
from graphshard.utils.text import brief

_DYNAMIC, _WEAK = "_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices"
# All that torch.export leaves on tensors for hints.
_MARKS = (_DYNAMIC, _WEAK, "_dynamo_dynamic_range", "_dynamo_static_indices")
# On a tensor that stands in for one on the meta device: it has memory, and what is in it means nothing.
WITHOUT_VALUES = "_graphshard_without_values"


def marks_of(tensor: torch.Tensor) -> dict[str, Any]:
    """What `mark_dynamic` or this package has left on a tensor, by attribute; a copy of the tensor needs them, too."""
    return {mark: getattr(tensor, mark) for mark in (_DYNAMIC, _WEAK, WITHOUT_VALUES) if hasattr(tensor, mark)}


def dynamic_dims(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], shapes: Any) -> Any:
    """The dimensions to trace as dynamic, for every input of a call, in torch.export's format; None if there are none.

    Args:
        forward: the module, or its method, that is called.
        args, kwargs: real inputs.
        shapes: what the user declared, in torch.export's format, or None.

    Raises:
        ArgumentError: the declaration does not fit the inputs.
        InputError: a size is outside the range of its `Dim`.
    """
    inputs = combine_args(forward, args, dict(kwargs))
    if not (shapes is None or isinstance(shapes, (tuple, list, Mapping))):
        raise _no_shapes("dynamic_shapes", shapes)
    if isinstance(shapes, (tuple, list)):
        if len(shapes) > len(inputs):
            raise ArgumentError(
                f"dynamic_shapes has {len(shapes)} entries, the call has {len(inputs)} inputs; it is {brief(shapes)}."
            )
        shapes = dict(zip(inputs, shapes))
    unknown = set(shapes or {}) - set(inputs)
    if unknown:
        raise ArgumentError(
            f"dynamic_shapes names {', '.join(sorted(map(brief, unknown)))}, the call's inputs are "
            f"{', '.join(map(repr, inputs))}."
        )
    found = {name: _spec(value, (shapes or {}).get(name), name) for name, value in inputs.items()}
    return found if any(leaf is not None for leaf in pytree.tree_leaves(found)) else None


def _spec(value: Any, shapes: Any, path: str) -> Any:
    """What export is told about an input: the same structure, with a dict of dimensions for a tensor."""
    if isinstance(value, torch.Tensor):
        return _dims(value, shapes, path) or None
    children, structure = pytree.tree_flatten(value, is_leaf=lambda v: v is not value)
    if structure.is_leaf() or (len(children) == 1 and children[0] is value):
        return None
    if not (shapes is None or isinstance(shapes, (tuple, list, Mapping))):
        raise _no_shapes(path, shapes)
    if isinstance(value, Mapping):
        if not (shapes is None or isinstance(shapes, Mapping)):
            raise _no_shapes(path, shapes)
        by_key = shapes or {}
        return {key: _spec(child, by_key.get(key), f"{path}[{key!r}]") for key, child in value.items()}
    specs = [None] * len(children) if shapes is None else list(shapes)
    if len(specs) != len(children):
        raise ArgumentError(f"dynamic_shapes: {path} has {len(children)} parts, its entry has {len(specs)}.")
    pairs = enumerate(zip(children, specs))
    found = [_spec(child, spec, f"{path}[{index}]") for index, (child, spec) in pairs]
    return tuple(found) if isinstance(value, tuple) else found


def _no_shapes(path: str, shapes: Any) -> ArgumentError:
    return ArgumentError(
        f"dynamic_shapes: the entry of {path} must be a dict by dimension, a tuple or None, got {brief(shapes)}."
    )


def _dims(tensor: torch.Tensor, shapes: Any, path: str) -> dict[int, Any]:
    if not (shapes is None or isinstance(shapes, (tuple, list, Mapping))):
        raise _no_shapes(path, shapes)
    if isinstance(shapes, (tuple, list)) and len(shapes) != tensor.dim():
        raise ArgumentError(f"dynamic_shapes: {path} has {tensor.dim()} dimensions, its entry is {brief(shapes)}.")
    given = dict(enumerate(shapes)) if isinstance(shapes, (tuple, list)) else dict(shapes or {})
    for dim in given:
        if not isinstance(dim, int):
            raise ArgumentError(f"dynamic_shapes: {path} has the entry {brief(dim)}. Give dims by number.")
    dims: dict[int, Any] = dict.fromkeys(getattr(tensor, _WEAK, ()), Dim.AUTO)
    dims |= dict.fromkeys(getattr(tensor, _DYNAMIC, ()), Dim.DYNAMIC)
    dims |= {dim: what for dim, what in given.items() if what is not None and not isinstance(what, int)}
    for dim, what in dims.items():
        if not -tensor.dim() <= dim < tensor.dim():
            raise ArgumentError(f"dynamic_shapes: {path} has {tensor.dim()} dimensions, there is no dimension {dim}.")
        low, high = getattr(what, "min", 0), getattr(what, "max", None)
        size = tensor.shape[dim]
        if (isinstance(low, int) and size < low) or (isinstance(high, int) and size > high):
            raise InputError(
                f"input {path} has size {size} in dimension {dim}, which dynamic_shapes declares as "
                f"{getattr(what, '__name__', what)!r} from {low} to {high}."
            )
    return {dim % tensor.dim(): what for dim, what in dims.items() if what is not Dim.STATIC and tensor.shape[dim] > 1}


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
        yield process_dynamic_shapes(combine_args(forward, args, kwargs), dims)
    finally:
        for tensor, marks in zip(tensors, kept):
            for mark in _MARKS:
                vars(tensor).pop(mark, None)
            vars(tensor).update(marks)
