"""What a program depends on besides its trace: versions, machine, settings of torch, options, the call."""

from __future__ import annotations

import platform
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphshard.artifact.fingerprint import environment
from graphshard.artifact.stored_options import describe_options
from graphshard.codec.converter import PASSES, class_name, write
from graphshard.frontend.signature import Signature
from graphshard.module.tracer import Tracer
from graphshard.passes import MakePlan
from graphshard.schedule.by_cost import PlanByCost
from graphshard.schedule.by_unit import PlanByUnit
from graphshard.torch_compat.autograd_state import modes_of_functions
from graphshard.torch_compat.operators import kernels_in_python
from graphshard.utils.environment_fingerprint import instruction_set, own_files, settings, variables
from graphshard.utils.text import users_class


def problem_of(model: nn.Module, tracer: Tracer) -> str:
    """Why programs of a tracer are not kept; "" if they may be."""
    spec = tracer.spec
    if spec.tensor is not None or spec.whole is not None:
        return "the model has a tensor axis: its programs are those of a rank's place on it"
    if spec.experts is not None:
        return "the model has parameters on another mesh: its programs are those of a rank's place on it"
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
        "graphshard": own_files(),
        "versions": {**here, "git": torch.version.git_version, "python": sys.version, "packages": _packages()},
        "machine": {**instruction_set(), "node": platform.machine(), "gpu": _gpu(device)},
        "settings of torch": settings(),
        "environment variables": variables(),
        "kernels in Python": kernels_in_python(),
        "model": f"{users_class(model).__module__}.{users_class(model).__qualname__}",
        "entry": [tracer.name, spec.method, spec.forward_class.__qualname__],
        "call": write(signature),
        "options": describe_options(tracer),
        "parameters": write(tracer.current_spec().params),
        "units": list(spec.units),
        "mesh": [write(spec.mesh), dist.get_world_size(), str(dist.get_backend()), device.type],
    }


def _gpu(device: torch.device) -> Any:
    if device.type != "cuda" or not torch.cuda.is_available():
        return [torch.cuda.is_available()]
    return [torch.cuda.device_count(), str(torch.cuda.get_device_properties(device)), str(torch.version.cuda)]


def _packages() -> dict[str, str]:
    """Versions of what is imported, but for torch."""
    return {name: str(getattr(sys.modules[name], "__version__", "")) for name in _VERSIONED if name in sys.modules}


# Those that are there whenever graphshard is: others may be imported while forward runs.
_VERSIONED = ("cattrs", "networkx", "numpy", "sympy")
