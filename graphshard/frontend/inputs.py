"""Inputs of a call: where they must be, what programs distinguish of them, their stand-ins and dynamic dimensions.

Dimensions are dynamic by `dynamic_shapes=` of compile, or by marks on the tensors. Torch fixes a dimension of size 0 or
1, whatever is asked for: such sizes broadcast and need different code. Such a dimension is captured as what it is, and
captured again as dynamic when it has another size.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.export import Dim

from graphshard.errors import ArgumentError, InputError
from graphshard.ir.gpus import is_pretended
from graphshard.ir.subclasses import overrides_operators
from graphshard.subclasses.results import DTensorParts, Layout
from graphshard.torch_compat.dynamo import combine_args, process_dynamic_shapes
from graphshard.torch_compat.fake_tensors import new_fake_mode
from graphshard.torch_compat.torch_ops import distinct, pytree, replaced, sent_to
from graphshard.utils.source_lines import PLAIN
from graphshard.utils.text import brief

_DYNAMIC, _WEAK = "_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices"
# All that torch.export leaves on tensors for hints.
_MARKS = (_DYNAMIC, _WEAK, "_dynamo_dynamic_range", "_dynamo_static_indices")


def _marked_like(made: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor with what `mark_dynamic` has left on the tensor."""
    made.__dict__.update({mark: getattr(tensor, mark) for mark in (_DYNAMIC, _WEAK) if hasattr(tensor, mark)})
    return made


def dynamic_dims(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], shapes: Any) -> Any:
    """Return the dims of each input to trace as dynamic, in torch.export's format; None if there are none.

    A declaration (`shapes`) that does not fit the inputs is an ArgumentError, a size out of its range an InputError.
    """
    try:
        inputs = combine_args(forward, args, dict(kwargs))
    except TypeError as error:  # of inspect, which does not say whose arguments they are
        raise TypeError(f"{getattr(forward, '__qualname__', 'forward')}() {error}") from None
    _check_shapes("dynamic_shapes", shapes)
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
    """Return what export is told about an input: the same structure, with a dict of dimensions for a tensor."""
    if isinstance(value, torch.Tensor):
        return _dims(value, shapes, path) or None
    children, structure = pytree.tree_flatten(value, is_leaf=lambda v: v is not value)
    if structure.is_leaf() or (len(children) == 1 and children[0] is value):
        return None
    _check_shapes(path, shapes, (Mapping,) if isinstance(value, Mapping) else (tuple, list, Mapping))
    if isinstance(value, Mapping):
        by_key = shapes or {}
        return {key: _spec(child, by_key.get(key), f"{path}[{key!r}]") for key, child in value.items()}
    specs = [None] * len(children) if shapes is None else list(shapes)
    if len(specs) != len(children):
        raise ArgumentError(f"dynamic_shapes: {path} has {len(children)} parts, its entry has {len(specs)}.")
    pairs = enumerate(zip(children, specs))
    found = [_spec(child, spec, f"{path}[{index}]") for index, (child, spec) in pairs]
    return tuple(found) if isinstance(value, tuple) else found


def _check_shapes(path: str, shapes: Any, kinds: tuple[type, ...] = (tuple, list, Mapping)) -> None:
    if not (shapes is None or isinstance(shapes, kinds)):
        raise ArgumentError(
            f"dynamic_shapes: the entry of {path} must be a dict by dimension, a tuple or None, got {brief(shapes)}."
        )


def _dims(tensor: torch.Tensor, shapes: Any, path: str) -> dict[int, Any]:
    _check_shapes(path, shapes)
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


def flat_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of a call, and its structure, with the local tensors of DTensors.

    Raises:
        InputError: a DTensor wants a gradient.
    """
    leaves, structure = pytree.tree_flatten((args, kwargs))
    if any(isinstance(leaf, DTensor) for leaf in leaves):
        return pytree.tree_flatten(pytree.tree_map_only(DTensor, _local_input, (args, kwargs)))
    return leaves, structure


def _local_input(given: DTensor) -> DTensorParts:
    if given.requires_grad:
        raise InputError(
            f"an input is a DTensor of shape {list(given.shape)} that requires a gradient. Pass its local tensor, "
            "x.to_local(), and let PrepareModuleInput distribute it."
        )
    layout = Layout(given.device_mesh, tuple(given.placements), given.shape, given.stride())
    return DTensorParts(given._local_tensor, layout)


def moved_to(device: torch.device, leaves: Sequence[Any], structure: pytree.TreeSpec) -> list[Any]:
    """Return input leaves with CPU tensors moved to the mesh's device, as FSDP2 does.

    Objects of other classes stay as they are, and so do the tensors in them: Dynamo takes them apart.

    Raises:
        InputError: a tensor is on another device, or is a subclass with its own operators.
    """

    @functools.cache
    def move(tensor: torch.Tensor) -> torch.Tensor:
        return _marked_like(tensor.to(device), tensor)

    moved = []
    flex_attention: Any = sys.modules.get("torch.nn.attention.flex_attention")
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and overrides_operators(leaf):
            raise InputError(
                f"input {input_path(structure, index)} is a {type(leaf).__name__}, a tensor subclass with operators of "
                "its own. Pass the plain tensors that it is made of."
            )
        if isinstance(leaf, torch.Tensor) and leaf.device != device and not is_pretended():
            if leaf.device.type != "cpu":
                raise InputError(
                    f"input {input_path(structure, index)} is on {leaf.device}, the model's mesh is on {device}. "
                    f"Move it there before the call."
                )
            leaf = move(leaf)
        elif flex_attention is not None and isinstance(leaf, flex_attention.BlockMask):
            leaf = leaf if leaf.kv_num_blocks.device == device or is_pretended() else leaf.to(device)
        elif isinstance(leaf, dict) and leaf and device.type != "cpu" and not is_pretended():
            leaf = sent_to(device, leaf)  # of a subclass, such as one with attributes for keys
        moved.append(leaf)
    return moved


def stand_ins(leaves: Iterable[Any]) -> list[Any]:
    """Return leaves with stand-ins for tensors on the meta device; one tensor has one."""
    once = functools.cache(stand_in)
    return [once(leaf) if isinstance(leaf, torch.Tensor) and leaf.is_meta else leaf for leaf in leaves]


def apart(leaves: Iterable[Any]) -> list[Any]:
    """Return leaves of an example that stands for all calls, not only for calls that are given one tensor twice."""
    return distinct(leaves, lambda x: _marked_like(x.detach().clone().requires_grad_(x.requires_grad), x))


def without_values(tensor: torch.Tensor, device: torch.device | str = "meta") -> torch.Tensor:
    """Return a new tensor that stands for an input, without its values."""
    made = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device, requires_grad=tensor.requires_grad
    )
    return _marked_like(made, tensor)


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Return what capture can read instead of an input: on the CPU, and without values if the input is elsewhere."""
    return tensor if tensor.device.type == "cpu" else without_values(tensor, "cpu")


def stand_in_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> tuple[Any, Any]:
    """Return a call with fake tensors instead of tensors on other devices than the program's; one tensor has one."""
    mode = new_fake_mode()

    @functools.cache
    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            return without_values(tensor, device) if is_pretended() or tensor.is_meta else tensor

    def of_leaf(leaf: Any) -> Any:
        """Return a tensor's stand-in, or the copy of an object that holds tensors, such as PyG's `Data`."""
        if isinstance(leaf, (torch.Tensor, nn.Module)):
            return fake(leaf) if isinstance(leaf, torch.Tensor) else leaf
        before, copied = fake.cache_info(), leaf
        with replaced(torch.Tensor, "__deepcopy__", lambda tensor, _: fake(tensor)), contextlib.suppress(Exception):
            copied = copy.deepcopy(leaf)
        return leaf if fake.cache_info() == before else copied

    return pytree.tree_map(of_leaf, (args, kwargs))


def input_path(structure: pytree.TreeSpec, index: int) -> str:
    """Return the path of a leaf in (args, kwargs), such as `args[0]` or `labels`."""
    marks = pytree.tree_unflatten(range(structure.num_leaves), structure)
    path = next(p for p, leaf in pytree.tree_flatten_with_path(marks)[0] if leaf == index)
    if str(path[0]) == "[0]":
        return f"args{pytree.keystr(path[1:])}"
    assert isinstance(path[1], pytree.MappingKey)
    return f"{path[1].key}{pytree.keystr(path[2:])}"


def leaf_key(leaf: Any) -> tuple[Any, ...]:
    """Return what programs distinguish of an input: four things of a tensor, type and value of anything else.

    The value can be hashed: of a slice its parts, and the text of numbers that == confuses, such as 0.0 and -0.0. Of
    an object of another class it is a text, because guards compare its attributes.
    """
    if isinstance(leaf, torch.Tensor):
        strides = leaf.stride() if leaf.layout is torch.strided else (str(leaf.layout),)
        return (leaf.shape, strides, leaf.dtype, leaf.requires_grad)
    if isinstance(leaf, slice):
        return (slice, (leaf.start, leaf.stop, leaf.step))
    if isinstance(leaf, (complex, np.generic)) or (isinstance(leaf, float) and repr(leaf) in ("-0.0", "nan")):
        return (type(leaf), repr(leaf))
    return (type(leaf), leaf if isinstance(leaf, PLAIN) else f"a {type(leaf).__name__}")
