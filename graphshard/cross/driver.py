"""A GPU's answers to torch, Triton and autograd on a machine that has none, to capture and compile for CUDA.

    with stand_in((9, 0)):
        ...                          fake CUDA tensors are differentiated, `torch.cuda` answers as on an H100

Nothing outlives the block. What else torch's builds for CPUs lack is in `cuda_library.py`. Three questions need a
driver otherwise.

* **Queries**: `torch.cuda`, Inductor's device interface and Triton's driver say what GPU there is.
* **Streams of autograd.** For each node it asks the device guard of the tensor's kind of device for a stream, and torch
  built for CPUs has no guard for CUDA. c10 keeps guards in a table (`device_guard_impl_registry`): in the block CUDA's
  entry is the meta device's, but for `getStream`, which answers with the default stream of the device it is asked for.
* **Whether there is CUDA at all**: the engine asks `CUDAHooksInterface`. In the block two of its methods are replaced,
  the one by which torch finds an accelerator and the one that tells whether a device is in use.

The last two are tables of C++ functions. Where in a table a function is, is read from torch's own headers
(`getStream`) or found by trying (the hooks), and the effect is checked before the block is entered. `cffi` makes the
function that returns a struct, which ctypes cannot.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from graphshard.cross.cuda_library import (
    as_built_for_cuda,
    hooks_replaced,
    library,
    table_at,
    unknown_build,
    virtual_functions,
)
from graphshard.errors import ArgumentError
from graphshard.ir.gpus import PRETENDED, Capability, OfSeveral, differs, properties_of
from graphshard.torch_compat.cuda import accelerator, without_stream
from graphshard.torch_compat.dynamo import CudaInterface
from graphshard.torch_compat.fake_tensors import FakeTensorMode, fake_tensor_module
from graphshard.torch_compat.torch_ops import replaced

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
        # Autograd has a thread for each device that is there, and runs the others' nodes nowhere but here.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(_streams())
        _check_autograd()
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
    for target, answers in _answers(capability):
        for name, answer in answers.items():
            stack.enter_context(replaced(target, name, answer))
    # It allocates on the GPU, for the streams of autograd; up to torch 2.11 it asks `torch.cuda` whether there is one.
    stack.enter_context(replaced(fake_tensor_module, "init_gpu_context", lambda device: None))
    stack.enter_context(as_built_for_cuda())


def _answers(capability: Capability) -> Iterator[tuple[Any, dict[str, Any]]]:
    gpu = types.SimpleNamespace(**properties_of(capability))
    cuda: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
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
    yield torch.cuda, cuda
    number = capability[0] * 10 + capability[1]
    asked: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_compute_capability": lambda device=None: number,
        "get_device_properties": lambda device=None: gpu,
        "raise_if_triton_unavailable": lambda device=None: None,
    }
    yield CudaInterface, {name: staticmethod(answer) for name, answer in asked.items()}
    in_workers = ("get_device_properties", "current_device")
    worker = {name: staticmethod(asked[name]) for name in in_workers}
    yield CudaInterface.Worker, {**worker, "set_device": staticmethod(lambda device: None)}
    yield without_stream()


@contextlib.contextmanager
def compiler_stand_in(capability: Capability, loaded: Callable[[Any], None]) -> Iterator[None]:
    """Within `stand_in`, let Triton compile for the GPU and load nothing.

    Args:
        loaded: called with each tuner of Inductor, instead of loading its kernels.

    Raises:
        ArgumentError: Triton is missing.
    """
    triton = package("triton")
    helpers = importlib.import_module("torch._inductor.runtime.triton_helpers")
    heuristics = importlib.import_module("torch._inductor.runtime.triton_heuristics")
    target = importlib.import_module("triton.backends.compiler").GPUTarget
    number = capability[0] * 10 + capability[1]
    driver = types.SimpleNamespace(
        get_current_target=lambda: target("cuda", number, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
        get_device_capability=lambda device=None: capability,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )
    with contextlib.ExitStack() as stack:
        _answer(capability, stack)
        active = triton.runtime.driver._active
        stack.callback(setattr, triton.runtime.driver, "_active", active)
        triton.runtime.driver._active = driver
        stack.enter_context(replaced(helpers, "set_driver_to_gpu", lambda: None))
        stack.enter_context(replaced(heuristics.CachingAutotuner, "_make_launchers", loaded))
        stack.callback(_forget_devices)
        _forget_devices()
        yield


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
    slot = _place_of_get_stream()
    guard, meta = guards[_KINDS.index("cuda")], guards[_KINDS.index("meta")]
    ffi = package("cffi").FFI()
    ffi.cdef("typedef struct {int8_t kind, index;} Device; typedef struct {Device device; int64_t id;} Stream;")
    default_stream = ffi.callback(
        "Stream(void *, Device)",
        lambda this, device: {"device": {"kind": device.kind, "index": max(device.index, 0)}, "id": 0},
    )
    assert meta is not None
    methods = table_at(ctypes.c_void_p.from_address(meta).value)
    methods[slot] = int(ffi.cast("intptr_t", default_stream))
    made = (ctypes.c_void_p * 1)(ctypes.addressof(methods))
    yes = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(lambda this: True)
    guards[_KINDS.index("cuda")] = ctypes.addressof(made)
    try:
        with hooks_replaced() as answers:
            _answer_where(answers, yes, lambda: accelerator() is not None)
            _answer_where(answers, yes, _has_context)
            yield
    finally:
        guards[_KINDS.index("cuda")] = guard


# c10::DeviceType, in its order.
_KINDS = (
    *("cpu", "cuda", "mkldnn", "opengl", "opencl", "ideep", "hip", "fpga", "maia", "xla", "vulkan", "metal", "xpu"),
    *("mps", "meta", "hpu", "ve", "lazy", "ipu", "mtia", "privateuseone"),
)


def _answer_where(table: Any, function: Any, answered: Callable[[], bool]) -> None:
    """Put a function into the place of a table at which it has an effect; raise ArgumentError if there is none."""
    if answered():
        return
    address = ctypes.cast(function, ctypes.c_void_p).value
    for place in range(len(table)):
        kept = table[place]
        if kept != address:
            table[place] = address
            if answered():
                return
            table[place] = kept
    raise unknown_build("nothing that it asks of CUDA's hooks can be answered")


def _has_context() -> bool:
    """Return whether autograd is told that a device is in use, which it asks after each backward."""
    try:
        _check_autograd()
    except ArgumentError:
        return False
    return True


def _place_of_get_stream() -> int:
    """Return the place of `getStream` in the table of a device guard, by torch's header."""
    names = virtual_functions("c10/core/impl/DeviceGuardImplInterface.h", "DeviceGuardImplInterface")
    if "getStream" not in names:
        raise unknown_build("its device guards have no getStream")
    return names.index("getStream")
