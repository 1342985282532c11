"""Custom operators of graphs: collectives of the model, and copies between host and device.

    own_chunk(whole, num_ranks, axis)   this rank's chunk of a tensor that is equal on all ranks
    subclass_all_gather(pieces, num_ranks, param)   all-gather of each piece of a parameter with an extension, as
                                        captured; `insert-collectives` replaces it by the gather
    all_reduce(value, op, axis)
    all_gather(value, num_ranks, axis)  along dim 0
    reduce_scatter(value, op, num_ranks, axis)   along dim 0
    all_to_all(value, out, in, axis)    of pieces along dim 0 with these sizes
    all_reduce_coalesced, all_gather_coalesced, reduce_scatter_coalesced   several tensors in one launch
    start_all_reduce, start_all_gather, ...   start one of the four; in flight until `wait`
    wait(value)                         wait for a started collective
    reduce_scatter_in_order(gradient, op, num_ranks, axis), all_reduce_in_order(shard, op, num_ranks, axis)   reduction
                                        of gradients as an exchange and a sum in the order of ranks, of twice as many
                                        bits if the gradients have 16; in flight until torch's wait
    upload(shard, device, dtype=None)   start a copy of a shard from the host; in flight until `arrived`
    reload(saved, device)               the same for a downloaded value, after its download is complete
    arrived(copy)                       wait for an upload or reload
    download(value, first=False)        start a copy to the host; complete after `finish_copies`, or for `reload`

Collectives name the mesh axis, so graphs are equal on all ranks. On CUDA, copies overlap compute, use pinned memory and
one stream for each direction: copies wait for the compute that is launched before them, and a reload also for earlier
downloads. On a CPU they are plain copies.

* Memory on the device is allocated and freed in the order of compute, however far ahead of the device the host is:
  uploads go to memory of the compute stream, and values are held while they are downloaded, until the first download of
  the next group, where compute waits for them. With `record_stream` memory would come back when the host sees that the
  device has used it, so that a host that launches a whole phase ahead would allocate all shards at once.

* Shards are uploaded in their stored dtype and cast on the device. With a dtype they are cast on the host, into pinned
  memory, which halves the bytes and keeps the bits. One thread casts 20 GB/s of float32 to bfloat16 (EPYC core) and
  PCIe 5 transfers 50, so this is faster only with at least four threads for each rank. It delays the thread that
  launches kernels, and torchrun leaves it one core, so the user chooses (`OffloadParameters(cast_on_host=True)`).
* Gradients are cast after their reduction on the compute stream, which has waited for it: 6 bytes a parameter of this
  rank's shard, 0.2 ms of an H100's memory bandwidth with 8 billion parameters on 64 ranks. A separate stream would need
  an event and a memory record for each gradient.
* torch caches pinned memory and reuses it when the copies into it are complete.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphshard.ir._rank_order_sum import sum_dtype, sum_in_rank_order
from graphshard.torch_compat.dtensor import all_gather_into, process_group, rank_in_group, started
from graphshard.torch_compat.torch_ops import OpOverload, OpOverloadPacket

c10d = torch.ops._c10d_functional
_LIBRARY = torch.library.Library("graphshard", "FRAGMENT")


def _own_chunk(whole: Tensor, num_ranks: int, group: str) -> Tensor:
    return whole.chunk(num_ranks)[rank_in_group(group)].clone()


def _subclass_all_gather(pieces: list[Tensor], num_ranks: int, param: str) -> list[Tensor]:
    """Gather as if every rank had these pieces: exact for one rank, and right in shape for any number."""
    return [torch.cat([piece.reshape(piece.shape or (1,))] * num_ranks) for piece in pieces]


def _start_all_gather(value: Tensor, num_ranks: int, group: str) -> Tensor:
    whole = value.new_empty([num_ranks * value.shape[0], *value.shape[1:]])
    # The functional all-gather corrupts gloo's heap, see runtime/collective_launches.py.
    return started(whole, all_gather_into(whole, value.contiguous(), group))


@dataclass(frozen=True)
class _Copies:
    """Streams for copies to and from a device.

    Attributes:
        held: values that are being downloaded; compute waits for them before their memory is free.
    """

    up: torch.cuda.Stream
    down: torch.cuda.Stream
    held: list[Tensor] = field(default_factory=list)

    def release(self) -> None:
        """Free the memory of earlier downloads for compute that is launched after this."""
        if self.held:
            torch.cuda.current_stream().wait_stream(self.down)
            self.held.clear()


@functools.cache
def _copies(device: torch.device) -> _Copies:
    return _Copies(torch.cuda.Stream(device), torch.cuda.Stream(device))


def _current() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _upload(shard: Tensor, device: str, dtype: torch.dtype | None = None) -> Tensor:
    if device == "cpu":
        return shard.clone() if dtype is None else shard.to(dtype, copy=True)
    if dtype is not None:  # torch does not reuse pinned memory that an earlier copy still reads
        shard = torch.empty_like(shard, dtype=dtype, pin_memory=True).copy_(shard)
    up, copy = _copies(_current()).up, torch.empty_like(shard, device=_current())
    up.wait_stream(torch.cuda.current_stream())  # compute may still read what was in this memory before
    with torch.cuda.stream(up):
        return copy.copy_(shard, non_blocking=True)


def _reload(saved: Tensor, device: str) -> Tensor:
    if device != "cpu":
        copies = _copies(_current())
        copies.up.wait_stream(copies.down)
        copies.release()
    return _upload(saved, device)


def _arrived(copy: Tensor) -> Tensor:
    if copy.is_cuda:
        torch.cuda.current_stream().wait_stream(_copies(copy.device).up)
    # An operator must not return its input, hence the view.
    return copy.view_as(copy)


def _download(value: Tensor, first: bool = False) -> Tensor:
    if not value.is_cuda:
        return value.clone()
    copies = _copies(value.device)
    if first:
        copies.release()
    copies.down.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(copies.down):
        host = torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
    copies.held.append(value)
    return host


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> OpOverload:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CPU")
    _LIBRARY.impl(name, run, "CUDA")
    torch.library.register_fake(f"graphshard::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.graphshard, name).default


OWN_CHUNK = _define(
    "own_chunk(Tensor whole, int num_ranks, str group) -> Tensor",
    _own_chunk,
    lambda whole, num_ranks, group: whole.new_empty([whole.shape[0] // num_ranks, *whole.shape[1:]]),
)
SUBCLASS_ALL_GATHER = _define(
    "subclass_all_gather(Tensor[] pieces, int num_ranks, str param) -> Tensor[]",
    _subclass_all_gather,
    lambda pieces, num_ranks, param: [_longer(piece.reshape(piece.shape or (1,)), num_ranks) for piece in pieces],
)
# Asynchronous start of each collective of the model, and its coalesced form.
STARTS: dict[OpOverload, OpOverload] = {}
COALESCED_FORMS: dict[OpOverload, OpOverload] = {}


def _define_collective(
    name: str, arguments: str, start: Callable[..., Tensor], fake: Callable[..., Tensor], coalesced: str = ""
) -> OpOverload:
    """Define a collective, its start, and its coalesced form by torch's coalesced operator."""
    more = f"{arguments}, str group) -> Tensor"
    done = _define(f"{name}(Tensor value, {more}", lambda *args: c10d.wait_tensor(start(*args)), fake)
    STARTS[done] = _define(f"start_{name}(Tensor value, {more}", start, fake)

    def run(values: list[Tensor], *args: Any) -> list[Tensor]:
        # Gloo would pack the tensors and sum in another order: start each one alone.
        if values[0].is_cuda:
            started = getattr(c10d, coalesced)([value.contiguous() for value in values], *args)
        else:
            started = [start(value, *args) for value in values]
        return [c10d.wait_tensor(value) for value in started]

    if coalesced:
        schema = f"{name}_coalesced(Tensor[] values, {more}[]"
        COALESCED_FORMS[done] = _define(schema, run, lambda values, *args: [fake(value, *args) for value in values])
    return done


def _longer(value: Tensor, times: int) -> Tensor:
    return value.new_empty([times * value.shape[0], *value.shape[1:]])


ALL_REDUCE = _define_collective(
    *("all_reduce", "str op", lambda *args: c10d.all_reduce(*args)),
    lambda value, op, group: torch.empty_like(value),
    "all_reduce_coalesced",
)
ALL_GATHER = _define_collective(
    *("all_gather", "int num_ranks", _start_all_gather),
    lambda value, num_ranks, group: _longer(value, num_ranks),
    "all_gather_into_tensor_coalesced",
)
REDUCE_SCATTER = _define_collective(
    *("reduce_scatter", "str op, int num_ranks", lambda *args: c10d.reduce_scatter_tensor(*args)),
    lambda value, op, num_ranks, group: value.new_empty([value.shape[0] // num_ranks, *value.shape[1:]]),
    "reduce_scatter_tensor_coalesced",
)
ALL_TO_ALL = _define_collective(
    *("all_to_all", "SymInt[] out_sizes, SymInt[] in_sizes", lambda *args: c10d.all_to_all_single(*args)),
    lambda value, out_sizes, in_sizes, group: value.new_empty([sum(out_sizes), *value.shape[1:]]),
)
START_ALL_GATHER = STARTS[ALL_GATHER]
# An operator must not return its input, hence the view.
MODEL_WAIT = _define("wait(Tensor value) -> Tensor", lambda x: c10d.wait_tensor(x).view_as(x), torch.empty_like)
# Mark of collectives that a pass has already started where they are, before others are moved to overlap compute.
STARTED_EARLY = "started_early"


def start_exchange(
    gradient: Tensor, num_ranks: int, group: str, *, copies: bool, alone: bool = True
) -> tuple[Tensor, Any]:
    """Start to receive this rank's chunk along dim 0 of every rank's gradient, or `copies` of it; return the work too.

    Two ranks of gloo send each other what is not their own: a third less time. One gradient `alone` is sent by torch's
    functional all-to-all, which traces tell apart from gathers, and has no work but its result's.
    """
    if copies:
        received = gradient.new_empty(num_ranks * gradient.numel())
        return received, all_gather_into(received, gradient.view(-1), group)
    among, sent, sizes = process_group(group), gradient, list[int]()
    if num_ranks == 2 and not gradient.is_cuda:
        other = 1 - among.rank()
        sent, sizes = gradient.chunk(2)[other], [0, 0]
        sizes[other] = len(sent)
        if alone:
            return c10d.all_to_all_single(sent, sizes, sizes, group), None
    received = torch.empty_like(sent)
    return received, among.alltoall_base(received, sent, sizes, sizes)


def add_exchanged(received: Tensor, gradient: Tensor, op: str, num_ranks: int, group: str, *, copies: bool) -> Tensor:
    """Return the sum or mean of what `start_exchange` has received."""
    halves = num_ranks == 2 and not copies and not gradient.is_cuda
    own = gradient.chunk(2)[rank_in_group(group)] if halves else None
    total = sum_in_rank_order(received, num_ranks, op, own)
    return total.view(gradient.shape) if copies else total


def _define_in_order(name: str, *, copies: bool) -> OpOverloadPacket:
    """Define a reduction in the order of ranks, and its form for several tensors."""
    more = "str op, int num_ranks, str group) -> Tensor"

    def run(gradient: Tensor, op: str, num_ranks: int, group: str) -> Tensor:  # executors start the exchange earlier
        received = c10d.wait_tensor(started(*start_exchange(gradient.contiguous(), num_ranks, group, copies=copies)))
        return add_exchanged(received, gradient, op, num_ranks, group, copies=copies)

    def fake(gradient: Tensor, op: str, num_ranks: int, group: str) -> Tensor:
        shape = gradient.shape if copies else [gradient.shape[0] // num_ranks, *gradient.shape[1:]]
        return gradient.new_empty(shape, dtype=sum_dtype(gradient.dtype))

    of_each = [lambda gradients, *args, of=of: [of(gradient, *args) for gradient in gradients] for of in (run, fake)]
    _define(f"{name}_coalesced(Tensor[] gradients, {more}[]", *of_each)
    return _define(f"{name}(Tensor gradient, {more}", run, fake).overloadpacket


REDUCE_SCATTER_IN_ORDER = _define_in_order("reduce_scatter_in_order", copies=False)
ALL_REDUCE_IN_ORDER = _define_in_order("all_reduce_in_order", copies=True)
# Operators whose last argument names a mesh axis; installation replaces it by the axis's process group.
NAMING_GROUPS = frozenset({OWN_CHUNK, *STARTS, *STARTS.values(), *COALESCED_FORMS.values()})
UPLOAD = _define(
    "upload(Tensor shard, str device, ScalarType? dtype=None) -> Tensor",
    _upload,
    lambda shard, device, dtype=None: torch.empty_like(shard, device=device, dtype=dtype),
)
RELOAD = _define(
    "reload(Tensor saved, str device) -> Tensor", _reload, lambda saved, device: torch.empty_like(saved, device=device)
)
ARRIVED = _define("arrived(Tensor copy) -> Tensor", _arrived, torch.empty_like)
DOWNLOAD = _define(
    "download(Tensor value, bool first=False) -> Tensor",
    _download,
    lambda value, first=False: torch.empty_like(value, device="cpu"),
)
# Copies to the device, and all operators of copies; none of them computes.
UPLOADS = frozenset({UPLOAD, RELOAD})
COPIES = UPLOADS | {ARRIVED, DOWNLOAD}


def copied_to(shards: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return shards on a device; shards on the host are copied, overlapping compute.

    The host waits for the copies, because it may write to the shards afterwards, but not for compute.
    """
    if device.type != "cuda" or all(shard.is_cuda for shard in shards):
        return [shard.to(device) for shard in shards]
    up, here = _copies(_current()).up, _current()
    with torch.cuda.stream(up):
        copies = [shard.to(here, non_blocking=True) for shard in shards]
    up.record_event().synchronize()
    for copy in copies:  # in memory of the stream for copies, as in that of compute they would wait for compute
        copy.record_stream(torch.cuda.current_stream())
    return [_arrived(copy) for copy in copies]


def finish_copies(device: torch.device) -> None:
    """Block the host until all downloads and uploads are complete."""
    copies_so_far(device)()
    if device.type == "cuda":
        _copies(_current()).release()


def copies_so_far(device: torch.device) -> Callable[[], None]:
    """Return a function that blocks the calling thread until the copies started so far are complete."""
    if device.type != "cuda":
        return lambda: None
    copies = _copies(_current())
    events = copies.up.record_event(), copies.down.record_event()

    def finish() -> None:
        for event in events:
            event.synchronize()

    return finish
