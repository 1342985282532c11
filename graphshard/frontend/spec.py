"""Specification of a capture."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from graphshard.frontend.extensions import Extended
from graphshard.ir.device_meshes import ExpertMeshes, axes_of_mesh
from graphshard.ir.mesh import Mesh
from graphshard.ir.params import ParamTable
from graphshard.ir.precision import Precision


@dataclass(frozen=True)
class CaptureSpec:
    """What a capture depends on besides the module and the inputs.

    Attributes:
        dynamic_shapes: in torch.export's format.
        method: the method that is captured.
        extended: parameters that decide themselves what is gathered of them.
        tensor: mesh of the tensor axis, on which the program is for this rank's place.
        experts: meshes of parameters that lie otherwise on the ranks.
        whole: mesh of all axes, if the model finds DTensors on it.
        groups: names of this rank's process groups by axis, to which capture adds the model's own that it finds.
    """

    params: ParamTable
    units: tuple[str, ...]
    mesh: Mesh
    device: torch.device
    precision: Precision
    forward_class: type[nn.Module]
    dynamic_shapes: Any = None
    method: str = "forward"
    extended: tuple[Extended, ...] = ()
    tensor: DeviceMesh | None = None
    experts: ExpertMeshes | None = None
    whole: DeviceMesh | None = None
    groups: dict[str, str] = field(default_factory=dict)

    @property
    def communicating(self) -> dict[tuple[str, ...], DeviceMesh]:
        """The meshes that parameters are DTensors on, by the names of their axes."""
        found = {}
        for row in self.params:
            mesh, whole = self.tensor, self.whole
            if row.expert and self.experts is not None:
                mesh, whole = self.experts.axis, self.experts.whole
            if row.split is not None and row.split.around:
                mesh = whole
            if row.split is not None and mesh is not None:
                found[row.split.found_on] = axes_of_mesh(mesh, row.split.found_on)
        return found
