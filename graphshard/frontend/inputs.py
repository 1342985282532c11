"""Inputs of a call: where they must be, what they may be, what programs distinguish of them, and their stand-ins."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from graphshard.errors import InputError
from graphshard.frontend.dynamic_shapes import WITHOUT_VALUES, marks_of
from graphshard.ir.gpus import is_pretended
from graphshard.ir.subclasses import overrides_operators
from graphshard.subclasses.results import Layout
from graphshard.torch_compat.fake_tensors import fake_tensor, new_fake_mode
from graphshard.torch_compat.torch_ops import distinct, pytree
from graphshard.utils.plain_values import PLAIN


class LocalInput:
    """An input that is a DTensor: its local tensor, which is an input of the program, and how it lies."""

    def __init__(self, local: Any, layout: Layout) -> None:
        self.local, self.layout = local, layout


def _put_together(locals_: Iterable[Any], layout: Any) -> LocalInput:
    (local,) = locals_
    return LocalInput(local, layout)


pytree.register_pytree_node(
    LocalInput,
    lambda given: ([given.local], given.layout),
    _put_together,
    flatten_with_keys_fn=lambda given: ([(pytree.GetAttrKey("local"), given.local)], given.layout),
)


def flat_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of a call, and its structure, with `LocalInput`s instead of DTensors.

    Raises:
        InputError: a DTensor wants a gradient.
    """
    leaves, structure = pytree.tree_flatten((args, kwargs))
    if any(isinstance(leaf, DTensor) for leaf in leaves):
        return pytree.tree_flatten(pytree.tree_map_only(DTensor, _local_input, (args, kwargs)))
    return leaves, structure


def _local_input(given: DTensor) -> LocalInput:
    if given.requires_grad:
        raise InputError(
            f"an input is a DTensor of shape {list(given.shape)} that requires a gradient. Pass its local tensor, "
            "x.to_local(), and let PrepareModuleInput distribute it."
        )
    layout = Layout(given.device_mesh, tuple(given.placements), given.shape, given.stride())
    return LocalInput(given._local_tensor, layout)


def moved_to(device: torch.device, leaves: Sequence[Any], structure: pytree.TreeSpec) -> list[Any]:
    """Input leaves with CPU tensors moved to the mesh's device, as FSDP2 does.

    Raises:
        InputError: a tensor is on another device, or a leaf is of a type that cannot be captured.
    """
    moved = []
    elsewhere: dict[int, torch.Tensor] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and overrides_operators(leaf):
            raise InputError(
                f"input {input_path(structure, index)} is a {type(leaf).__name__}, a tensor subclass with operators of "
                "its own. Pass the plain tensors that it is made of."
            )
        if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
            raise InputError(
                f"input {input_path(structure, index)} has the layout {leaf.layout}, which no program takes. Pass its "
                "parts (indices and values) and make it in forward, or pass to_dense()."
            )
        if isinstance(leaf, torch.Tensor) and leaf.device != device and not is_pretended():
            if leaf.device.type != "cpu":
                raise InputError(
                    f"input {input_path(structure, index)} is on {leaf.device}, the model's mesh is on {device}. "
                    f"Move it there before the call."
                )
            if id(leaf) not in elsewhere:
                elsewhere[id(leaf)] = leaf.to(device)
                elsewhere[id(leaf)].__dict__.update(marks_of(leaf))
            leaf = elsewhere[id(leaf)]
        elif is_block_mask(leaf):
            leaf = leaf if leaf.kv_num_blocks.device == device or is_pretended() else leaf.to(device)
        elif not isinstance(leaf, (torch.Tensor, *PLAIN)) and not is_numpys(leaf):
            raise InputError(
                f"input {input_path(structure, index)} is a {type(leaf).__name__}, which is neither a tensor nor a "
                f"number, string or None. {_remedy(leaf)}"
            )
        moved.append(leaf)
    return moved


def is_block_mask(leaf: Any) -> bool:
    """Return whether a leaf is a mask of flex_attention, whose tensors Dynamo finds."""
    flex_attention = sys.modules.get("torch.nn.attention.flex_attention")
    return flex_attention is not None and isinstance(leaf, flex_attention.BlockMask)


def _remedy(leaf: Any) -> str:
    if hasattr(leaf, "get_seq_length"):  # a cache of transformers, which forward would write to
        return (
            "Pass use_cache=False: model.generate(..., use_cache=False) runs compiled programs, one for each length. "
            "Or generate within `with graphshard.uncompiled(model):`, which takes caches."
        )
    if type(leaf).__module__ == "numpy":
        return "Pass torch.from_numpy(array), or numbers."
    if isinstance(leaf, dist.Work):
        return "Wait for it before the call, and pass what it made."
    return (
        "Pass its tensors, or register the class with torch.utils._pytree.register_dataclass or "
        "torch.export.register_dataclass."
    )


def stand_ins(leaves: Iterable[Any], *, meta_only: bool = False) -> list[Any]:
    """Leaves with stand-ins for tensors, or for those on the meta device; one tensor has one."""
    made: dict[int, torch.Tensor] = {}

    def instead(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or (meta_only and not leaf.is_meta):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = stand_in(leaf)
        return made[id(leaf)]

    return list(map(instead, leaves))


def apart(leaves: Iterable[Any]) -> list[Any]:
    """Return leaves of an example that stands for all calls, not only for calls that are given one tensor twice."""
    return distinct(leaves, _copy_of)


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    copy.__dict__.update(marks_of(tensor))
    return copy


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Return what capture can read instead of an input: on the CPU, and without values if the input is elsewhere."""
    if tensor.device.type == "cpu":
        return tensor
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, requires_grad=tensor.requires_grad)
    empty.__dict__.update(marks_of(tensor), **{WITHOUT_VALUES: True})
    return empty


def without_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the meta device that stands for an input, for `stand_in`."""
    like = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad
    )
    like.__dict__.update(marks_of(tensor))
    return like


def input_path(structure: pytree.TreeSpec, index: int) -> str:
    """Return the path of a leaf in (args, kwargs), such as `args[0]` or `labels`."""
    marks = pytree.tree_unflatten(range(structure.num_leaves), structure)
    path = next(p for p, leaf in pytree.tree_flatten_with_path(marks)[0] if leaf == index)
    if str(path[0]) == "[0]":
        return f"args{pytree.keystr(path[1:])}"
    assert isinstance(path[1], pytree.MappingKey)
    return f"{path[1].key}{pytree.keystr(path[2:])}"


def count_tokens(leaves: Iterable[Any]) -> int:
    """Elements of the first integer tensor among a call's inputs, or else the batch size."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    tokens = next((t.numel() for t in tensors if not t.is_floating_point()), 0)
    return tokens or next((t.shape[0] for t in tensors), 1)


def leaf_key(leaf: Any) -> tuple[Any, ...]:
    """What programs distinguish of an input: four things of a tensor, type and value of anything else.

    The value is something that can be hashed, and is equal where it is the same: of a slice its parts, and the text of
    numbers for which == does not say that, such as 0.0 and -0.0.
    """
    if isinstance(leaf, torch.Tensor):
        return (leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad)
    if isinstance(leaf, slice):
        return (slice, (leaf.start, leaf.stop, leaf.step))
    if isinstance(leaf, complex) or is_numpys(leaf) or (isinstance(leaf, float) and repr(leaf) in ("-0.0", "nan")):
        return (type(leaf), repr(leaf))
    return (type(leaf), leaf)


def is_numpys(leaf: Any) -> bool:
    """Whether an input is a number of numpy's, such as np.float32(3), and no array."""
    kind = type(leaf)
    return kind.__module__ == "numpy" and getattr(leaf, "shape", None) == () and not hasattr(kind, "__setitem__")


def stand_in_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> tuple[Any, Any]:
    """Return a call with fake tensors instead of tensors on other devices than the program's; one tensor has one."""
    leaves = pytree.tree_leaves((args, kwargs))
    if not is_pretended() and not any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in leaves):
        return args, kwargs
    mode = new_fake_mode()
    made: dict[int, torch.Tensor] = {}

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made and (is_pretended() or tensor.is_meta):
            fake = fake_tensor(mode, list(tensor.shape), list(tensor.stride()), tensor.dtype, device)
            made[id(tensor)] = fake.requires_grad_(tensor.requires_grad)
            fake.__dict__.update(marks_of(tensor))
        return made.get(id(tensor), tensor)

    changed: tuple[Any, Any] = pytree.tree_map_only(torch.Tensor, stand_in, (args, kwargs))
    return changed
