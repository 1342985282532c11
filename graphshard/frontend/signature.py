"""What a capture depends on (`CaptureSpec`), and which later calls its program serves (`Signature`)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from graphshard.ir.mesh import ExpertMeshes, Mesh, axes_of_mesh
from graphshard.ir.param_table import ParamTable, Settings
from graphshard.ir.repeats import BlocksDifferError, Repeats
from graphshard.ir.units import Precision
from graphshard.subclasses.extensions import Extended
from graphshard.torch_compat.torch_ops import pytree


@dataclass(frozen=True)
class CaptureSpec:
    """What a capture depends on in addition to the module and the inputs.

    Attributes:
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


def check_alike(spec: CaptureSpec, repeats: Repeats) -> None:
    """Raise BlocksDifferError if blocks that are left out have other parameter or unit options than captured ones."""
    if spec.extended:
        raise BlocksDifferError("parameters are subclasses of tensors")
    found: dict[int | None, list[Any]] = {}
    for row in spec.params:
        names, unit = tuple(repeats.name_at(0, name) for name in row.names), repeats.name_at(0, row.unit)
        found.setdefault(repeats.group_of(row.name), []).append(replace(row, names=names, unit=unit))
    for unit in spec.units:
        found.setdefault(repeats.group_of(unit), []).append((repeats.name_at(0, unit), spec.precision.of(unit)))
    if any(found.get(group) != found.get(0) for group in range(repeats.groups)):
        raise BlocksDifferError("parameters of blocks are treated differently")


@dataclass(frozen=True)
class Signature:
    """Calls that a program is for, as far as guards do not check them.

    Attributes:
        structure, inputs: of a call; guards look at them, and messages say how two calls differ.
        extended: what programs rely on of parameters that decide themselves what is gathered of them.
        casts_once: autocast keeps its casts of parameters.
    """

    structure: pytree.TreeSpec
    inputs: tuple[tuple[Any, ...], ...]
    training: tuple[bool, ...]
    grad: bool
    autocast: Hashable
    params: tuple[tuple[bool, torch.dtype], ...]
    settings: tuple[Settings, ...] = ()
    extended: tuple[Any, ...] = ()
    casts_once: bool = True

    def __hash__(self) -> int:
        # What is left out has an entry per module or parameter, and is rarely what signatures differ in.
        return hash((self.inputs, self.training[:1], self.grad, self.autocast))

    def changes_besides_inputs(self, other: Signature) -> list[str]:
        """Return how this signature differs from another one apart from structure and inputs, in words."""
        reasons = {
            "training": "train() or eval() was called",
            "grad": "gradients are " + ("on" if self.grad else "off"),
            "autocast": "autocast changed",
            "params": "dtype or requires_grad of a parameter changed",
            "extended": "attributes or methods of a parameter that is a tensor subclass, or what they read, changed",
            "casts_once": "autocast has another cache_enabled",
            "settings": "resharding, the divisor of gradients, or what is gathered by hand was changed",
        }
        return [why for name, why in reasons.items() if getattr(self, name) != getattr(other, name)]
