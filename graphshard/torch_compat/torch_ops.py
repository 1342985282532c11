"""Operators, pytrees and dispatch modes under names that do not start with an underscore; questions to operators."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._prims_common import (
    compute_elementwise_output_strides,
    make_channels_last_strides_for,
    make_contiguous_strides_for,
    suggest_memory_format,
)
from torch.distributed.utils import _apply_to_tensors
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DispatchKey",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "arguments_of",
    "assert_async",
    "cast_tensors",
    "compute_elementwise_output_strides",
    "dispatcher_operators",
    "distinct",
    "foreach_copy_",
    "foreach_mul",
    "foreach_norm",
    "kernels_in_python",
    "make_channels_last_strides_for",
    "make_contiguous_strides_for",
    "make_subclass",
    "make_wrapper_subclass",
    "memory_of",
    "pytree",
    "replaced",
    "set_grad_enabled",
    "suggest_memory_format",
    "written_by",
]

assert_async = torch._assert_async
foreach_copy_, foreach_mul, foreach_norm = torch._foreach_copy_, torch._foreach_mul, torch._foreach_norm
make_subclass = torch.Tensor._make_subclass
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
# The function that graphs of Dynamo call.
set_grad_enabled = torch._C._set_grad_enabled


def dispatcher_operators() -> frozenset[str]:
    """Return the operators that the dispatcher knows, as "aten::add.Tensor".

    `torch.ops` also finds operators of TorchScript, some of which read and write files.
    """
    return frozenset(torch._C._dispatch_get_all_op_names())


def kernels_in_python() -> str:
    """Return a digest of the aten operators that have implementations in Python, which any library may add."""
    own = (name for name in torch.library._impls if name.startswith(("aten/", "prims/")))
    return hashlib.sha256("\n".join(sorted(own)).encode()).hexdigest()[:32]


def distinct(values: Iterable[Any], copy: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """Return the values, with copies of tensors that occur a second time."""
    seen: set[int] = set()
    found = []
    for value in values:
        again = isinstance(value, torch.Tensor) and id(value) in seen
        seen.add(id(value))
        found.append(copy(value) if again else value)
    return found


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute while the block runs; an inherited attribute is inherited again afterwards."""
    is_own, own = name in vars(owner), vars(owner).get(name)  # which may be None
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, own)
        else:
            delattr(owner, name)


def cast_tensors(tree: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in containers and dataclasses, as FSDP2 does."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return _apply_to_tensors(cast, tree)


def memory_of(tensor: torch.Tensor) -> int:
    """Return an identifier of a tensor's storage: equal for views of the same, also while a forward is traced."""
    return int(tensor.untyped_storage()._cdata)


def arguments_of(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator's call by name, defaults included."""
    arguments = func._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return {**defaults, **dict(zip((argument.name for argument in arguments), args)), **kwargs}


def written_by(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operator's call writes to."""
    given = arguments_of(func, args, kwargs)
    writes = [given.get(a.name) for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
    return [leaf for leaf in pytree.tree_leaves(writes) if isinstance(leaf, torch.Tensor)]
