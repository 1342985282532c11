"""graphshard: fully sharded data parallelism for PyTorch, as a compiler.

mesh = init_device_mesh("cuda", (8,))
model = graphshard.compile(model, mesh)
"""

from graphshard.api import compile, programs
from graphshard.bisection import Bisection, bisect
from graphshard.errors import (
    ArgumentError,
    CaptureError,
    CaptureLimitError,
    DivergenceError,
    GraphshardError,
    InputError,
    MaterializationError,
    ParameterError,
    PassError,
)
from graphshard.explain import explain, explain_grid
from graphshard.explanation import Explanation, Grid
from graphshard.passes import Pass
from graphshard.pipeline import Pipeline
from graphshard.plan import Plan
from graphshard.profile import Profile, load_profile
from graphshard.program import Program

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "Bisection",
    "CaptureError",
    "CaptureLimitError",
    "DivergenceError",
    "Explanation",
    "GraphshardError",
    "Grid",
    "InputError",
    "MaterializationError",
    "ParameterError",
    "Pass",
    "PassError",
    "Pipeline",
    "Plan",
    "Profile",
    "Program",
    "bisect",
    "compile",
    "explain",
    "explain_grid",
    "load_profile",
    "programs",
]
