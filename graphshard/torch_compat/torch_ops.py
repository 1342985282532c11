"""Operators, pytrees, dispatch modes, code of FX graphs, torch's logs, kernels of a GPU; questions to operators."""

from __future__ import annotations

import contextlib
import hashlib
import linecache
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._C import DispatchKey
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)
from torch._logging import getArtifactLogger, trace_structured
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._prims_common import (
    compute_elementwise_output_strides,
    make_channels_last_strides_for,
    make_contiguous_strides_for,
    suggest_memory_format,
)
from torch.distributed.utils import _apply_to_tensors, _recursive_to
from torch.fx import Graph, GraphModule, graph_module
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import _BoxedCodeGen
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

accelerator = torch._C._accelerator_getAccelerator
assert_async = torch._assert_async
dispatch_keys = torch._C._dispatch_keys
foreach_copy_ = torch._foreach_copy_
make_subclass = torch.Tensor._make_subclass
# Number of references to a tensor in C++. A graph of autograd that has saved it has one.
use_count: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]
# A context in which subclasses of tensors see no calls of torch's functions.
without_torch_function = torch._C.DisableTorchFunctionSubclass
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


def sent_to(device: torch.device, tree: Any) -> Any:
    """Return a dict, list or tuple of any class with its tensors on a device, as FSDP2 does."""
    return _recursive_to(tree, device, False)[0]


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


# Prints with `TORCH_LOGS=recompiles`: torch gives its handlers to loggers under "torch" only.
recompiles_log = getArtifactLogger("torch.graphshard", "recompiles")


def use_boxed_calls(graph: Graph) -> None:
    """Generate code that takes one list of inputs and clears it, so that inputs can be freed early."""
    graph.set_codegen(_BoxedCodeGen())


def uncompiled(root: nn.Module, graph: Graph) -> GraphModule:
    """Return a module of a graph whose code is generated when it is first read or called."""
    return _LazyGraphModule(root, graph)


@contextlib.contextmanager
def forget_sources() -> Iterator[None]:
    """Remove the source of graphs that torch.fx compiles in the block, which it keeps forever for tracebacks.

    A GraphModule holds its code, and executors keep their source while they live.
    """
    known = set(graph_module._loader.eval_cache)
    try:
        yield
    finally:
        for name in set(graph_module._loader.eval_cache) - known:
            graph_module._loader.eval_cache.pop(name, None)
            linecache.cache.pop(name, None)


# --- kernels of a GPU ------------------------------------------------------------------------------------------------


def current_raw_stream(index: int) -> int:
    """Return the handle of the stream that is current on a GPU."""
    return torch._C._cuda_getCurrentRawStream(index)


def static_launcher() -> Any:
    """Return the class that loads and launches compiled kernels; AttributeError if torch was built without CUDA."""
    return torch._C._StaticCudaLauncher


def convolution_backend(x: torch.Tensor, weight: torch.Tensor, **settings: Any) -> str:
    """Return the name of the backend that torch selects for a convolution."""
    return str(torch._C._select_conv_backend(x, weight, **settings))


def clear_cublas_workspaces() -> None:
    """Let cuBLAS allocate new workspaces; builds without CUDA have none."""
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


def without_stream() -> tuple[Any, dict[str, Any]]:
    """Return the owner of the current stream's query, and an answer for a machine without a GPU."""
    return torch._C, {"_cuda_getCurrentRawStream": lambda index: 0}
