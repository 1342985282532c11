"""Predict a training step on a machine that is not here: `graphshard.explain`.

No process group, no GPU, and no memory for parameters: the model may be on the meta device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard

from graphshard.cost.profile import Hardware, Profile, load_profile
from graphshard.explain.explanation import Explanation, Grid
from graphshard.explain.study import Study
from graphshard.ir.errors import ArgumentError
from graphshard.ir.mesh import MeshLike
from graphshard.ir.precision import PolicySpec
from graphshard.ir.units import UnitSpec
from graphshard.pipeline.pipeline import Pipeline

# The options of `graphshard.compile` that change what is predicted.
OPTIONS = (
    *("reshard_after_forward", "shard_placement_fn", "mp_policy", "ignored_params", "units", "passes"),
    *("optimizer_states", "memory_limit", "symbols"),
)


def explain(
    model: nn.Module,
    mesh: MeshLike,
    *,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    hardware: Hardware = "h100",
    network: str = "isolated",
    reshard_after_forward: bool | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: PolicySpec = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    units: Sequence[UnitSpec] | None = None,
    passes: Pipeline | None = None,
    optimizer_states: int = 2,
    memory_limit: int | None = None,
    measured: Mapping[str, float] | None = None,
    symbols: Mapping[str, int] | None = None,
) -> Explanation:
    """Predict the training step that `graphshard.compile` with the same arguments would run; nothing is changed.

    Args:
        model: any module that torch.export can trace, on the CPU or on the meta device.
        mesh: a DeviceMesh, or the shape of one that need not exist: `(64,)` or `{"shard": 64}`; with two axes the first
            replicates: `(8, 64)`.
        example_inputs, example_kwargs: inputs of one rank's call; only shapes, dtypes and non-tensor values matter.
        hardware: "a100", "h100", "h200", "b200", a file that `graphshard calibrate` wrote, or a `Profile`.
        network: the profile's model of the network between nodes, "isolated" or "in-training".
        reshard_after_forward, shard_placement_fn, mp_policy, ignored_params, units, passes: as for
            `graphshard.compile`.
        optimizer_states: tensors like the parameter that the optimizer keeps: 2 for Adam, 0 for plain SGD.
        memory_limit: bytes that the schedule may take, as for `graphshard.compile`.
        measured: seconds of regions by key, from `graphshard.measure_regions`; they replace estimates.
        symbols: names for dims of the inputs, such as `{"batch": 0, "seq": 1}`: the result has `formulas` in them and
            in the number of ranks. The model is captured at a few more sizes.

    Raises:
        ArgumentError: an argument is wrong.
        CaptureError: the module cannot be captured from the example inputs.
    """
    options = {
        "reshard_after_forward": reshard_after_forward,
        "shard_placement_fn": shard_placement_fn,
        "mp_policy": mp_policy,
        "ignored_params": ignored_params,
        "units": units,
        "passes": passes,
        "optimizer_states": optimizer_states,
        "memory_limit": memory_limit,
        "symbols": symbols,
    }
    study = Study(model, example_inputs, example_kwargs, options)
    return study.explain(mesh, load_profile(hardware), network, measured=measured or {})


def explain_grid(
    model: nn.Module,
    meshes: Sequence[MeshLike],
    *,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    hardware: Sequence[Hardware] = ("h100",),
    network: Sequence[str] = ("isolated",),
    settings: Mapping[str, Mapping[str, Any]] = MappingProxyType({"": {}}),
    show: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> Grid:
    """Every combination of meshes, machines, networks and settings, in one table.

    The model is captured once per setting, and scheduled as `compile` would on each mesh and machine.

    Args:
        settings: options of `explain` by a name for the table, such as `{"keep": {"reshard_after_forward": False}}`.
        show: told what is being done.
        options: those of `explain` that all settings share.

    Raises:
        ArgumentError: an argument is wrong.
    """
    for name, value in (("meshes", meshes), ("hardware", hardware), ("network", network)):
        if isinstance(value, (str, os.PathLike, Profile, Mapping)) or not isinstance(value, Sequence):
            raise ArgumentError(f"{name} of a grid must be a list, got {value!r}. Pass [{value!r}], or use explain.")
    profiles = [load_profile(item) for item in hardware]
    found = []
    for label, setting in settings.items():
        unknown = sorted({*options, *setting} - set(OPTIONS))
        if unknown:
            raise ArgumentError(f"explain has no option {unknown[0]!r}. It has {', '.join(OPTIONS)}.")
        study = Study(model, example_inputs, example_kwargs, {**options, **setting}, label, show)
        for mesh in meshes:
            for profile in profiles:
                found += [study.explain(mesh, profile, name) for name in network]
    return Grid(tuple(found))
