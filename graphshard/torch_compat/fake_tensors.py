"""Fake and functional tensors: shapes without values, and writes that a trace turns into new values."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses import fake_tensor as fake_tensor_module
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphshard.torch_compat.torch_ops import OpOverload, dispatch_keys, make_contiguous_strides_for, replaced


def fake_mode_of(tensor: torch.Tensor) -> FakeTensorMode:
    """Return the mode that a fake tensor belongs to."""
    assert isinstance(tensor, FakeTensor)
    return tensor.fake_mode


def new_fake_mode(sizes: ShapeEnv | None = None) -> FakeTensorMode:
    """Return a mode like the one that captures programs; `sizes` holds dynamic sizes that are known already."""
    return FakeTensorMode(shape_env=sizes or ShapeEnv())


def fake_tensor(
    mode: FakeTensorMode, shape: list[int], stride: list[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a fake tensor; constructing it outside the mode's dispatch takes a sixth of the time."""
    return FakeTensor(mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)


def guarded_as_real(fake: torch.Tensor) -> torch.Tensor:
    """Let Dynamo's guards on a fake tensor expect a plain tensor of its device, which the module has when it runs."""
    assert isinstance(fake, FakeTensor)
    fake.pytype, fake.dispatch_keys = torch.Tensor, dispatch_keys(torch.empty(0, device=fake.device))
    return fake


@contextlib.contextmanager
def quiet_tracing() -> Iterator[None]:
    """Suppress torch's logs of a failed trace: the user gets an error."""
    with replaced(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Error detected in ")
        yield


@contextlib.contextmanager
def fake_kernels(kernels: Mapping[OpOverload, Callable[..., Any]]) -> Iterator[None]:
    """Give operators other kernels for fake tensors, called with mode, operator and arguments."""
    known = {op: op_implementations_dict[op] for op in kernels if op in op_implementations_dict}
    op_implementations_dict.update(kernels)
    try:
        yield
    finally:
        for op in kernels:
            op_implementations_dict.pop(op)
        op_implementations_dict.update(known)


def is_traced(tensor: torch.Tensor) -> bool:
    """Return whether AOTAutograd traces this tensor, perhaps inside a transform of torch.func."""
    return isinstance(tensor, FunctionalTensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def contents_now(value: Any) -> Any:
    """Return the tensor inside a functional one: another object after each write; other values as they are."""
    if not isinstance(value, FunctionalTensor):
        return value
    torch._sync(value)
    return torch._from_functional_tensor(value.elem)


def keep_strides(tensor: torch.Tensor, stride: Sequence[int]) -> None:
    """Restore the strides that a traced tensor had before it was written to.

        x.relu_()        eager mode    x keeps its layout
                         tracing       relu(x), in the layout that the operator's kernel chooses

    Later operators compute in memory order, which they derive from strides, also from strides of dims of size 1.
    Kernels choose them differently from the trace, so strides that say nothing are always restored.
    """
    if not isinstance(tensor, FunctionalTensor):
        return
    # The tensor reports its old strides: torch assumes that writing does not change them.
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
