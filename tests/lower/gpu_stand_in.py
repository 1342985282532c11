"""A region for a GPU that is not here, and what lets its kept code run on the CPU. Imports nothing of Inductor."""

from __future__ import annotations

import contextlib
import os
import pkgutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from graphshard.ir.gpus import properties_of
from graphshard.ir.program import Region
from graphshard.lower import cubin_kernels
from graphshard.torch_compat.fake_tensors import FakeTensorMode, ShapeEnv
from graphshard.utils.archive import Archive, read_private
from tests.lower.small_regions import region_of

config: Any = pkgutil.resolve_name("torch._inductor.config")
H100 = (9, 0)
SIZES = (8, 32), (32, 4096), (8, 4096)


def gated(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    y = F.silu(x @ w)
    z = y * v
    return [z - z.mean(1, keepdim=True), y.sum(0), (x.t() @ x).exp()]  # the last one in place, of the product


def plain_region(index: int = 0, sizes: Sequence[tuple[int, int]] = SIZES) -> Region:
    """Return the same region without a stand-in for the GPU, which imports Triton."""
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        inputs = [torch.empty(size, device=f"cuda:{index}") for size in sizes]
    return region_of(gated, inputs)


class Launcher:
    """Torch's launcher of kernels; counts what is loaded and launched."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, int]] = []
        self.launched: list[tuple[Any, ...]] = []

    def _load_kernel(self, path: str, name: str, shared: int, index: int) -> tuple[Any, ...]:
        assert Path(path).read_bytes().startswith(b"\x7fELF")
        self.loaded.append((name, index))
        return f"module {name}", f"{name} {len(self.loaded)}", 32, 0

    def _launch_kernel(self, function: Any, *args: Any) -> None:
        x, y, z, _, _, types, values, stream = args
        assert len(types) == len(values)
        assert stream in (0, 7)
        self.launched.append((function.partition(" ")[0], (x, y, z)))


class Event:
    """An event of CUDA; each measurement takes a millisecond less than the one before."""

    made = 0

    def __init__(self, enable_timing: bool) -> None:
        Event.made += 1

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        return 1000.0 - Event.made


@contextlib.contextmanager
def on_the_cpu(launcher: Any) -> Iterator[None]:
    """Let kept code run on the CPU, with another launcher of kernels."""
    gpu = SimpleNamespace(**properties_of(H100))
    guards = torch._C._dynamo.guards  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch, config.patch(compile_threads=1):
        patch.setattr(cubin_kernels, "static_launcher", lambda: launcher)
        patch.setattr(torch.cuda, "get_device_properties", lambda device=None: gpu)
        patch.setattr(torch.cuda, "_DeviceGuard", lambda index: contextlib.nullcontext())
        patch.setattr(torch.cuda, "set_device", lambda index: None)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
        patch.setattr(guards, "_empty_strided_cuda", guards._empty_strided_cpu)
        yield


def only_file(directory: Path) -> Path:
    (path,) = directory.glob("*.region")
    return path


def archive_here() -> Archive:
    return read_private(only_file(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "graphshard-regions")))


def inputs_of_region() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size) for size in SIZES]
