"""Torch internals that tracing needs, in one place to adapt when torch moves them."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._prims_common import make_contiguous_strides_for
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.utils import _apply_to_tensors
from torch.utils import _pytree as pytree

from graphshard.ir.torch_internals import replaced

__all__ = [
    "arguments_of",
    "cast_tensors",
    "contents_now",
    "fake_kernels",
    "is_traced",
    "leaves_stay_leaves",
    "memory_of",
    "quiet_tracing",
    "written_by",
]


@contextlib.contextmanager
def quiet_tracing() -> Iterator[None]:
    """Keep what torch logs of a failure while it traces from the user, who gets an error."""
    with replaced(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Error detected in ")
        yield


@contextlib.contextmanager
def fake_kernels(kernels: Mapping[OpOverload, Callable[..., Any]]) -> Iterator[None]:
    """Within the block, operators that fake tensors have no kernel for have these; given mode, operator, arguments."""
    known = {op: op_implementations_dict[op] for op in kernels if op in op_implementations_dict}
    op_implementations_dict.update(kernels)
    try:
        yield
    finally:
        for op in kernels:
            op_implementations_dict.pop(op)
        op_implementations_dict.update(known)


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tensor belongs to a function that AOTAutograd traces, perhaps within one of torch.func's."""
    return isinstance(tensor, FunctionalTensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def contents_now(value: Any) -> Any:
    """What a traced tensor holds: another object after each write to it; of anything else, itself."""
    if not isinstance(value, FunctionalTensor):
        return value
    torch._sync(value)
    return torch._from_functional_tensor(value.elem)


def keep_strides(tensor: torch.Tensor, stride: Sequence[int]) -> None:
    """Give a traced tensor that was written to the strides it had before.

        x.relu_()        eager mode    x as it lies
                         tracing       relu(x), whose result lies as that operator's kernel likes it

    What follows computes in the order of memory, and takes that from strides of dims of size 1, too. These the kernels
    choose otherwise than tracing believes, so where they say nothing they are always given back.
    """
    if not isinstance(tensor, FunctionalTensor):
        return
    # The tensor itself says what it was before: torch takes for granted that writing changes no strides.
    sizes, lies = tensor.shape, contents_now(tensor).stride()
    if not all(type(s) is int for s in (*sizes, *lies, *stride)):
        return
    unclear = tensor.is_contiguous() and tuple(stride) != make_contiguous_strides_for(sizes)
    if tuple(lies) == tuple(stride) and not unclear:
        return
    aten = torch.ops.aten
    if all(now == before or size == 1 for now, before, size in zip(lies, stride, sizes)):
        laid_out = aten.as_strided.default(tensor, sizes, stride)
    else:
        laid_out = aten.copy.default(aten.new_empty_strided.default(tensor, sizes, stride), tensor)
    torch._functionalize_replace(tensor.elem, contents_now(laid_out))
    torch._functionalize_commit_update(tensor.elem)
    torch._sync(tensor)


def cast_tensors(tree: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in containers, dataclasses among them, in another dtype: those that FSDP2 casts."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return _apply_to_tensors(cast, tree)


def memory_of(tensor: torch.Tensor) -> int:
    """Which memory a tensor shows; equal for views of the same, also while a forward is traced."""
    return int(tensor.untyped_storage()._cdata)


def arguments_of(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What an operator was given, or takes where it was given nothing, by the names of its arguments."""
    arguments = func._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return {**defaults, **dict(zip((argument.name for argument in arguments), args)), **kwargs}


def written_by(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among an operator's arguments that it writes to."""
    given = arguments_of(func, args, kwargs)
    writes = [given.get(a.name) for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
    return [leaf for leaf in pytree.tree_leaves(writes) if isinstance(leaf, torch.Tensor)]


@contextlib.contextmanager
def leaves_stay_leaves() -> Iterator[None]:
    """What AOTAutograd traces for a leaf is one; it would be the result of something else.

    Autocast keeps casts of leaves only, and code may ask.
    """
    mirror = torch._mirror_autograd_meta_to  # type: ignore[attr-defined]

    def as_it_was(source: torch.Tensor, traced: torch.Tensor) -> None:
        if source.is_leaf and source.requires_grad:
            traced.requires_grad_()
            if getattr(source, "grad_dtype", source.dtype) is None:
                traced.grad_dtype = None
        else:
            mirror(source, traced)

    with replaced(torch, "_mirror_autograd_meta_to", as_it_was):
        yield
