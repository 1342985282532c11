"""What a capture depends on besides the model and the code: versions, machine, settings of torch, options, the call."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphshard.artifact.fingerprint import environment, instruction_set
from graphshard.artifact.stored_options import describe_options
from graphshard.cache.watching import origin, origin_of_code, origin_of_module
from graphshard.capture.signature import Signature
from graphshard.codec.converter import PASSES, class_name, write
from graphshard.ir.classes import users_class
from graphshard.ir.torch_internals import changed_settings, modes_of_functions
from graphshard.module.tracer import Tracer
from graphshard.passes import MakePlan
from graphshard.schedule.by_cost import PlanByCost
from graphshard.schedule.by_unit import PlanByUnit

_PREFIXES = ("TORCH", "PYTORCH", "GRAPHSHARD_", "TRITON", "ATEN_", "MKL_", "DNNL_", "ONEDNN_", "KMP_", "NVIDIA_TF32")
# Of a launch, not of a program.
_OF_LAUNCHES = (
    *("TORCHELASTIC_", "TORCH_NCCL_", "TORCHINDUCTOR_CACHE_DIR", "TORCH_LOGS", "TORCH_TRACE", "TORCH_COMPILE_DEBUG"),
    *("TORCHINDUCTOR_COMPILE_THREADS", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "PYTORCH_TEST", "TORCH_SHOW_"),
    *(f"GRAPHSHARD_{name}" for name in ("CACHE", "CHECK", "DUMP", "PATIENCE", "VERIFY")),
    *("TRITON_CACHE_DIR", "TORCH_HOME", "TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG", "TORCH_FR_"),
)
_COMPILERS = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "CUDA_HOME", "LD_PRELOAD")
_BACKENDS = {
    "mkldnn": ("enabled", "deterministic", "allow_tf32"),
    "cudnn": ("enabled", "benchmark", "deterministic", "allow_tf32"),
    "cuda.matmul": ("allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"),
    "opt_einsum": ("enabled", "strategy"),
    "nnpack": (),
}


def problem_of(model: nn.Module, tracer: Tracer) -> str:
    """Why programs of a tracer are not kept; "" if they may be."""
    spec, options = tracer.spec, tracer.options
    if spec.tensor is not None:
        return "the model has a tensor axis: its programs are those of a rank's place on it"
    if spec.experts is not None:
        return "the model has parameters on another mesh: its programs are those of a rank's place on it"
    if options.allow:
        return f"allow={tuple(options.allow)!r} keeps values of this launch in the program"
    if tracer.current_spec().extended:
        return "a parameter decides itself what is gathered of it"
    known = tuple(PASSES.values())
    for step in tracer.pipeline:
        if type(step) not in known:
            return f"the pass {step.name} ({class_name(type(step))}) is not graphshard's: its code is not compared"
        planner = step.planner if isinstance(step, MakePlan) else None
        if planner is not None and type(planner) not in (PlanByUnit, PlanByCost):
            return f"the planner {type(planner).__qualname__} is not graphshard's: its code is not compared"
    if modes_of_functions():
        return "a mode of torch is active that sees every function"
    return ""


def facts_of(model: nn.Module, tracer: Tracer, signature: Signature) -> dict[str, Any]:
    """All that is known before the capture, by what it is called in messages, as plain data.

    Raises:
        Exception: something of it cannot be written down.
    """
    spec, device = tracer.spec, tracer.spec.device
    here = environment(device, native=True)
    return {
        "graphshard": _own_files(),
        "versions": {**here, "git": torch.version.git_version, "python": sys.version, "packages": _packages()},
        "machine": {**instruction_set(), "node": platform.machine(), "gpu": _gpu(device)},
        "settings of torch": _settings(),
        "environment variables": variables(),
        "names in torch": _names_in_torch(),
        "functions put into torch": sorted(name for name, _ in put_into_torch()),
        "model": f"{users_class(model).__module__}.{users_class(model).__qualname__}",
        "entry": [tracer.name, spec.method, spec.forward_class.__qualname__],
        "call": write(signature),
        "options": describe_options(tracer),
        "parameters": write(tracer.current_spec().params),
        "units": list(spec.units),
        "followed": write(spec.followed),
        "mesh": [write(spec.mesh), dist.get_world_size(), str(dist.get_backend()), device.type],
    }


def variables(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment variables that torch, its compilers and graphshard read."""
    given = os.environ if given is None else given
    return {
        name: value
        for name, value in sorted(given.items())
        if name in _COMPILERS or (name.startswith(_PREFIXES) and not name.startswith(_OF_LAUNCHES))
    }


def put_into_torch() -> list[tuple[str, Any]]:
    """Functions of the user's that somebody has put into modules and classes of torch, Python and what they need."""
    found = []
    for name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or origin_of_module(name) not in ("torch", "python", "needed"):
            continue
        if origin(getattr(module, "__file__", None) or name) == "users" and getattr(module, "__file__", None):
            continue  # Inductor's code goes by such names
        for key, value in list(vars(module).items()):
            if type(value) is types.FunctionType:  # isinstance asks some objects, which warn
                if _is_users(value):
                    found.append((f"{name}.{key}", value))
            elif issubclass(type(value), type) and value.__module__ == name:
                for attribute, held in list(vars(value).items()):
                    held = getattr(held, "__func__", getattr(held, "fget", held))
                    if type(held) is types.FunctionType and _is_users(held):
                        found.append((f"{name}.{key}.{attribute}", held))
    return found


def _is_users(function: types.FunctionType) -> bool:
    return origin_of_code(function.__code__, str(function.__globals__.get("__name__", ""))) == "users"


def files_of(names: Iterable[str]) -> str:
    """Digest of sizes and times of files, of which the version says what is in them unless somebody edits them."""
    parts = []
    for name in sorted(names):
        try:
            about = os.stat(name)
        except OSError:
            continue
        parts.append(f"{name} {about.st_size} {about.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _names_in_torch() -> str:
    """What is called what where forward finds torch's functions; an exchange of two is none of the user's code."""
    spaces = (torch, torch.nn.functional, torch.Tensor, torch.nn)
    parts = [
        f"{space.__name__}.{name} {getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
        for space in spaces
        for name, value in sorted(vars(space).items())
        if callable(value) and not isinstance(value, torch.nn.Module)
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _settings() -> dict[str, Any]:
    """What of torch's state traces and kernels depend on."""
    found: dict[str, Any] = {
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "deterministic": [
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        ],
        "autocast": [
            [kind, torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))] for kind in ("cpu", "cuda")
        ],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "grad": [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()],
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "precision": torch.get_float32_matmul_precision(),
        "attention": [
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ],
        "configs": changed_settings(),
    }
    for name, settings in _BACKENDS.items():
        backend: Any = torch.backends
        for key in name.split("."):
            backend = getattr(backend, key, None)
        found[name] = [str(getattr(backend, setting, None)) for setting in settings]
    return found


def _gpu(device: torch.device) -> Any:
    if device.type != "cuda" or not torch.cuda.is_available():
        return [torch.cuda.is_available()]
    return [torch.cuda.device_count(), str(torch.cuda.get_device_properties(device)), str(torch.version.cuda)]


@functools.cache
def _own_files() -> str:
    """Digest of graphshard's own source, which may change without its version."""
    root = Path(__file__).parents[1]
    found = hashlib.sha256()
    for path in sorted([*root.rglob("*.py"), *(root / "passes").rglob("*.py")]):
        found.update(f"{path.relative_to(root)}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:32]


def _packages() -> dict[str, str]:
    """Versions of what is imported, but for torch: what is executed of these is compared, too."""
    return {name: str(getattr(sys.modules[name], "__version__", "")) for name in _VERSIONED if name in sys.modules}


# Those that are there whenever graphshard is: others may be imported while forward runs.
_VERSIONED = ("cattrs", "networkx", "numpy", "sympy")
