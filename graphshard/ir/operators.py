"""Operators of our own that graphs may hold: those that know of other ranks, and copies between host and device.

    own_chunk(whole, num_ranks, axis)   this rank's chunk of a tensor that all ranks have
    join(pieces, num_ranks, param)      of each tensor, what the ranks' pieces make one behind another; a captured graph
                                        has it where `insert-collectives` puts the gather of a parameter
    reduced(value, op, axis)            a tensor reduced over the ranks at once: a small one on the way to a gather, or
                                        what a tensor-parallel model sums up
    joined(value, num_ranks, axis)      the ranks' tensors one behind another along dim 0, at once
    scattered(value, op, num_ranks, axis)   this rank's piece along dim 0 of the sum over ranks, at once
    exchanged(value, out, in, axis)     pieces along dim 0 of those sizes are sent to each rank, and received, at once
    reduced_together, joined_together, scattered_together   the same of several tensors by one launch
    reducing, joining, scattering, exchanging   start one of these four; under way until `settled`
    settled(value)                      what is computed from here on sees the result of one that was started
    upload(shard, device, dtype=None)   start a copy of a shard that lives on the host; in flight until `arrived`
    reload(saved, device)               the same of a value that forward has downloaded, once that copy is complete
    arrived(copy)                       what is computed from here on sees the copy
    download(value)                     start a copy to the host; complete after `finish_copies`, or for `reload`
    checked(value, status, operator, is_matrix)         a value, if the status of torch.linalg says that it is one
    cumulated(x, weight, bias, mean, var, count, eps)   what batch norm without a momentum makes of its statistics

With these that communicate the graph stays the same on every rank: they name the mesh axis, as a collective does. On
CUDA copies run beside the compute, to and from pinned memory, with a stream for each direction: a download waits for
the compute that makes it, a reload for the downloads before it, and no other upload waits for a download. On a CPU they
are plain copies.

* Shards are uploaded in the dtype in which they are stored, and cast on the device. With a dtype they are cast first,
  on the host, into pinned memory: half as many bytes travel, with the same bits. One thread casts 20 GB/s of float32 to
  bfloat16 (an EPYC core by its CPU time), and PCIe 5 brings 50, so this takes at least four threads for each rank to be
  faster. The thread that launches kernels would have to wait for it, and torchrun leaves it one core: it is the
  user's choice (`OffloadParameters(cast_on_host=True)`).
* Gradients are cast behind their reduction on the compute stream, which has waited for it. It is only this rank's
  shard: 6 bytes a parameter, 0.2 ms of an H100's memory in a step of 8 billion parameters on 64 ranks. Another stream
  would take an event and a record of the memory for each of them.
* Pinned memory of a gradient is that of an earlier step: torch keeps what was pinned, and gives it out again when the
  copies into it are done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphshard.torch_compat.dtensor import all_gather_into, rank_in_group
from graphshard.torch_compat.operators import OpOverload

_LIBRARY = torch.library.Library("graphshard", "FRAGMENT")


def _own_chunk(whole: Tensor, num_ranks: int, group: str) -> Tensor:
    return whole.chunk(num_ranks)[rank_in_group(group)].clone()


def _join(pieces: list[Tensor], num_ranks: int, param: str) -> list[Tensor]:
    """As if every rank had the same pieces: what a world of one rank has, and what sizes and costs are known by."""
    return [torch.cat([piece.reshape(piece.shape or (1,))] * num_ranks) for piece in pieces]


def _joined_shapes(pieces: list[Tensor], num_ranks: int, param: str) -> list[Tensor]:
    return [piece.new_empty([num_ranks * (piece.shape or (1,))[0], *piece.shape[1:]]) for piece in pieces]


def _reducing(value: Tensor, op: str, group: str) -> Tensor:
    return torch.ops._c10d_functional.all_reduce(value, op, group)


def _joining(value: Tensor, num_ranks: int, group: str) -> Tensor:
    whole = value.new_empty([num_ranks * value.shape[0], *value.shape[1:]])
    all_gather_into(whole, value.contiguous(), group)  # the functional one corrupts gloo's heap, see runtime/gloo.py
    return whole


def _scattering(value: Tensor, op: str, num_ranks: int, group: str) -> Tensor:
    return torch.ops._c10d_functional.reduce_scatter_tensor(value, op, num_ranks, group)


def _exchanging(value: Tensor, out_sizes: list[int], in_sizes: list[int], group: str) -> Tensor:
    return torch.ops._c10d_functional.all_to_all_single(value, out_sizes, in_sizes, group)


def _settled(value: Tensor) -> Tensor:
    # An operator must not return its input: this shares its memory.
    return torch.ops._c10d_functional.wait_tensor(value).view_as(value)


def _at_once(start: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args: torch.ops._c10d_functional.wait_tensor(start(*args))


def _together(start: Callable[..., Tensor], coalesced: str) -> Callable[..., list[Tensor]]:
    """Several at once. Gloo would pack them, and add up in another order: there each is started by itself."""

    def run(values: list[Tensor], *args: Any) -> list[Tensor]:
        if values[0].is_cuda:
            values = [value.contiguous() for value in values]
            started = getattr(torch.ops._c10d_functional, coalesced)(values, *args)
        else:
            started = [start(value, *args) for value in values]
        return [torch.ops._c10d_functional.wait_tensor(value) for value in started]

    return run


@dataclass(frozen=True)
class _Copies:
    """The streams of a device that copies run on."""

    up: torch.cuda.Stream
    down: torch.cuda.Stream


@functools.cache
def _copies(device: torch.device) -> _Copies:
    return _Copies(torch.cuda.Stream(device), torch.cuda.Stream(device))


def _current() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _upload(shard: Tensor, device: str, dtype: torch.dtype | None = None) -> Tensor:
    if device == "cpu":
        return shard.clone() if dtype is None else shard.to(dtype, copy=True)
    if dtype is not None:  # memory that an earlier copy still reads is not given out again
        shard = torch.empty_like(shard, dtype=dtype, pin_memory=True).copy_(shard)
    with torch.cuda.stream(_copies(_current()).up):
        copy = shard.to(_current(), non_blocking=True)
    copy.record_stream(torch.cuda.current_stream())
    return copy


def _reload(saved: Tensor, device: str) -> Tensor:
    if device != "cpu":
        copies = _copies(_current())
        copies.up.wait_stream(copies.down)
    return _upload(saved, device)


def _arrived(copy: Tensor) -> Tensor:
    if copy.is_cuda:
        torch.cuda.current_stream().wait_stream(_copies(copy.device).up)
    # An operator must not return its input: this shares its memory.
    return copy.view_as(copy)


def _download(value: Tensor) -> Tensor:
    if not value.is_cuda:
        return value.clone()
    stream = _copies(value.device).down
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        host = torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
    value.record_stream(stream)
    return host


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> OpOverload:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CPU")
    _LIBRARY.impl(name, run, "CUDA")
    torch.library.register_fake(f"graphshard::{name}", fake, lib=_LIBRARY)
    operator: OpOverload = getattr(torch.ops.graphshard, name).default
    return operator


OWN_CHUNK = _define(
    "own_chunk(Tensor whole, int num_ranks, str group) -> Tensor",
    _own_chunk,
    lambda whole, num_ranks, group: whole.new_empty([whole.shape[0] // num_ranks, *whole.shape[1:]]),
)
JOIN = _define("join(Tensor[] pieces, int num_ranks, str param) -> Tensor[]", _join, _joined_shapes)


def _define_both(
    done: str, doing: str, arguments: str, start: Callable[..., Any], fake: Callable[..., Any]
) -> tuple[OpOverload, OpOverload]:
    """A collective that runs at once, and the start of it."""
    schema = f"({arguments}, str group) -> Tensor"
    return _define(done + schema, _at_once(start), fake), _define(doing + schema, start, fake)


def _define_together(
    done: str, arguments: str, start: Callable[..., Any], coalesced: str, fake: Callable[..., Any]
) -> OpOverload:
    """A collective of several tensors that runs at once."""
    schema = f"{done}_together(Tensor[] values, {arguments}, str group) -> Tensor[]"
    return _define(schema, _together(start, coalesced), lambda values, *args: [fake(value, *args) for value in values])


def _reduced_shape(value: Tensor, op: str, group: str) -> Tensor:
    return torch.empty_like(value)


def _joined_shape(value: Tensor, num_ranks: int, group: str) -> Tensor:
    return value.new_empty([num_ranks * value.shape[0], *value.shape[1:]])


def _scattered_shape(value: Tensor, op: str, num_ranks: int, group: str) -> Tensor:
    return value.new_empty([value.shape[0] // num_ranks, *value.shape[1:]])


REDUCED, REDUCING = _define_both("reduced", "reducing", "Tensor value, str op", _reducing, _reduced_shape)
JOINED, JOINING = _define_both("joined", "joining", "Tensor value, int num_ranks", _joining, _joined_shape)
SCATTERED, SCATTERING = _define_both(
    "scattered", "scattering", "Tensor value, str op, int num_ranks", _scattering, _scattered_shape
)
EXCHANGED, EXCHANGING = _define_both(
    *("exchanged", "exchanging", "Tensor value, SymInt[] out_sizes, SymInt[] in_sizes", _exchanging),
    lambda value, out_sizes, in_sizes, group: value.new_empty([sum(out_sizes), *value.shape[1:]]),
)
# Of what runs at once, what carries several.
TOGETHER = {
    REDUCED: _define_together("reduced", "str op", _reducing, "all_reduce_coalesced", _reduced_shape),
    JOINED: _define_together("joined", "int num_ranks", _joining, "all_gather_into_tensor_coalesced", _joined_shape),
    SCATTERED: _define_together(
        "scattered", "str op, int num_ranks", _scattering, "reduce_scatter_tensor_coalesced", _scattered_shape
    ),
}
# Of what runs at once, what starts it.
BEGINS = {REDUCED: REDUCING, JOINED: JOINING, SCATTERED: SCATTERING, EXCHANGED: EXCHANGING}
SETTLED = _define("settled(Tensor value) -> Tensor", _settled, torch.empty_like)
# Mark of what a pass has started where it stands, before collectives are given compute to run beside.
BEGUN = "begun"
# They name a mesh axis by their last argument; its process group takes the place when a program is installed.
NAMING_GROUPS = frozenset({OWN_CHUNK, *BEGINS, *BEGINS.values(), *TOGETHER.values()})
UPLOAD = _define(
    "upload(Tensor shard, str device, ScalarType? dtype=None) -> Tensor",
    _upload,
    lambda shard, device, dtype=None: torch.empty_like(shard, device=device, dtype=dtype),
)
RELOAD = _define(
    "reload(Tensor saved, str device) -> Tensor",
    _reload,
    lambda saved, device: torch.empty_like(saved, device=device),
)
ARRIVED = _define("arrived(Tensor copy) -> Tensor", _arrived, torch.empty_like)
DOWNLOAD = _define("download(Tensor value) -> Tensor", _download, lambda value: torch.empty_like(value, device="cpu"))
# Copies to the device, and all that has to do with copies; none of it computes.
UPLOADS = frozenset({UPLOAD, RELOAD})
COPIES = UPLOADS | {ARRIVED, DOWNLOAD}


def copied_to(shards: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Shards as they are on a device, which those on the host are copied to beside the compute.

    The host waits for the copies, as it may write to the shards afterwards, and not for the compute.
    """
    if device.type != "cuda" or all(shard.is_cuda for shard in shards):
        return [shard.to(device) for shard in shards]
    copies = [_arrived(_upload(shard, device.type)) for shard in shards]
    _copies(_current()).up.record_event().synchronize()
    return copies


def finish_copies(device: torch.device) -> None:
    """Wait on the host until downloads are there, and until what is uploaded may be written to."""
    copies_so_far(device)()


def copies_so_far(device: torch.device) -> Callable[[], None]:
    """What waits on the host, in any thread, as `finish_copies` does, for those that have been started by now."""
    if device.type != "cuda":
        return lambda: None
    copies = _copies(_current())
    events = copies.up.record_event(), copies.down.record_event()

    def finish() -> None:
        for event in events:
            event.synchronize()

    return finish
