"""What a capture depends on besides the model and the code: versions, machine, settings of torch, options, the call."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import types
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphshard.artifact.fingerprint import environment
from graphshard.artifact.stored_options import describe_options
from graphshard.cache.origins import origin, origin_of_code, origin_of_module
from graphshard.capture.signature import Signature
from graphshard.codec.converter import PASSES, class_name, write
from graphshard.ir.classes import users_class
from graphshard.ir.surroundings import instruction_set, own_files, settings, variables
from graphshard.ir.torch_internals import kernels_in_python, modes_of_functions
from graphshard.module.tracer import Tracer
from graphshard.passes import MakePlan
from graphshard.schedule.by_cost import PlanByCost
from graphshard.schedule.by_unit import PlanByUnit


def problem_of(model: nn.Module, tracer: Tracer) -> str:
    """Why programs of a tracer are not kept; "" if they may be."""
    spec, options = tracer.spec, tracer.options
    if spec.tensor is not None or spec.whole is not None:
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


def facts_of(model: nn.Module, tracer: Tracer, signature: Signature, put: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """All that is known before the capture, by what it is called in messages, as plain data.

    Args:
        put: what `put_into_torch` has found.

    Raises:
        Exception: something of it cannot be written down.
    """
    spec, device = tracer.spec, tracer.spec.device
    here = environment(device, native=True)
    return {
        "graphshard": own_files(),
        "versions": {**here, "git": torch.version.git_version, "python": sys.version, "packages": _packages()},
        "machine": {**instruction_set(), "node": platform.machine(), "gpu": _gpu(device)},
        "settings of torch": settings(),
        "environment variables": variables(),
        "names in torch": _names_in_torch(),
        "kernels in Python": kernels_in_python(),
        "functions put into torch": sorted(name for name, _ in put),
        "model": f"{users_class(model).__module__}.{users_class(model).__qualname__}",
        "entry": [tracer.name, spec.method, spec.forward_class.__qualname__],
        "call": write(signature),
        "options": describe_options(tracer),
        "parameters": write(tracer.current_spec().params),
        "units": list(spec.units),
        "followed": write(spec.followed),
        "mesh": [write(spec.mesh), dist.get_world_size(), str(dist.get_backend()), device.type],
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


def _gpu(device: torch.device) -> Any:
    if device.type != "cuda" or not torch.cuda.is_available():
        return [torch.cuda.is_available()]
    return [torch.cuda.device_count(), str(torch.cuda.get_device_properties(device)), str(torch.version.cuda)]


def _packages() -> dict[str, str]:
    """Versions of what is imported, but for torch: what is executed of these is compared, too."""
    return {name: str(getattr(sys.modules[name], "__version__", "")) for name in _VERSIONED if name in sys.modules}


# Those that are there whenever graphshard is: others may be imported while forward runs.
_VERSIONED = ("cattrs", "networkx", "numpy", "sympy")
