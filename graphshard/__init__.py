"""graphshard: fully sharded data parallelism for PyTorch, as a compiler.

mesh = init_device_mesh("cuda", (8,))
model = graphshard.compile(model, mesh)

`graphshard.checkpoint`, `graphshard.errors`, `graphshard.passes` and `graphshard.profiling` have further public names.
Names are imported on first use: `graphshard --help` and `import graphshard` do not import torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from types import ModuleType
from typing import TYPE_CHECKING, Any

from graphshard import errors

if TYPE_CHECKING:
    from graphshard import checkpoint as checkpoint
    from graphshard import passes as passes
    from graphshard import profiling as profiling
    from graphshard.aot.export import Call as Call
    from graphshard.aot.export import export as export
    from graphshard.aot.load import load as load
    from graphshard.api import compile as compile
    from graphshard.api import fully_shard as fully_shard
    from graphshard.api import programs as programs
    from graphshard.api import register_forward_method as register_forward_method
    from graphshard.debug.bisect import Bisection as Bisection
    from graphshard.debug.bisect import bisect as bisect
    from graphshard.errors import GraphshardError as GraphshardError
    from graphshard.ir.plan import Plan as Plan
    from graphshard.ir.program import Program as Program
    from graphshard.module.compile_step import CompiledStep as CompiledStep
    from graphshard.module.compile_step import compile_step as compile_step
    from graphshard.module.compiled_module import CompiledModule as CompiledModule
    from graphshard.module.rebuild import rebuild as rebuild
    from graphshard.module.rebuild import unsharded as unsharded
    from graphshard.module.uncompiled import uncompiled as uncompiled
    from graphshard.passes import Pass as Pass
    from graphshard.pipeline.pipeline import Pipeline as Pipeline
    from graphshard.predict.answers import WhatIf as WhatIf
    from graphshard.predict.explain import explain as explain
    from graphshard.predict.explain import explain_grid as explain_grid
    from graphshard.predict.explanation import Explanation as Explanation
    from graphshard.predict.search import Grid as Grid
    from graphshard.predict.what_if import what_if as what_if
    from graphshard.schedule.fsdp2_order import PlanByUnit as PlanByUnit
    from graphshard.schedule.graph_collectives import Group as Group
    from graphshard.schedule.schedule_graph import ScheduledGraph as ScheduledGraph
    from graphshard.schedule.schedule_graph import schedule_graph as schedule_graph

    __version__: str

# Where a public name is defined; type checkers read the block above.
_HOMES = {
    "aot.export": ("Call", "export"),
    "aot.load": ("load",),
    "api": ("compile", "fully_shard", "programs", "register_forward_method"),
    "debug.bisect": ("Bisection", "bisect"),
    "errors": ("GraphshardError",),
    "ir.plan": ("Plan",),
    "ir.program": ("Program",),
    "module.compile_step": ("CompiledStep", "compile_step"),
    "module.compiled_module": ("CompiledModule",),
    "module.rebuild": ("rebuild", "unsharded"),
    "module.uncompiled": ("uncompiled",),
    "passes": ("Pass",),
    "pipeline.pipeline": ("Pipeline",),
    "predict.answers": ("WhatIf",),
    "predict.explain": ("explain", "explain_grid"),
    "predict.explanation": ("Explanation",),
    "predict.search": ("Grid",),
    "predict.what_if": ("what_if",),
    "schedule.fsdp2_order": ("PlanByUnit",),
    "schedule.graph_collectives": ("Group",),
    "schedule.schedule_graph": ("ScheduledGraph", "schedule_graph"),
}
# Public names that moved from here into a module. The old ones go with graphshard 0.2.
_MOVED = {
    "checkpoint": (
        "async_save_checkpoint",
        "latest_checkpoint",
        "load_checkpoint",
        "save_checkpoint",
        "unsharded_init",
    ),
    "errors": tuple(name for name in errors.__all__ if name not in _HOMES["errors"]),
    "profiling": (
        "Profile",
        "StepProfile",
        "load_measured",
        "load_profile",
        "measure_regions",
        "profile_step",
        "save_measured",
    ),
}
_HOME = {name: f"{__name__}.{home}" for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)
_MOVED_TO = {name: f"{__name__}.{module}" for module, names in _MOVED.items() for name in names}


class _Package(ModuleType):
    """The package: it imports what is asked of it. Type checkers see names of the block above, and no others."""

    def __getattr__(self, name: str) -> Any:
        """A public name, the version, or a subpackage, which needs no separate import."""
        if name in _HOME:
            value = getattr(importlib.import_module(_HOME[name]), name)
        elif name in _MOVED_TO:
            module = _MOVED_TO[name]
            warnings.warn(f"graphshard.{name} is now {module}.{name}", FutureWarning, stacklevel=2)
            return getattr(importlib.import_module(module), name)
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
