"""Predict a training step on a machine that is not here: `graphshard.explain`.

No process group, no GPU, and no memory for parameters: the model may be on the meta device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from torch import nn
from typing_extensions import Unpack

from graphshard.cost.profile import Hardware, Profile, load_profile
from graphshard.explain.explanation import Explanation, Grid
from graphshard.explain.study import Study
from graphshard.ir.errors import ArgumentError
from graphshard.ir.given import check_function
from graphshard.ir.mesh import MeshLike
from graphshard.ir.text import brief
from graphshard.options.arguments import check_known, check_names, options_given, takes_options
from graphshard.options.options import OptionArguments, Options

# What a setting of a grid may choose.
_SETTINGS = (*(f.name for f in fields(Options) if f.name != "hardware"), "optimizer_states", "symbols")


@takes_options
def explain(
    model: nn.Module,
    mesh: MeshLike,
    *,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    hardware: Hardware = "h100",
    network: str = "isolated",
    optimizer_states: int = 2,
    measured: Mapping[str, float] | None = None,
    symbols: Mapping[str, int] | None = None,
    **options: Unpack[OptionArguments],
) -> Explanation:
    """Predict the training step that `graphshard.compile` with the same arguments would run; nothing is changed.

    Arguments that are not described here are those of `graphshard.compile`. In a prediction, `activation` changes what
    is saved and what backward computes again. `offload_policy` copies on a link of its own and takes state off the
    device; pinned or not is the same, and the optimizer's time stays the device's. `backend="eager"` runs the same plan
    with a kernel for each operator. `dynamic_shapes` predicts the program for all sizes at those of the example.
    `verify` checks rules only if it is given. `max_captures` changes nothing, as there is one program.

    Args:
        model: any module, on the CPU or on the meta device.
        mesh: a DeviceMesh, or the shape of one that need not exist: `(64,)` or `{"shard": 64}`; with two axes the first
            replicates: `(8, 64)`.
        example_inputs, example_kwargs: inputs of one rank's call; only shapes, dtypes and non-tensor values matter.
        hardware: the machine: "a100", "h100", "h200", "b200", a file that `graphshard calibrate` wrote, or a `Profile`.
        network: the profile's model of the network between nodes, "isolated" or "in-training".
        optimizer_states: tensors like the parameter that the optimizer keeps: 2 for Adam, 0 for plain SGD.
        measured: seconds of regions by key, from `graphshard.measure_regions`; they replace estimates.
        symbols: names for dims of the inputs, such as `{"batch": 0, "seq": 1}`: the result has `formulas` in them and
            in the number of ranks. The model is captured at a few more sizes.

    Raises:
        ArgumentError: an argument is wrong.
        InfeasibleError: no schedule fits in memory_limit; it says the least that one needs. It is an ArgumentError.
        CaptureError: the module cannot be captured from the example inputs.
    """
    chosen = options_given(explain, options)
    study = Study(model, example_inputs, example_kwargs, chosen, optimizer_states, symbols)
    return study.explain(mesh, load_profile(hardware), network, measured={} if measured is None else measured)


@takes_options
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
    optimizer_states: int = 2,
    symbols: Mapping[str, int] | None = None,
    **options: Unpack[OptionArguments],
) -> Grid:
    """Every combination of meshes, machines, networks and settings, in one table.

    The model is captured once per setting, and scheduled as `compile` would on each mesh and machine. Arguments that
    are not described here are those of `explain`, for all settings.

    Args:
        model, example_inputs, example_kwargs: as for `explain`.
        meshes, hardware, network: several of what `explain` takes one of.
        settings: options by a name for the table, such as `{"keep": {"reshard_after_forward": False}}`; also
            `optimizer_states` and `symbols`. They replace those for all settings.
        show: told what is being done.
        optimizer_states, symbols: as for `explain`, for all settings.

    Raises:
        ArgumentError: an argument is wrong.
        InfeasibleError: no schedule fits in memory_limit.
        CaptureError: the module cannot be captured from the example inputs.
    """
    check_names(explain_grid, options)
    for name, value in (("meshes", meshes), ("hardware", hardware), ("network", network)):
        if isinstance(value, (str, bytes, os.PathLike, Profile, Mapping)) or not isinstance(value, Sequence):
            raise ArgumentError(
                f"{name} of a grid must be a list, got {brief(value)}. Pass a list of it, or use explain."
            )
        if not value:
            raise ArgumentError(f"{name} of a grid must not be empty, got {brief(value)}. Give at least one.")
    _check_settings(settings)
    check_function("show", show, "print")
    profiles = [load_profile(item) for item in hardware]
    shared: dict[str, Any] = {"optimizer_states": optimizer_states, "symbols": symbols, **options}
    found = []
    for label, setting in settings.items():
        check_known(f"settings[{brief(label)}]", setting, _SETTINGS)
        own = {**shared, **setting}
        apart = {name: own.pop(name) for name in ("optimizer_states", "symbols")}
        study = Study(model, example_inputs, example_kwargs, Options(**own), **apart, label=label, show=show)
        for mesh in meshes:
            for profile in profiles:
                found += [study.explain(mesh, profile, name) for name in network]
    return Grid(tuple(found))


def _check_settings(settings: Any) -> None:
    """Raise ArgumentError for what is no dict of options by the names of settings."""
    if not isinstance(settings, Mapping) or not settings:
        raise ArgumentError(f"settings must be a dict of options by a name, got {brief(settings)}.")
    for label, setting in settings.items():
        if not isinstance(label, str) or not isinstance(setting, Mapping) or not all(map(_is_text, setting)):
            raise ArgumentError(
                'settings must be such as {"keep": {"reshard_after_forward": False}}, got '
                f"{brief({label: setting})}."
            )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
