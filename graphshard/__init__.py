"""graphshard: fully sharded data parallelism for PyTorch, as a compiler.

mesh = init_device_mesh("cuda", (8,))
model = graphshard.compile(model, mesh)
"""

from importlib.metadata import version

from graphshard.api import compile, programs, register_forward_method
from graphshard.artifact.export import Call, export
from graphshard.artifact.load import load
from graphshard.cost.profile import Profile, load_profile
from graphshard.debug.bisect import Bisection, bisect
from graphshard.explain.explain import explain, explain_grid
from graphshard.explain.explanation import Explanation, Grid
from graphshard.ir.errors import (
    ArgumentError,
    ArtifactError,
    CaptureError,
    CaptureLimitError,
    CheckpointError,
    DivergenceError,
    GraphshardError,
    InfeasibleError,
    InputError,
    MaterializationError,
    ParameterError,
    PassError,
    PeerError,
    UnsupportedError,
)
from graphshard.ir.plan import Plan
from graphshard.ir.program import Program
from graphshard.measure.regions import load_measured, measure_regions, save_measured
from graphshard.measure.step import profile_step
from graphshard.measure.step_profile import StepProfile
from graphshard.passes import Pass
from graphshard.pipeline.pipeline import Pipeline
from graphshard.schedule.by_unit import PlanByUnit
from graphshard.state.asynchronous import async_save_checkpoint
from graphshard.state.checkpoint import load_checkpoint, save_checkpoint
from graphshard.state.initialize import unsharded_init
from graphshard.state.manifest import latest_checkpoint

__version__ = version("graphshard")

__all__ = [
    "ArgumentError",
    "ArtifactError",
    "Bisection",
    "Call",
    "CaptureError",
    "CaptureLimitError",
    "CheckpointError",
    "DivergenceError",
    "Explanation",
    "GraphshardError",
    "Grid",
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
    "StepProfile",
    "UnsupportedError",
    "async_save_checkpoint",
    "bisect",
    "compile",
    "explain",
    "explain_grid",
    "export",
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
    "unsharded_init",
]
