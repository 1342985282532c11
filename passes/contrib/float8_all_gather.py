"""Gather parameters in float8: each shard travels with its own scale.

  * %g = all_gather_into_tensor(%s, 2, shard)        * %b = cat([(%s / %scale) as float8, %scale as bytes])
    %w: bf16[8, 4] = wait_tensor(%g)                 * %g = all_gather_into_tensor(%b, 2, shard)
                                                     * %r: u8[34] = wait_tensor(%g)
                                                     * %w: bf16[8, 4] = (%r as float8) * (%r as scales)

FSDP2 does this with `fsdp_pre_all_gather` and `fsdp_post_all_gather` of float8 weights: half the bytes of bfloat16, a
quarter of float32. The gradient of the gathered values goes to the stored parameter unchanged. The pass skips uneven
parameters, whose padding must not reach a scale, and parameters with an `fsdp_pre_all_gather`.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from graphshard.ir.collective_regions import Collective
from graphshard.ir.graph import aten, fake, trace
from graphshard.ir.param_table import ParamSpec
from graphshard.ir.program import Phase, Program
from graphshard.passes.base import Pass, gathers_of

_FLOAT8 = torch.float8_e4m3fn
_SCALE_BYTES = 4  # a float32


@dataclass(frozen=True)
class Float8AllGather(Pass):
    """Requires: a partitioned program without a plan.  Preserves: shapes and dtypes; values within 2^-4, relative.

    Attributes:
        params: patterns of parameter names, such as "layers.*.weight".
    """

    name: ClassVar[str] = "float8-all-gather"
    runs: ClassVar = "before plan"
    exact: ClassVar[bool] = False
    params: tuple[str, ...] = ("*",)

    def rewrite_phase(self, phase: Phase, program: Program) -> int:
        chosen = [gather for gather, spec in gathers_of(phase, program) if self._applies(spec)]
        for gather in chosen:
            _quantize(gather)
        return len(chosen)

    def _applies(self, spec: ParamSpec) -> bool:
        chosen = any(fnmatch.fnmatchcase(spec.name, pattern) for pattern in self.params)
        large = spec.compute_dtype.is_floating_point and spec.compute_dtype.itemsize > 1
        return chosen and large and spec.is_even and spec.extension is None


def _quantize(gather: Collective) -> None:
    launch, (wait,) = gather.node, gather.waits
    args: Any = launch.args
    shard, num_ranks, axis = args
    gathered, users = fake(wait), list(wait.users)
    sent = trace(launch, _pack, shard)
    launch.args = (sent, num_ranks, axis)
    launch.meta["val"] = fake(sent).new_empty([num_ranks * len(fake(sent))])
    wait.meta["val"] = fake(launch)
    full = trace(wait.next, partial(_unpack, num_ranks, gathered), wait, like=launch)
    for user in users:
        user.replace_input_with(wait, full)


def _pack(shard: Tensor) -> Tensor:
    """Return the bytes of a shard in float8, followed by the bytes of its scale."""
    wide = shard.reshape(-1).to(torch.float32)
    above_zero = wide.abs().amax([0], True).clamp_min(torch.finfo(torch.float32).tiny * 2**10)
    scale = above_zero / torch.finfo(_FLOAT8).max
    return torch.cat([part.view(torch.uint8) for part in ((wide / scale).to(_FLOAT8), scale)])


def _unpack(num_ranks: int, like: Tensor, buffer: Tensor) -> Tensor:
    """Return the gathered parameter, with the shape and dtype of `like`."""
    numel = like.numel() // num_ranks
    rows = buffer.view([num_ranks, numel + _SCALE_BYTES])
    values = aten.slice.Tensor(rows, 1, 0, numel).view(_FLOAT8).to(torch.float32)
    scales = aten.contiguous.default(aten.slice.Tensor(rows, 1, numel, numel + _SCALE_BYTES)).view(torch.float32)
    return (values * scales).to(like.dtype).reshape(like.shape)
