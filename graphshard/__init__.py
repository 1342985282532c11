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
from graphshard.passes import Pass
from graphshard.pipeline import Pipeline
from graphshard.plan import Plan
from graphshard.program import Program

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "Bisection",
    "CaptureError",
    "CaptureLimitError",
    "DivergenceError",
    "GraphshardError",
    "InputError",
    "MaterializationError",
    "ParameterError",
    "Pass",
    "PassError",
    "Pipeline",
    "Plan",
    "Program",
    "bisect",
    "compile",
    "programs",
]
