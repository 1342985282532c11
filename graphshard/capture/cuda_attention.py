"""Attention as torch runs it on a GPU, where there is none.

    F.scaled_dot_product_attention(q, k, v)     on the CPU    _scaled_dot_product_flash_attention_for_cpu
                                                bfloat16      _scaled_dot_product_flash_attention
                                                float32       _scaled_dot_product_efficient_attention

torch chooses among its kernels in code that its builds for CPUs lack. The choice is made here by the same conditions,
in torch's order of preference: flash, memory-efficient, plain operators, cuDNN. `torch.nn.attention.sdpa_kernel`
changes it as it does there. On GPUs for which torch prefers cuDNN's kernel (9.x and 10.x with a recent cuDNN) flash is
taken all the same, unless `sdpa_kernel` asks for cuDNN: which library there is at run time is not known here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)
# Memory-efficient attention reads masks in vectors of this many elements.
_MASK_VECTOR = 8


class CudaAttention(TorchFunctionMode):
    """While this is open, attention of CUDA tensors is the operator that a GPU would run."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention and args and args[0].is_cuda:
            return attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention by the kernel that torch chooses on a GPU; the arguments of F.scaled_dot_product_attention.

    Raises:
        RuntimeError: `sdpa_kernel` allows none of those that could run.
    """
    with contextlib.ExitStack() as stack:
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            query, key, value = (each.to(dtype) for each in (query, key, value))
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(dtype)
            stack.enter_context(torch.autocast("cuda", enabled=False))
        given = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        for kernel in _allowed():
            found = kernel(*given)
            if found is not None:
                return found
    raise RuntimeError(
        "no kernel of scaled_dot_product_attention that torch.nn.attention.sdpa_kernel allows can run this on a GPU: "
        "allow MATH, too."
    )


Kernel = Callable[..., Tensor | None]


def _allowed() -> Iterator[Kernel]:
    """Kernels in the order in which they are asked, without those that are switched off."""
    backends = torch.backends.cuda
    switches: dict[int, tuple[bool, Kernel]] = {
        0: (backends.math_sdp_enabled(), _math),
        1: (backends.flash_sdp_enabled(), _flash),
        2: (backends.mem_efficient_sdp_enabled(), _efficient),
        3: (backends.cudnn_sdp_enabled(), _cudnn),
    }
    for number in torch._C._get_sdp_priority_order():
        enabled, kernel = switches.get(number, (False, _math))
        if enabled:
            yield kernel


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> Tensor | None:
    size = query.shape[-1]
    if mask is not None or query.dtype not in _HALF or not _fits(query, key, value, grouped=grouped):
        return None
    if not size == key.shape[-1] == value.shape[-1] <= 256 or (causal and query.shape[-2] != key.shape[-2]):
        return None
    scale = scale if scale is not None else 1 / math.sqrt(size)
    padded = [F.pad(each, (0, -size % 8)) if size % 8 else each for each in (query, key, value)]
    result = aten._scaled_dot_product_flash_attention(*padded, dropout, causal, False, scale=scale)[0]
    return result[..., :size] if size % 8 else result


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> Tensor | None:
    vector = 8 if query.dtype in _HALF else 4
    if query.dtype not in (*_HALF, torch.float32) or not _fits(query, key, value, grouped=False):
        return None
    if query.shape[-1] != key.shape[-1] or query.shape[-1] % vector or value.shape[-1] % vector:
        return None
    needs = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    bias = None if mask is None else _bias(mask, query, key)
    return aten._scaled_dot_product_efficient_attention(query, key, value, bias, needs, dropout, causal, scale=scale)[0]


def _cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> Tensor | None:
    sizes = (query.shape[-1], value.shape[-1])
    if query.dtype not in _HALF or not _fits(query, key, value, grouped=grouped):
        return None
    if any(size > 128 or size % 8 for size in sizes) or (causal and query.shape[-2] != key.shape[-2]):
        return None
    needs = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    bias = None if mask is None else _additive(mask, query.dtype)
    return aten._scaled_dot_product_cudnn_attention(
        query, key, value, bias, needs, dropout, causal, False, scale=scale
    )[0]


def _math(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> Tensor | None:
    bias = None if mask is None else _additive(mask, query.dtype)
    return aten._scaled_dot_product_attention_math(
        query, key, value, bias, dropout, causal, None, scale=scale, enable_gqa=grouped
    )[0]


def _fits(query: Tensor, key: Tensor, value: Tensor, *, grouped: bool) -> bool:
    """What the fused kernels have in common: four dims, dense heads, batches and heads alike, or heads in groups."""
    tensors = (query, key, value)
    if any(each.dim() != 4 or each.dtype != query.dtype for each in tensors):
        return False
    if any(each.stride(-1) != 1 and each.shape[-1] != 1 for each in tensors) or key.shape[-2] == 0:
        return False
    if not query.shape[0] == key.shape[0] == value.shape[0] or query.shape[-2] == 0:
        return False
    heads = [each.shape[1] for each in tensors]
    alike = heads[0] == heads[1] == heads[2]
    return alike or (grouped and heads[1] == heads[2] and heads[0] % heads[1] == 0)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to scores."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask.logical_not(), -math.inf)


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as memory-efficient attention takes it: rows at multiples of a vector, for each batch and head."""
    bias = _additive(mask, query.dtype)
    length = bias.shape[-1]
    if length % _MASK_VECTOR:
        bias = F.pad(bias, (0, -length % _MASK_VECTOR))[..., :length]
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
