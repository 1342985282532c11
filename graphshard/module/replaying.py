"""The argument `cuda_graphs` of `compile`: which runs of regions are launched by one launch each."""

from __future__ import annotations

from typing import Any, Literal

import torch

from graphshard.cost.costs import Costs
from graphshard.ir.errors import ArgumentError
from graphshard.ir.mesh import Mesh
from graphshard.ir.text import brief
from graphshard.options.options import Options
from graphshard.options.passes import profile_here
from graphshard.runtime.device_graphs import CudaGraphs, DeviceGraphs
from graphshard.runtime.replays import Arena, Replaying

CudaGraphsChoice = bool | Literal["auto"]


def replaying(cuda_graphs: Any, options: Options, mesh: Mesh, device: torch.device) -> Replaying | None:
    """What replays runs of a model's regions; None if nothing does.

    Args:
        cuda_graphs: as given to `compile`.
        device: this rank's.

    Raises:
        ArgumentError: `cuda_graphs` is wrong, or does not fit the device.
    """
    if not (isinstance(cuda_graphs, bool) or (isinstance(cuda_graphs, str) and cuda_graphs == "auto")):
        raise ArgumentError(f"cuda_graphs must be True, False or 'auto', got {brief(cuda_graphs)}.")
    if cuda_graphs is False:
        return None
    graphs = graphs_of(device, cuda_graphs)
    if cuda_graphs is True:
        return Replaying(Arena(graphs, device), None)
    profile = profile_here(device, options.hardware)
    if profile is None:
        raise ArgumentError(
            "cuda_graphs='auto': no hardware profile of this GPU says what launches cost. Pass one as hardware=, or "
            "True or False."
        )
    return Replaying(Arena(graphs, device), Costs(profile, mesh=mesh, fused=options.backend != "eager"))


def graphs_of(device: torch.device, cuda_graphs: bool | str) -> DeviceGraphs:
    """How launches are captured on a device.

    Raises:
        ArgumentError: they cannot be.
    """
    if device.type != "cuda":
        raise ArgumentError(
            f"cuda_graphs={cuda_graphs!r}: there are none on {device.type}. Leave it out, or use a CUDA mesh."
        )
    return CudaGraphs(device)
