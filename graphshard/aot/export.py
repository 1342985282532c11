"""Compile ahead of time, for a mesh and a machine that need not be here: `graphshard.export`.

One process, no process group, no weights. For each mesh every call is captured, scheduled and lowered as `compile`
would; regions are compiled once for all of them. The result is one file for all ranks, see `store/artifact_file.py`.

On axes along which the model communicates (tensor, context, expert), a program belongs to a rank's place: the rows of
an embedding that it owns are written in it, and the positions of a sequence, and shards may have different sizes. So
the model is made and captured once for each place, on a pretended mesh. These axes are the inner ones, so the place is
the rest of a rank's number. The number of places is known after the capture at the first one, which shows among which
neighbors the model communicates.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack

from graphshard.aot.exporter import Call, Exporter, compiler_for_file, export_pt2, in_mode, with_threads
from graphshard.cost.costs import Costs
from graphshard.cost.profile import load_profile
from graphshard.cross.driver import stand_in
from graphshard.debug.dump import dump_directory, recorder
from graphshard.errors import ArgumentError
from graphshard.frontend.inputs import apart
from graphshard.ir.gpus import CAPABILITIES, USUAL, Capability
from graphshard.ir.mesh import CONTEXT, EXPERT, TENSOR, Mesh, MeshLike
from graphshard.ir.param_table import even_pieces
from graphshard.ir.program import Program
from graphshard.lower.regions import RegionCall
from graphshard.module.compiled_module import make_tracer
from graphshard.module.tracer import Tracer
from graphshard.options.mesh_axes import MeshAxes, dims_of
from graphshard.options.options import CompileArguments, Options, options_given, takes_options
from graphshard.options.resolve import example_of, find_axes, request_for, resolve_model
from graphshard.options.simulated_mesh import Parallelize, options_for, shape_of, simulated_mesh
from graphshard.options.validate import ModelContents, check_examples, check_model
from graphshard.runtime.process_groups import make_groups, whole_mesh
from graphshard.schedule.rank_consistent_planner import Share
from graphshard.store.artifact_file import ArtifactWriter, CompiledProgram
from graphshard.store.artifact_manifest import MeshEntry
from graphshard.store.fingerprint import describe_options, environment, model_facts
from graphshard.store.signing import signer_of
from graphshard.torch_compat.torch_ops import pytree
from graphshard.utils.argument_validation import check_bool, check_choice, check_count, path_of
from graphshard.utils.progress import progress
from graphshard.utils.text import brief

Mode = Literal["training", "inference", "both"]

# A file for more would fit no machine.
MOST_THREADS = 1 << 16


@takes_options
def export(
    model: nn.Module,
    mesh: MeshLike | Sequence[MeshLike],
    path: str | os.PathLike[str],
    *,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    mode: Mode = "training",
    calls: Sequence[Call] = (),
    accumulate: bool = False,
    device: Literal["cpu", "cuda"] | None = None,
    capability: Sequence[int] | Sequence[Sequence[int]] | None = None,
    threads: int | None = None,
    compile_regions: bool | None = None,
    sign: Any = None,
    parallelize: Parallelize | None = None,
    **options: Unpack[CompileArguments],
) -> Path:
    """Compile a module for a mesh that need not exist, in one process, into one file that every rank loads.

    Nothing of the module is changed or allocated; it may be on the meta device. There need be no process group.

    For GPUs on a machine without one, say by `capability` which: regions are compiled to cubins, as where such a GPU
    is. Without it the file holds programs, plans and graphs, and regions are compiled on the target, at each load or
    once by `graphshard finish FILE`. Both take the packages of `graphshard[cross]`.

    Other arguments have the meaning they have in `graphshard.compile`: mp_policy, units, passes and so on.
    `hardware` is also the machine that the summary's prediction is for; None predicts for an H100, or for CPUs.

    Args:
        model: any module, or an exported program of one, as for `compile`; its example inputs are used if none are
            given.
        mesh: a DeviceMesh, the shape of one such as `(8,)`, `{"shard": 8}` or, to replicate over the first axis and to
            shard over the second, `(2, 4)` or `{"replicate": 2, "shard": 4}`; or a list of those: one file for all of
            them. Regions do not depend on the number of ranks, except regions that pack shards.
        path: the file, by convention with the ending `.gshard`. With the ending `.pt2`, for one rank and
            mode="inference", it is PyTorch's own: the program with the model's weights, for `torch.export.load`.
        example_inputs, example_kwargs: inputs of one rank's call; only shapes, dtypes and non-tensor values matter.
        mode: what they are captured for: "training" (forward and backward, modules in the modes they are in),
            "inference" (forward alone, in eval() mode and under no_grad) or "both".
        calls: further calls that the file is to have programs for: other inputs, submodules, modes, gradients.
        accumulate: True has the file hold what gradient accumulation takes, too: the backwards of steps of any number
            of microbatches, for `set_requires_gradient_sync(False)` of the whole model until the last one and, on two
            axes, for `set_requires_all_reduce(False)`. They are up to 3 and 6 further backwards for each set of
            outputs that there is a backward for.
        device: what kind of device it is for; None is the DeviceMesh's, or CUDA where there is a GPU here.
        capability: compute capability of the GPUs that it is for, (8, 0), (9, 0) or (10, 0), or a list of several,
            where no GPU is here; None leaves regions to the target.
        threads: threads of each rank that CPU code is compiled for; None is torch.get_num_threads() here.
        compile_regions: False leaves regions to each load, or to `graphshard finish FILE` on the target machine;
            None compiles them if there is such a device here, or `capability` names one. With backend="eager" there is
            nothing to compile.
        sign: an ed25519 private key to sign the file with, as a PEM file or as an object of the package cryptography;
            `load(..., trust=)` checks it. None does not sign.
        parallelize: makes the model for meshes with axes along which it communicates (tensor, context, expert), such as
            `{"dp": 2, "tp": 2}`: a function of (model, mesh), as for `explain`. Where a program depends on a rank's
            place on these axes, the file has one for each.

    Returns:
        The path.

    Raises:
        ArgumentError: an argument is wrong.
        CaptureError: the module cannot be captured from the inputs.
        ArtifactError: something of a program cannot be stored.
    """
    model, chosen = resolve_model(model, options_given(export, options))
    if example_inputs is None and example_kwargs is None and not calls:
        example_inputs, example_kwargs = example_of(model)
    contents = check_model(model)
    check_examples(model, example_inputs, example_kwargs)
    target = _target(path)
    signer = None if sign is None else signer_of(sign)
    if signer is not None and target.suffix == ".pt2":
        raise ArgumentError(f"sign: {target.name} is PyTorch's own format, which has no signature. Sign it yourself.")
    shapes = [] if parallelize is None else [shape_of(item) for item in _meshes(mesh)]
    meshes = [Mesh.of_shape(item) for item in _meshes(mesh)] if parallelize is None else []
    wanted = _calls(example_inputs, example_kwargs, mode, calls)
    kind = _device(device, mesh)
    targets = _capabilities(capability, kind)
    check_bool("accumulate", accumulate)
    if threads is not None:
        check_count("threads", threads, most=MOST_THREADS)
    if compile_regions is not None:
        check_bool("compile_regions", compile_regions)
    machine = load_profile(chosen.hardware or ("h100" if kind.type == "cuda" else "cpu-gloo"))
    if target.suffix == ".pt2":
        export_pt2(contents, meshes, wanted, kind, target, chosen)
        return target
    wanted = [each for call in wanted for each in _one_and_several(call)]
    records = recorder(dump_directory(None, 0))
    compiler, later = compiler_for_file(chosen.backend, kind, compile_regions, targets)
    writer, compiled = ArtifactWriter(), dict[str, RegionCall]()
    with contextlib.ExitStack() as stack:
        show = stack.enter_context(progress(f"graphshard: export {type(model).__name__}"))
        stack.enter_context(with_threads(threads))
        if kind.type == "cuda" and not torch.cuda.is_available():
            stack.enter_context(stand_in(targets[0] if targets else USUAL, among=targets))

        def programs_of(
            made: nn.Module, tracer: Tracer, shape: dict[str, int], share: Share | None = None
        ) -> tuple[MeshEntry, list[CompiledProgram]]:
            described, item = describe_options(tracer), tracer.spec.mesh
            tracer.compiled = compiled
            costs = Costs(machine, mesh=item, fused=chosen.backend != "eager")
            ranks = " x ".join(map(str, item.shape.values()))

            def tell(text: str) -> None:
                show(f"{ranks} ranks: {text}")

            exporter = Exporter(tracer, made, compiler, costs, later, accumulate, writer, tell, records, share)
            programs = []
            for call in wanted:
                with in_mode(made, call.training):
                    programs.append(exporter.capture(call))
            return MeshEntry(item, shape, None, described, tracer.spec.params, []), programs

        for item in meshes:
            tracer = make_tracer(request_for(contents, MeshAxes(item), chosen, kind))
            writer.add_mesh(*programs_of(model, tracer, item.shape))
        for shape in shapes:
            assert parallelize is not None
            places: list[tuple[MeshEntry, list[CompiledProgram]]] = []
            plans: list[dict[str, Any]] = []
            # On axes for models, and on those along which the captured programs communicate.
            count = math.prod(size for name, size in shape.items() if name in (*CONTEXT, *EXPERT, *TENSOR))
            while len(places) < math.lcm(count, *(program.period for _, programs in places for program in programs)):
                with _tracer_at(model, shape, parallelize, chosen, kind, len(places)) as (made, tracer):
                    places.append(programs_of(made, tracer, shape, _sharing(plans, len(places))))
            differ = any(found != places[0] for found in places)
            for place, (entry, programs) in enumerate(places if differ else places[:1]):
                writer.add_mesh(replace(entry, place=place if differ else None), programs)
        native = any(region.code == "native" for region in writer.regions.values())
        here = environment(kind, native=native)
    writer.write(target, here, model_facts(model), sign=signer)
    return target


def _target(path: Any) -> Path:
    """Return where to write; check it before hours of compilation, not after."""
    target = path_of("path", path, "a file such as 'model.gshard'")
    try:
        if target.is_dir():
            raise IsADirectoryError
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError:
        raise ArgumentError(
            f"path: {str(target)!r} cannot be written. Give a file in a directory that is there and writable."
        ) from None
    return target


def _meshes(mesh: Any) -> list[Any]:
    """Return one mesh or several: a shape is a tuple or list of numbers, several are a list of shapes."""
    if isinstance(mesh, (list, tuple)) and mesh and not isinstance(mesh[0], int):
        return list(mesh)
    return [mesh]


def _calls(inputs: Any, kwargs: Any, mode: str, calls: Any) -> list[Call]:
    check_choice("mode", mode, get_args(Mode))
    if not isinstance(calls, (list, tuple)) or not all(isinstance(call, Call) for call in calls):
        raise ArgumentError(f"calls must be a list of graphshard.Call, got {brief(calls)}.")
    found = []
    if inputs is not None or kwargs is not None:
        given = tuple(inputs or ()), dict(kwargs or {})
        found += [Call(*given)] if mode != "inference" else []
        found += [Call(*given, training=False, grad=False)] if mode != "training" else []
    found += calls
    if not found:
        raise ArgumentError("export needs example_inputs, example_kwargs or calls: inputs of one rank's call.")
    return found


def _one_and_several(call: Call) -> list[Call]:
    """Return the call, and one with separate tensors if it has one tensor twice: these have another program."""
    leaves, structure = pytree.tree_flatten((tuple(call.inputs), dict(call.kwargs)))
    tensors = [id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if len(set(tensors)) == len(tensors):
        return [call]
    inputs, kwargs = pytree.tree_unflatten(apart(leaves), structure)
    return [call, replace(call, inputs=inputs, kwargs=kwargs)]


def _capabilities(capability: Any, device: torch.device) -> list[Capability]:
    """Return the compute capabilities to compile for; [] leaves it to what is here."""
    if capability is None:
        return []
    several = isinstance(capability, (list, tuple)) and all(isinstance(item, (list, tuple)) for item in capability)
    wanted = [tuple(item) for item in capability] if several else [capability]
    known = ", ".join(map(str, CAPABILITIES))
    for item in wanted:
        if not isinstance(item, (list, tuple)) or tuple(item) not in CAPABILITIES:
            raise ArgumentError(
                f"capability must be one of {known}, or a list of them, got {brief(item)}. Export where a GPU of "
                "another kind is, or leave capability out: `graphshard finish FILE` compiles there."
            )
    if device.type != "cuda" or torch.cuda.is_available():
        what = "there is a GPU here, which is compiled for" if device.type == "cuda" else "device is 'cpu'"
        raise ArgumentError(
            f"capability={brief(capability)} is for device='cuda' on a machine without a GPU, and {what}. Leave it "
            "out, or hide the GPU (CUDA_VISIBLE_DEVICES=)."
        )
    if not wanted:
        raise ArgumentError(f"capability is an empty list; such are {known}.")
    return list(dict.fromkeys((int(major), int(minor)) for major, minor in wanted))


def _device(device: Any, mesh: Any) -> torch.device:
    if device is not None:
        check_choice("device", device, ("cpu", "cuda"))
    if device is None and isinstance(mesh, DeviceMesh):
        device = mesh.device_type
    here = torch.cuda.is_available()
    kind = device or ("cuda" if here else "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device() if here else 0)


# --- meshes along which the model communicates -------------------------------------------------------------------


def _sharing(plans: list[dict[str, Any]], place: int) -> Share:
    """Return what plans at a place: the first place fills `plans`, the others take them in the same order."""
    following = iter(plans)

    def share(program: Program, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if place:
            return next(following, None) or make()
        plans.append(make())
        return plans[-1]

    return share


@contextlib.contextmanager
def _tracer_at(
    model: nn.Module,
    shape: Mapping[str, int],
    parallelize: Parallelize,
    options: Options,
    device: torch.device,
    place: int,
) -> Iterator[tuple[nn.Module, Tracer]]:
    """Put this process at a place of these axes; yield the model that is made there, and its tracer for a device."""
    with simulated_mesh(model, shape, parallelize, device.type, rank=place) as (made, mesh):
        chosen = options_for(made, model, options)
        contents = ModelContents.of(made)
        contents, axes = find_axes(contents, mesh, chosen, dims_of(shape))
        assert axes.data is not None
        tracer = make_tracer(request_for(contents, axes, chosen, device))
        if chosen.memory_limit is not None and not even_pieces(tracer.spec.mesh, tracer.spec.params):
            raise ArgumentError(
                f"memory_limit={chosen.memory_limit} cannot be kept in a file for a mesh on which parameters are in "
                "pieces of different sizes: what each rank takes with a plan is known when ranks plan together. Leave "
                "it out, or call compile on the ranks."
            )
        groups = make_groups(tracer.spec.mesh, whole_mesh(axes.data, axes.tensor), axes.experts)
        tracer.spec = replace(tracer.spec, groups=groups)
        yield made, tracer
