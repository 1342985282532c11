"""A GPU's answers to torch, Triton and autograd on a machine that has none, to capture and compile for CUDA.

    with stand_in((9, 0)):
        ...                          fake CUDA tensors are differentiated, `torch.cuda` answers as on an H100

Nothing outlives the block.

* **Queries**: `torch.cuda`, Inductor's device interface and Triton's driver say what GPU there is.
* **Streams of autograd.** For each node it asks the device guard of the tensor's kind of device for a stream, and torch
  built for CPUs has no guard for CUDA. c10 keeps guards in a table (`device_guard_impl_registry`): in the block CUDA's
  entry is the meta device's, but for `getStream`, which answers with the default stream of the device it is asked for.
* **Whether there is CUDA at all**, and cuDNN: torch asks `CUDAHooksInterface`, of which some methods are replaced.
* **Operators with kernels.** Torch takes others apart, and its builds differ:

      the gradient of silu           built for CUDA   silu_backward, which has a kernel
                                     built for CPUs   sigmoid, mul, add, ...: there is none
      a convolution, channels last   built for CUDA   its result is channels last, as cuDNN leaves it
                                     built for CPUs   its result is contiguous

  In the block both decide alike: kernels are registered that only say that they are there.

Guards and hooks are tables of C++ functions. Where in a table a function is, is read from torch's own headers, and the
effect is checked. `cffi` makes the function that returns a struct, which ctypes cannot.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from graphshard.errors import ArgumentError
from graphshard.ir.gpus import PRETENDED, Capability, OfSeveral, differs, properties_of
from graphshard.torch_compat.dynamo import CudaInterface
from graphshard.torch_compat.fake_tensors import FakeTensorMode, fake_tensor_module
from graphshard.torch_compat.torch_ops import (
    DispatchKey,
    OpOverload,
    accelerator,
    convolution_backend,
    replaced,
    without_stream,
)

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
    """Let tracing of CUDA tensors take the operators and layouts of torch's builds for CUDA."""
    operators: list[OpOverload] = [getattr(torch.ops.aten, name).default for name in KERNELS]
    lacking = [op for op in operators if not op.has_kernel_for_dispatch_key(DispatchKey.CUDA)]
    kernels = torch.library.Library("aten", "IMPL", "CUDA")
    # Builds for CUDA ask the GPU, too.
    answers = _CUDNN if torch.backends.cudnn.is_available() else _CUDNN | _VERSIONS
    try:
        for op in lacking:
            kernels.impl(op, _not_here)
            op._dispatch_cache.clear()
        with hooks_answering(answers):
            if not _has_cudnn():
                raise unknown_build("it does not ask CUDA's hooks for cuDNN")
            yield
    finally:
        kernels._destroy()
        for op in lacking:
            op._dispatch_cache.clear()


def _not_here(*_: Any) -> Any:
    raise RuntimeError("this build of torch has no kernels for CUDA: the operator can be traced, and not run.")


def _has_cudnn() -> bool:
    """Return whether torch takes cuDNN for a convolution in bfloat16."""
    with FakeTensorMode():
        x, weight = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in ((1, 8, 5, 5), (8, 8, 3, 3)))
        sizes = {"stride": [1, 1], "padding": [0, 0], "dilation": [2, 2], "output_padding": [0, 0]}
        chosen = convolution_backend(x, weight, bias=None, transposed=False, groups=1, bias_sizes=None, **sizes)
    return "Cudnn" in chosen


@contextlib.contextmanager
def hooks_answering(answers: Mapping[str, tuple[Any, Any]]) -> Iterator[None]:
    """Answer torch's questions about CUDA: by the names of functions, what they return and of which type."""
    names = hooks_functions()
    missing = sorted(set(answers) - set(names))
    if missing:
        raise unknown_build(f"its hooks have no {missing[0]}")
    try:
        hooks_of = library("torch_cpu")._ZN2at6detail12getCUDAHooksEv
    except (OSError, AttributeError) as error:
        raise unknown_build(str(error)) from error
    hooks_of.restype = ctypes.c_void_p
    hooks = ctypes.c_void_p.from_address(hooks_of())  # they begin with the address of their table
    kept = hooks.value
    table = table_at(kept)
    made = {name: ctypes.CFUNCTYPE(kind, ctypes.c_void_p)(lambda _, it=it: it) for name, (kind, it) in answers.items()}
    for name, function in made.items():
        table[names.index(name)] = ctypes.cast(function, ctypes.c_void_p).value
    hooks.value = ctypes.addressof(table)
    try:
        yield
    finally:
        hooks.value = kept


def hooks_functions() -> list[str]:
    """List the functions in the table of CUDA's hooks, in order."""
    base = virtual_functions("ATen/detail/AcceleratorHooksInterface.h", "AcceleratorHooksInterface")
    own = virtual_functions("ATen/detail/CUDAHooksInterface.h", "CUDAHooksInterface")
    return base + [name for name in own if name not in base]


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


REMEDY = "pip install 'graphshard[cross]' brings it"


@contextlib.contextmanager
def stand_in(capability: Capability, *, among: Sequence[Capability] = ()) -> Iterator[None]:
    """Let torch decide as with a GPU of this compute capability, where there is none.

    Args:
        among: what is made in the block is for several GPUs. A model that asks for what differs among them gets a
            RuntimeError.

    Raises:
        ArgumentError: a package that this takes is missing, or torch is built in an unknown way.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(_forget_devices)  # Dynamo asks whether there is Triton, too
        _answer(capability, stack)
        _forget_devices()
        for name in _BY_KIND if len(among) > 1 else ():
            stack.enter_context(replaced(torch.cuda, name, _for_torch(name, getattr(torch.cuda, name), among)))
        token = PRETENDED.set(capability)
        stack.callback(PRETENDED.reset, token)
        if importlib.util.find_spec("triton") is not None:
            stack.enter_context(_triton_driver(capability))
        # Autograd has a thread for each device that is there, and runs the others' nodes nowhere but here.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(_streams())
        yield


# Queries of `torch.cuda` whose answers differ between GPUs.
_BY_KIND = ("get_device_capability", "get_device_name", "get_device_properties")


def _for_torch(name: str, answer: Callable[..., Any], among: Sequence[Capability]) -> Callable[..., Any]:
    """Make an answer for torch alone, whose decisions are the same on all GPUs that there are files for."""

    def told(device: Any = None) -> Any:
        asking = str(sys._getframe(1).f_globals.get("__name__"))
        if asking.partition(".")[0] in ("torch", "triton", "graphshard"):
            return answer(device)
        if name == "get_device_capability":
            return OfSeveral(among)
        raise differs(name)

    return told


def _answer(capability: Capability, stack: contextlib.ExitStack) -> None:
    """Let torch be told, while the stack is open, that there is a GPU of this compute capability."""
    gpu = types.SimpleNamespace(**properties_of(capability))
    both: dict[str, Any] = {"is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0}
    cuda: dict[str, Any] = {
        **both,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "get_device_name": lambda device=None: gpu.name,
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: gpu,
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None,
        "_lazy_init": lambda: None,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
    }
    asked: dict[str, Any] = {
        **both,
        "get_compute_capability": lambda device=None: capability[0] * 10 + capability[1],
        "get_device_properties": cuda["get_device_properties"],
        "raise_if_triton_unavailable": lambda device=None: None,
    }
    in_workers = {name: staticmethod(cuda[name]) for name in ("get_device_properties", "current_device", "set_device")}
    for target, answers in (
        (torch.cuda, cuda),
        (CudaInterface, {name: staticmethod(answer) for name, answer in asked.items()}),
        (CudaInterface.Worker, in_workers),
        without_stream(),
    ):
        for name, answer in answers.items():
            stack.enter_context(replaced(target, name, answer))
    # It allocates on the GPU, for the streams of autograd; up to torch 2.11 it asks `torch.cuda` whether there is one.
    stack.enter_context(replaced(fake_tensor_module, "init_gpu_context", lambda device: None))
    stack.enter_context(as_built_for_cuda())


@contextlib.contextmanager
def compiler_stand_in(capability: Capability, loaded: Callable[[Any], None]) -> Iterator[None]:
    """Within `stand_in`, let Triton compile for the GPU; `loaded` is called with each tuner, and nothing is loaded.

    Raises:
        ArgumentError: Triton is missing.
    """
    package("triton")
    helpers = importlib.import_module("torch._inductor.runtime.triton_helpers")
    heuristics = importlib.import_module("torch._inductor.runtime.triton_heuristics")
    with contextlib.ExitStack() as stack:
        _answer(capability, stack)
        stack.enter_context(_triton_driver(capability))
        stack.enter_context(replaced(helpers, "set_driver_to_gpu", lambda: None))
        stack.enter_context(replaced(heuristics.CachingAutotuner, "_make_launchers", loaded))
        stack.callback(_forget_devices)
        _forget_devices()
        yield


def _triton_driver(capability: Capability) -> contextlib.AbstractContextManager[None]:
    """Answer Triton's questions about the GPU; a trace asks when it finds out what a kernel writes to."""
    target = importlib.import_module("triton.backends.compiler").GPUTarget
    driver = types.SimpleNamespace(
        get_current_target=lambda: target("cuda", capability[0] * 10 + capability[1], 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
        get_device_capability=lambda device=None: capability,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )
    return replaced(package("triton").runtime.driver, "_active", driver)


# Modules with functions that cache facts about devices.
_KEEPING = ("torch._inductor.utils", "torch._inductor.runtime.hints", "torch.utils._triton")


def _forget_devices() -> None:
    """Clear what torch has cached about devices, which is about the GPU before, or none."""
    for module in (sys.modules[name] for name in _KEEPING if name in sys.modules):
        for value in [*vars(module).values(), *vars(getattr(module, "DeviceProperties", module)).values()]:
            cached = getattr(value, "__func__", value)
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()


def package(name: str) -> Any:
    """Import a package that compiling for a GPU needs; raise ArgumentError if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ArgumentError(
            f"code for CUDA is made by the package {name}, which is not installed ({error}): {REMEDY}."
        ) from None


def _check_autograd() -> None:
    """Check that a fake CUDA tensor can be differentiated."""
    try:
        with FakeTensorMode(), torch.enable_grad():
            value = torch.empty(2, device="cuda", requires_grad=True)
            torch.autograd.grad((value * value).sum(), value)
    except RuntimeError as error:
        raise unknown_build(str(error).splitlines()[0]) from error


@contextlib.contextmanager
def _streams() -> Iterator[None]:
    """Let autograd find a stream for each fake CUDA tensor, and CUDA be the accelerator that is here."""
    try:
        guards = (ctypes.c_void_p * len(_KINDS)).in_dll(library("c10"), "_ZN3c104impl26device_guard_impl_registryE")
    except (OSError, ValueError) as error:
        raise unknown_build(str(error)) from error
    names = virtual_functions("c10/core/impl/DeviceGuardImplInterface.h", "DeviceGuardImplInterface")
    if "getStream" not in names:
        raise unknown_build("its device guards have no getStream")
    guard, meta = guards[_KINDS.index("cuda")], guards[_KINDS.index("meta")]
    ffi = package("cffi").FFI()
    ffi.cdef("typedef struct {int8_t kind, index;} Device; typedef struct {Device device; int64_t id;} Stream;")
    default_stream = ffi.callback(
        "Stream(void *, Device)",
        lambda this, device: {"device": {"kind": device.kind, "index": max(device.index, 0)}, "id": 0},
    )
    assert meta is not None
    methods = table_at(ctypes.c_void_p.from_address(meta).value)
    methods[names.index("getStream")] = int(ffi.cast("intptr_t", default_stream))
    made = (ctypes.c_void_p * 1)(ctypes.addressof(methods))
    guards[_KINDS.index("cuda")] = ctypes.addressof(made)
    try:
        with hooks_answering(dict.fromkeys(("isBuilt", "hasPrimaryContext"), (ctypes.c_bool, True))):
            if accelerator() is None:
                raise unknown_build("it does not ask CUDA's hooks for an accelerator")
            _check_autograd()
            yield
    finally:
        guards[_KINDS.index("cuda")] = guard


# c10::DeviceType, in its order.
_KINDS = (
    *("cpu", "cuda", "mkldnn", "opengl", "opencl", "ideep", "hip", "fpga", "maia", "xla", "vulkan", "metal", "xpu"),
    *("mps", "meta", "hpu", "ve", "lazy", "ipu", "mtia", "privateuseone"),
)
