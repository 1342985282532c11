"""Predict a training step on a machine that is not here: `graphshard.explain`.

No process group, no GPU, and no memory for parameters: the model may be on the meta device.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from torch import nn
from typing_extensions import Unpack

from graphshard.cost.profile import Hardware, Profile, load_profile
from graphshard.errors import ArgumentError
from graphshard.ir.mesh import CONTEXT, EXPERT, MOST_RANKS, PIPELINE, REPLICATING, TENSOR, MeshLike
from graphshard.options.options import Options, check_known, check_names, takes_options
from graphshard.options.simulated_mesh import Parallelize
from graphshard.predict.explanation import Explanation
from graphshard.predict.search import Grid, Messages, Task, outcomes
from graphshard.predict.study import Study, is_same
from graphshard.predict.training_config import ExplainArguments, Training, split_arguments
from graphshard.utils.argument_validation import check_count, check_function
from graphshard.utils.text import brief

# Arguments that matter on a mesh with stages only.
_OF_PIPELINES = {"pipeline", "stages_per_rank"}
# Arguments that a setting of a grid may choose.
_SETTINGS = (*(f.name for kind in (Options, Training) for f in fields(kind) if f.name != "hardware"), "symbols")


@functools.partial(takes_options, also=(Training,))
def explain(
    model: nn.Module,
    mesh: MeshLike,
    *,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    hardware: Hardware = "h100",
    network: str = "isolated",
    measured: Mapping[str, float] | None = None,
    symbols: Mapping[str, int] | None = None,
    every_block: bool = False,
    parallelize: Parallelize | None = None,
    device: str | None = None,
    **options: Unpack[ExplainArguments],
) -> Explanation:
    """Predict the training step that `graphshard.compile` with the same arguments would run; nothing is changed.

    Arguments not described here are the same as for `graphshard.compile`. In a prediction, `activation` changes which
    tensors are saved and recomputed. `offload_policy` copies on a separate link and takes state off the device; pinned
    or not is the same, and the optimizer's time stays the device's. `backend="eager"` runs the same plan with a kernel
    for each operator. `dynamic_shapes` predicts the program for all sizes at the sizes of the example. `verify` checks
    rules only if it is given. `max_captures` and `fullgraph` change nothing, as there is one program.

    Args:
        model: any module, on the CPU or on the meta device, or an exported program of one, as for `compile`; its
            example inputs are used if none are given.
        mesh: a DeviceMesh with any axes that `compile` takes, or the shape of one that need not exist: `(64,)` or
            `{"shard": 64}`; with two axes the first replicates: `(8, 64)`. With `parallelize`, sizes by the axis names
            that `compile` knows, such as `{"dp": 16, "tp": 8}`. An additional axis "pp" has the stages of a pipeline:
            the model's blocks are divided among them. It is the outermost axis, at any position.
        example_inputs, example_kwargs: inputs of one rank's call; only shapes, dtypes and non-tensor values matter.
        hardware: the machine: "a100", "h100", "h200", "b200", "gb200", "mi300x" or another of `graphshard explain
            --help`, a file that `graphshard calibrate` wrote, or a `Profile`.
        network: the profile's model of the network between nodes: "isolated", "in-training" or "no-rails".
        measured: seconds of regions by key, from `graphshard.profiling.measure_regions`, instead of estimates.
        symbols: names for dims of the inputs, such as `{"batch": 0, "seq": 1}`: the result has `formulas` in them and
            in the number of ranks. The model is captured at a few more sizes.
        every_block: capture every block of a model, even where five represent all of them. The result is the same.
        parallelize: makes the model for a mesh along which it communicates itself. It is called with a copy of the
            model on the meta device and the `DeviceMesh`, of which this process is then rank 0, and changes the copy
            (`parallelize_module(model, mesh["tp"], plan)`, or experts as DTensors on `mesh["ep"]`), or returns a
            model. There must be no process group.
        optimizer_states: tensors like the parameter that the optimizer keeps: 2 for Adam, 0 for plain SGD.
        foreach: the optimizer runs one operation after the other over all parameters, as torch's do by default on
            GPUs; False is one fused kernel.
        clip_norm: gradients are clipped to it, as by `clip_grad_norm_`; None clips nothing. Its value makes no
            difference to the prediction.
        accumulate: microbatches of a step, each of which gathers, computes and reduces; one optimizer step.
        global_batch: first dim of the inputs that all ranks process in a step together, in the microbatches that this
            takes. None leaves it to `accumulate`.
        tokens: of the whole training: the result's `cost` has its days and GPU hours.
        price: of one GPU for an hour, in any currency: `cost` has the money, too.
        pipeline: the schedule of a mesh with a pipeline axis: "1f1b", "gpipe" or "interleaved", as in
            `torch.distributed.pipelining`.
        stages_per_rank: of `pipeline="interleaved"`.
        device: "cuda" captures the program that a GPU runs, with its attention and its dropout, even where there is
            none (`pip install 'graphshard[cross]'`), and Inductor fuses its regions for the GPU of the profile: kernels
            and bytes come from its scheduler. Regions measured on a GPU have the same keys. None and "cpu" capture for
            a CPU, which takes no package, with rules about fusion that mostly agree.

    Raises:
        InfeasibleError: no schedule fits in memory_limit; it names the least that one needs. It is an ArgumentError.
        CaptureError: the module cannot be captured from the example inputs.
    """
    check_names(explain, options)
    capture: dict[str, Any] = {"every_block": every_block, "parallelize": parallelize, "device": device}
    study = Study(model, example_inputs, example_kwargs, *split_arguments(options), symbols, **capture)
    return study.explain(mesh, load_profile(hardware), network, measured={} if measured is None else measured)


@functools.partial(takes_options, also=(Training,))
def explain_grid(
    model: nn.Module,
    meshes: Sequence[MeshLike],
    *,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    hardware: Sequence[Hardware] = ("h100",),
    network: Sequence[str] = ("isolated",),
    settings: Mapping[str, Mapping[str, Any]] = MappingProxyType({"": {}}),
    degrees: Mapping[str, Sequence[int]] = MappingProxyType({}),
    show: Callable[[str], None] = lambda _: None,
    workers: int | None = None,
    symbols: Mapping[str, int] | None = None,
    every_block: bool = False,
    parallelize: Parallelize | None = None,
    device: str | None = None,
    **options: Unpack[ExplainArguments],
) -> Grid:
    """Predict every combination of meshes, machines, networks and settings, in one table.

    The model is captured once for all settings with the same capture, and scheduled as `compile` would on each mesh and
    machine. Arguments not described here are the same as for `explain`, for all settings.

    Args:
        meshes, hardware, network: lists of values that `explain` takes.
        settings: options by a name for the table, such as `{"keep": {"reshard_after_forward": False}}`; also `symbols`,
            `accumulate` and the like. They replace options given for all settings.
        degrees: sizes of axes to try, such as `{"pp": (1, 2, 4), "tp": (1, 8)}`: each of `meshes` is then a number of
            ranks, and stands for all meshes with these sizes that it can be divided into; "dp" is the rest.
        show: receives progress.
        workers: processes that predict in parallel, forked from this one; 1 predicts in this process alone. None takes
            one for each core, up to eight of about a gigabyte each, if the table takes longer than some seconds, on
            Linux, and neither CUDA, a process group nor another Python thread is in this process.
        global_batch: as for `explain`. A mesh is left out if it is larger than the batch or does not divide it, if no
            schedule fits in memory_limit, or if the model cannot be cut into the stages: `Grid.left_out` says why.

    Raises:
        ArgumentError: an argument is wrong, or everything is left out.
        GraphshardError: one of the workers ended.
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
    if not isinstance(degrees, Mapping) or degrees:
        meshes = meshes_of(meshes, degrees)
    check_function("show", show, "print")
    profiles = [load_profile(item) for item in hardware]
    messages = Messages(show)
    capture: dict[str, Any] = {"every_block": every_block, "parallelize": parallelize, "device": device}
    capture["show"] = messages
    groups: list[list[Task]] = []
    first: Study | None = None
    tried: list[dict[str, Any]] = []
    for label, setting in settings.items():
        check_known(f"settings[{brief(label)}]", setting, _SETTINGS)
        chosen: dict[str, Any] = {"symbols": symbols, **options, **setting}
        program, training = split_arguments({name: value for name, value in chosen.items() if name != "symbols"})
        if first is not None and chosen["symbols"] == first.symbols:
            study = first.changed(program, training, label)
        else:
            named = chosen["symbols"]
            study = first = Study(model, example_inputs, example_kwargs, program, training, named, label, **capture)
        # Where only the schedule of stages differs from an earlier setting, meshes without stages are not repeated.
        repeated = False
        for before in tried:
            different = {name for name in {**before, **chosen} if not is_same(before.get(name), chosen.get(name))}
            repeated |= bool(different) and different <= _OF_PIPELINES
        tried.append(chosen)
        for mesh in meshes:
            staged = isinstance(mesh, Mapping) and any(axis in PIPELINE and size != 1 for axis, size in mesh.items())
            if staged or not repeated:
                groups.append([Task(study, mesh, profile, name) for profile in profiles for name in network])
    made = outcomes(groups, workers, messages)
    refused = [outcome for outcome in made if not isinstance(outcome, Explanation)]
    if len(refused) == len(made):
        raise refused[0]
    found = tuple(outcome for outcome in made if isinstance(outcome, Explanation))
    return Grid(found, tuple(dict.fromkeys(map(str, refused))))


def meshes_of(ranks: Sequence[Any], degrees: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    """Return all meshes with these axis sizes, outermost first; "dp" lies inside of stages and replicas."""
    if not isinstance(degrees, Mapping) or not all(isinstance(name, str) for name in degrees):
        raise ArgumentError(f'degrees must be such as {{"pp": (1, 2, 4), "tp": (1, 8)}}, got {brief(degrees)}.')
    known = (*PIPELINE, *TENSOR, *CONTEXT, *EXPERT, *REPLICATING)
    for name, sizes in degrees.items():
        if name not in known:
            raise ArgumentError(f"degrees has an axis {brief(name)}. Use {', '.join(map(repr, known))}.")
        if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Sequence) or not sizes:
            raise ArgumentError(f"degrees[{name!r}] must be a list of sizes such as (1, 2, 4), got {brief(sizes)}.")
        for size in sizes:
            check_count(f"degrees[{name!r}]", size, most=MOST_RANKS, what="list of sizes such as (1, 2, 4)")
    found = []
    for count in ranks:
        check_count("meshes", count, most=MOST_RANKS, what="list of numbers of ranks, beside degrees")
        for tried in itertools.product(*degrees.values()):
            if count % math.prod(tried) == 0:
                by_name = dict(zip(degrees, tried))
                outer = {name: size for name, size in by_name.items() if name in (*PIPELINE, *REPLICATING)}
                found.append({**outer, "dp": count // math.prod(tried), **by_name})
    if not found:
        raise ArgumentError(f"degrees {brief(dict(degrees))}: none divides {brief(list(ranks))} ranks. Give others.")
    return found


def _check_settings(settings: Any) -> None:
    if not isinstance(settings, Mapping) or not settings:
        raise ArgumentError(f"settings must be a dict of options by a name, got {brief(settings)}.")
    for label, setting in settings.items():
        named = isinstance(setting, Mapping) and all(isinstance(name, str) for name in setting)
        if not isinstance(label, str) or not named:
            raise ArgumentError(
                'settings must be such as {"keep": {"reshard_after_forward": False}}, got '
                f"{brief({label: setting})}."
            )
