"""Parameters that are tensor subclasses, and FSDP2's protocol for them.

A subclass takes part in sharding by two methods, on its class or on the shard itself: `fsdp_pre_all_gather` makes the
tensors that travel out of a shard, `fsdp_post_all_gather` makes the parameter that the model uses out of what arrived.
"""

from __future__ import annotations

import torch
from torch import nn

from graphshard.ir.torch_internals import FakeTensor

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def is_subclass(tensor: torch.Tensor) -> bool:
    """Whether operators on a tensor may do something else than on a plain one, so that its elements are not all of it.

    A class derived from `nn.Parameter` that overrides no operators is a plain tensor with attributes.
    """
    cls = type(tensor)
    if cls in (torch.Tensor, nn.Parameter, FakeTensor) or nn.parameter.is_lazy(tensor):
        return False
    like_plain = (nn.Parameter.__torch_function__, torch.Tensor.__torch_dispatch__)
    return nn.Parameter not in cls.__mro__ or (cls.__torch_function__, cls.__torch_dispatch__) != like_plain


def hooks_of(tensor: torch.Tensor) -> tuple[str, ...]:
    """Which of the protocol's two methods a tensor has."""
    return tuple(name for name in (PRE, POST) if hasattr(tensor, name))
