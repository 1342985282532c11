"""Copies between host and device that run beside the compute, as operators of the graph.

    upload(shard, device)   start a copy of a shard that lives on the host; in flight until `arrived`
    arrived(copy)           what is computed from here on sees the copy
    download(gradient)      start a copy to the host; complete after `finish_downloads`

On CUDA they run on a stream of their own, to and from pinned memory. On a CPU they are plain copies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("graphshard", "FRAGMENT")
_LIBRARY.define("upload(Tensor shard, str device) -> Tensor")
_LIBRARY.define("arrived(Tensor copy) -> Tensor")
_LIBRARY.define("download(Tensor gradient) -> Tensor")


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


for _name, _run in {"upload": _upload, "arrived": _arrived, "download": _download}.items():
    _LIBRARY.impl(_name, _run, "CPU")
    _LIBRARY.impl(_name, _run, "CUDA")


_FAKES: dict[str, Callable[..., Tensor]] = {
    "upload": lambda shard, device: torch.empty_like(shard, device=device),
    "arrived": torch.empty_like,
    "download": lambda gradient: torch.empty_like(gradient, device="cpu"),
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"graphshard::{_name}", _fake, lib=_LIBRARY)

UPLOAD = torch.ops.graphshard.upload.default
ARRIVED = torch.ops.graphshard.arrived.default
DOWNLOAD = torch.ops.graphshard.download.default


def finish_downloads(device: torch.device) -> None:
    """Wait on the host until what was downloaded is there."""
    if device.type == "cuda":
        _stream(_current()).synchronize()
