"""Parts of torch's builds for CUDA that tracing asks for: its kernels, and cuDNN.

    the gradient of silu           built for CUDA   silu_backward, which has a kernel
                                   built for CPUs   sigmoid, mul, add, ...: there is none, so torch takes it apart
    a convolution, channels last   built for CUDA   its result is channels last, as cuDNN leaves it
                                   built for CPUs   its result is contiguous, like the kernel's without cuDNN

In the block of `as_built_for_cuda` both builds decide alike. Kernels are registered that only say that they are there,
and the questions that are asked about cuDNN are answered. They are functions in a table of C++, `CUDAHooksInterface`;
where in it they are is read from torch's own headers, and the effect is checked.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from graphshard.errors import ArgumentError
from graphshard.torch_compat.cuda import convolution_backend
from graphshard.torch_compat.fake_tensors import FakeTensorMode
from graphshard.torch_compat.torch_ops import DispatchKey, OpOverload

# ATen's operators with a kernel for CUDA, and a form in C++ or in Python that torch takes apart where there is none.
# Which there are says native_functions.yaml; tests/cross/test_cuda_library.py compares.
KERNELS = (
    "_fused_rms_norm",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "mish_backward",
    "native_batch_norm",
    "silu_backward",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
)

# Answers to torch about cuDNN on a GPU from compute capability 8.0 on.
_CUDNN: dict[str, tuple[Any, Any]] = {
    "hasCuDNN": (ctypes.c_bool, True),
    "compiledWithCuDNN": (ctypes.c_bool, True),
    "supportsDilatedConvolutionWithCuDNN": (ctypes.c_bool, True),
    "supportsDepthwiseConvolutionWithCuDNN": (ctypes.c_bool, True),
    "supportsBFloat16ConvolutionWithCuDNNv8": (ctypes.c_bool, True),
    "supportsBFloat16RNNWithCuDNN": (ctypes.c_bool, True),
}
# And where there is none. The version is the one that torch 2.12 for CUDA 13 asks for in its metadata, 9.20.0, as
# cudnnGetVersion() writes it; the least epsilon is CUDNN_BN_MIN_EPSILON of its headers.
_VERSIONS: dict[str, tuple[Any, Any]] = {
    "versionCuDNN": (ctypes.c_long, 92000),
    "versionRuntimeCuDNN": (ctypes.c_long, 92000),
    "batchnormMinEpsilonCuDNN": (ctypes.c_double, 0.0),
}

# More than any table here has; what follows is copied with it, and not used.
_ENTRIES = 64


@contextlib.contextmanager
def as_built_for_cuda() -> Iterator[None]:
    """Let tracing of CUDA tensors take the operators and layouts of torch's builds for CUDA.

    Raises:
        ArgumentError: torch is built in an unknown way.
    """
    with _kernels(), _cudnn():
        yield


@contextlib.contextmanager
def _kernels() -> Iterator[None]:
    """Let no operator be decomposed that has a kernel in torch's builds for CUDA."""
    lacking = [op for op in map(_operator, KERNELS) if not op.has_kernel_for_dispatch_key(DispatchKey.CUDA)]
    library = torch.library.Library("aten", "IMPL", "CUDA")
    try:
        for op in lacking:
            library.impl(op, _not_here)
            op._dispatch_cache.clear()
        yield
    finally:
        library._destroy()
        for op in lacking:
            op._dispatch_cache.clear()


def _operator(name: str) -> OpOverload:
    return getattr(torch.ops.aten, name).default


def _not_here(*_: Any) -> Any:
    raise RuntimeError("this build of torch has no kernels for CUDA: the operator can be traced, and not run.")


@contextlib.contextmanager
def _cudnn() -> Iterator[None]:
    """Tell torch that there is cuDNN, and a GPU for it; builds for CUDA ask the GPU, too."""
    answers = _CUDNN if torch.backends.cudnn.is_available() else _CUDNN | _VERSIONS
    names = hooks_functions()
    missing = sorted(set(answers) - set(names))
    if missing:
        raise unknown_build(f"its hooks have no {missing[0]}")
    made = {name: ctypes.CFUNCTYPE(kind, ctypes.c_void_p)(lambda _, it=it: it) for name, (kind, it) in answers.items()}
    with hooks_replaced() as table:
        for name, function in made.items():
            table[names.index(name)] = ctypes.cast(function, ctypes.c_void_p).value
        if not _has_cudnn():
            raise unknown_build("it does not ask CUDA's hooks for cuDNN")
        yield


def _has_cudnn() -> bool:
    """Return whether torch takes cuDNN for a convolution in bfloat16."""
    with FakeTensorMode():
        x, weight = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in ((1, 8, 5, 5), (8, 8, 3, 3)))
        chosen = convolution_backend(
            x,
            weight,
            bias=None,
            stride=[1, 1],
            padding=[0, 0],
            dilation=[2, 2],
            transposed=False,
            output_padding=[0, 0],
            groups=1,
            bias_sizes=None,
        )
    return "Cudnn" in chosen


@contextlib.contextmanager
def hooks_replaced() -> Iterator[Any]:
    """Answer torch's questions about CUDA by a table of functions, which is yielded and may be written to."""
    hooks = _hooks()
    kept = hooks.value
    table = table_at(kept)
    hooks.value = ctypes.addressof(table)
    try:
        yield table
    finally:
        hooks.value = kept


def _hooks() -> ctypes.c_void_p:
    """Return where the hooks keep the address of their table."""
    try:
        hooks_of = library("torch_cpu")._ZN2at6detail12getCUDAHooksEv
    except (OSError, AttributeError) as error:
        raise unknown_build(str(error)) from error
    hooks_of.restype = ctypes.c_void_p
    return ctypes.c_void_p.from_address(hooks_of())


def hooks_functions() -> list[str]:
    """List the functions in the table of CUDA's hooks, in order."""
    base = virtual_functions("ATen/detail/AcceleratorHooksInterface.h", "AcceleratorHooksInterface")
    return base + [
        name for name in virtual_functions("ATen/detail/CUDAHooksInterface.h", "CUDAHooksInterface") if name not in base
    ]


def virtual_functions(header: str, name: str) -> list[str]:
    """List the functions in the table of a C++ class, in order, by its header in torch."""
    try:
        text = (Path(torch.__file__).parent / "include" / header).read_text()
        text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
        text = re.split(rf"struct \w+_API {name} [^;]*?{{", text, maxsplit=1)[1]
    except (OSError, IndexError) as error:
        raise unknown_build(str(error)) from error
    found = re.findall(r"virtual\s+[\w:\*&<> ]*?(~?\w+)\(", text[: text.index("\n};")])
    # A destructor has two places, for objects that own their memory and for others.
    return [each for each in found for _ in range(2 if each.startswith("~") else 1)]


def library(name: str) -> ctypes.CDLL:
    """Load a library of torch."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"lib{name}.so"))


def table_at(address: int | None) -> Any:
    """Copy a table of C++ functions."""
    assert address is not None
    return (ctypes.c_void_p * _ENTRIES)(*(ctypes.c_void_p * _ENTRIES).from_address(address))


def unknown_build(why: str) -> ArgumentError:
    """Make the error for a build of torch that this file does not know."""
    return ArgumentError(
        f"this build of torch ({torch.__version__}) cannot differentiate for CUDA without a GPU: {why}. Export where "
        "there is a GPU, or with torch 2.12 or newer, for Linux, from PyPI or download.pytorch.org."
    )
