"""Environment that programs and generated code depend on: torch's settings, the processor, graphshard's source."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import torch

from graphshard.torch_compat.inductor_settings import changed_settings

# Prefixes of environment variables that torch, its compilers and graphshard read.
_PREFIXES = ("TORCH", "PYTORCH", "GRAPHSHARD_", "TRITON", "ATEN_", "MKL_", "DNNL_", "ONEDNN_", "KMP_", "NVIDIA_TF32")
# Variables that concern a launch, not its programs.
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
# Prefixes of the x86 and ARM flags that compilers use when they target the local processor.
_EXTENSIONS = ("avx", "amx", "sse", "fma", "f16c", "bmi", "vaes", "gfni", "sve", "asimd", "bf16", "i8mm")


def instruction_set() -> dict[str, str]:
    """Return the architecture, the instruction set that ATen uses, and extensions that compilers may use."""
    found = {"machine": platform.machine(), "vectors": torch.backends.cpu.get_cpu_capability()}
    flags = _processor("flags", "Features").split()
    return found | {flag: "yes" for flag in sorted(flags) if flag.startswith(_EXTENSIONS)}


@functools.cache
def vendor() -> str:
    """Return the vendor id of an x86 processor, such as "GenuineIntel" or "AuthenticAMD"; "" if it is unknown."""
    return _processor("vendor_id").strip()


def _processor(*names: str) -> str:
    """Return a line of /proc/cpuinfo about the first processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    return next((line.partition(":")[2] for line in lines if line.startswith(names)), "")


def variables() -> dict[str, str]:
    """Return the environment variables that torch, its compilers and graphshard read."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name in _COMPILERS or (name.startswith(_PREFIXES) and not name.startswith(_OF_LAUNCHES))
    }


def settings() -> dict[str, Any]:
    """Return the state of torch that traces and kernels depend on."""
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
        "fast path": torch.backends.mha.get_fastpath_enabled(),  # of attention and encoder layers
        "configs": changed_settings(),
    }
    for name, kept in _BACKENDS.items():
        backend: Any = torch.backends
        for key in name.split("."):
            backend = getattr(backend, key, None)
        found[name] = [str(getattr(backend, setting, None)) for setting in kept]
    return found


@functools.cache
def own_files() -> str:
    """Return a digest of graphshard's source, which may change without its version."""
    root = Path(__file__).parents[1]
    found = hashlib.sha256()
    for path in sorted([*root.rglob("*.py"), *(root / "passes").rglob("*.py")]):
        found.update(f"{path.relative_to(root)}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:32]
