"""graphshard: fully sharded data parallelism for PyTorch, as a compiler.

mesh = init_device_mesh("cuda", (8,))
model = graphshard.compile(model, mesh)

Names are imported when they are asked for: `graphshard --help` and `import graphshard` do not wait for torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphshard.aot.export import Call, export
    from graphshard.aot.load import load
    from graphshard.api import compile, fully_shard, programs, register_forward_method
    from graphshard.checkpoint.manifest import latest_checkpoint
    from graphshard.checkpoint.save_load import async_save_checkpoint, load_checkpoint, save_checkpoint, unsharded_init
    from graphshard.cost.profile import Profile, load_profile
    from graphshard.debug.bisect import Bisection, bisect
    from graphshard.errors import (
        ArgumentError,
        ArtifactError,
        BatchError,
        CaptureError,
        CheckpointError,
        DivergenceError,
        GraphshardError,
        InfeasibleError,
        InputError,
        MaterializationError,
        ParameterError,
        PassError,
        PeerError,
        StageError,
        UnsupportedError,
    )
    from graphshard.ir.plan import Plan
    from graphshard.ir.program import Program
    from graphshard.module.compile_step import CompiledStep, compile_step
    from graphshard.module.uncompiled import uncompiled
    from graphshard.passes import Pass
    from graphshard.pipeline.pipeline import Pipeline
    from graphshard.predict.answers import WhatIf
    from graphshard.predict.explain import explain, explain_grid
    from graphshard.predict.explanation import Explanation
    from graphshard.predict.profile_step import load_measured, measure_regions, profile_step, save_measured
    from graphshard.predict.search import Grid
    from graphshard.predict.step_profile import StepProfile
    from graphshard.predict.what_if import what_if
    from graphshard.schedule.fsdp2_order import PlanByUnit
    from graphshard.schedule.graph_collectives import Group
    from graphshard.schedule.schedule_graph import ScheduledGraph, schedule_graph

    __version__: str

__all__ = [
    "ArgumentError",
    "ArtifactError",
    "BatchError",
    "Bisection",
    "Call",
    "CaptureError",
    "CheckpointError",
    "CompiledStep",
    "DivergenceError",
    "Explanation",
    "GraphshardError",
    "Grid",
    "Group",
    "InfeasibleError",
    "InputError",
    "MaterializationError",
    "ParameterError",
    "Pass",
    "PassError",
    "PeerError",
    "Pipeline",
    "Plan",
    "PlanByUnit",
    "Profile",
    "Program",
    "ScheduledGraph",
    "StageError",
    "StepProfile",
    "UnsupportedError",
    "WhatIf",
    "async_save_checkpoint",
    "bisect",
    "compile",
    "compile_step",
    "explain",
    "explain_grid",
    "export",
    "fully_shard",
    "latest_checkpoint",
    "load",
    "load_checkpoint",
    "load_measured",
    "load_profile",
    "measure_regions",
    "profile_step",
    "programs",
    "register_forward_method",
    "save_checkpoint",
    "save_measured",
    "schedule_graph",
    "uncompiled",
    "unsharded_init",
    "what_if",
]

# Where a public name is defined; what type checkers read is above.
_HOMES = {
    "api": ("compile", "fully_shard", "programs", "register_forward_method"),
    "aot.export": ("Call", "export"),
    "aot.load": ("load",),
    "checkpoint.manifest": ("latest_checkpoint",),
    "checkpoint.save_load": ("async_save_checkpoint", "load_checkpoint", "save_checkpoint", "unsharded_init"),
    "cost.profile": ("Profile", "load_profile"),
    "debug.bisect": ("Bisection", "bisect"),
    "predict.answers": ("WhatIf",),
    "predict.explain": ("explain", "explain_grid"),
    "predict.explanation": ("Explanation",),
    "predict.search": ("Grid",),
    "predict.what_if": ("what_if",),
    "errors": (
        "ArgumentError",
        "ArtifactError",
        "BatchError",
        "CaptureError",
        "CheckpointError",
        "DivergenceError",
        "GraphshardError",
        "InfeasibleError",
        "InputError",
        "MaterializationError",
        "ParameterError",
        "PassError",
        "PeerError",
        "StageError",
        "UnsupportedError",
    ),
    "ir.plan": ("Plan",),
    "ir.program": ("Program",),
    "predict.profile_step": ("load_measured", "measure_regions", "profile_step", "save_measured"),
    "predict.step_profile": ("StepProfile",),
    "module.compile_step": ("CompiledStep", "compile_step"),
    "module.uncompiled": ("uncompiled",),
    "passes": ("Pass",),
    "pipeline.pipeline": ("Pipeline",),
    "schedule.fsdp2_order": ("PlanByUnit",),
    "schedule.graph_collectives": ("Group",),
    "schedule.schedule_graph": ("ScheduledGraph", "schedule_graph"),
}
_HOME = {name: f"{__name__}.{home}" for home, names in _HOMES.items() for name in names}


class _Package(ModuleType):
    """The package: it imports what is asked of it. Type checkers see names of the block above, and no others."""

    def __getattr__(self, name: str) -> Any:
        """A public name, the version, or a subpackage, which needs no separate import."""
        if name in _HOME:
            value = getattr(importlib.import_module(_HOME[name]), name)
        elif name == "__version__":
            value = importlib.import_module(f"{__name__}.utils.text").own_version()
        elif not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=self)
        setattr(self, name, value)
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        """By name, as cloudpickle does plain modules: Ray sends functions that use the package to other processes."""
        return importlib.import_module, (__name__,)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_HOME, "__version__"})


sys.modules[__name__].__class__ = _Package
