"""Tensors of a module that forward reaches on another way than through its attributes.

    nn.LSTM                    keeps a list of its parameters
    a function in a closure    remembers a tensor

Wherever they come from, the tensor that is traced takes their place. A tensor that is nobody's is a constant of the
program, unless it requires a gradient: that would be lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from graphshard.capture.untraceable import Untraceable
from graphshard.ir.subclasses import has_traced
from graphshard.ir.tracing_internals import without_onednn

_GRAD = vars(torch._C.TensorBase)["grad"].__get__


class Substitute(TorchFunctionMode):
    """Lets torch's functions see other tensors, by the identities of those they are given.

    Raises Untraceable for a tensor that requires a gradient and is nobody's, and for what accumulates gradients or
    reads those that were.
    """

    def __init__(self, by_id: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._by_id = by_id

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.backward:
            raise Untraceable("backward", "Tensor.backward")
        if func == _GRAD and isinstance(args[0], nn.Parameter):
            raise Untraceable("backward", ".grad of a parameter")
        real = [a for a in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(a, torch.Tensor) and not has_traced(a)]
        if real:
            args, kwargs = pytree.tree_map_only(
                torch.Tensor, lambda tensor: self._by_id.get(id(tensor), tensor), (args, kwargs)
            )
        # Tracing takes oneDNN's LSTM in the form that has no backward.
        with without_onednn() if func is torch.lstm else contextlib.nullcontext():
            result = func(*args, **kwargs)
        foreign = [tensor for tensor in real if tensor.requires_grad and id(tensor) not in self._by_id]
        if foreign and any(isinstance(r, torch.Tensor) and r.requires_grad for r in pytree.tree_leaves(result)):
            raise Untraceable("foreign", f"a tensor of shape {list(foreign[0].shape)}")
        return result
