"""Tensors that forward makes of numbers on a GPU that is not here.

    torch.tensor([0, 2], device=x.device)     traced     copy(empty(device=cuda), lift_fresh_copy(constant on the CPU))
                                              settled    lift_fresh_copy(constant on the GPU)

Torch makes such a tensor where it will be, at once, and there is no memory of a GPU. So it is made on the CPU and
copied, as far as the trace goes; afterwards it is a constant of the program, which is on the GPU when that is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from graphshard.ir.graph import aten

_MAKERS = (torch.tensor, torch.as_tensor, torch.asarray)


class CudaConstants(TorchFunctionMode):
    """While this is open, what is made of numbers for a GPU is made on the CPU and copied."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.new_tensor and args[0].is_cuda:
            kwargs = {"dtype": args[0].dtype, "device": args[0].device, **kwargs}
            func, args = torch.tensor, args[1:]
        if func not in _MAKERS or not _is_cuda(kwargs.get("device")) or _has_tensors(args, kwargs):
            return func(*args, **kwargs)
        device, trained = kwargs.pop("device"), kwargs.pop("requires_grad", False)
        made = func(*args, **kwargs, device="cpu")
        # Not `.to`, which fake tensors would do at once with what they know the values of.
        memory = torch.empty(made.shape, dtype=made.dtype, device=device)
        return memory.copy_(made).requires_grad_(trained)


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _has_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.arg_tree_leaves(*args, **kwargs))


def settle_constants(graph: Graph) -> None:
    """Let constants be where they were copied to."""
    for node in graph.find_nodes(op="call_function", target=aten.copy.default):
        memory, lift = node.args
        if not isinstance(lift, Node) or lift.target is not aten.lift_fresh_copy.default or len(lift.users) > 1:
            continue
        (constant,) = lift.all_input_nodes
        if constant.op == "get_attr" and node.meta["val"].is_cuda:
            for each in (constant, lift):
                each.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(lift)
            graph.erase_node(node)
            if not memory.users:
                graph.erase_node(memory)
