"""Kernels of a GPU: the current stream, torch's launcher of compiled kernels, and choices that torch makes."""

from __future__ import annotations

from typing import Any

import torch


def current_raw_stream(index: int) -> int:
    """Return the handle of the stream that is current on a GPU."""
    return torch._C._cuda_getCurrentRawStream(index)


def static_launcher() -> Any:
    """Return the class that loads and launches compiled kernels.

    Raises:
        AttributeError: torch was built without CUDA.
    """
    return torch._C._StaticCudaLauncher


def convolution_backend(x: torch.Tensor, weight: torch.Tensor, **settings: Any) -> str:
    """Return the name of the backend that torch selects for a convolution."""
    return str(torch._C._select_conv_backend(x, weight, **settings))


def accelerator() -> torch.device | None:
    """Return the kind of accelerator that torch was built for and finds."""
    return torch._C._accelerator_getAccelerator()


def clear_cublas_workspaces() -> None:
    """Let cuBLAS allocate new workspaces; builds without CUDA have none."""
    clear: Any = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def without_stream() -> tuple[Any, dict[str, Any]]:
    """Return the owner of the current stream's query, and an answer for a machine without a GPU."""
    return torch._C, {"_cuda_getCurrentRawStream": lambda index: 0}
