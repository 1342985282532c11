"""Operators of our own that graphs may hold: those that know of other ranks, and copies between host and device.

    own_chunk(whole, num_ranks, axis)   this rank's chunk of a tensor that all ranks have
    join(pieces, num_ranks, param)      of each tensor, what the ranks' pieces make one behind another; a captured graph
                                        has it where `insert-collectives` puts the gather of a parameter
    reduced(value, op, axis)            a tensor reduced over the ranks at once: a small one on the way to a gather, or
                                        what a tensor-parallel model sums up
    joined(value, num_ranks, axis)      the ranks' tensors one behind another along dim 0, at once
    scattered(value, op, num_ranks, axis)   this rank's piece along dim 0 of the sum over ranks, at once
    exchanged(value, out, in, axis)     pieces along dim 0 of those sizes are sent to each rank, and received, at once
    upload(shard, device)               start a copy of a shard that lives on the host; in flight until `arrived`
    arrived(copy)                       what is computed from here on sees the copy
    download(gradient)                  start a copy to the host; complete after `finish_downloads`

With these that communicate the graph stays the same on every rank: they name the mesh axis, as a collective does. On
CUDA copies run beside the compute on a stream of their own, to and from pinned memory; on a CPU they are plain copies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphshard.ir.torch_internals import all_gather_into, rank_in_group

_LIBRARY = torch.library.Library("graphshard", "FRAGMENT")


def _own_chunk(whole: Tensor, num_ranks: int, group: str) -> Tensor:
    return whole.chunk(num_ranks)[rank_in_group(group)].clone()


def _join(pieces: list[Tensor], num_ranks: int, param: str) -> list[Tensor]:
    """As if every rank had the same pieces: what a world of one rank has, and what sizes and costs are known by."""
    return [torch.cat([piece.reshape(piece.shape or (1,))] * num_ranks) for piece in pieces]


def _joined_shapes(pieces: list[Tensor], num_ranks: int, param: str) -> list[Tensor]:
    return [piece.new_empty([num_ranks * (piece.shape or (1,))[0], *piece.shape[1:]]) for piece in pieces]


def _reduced(value: Tensor, op: str, group: str) -> Tensor:
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_reduce(value, op, group))


def _joined(value: Tensor, num_ranks: int, group: str) -> Tensor:
    whole = value.new_empty([num_ranks * value.shape[0], *value.shape[1:]])
    all_gather_into(whole, value.contiguous(), group)  # the functional one corrupts gloo's heap, see runtime/gloo.py
    return torch.ops._c10d_functional.wait_tensor(whole)


def _scattered(value: Tensor, op: str, num_ranks: int, group: str) -> Tensor:
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.reduce_scatter_tensor(value, op, num_ranks, group))


def _exchanged(value: Tensor, out_sizes: list[int], in_sizes: list[int], group: str) -> Tensor:
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_to_all_single(value, out_sizes, in_sizes, group))


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _current() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _upload(shard: Tensor, device: str) -> Tensor:
    if device == "cpu":
        return shard.clone()
    with torch.cuda.stream(_stream(_current())):
        copy = shard.to(_current(), non_blocking=True)
    copy.record_stream(torch.cuda.current_stream())
    return copy


def _arrived(copy: Tensor) -> Tensor:
    if copy.is_cuda:
        torch.cuda.current_stream().wait_stream(_stream(copy.device))
    # An operator must not return its input: this shares its memory.
    return copy.view_as(copy)


def _download(gradient: Tensor) -> Tensor:
    if not gradient.is_cuda:
        return gradient.clone()
    stream = _stream(gradient.device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        host = torch.empty_like(gradient, device="cpu", pin_memory=True).copy_(gradient, non_blocking=True)
    gradient.record_stream(stream)
    return host


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> torch._ops.OpOverload:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CPU")
    _LIBRARY.impl(name, run, "CUDA")
    torch.library.register_fake(f"graphshard::{name}", fake, lib=_LIBRARY)
    operator: torch._ops.OpOverload = getattr(torch.ops.graphshard, name).default
    return operator


OWN_CHUNK = _define(
    "own_chunk(Tensor whole, int num_ranks, str group) -> Tensor",
    _own_chunk,
    lambda whole, num_ranks, group: whole.new_empty([whole.shape[0] // num_ranks, *whole.shape[1:]]),
)
JOIN = _define("join(Tensor[] pieces, int num_ranks, str param) -> Tensor[]", _join, _joined_shapes)
REDUCED = _define(
    "reduced(Tensor value, str op, str group) -> Tensor", _reduced, lambda value, op, group: torch.empty_like(value)
)
JOINED = _define(
    "joined(Tensor value, int num_ranks, str group) -> Tensor",
    _joined,
    lambda value, num_ranks, group: value.new_empty([num_ranks * value.shape[0], *value.shape[1:]]),
)
SCATTERED = _define(
    "scattered(Tensor value, str op, int num_ranks, str group) -> Tensor",
    _scattered,
    lambda value, op, num_ranks, group: value.new_empty([value.shape[0] // num_ranks, *value.shape[1:]]),
)
EXCHANGED = _define(
    "exchanged(Tensor value, SymInt[] out_sizes, SymInt[] in_sizes, str group) -> Tensor",
    _exchanged,
    lambda value, out_sizes, in_sizes, group: value.new_empty([sum(out_sizes), *value.shape[1:]]),
)
# They name a mesh axis by their last argument; its process group takes the place when a program is installed.
NAMING_GROUPS = frozenset({OWN_CHUNK, REDUCED, JOINED, SCATTERED, EXCHANGED})
UPLOAD = _define(
    "upload(Tensor shard, str device) -> Tensor",
    _upload,
    lambda shard, device: torch.empty_like(shard, device=device),
)
ARRIVED = _define("arrived(Tensor copy) -> Tensor", _arrived, torch.empty_like)
DOWNLOAD = _define(
    "download(Tensor gradient) -> Tensor", _download, lambda gradient: torch.empty_like(gradient, device="cpu")
)


def finish_downloads(device: torch.device) -> None:
    """Wait on the host until what was downloaded is there."""
    if device.type == "cuda":
        _stream(_current()).synchronize()
