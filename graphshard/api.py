"""Public functions: `compile`, `fully_shard`, `programs`, `register_forward_method`."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, overload

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.export import ExportedProgram
from typing_extensions import Unpack

from graphshard.aot.load import artifact_path, library_for
from graphshard.debug.dump import dump_directory, recorder
from graphshard.errors import ArgumentError, GraphBreak
from graphshard.frontend.inputs import flat_call
from graphshard.ir.program import Program
from graphshard.lower.backends import begin_compiling
from graphshard.module.compiled_module import (
    CompiledModule,
    CudaGraphsChoice,
    compiled_module,
    install_method,
    make_runner,
    make_tracer,
    replaying_of,
    shard,
)
from graphshard.module.fsdp2_model import compile_sharded, sharded_by_fsdp2
from graphshard.module.fully_shard import join_parts, shard_unit
from graphshard.module.tracer import ModuleCall
from graphshard.options.mesh_axes import DataParallelMeshDims
from graphshard.options.options import (
    CompileArguments,
    FullyShardArguments,
    check_names,
    options_given,
    takes_options,
)
from graphshard.options.resolve import resolve
from graphshard.options.validate import check_examples, check_model, default_mesh
from graphshard.store.program_cache import cache_at
from graphshard.torch_compat.torch_ops import pytree
from graphshard.utils.argument_validation import path_of
from graphshard.utils.text import brief, users_class


@takes_options
def compile(
    model: nn.Module | ExportedProgram | str | os.PathLike[str],
    mesh: DeviceMesh | None = None,
    *,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    dump: str | os.PathLike[str] | None = None,
    artifact: str | os.PathLike[str] | None = None,
    cache: bool | str | os.PathLike[str] | None = None,
    cuda_graphs: CudaGraphsChoice = False,
    **options: Unpack[CompileArguments],
) -> CompiledModule:
    """Shard a module's parameters over a mesh and compile its training step, in place.

    Parameters and their gradients become `DTensor`s with placement `Shard(0)`, under the same names; the module
    keeps its class by `isinstance`. Call it, its submodules, its optimizer and its state_dict as before.

    Args:
        model: any module; on the CPU, on the mesh's device, or on the meta device. Or an exported program of it: the
            `ExportedProgram` that `torch.export.export` returned, or the path of a .pt2 file that `torch.export.save`
            wrote. It keeps what was decided at export: the mode (train() or eval()), dtypes, and sizes that were not
            declared dynamic. Or a module that torch's `fully_shard` was called on, the root last: it keeps its shards,
            and FSDP2's settings are the mesh, units, policies and choices here.
        mesh: mesh of "cpu" or "cuda" devices; None is all ranks, on CUDA where there is any. Of two axes the first
            replicates and the second shards (HSDP); size 1 of the second is plain data parallelism (DDP). On a tensor
            axis "tp" parameters are DTensors already, by
            `torch.distributed.tensor.parallel.parallelize_module(model, mesh["tp"], plan)`. Parameters are sharded over
            a context axis "cp" inside of the sharding axis, too, and the model communicates along it. They are also
            sharded over an expert axis "ep", except the experts' parameters, which are DTensors on it.
        dp_mesh_dims: FSDP2's `DataParallelMeshDims`, the axes of the mesh to shard and to replicate over; None goes
            by the names of the axes. With none to shard over, every rank keeps all parameters.
        reshard_after_forward: True gathers parameters again in backward, False keeps them gathered, None keeps
            the root's and gathers the units' again, as FSDP2 does. A divisor of the number of shards gathers again
            among that many neighbors, such as the ranks of a node, and keeps what they need.
        shard_placement_fn: chooses another dim to shard a parameter along, `Shard(dim)`; None is `Shard(0)`. Sizes
            need not be multiples of the number of ranks. FSDP2's `ShardPlacementResult` chooses another mesh, too: one
            in addition to the mesh of the others.
        mp_policy: FSDP2's `MixedPrecisionPolicy`, or a dict of policies by patterns of the names of units, "" being
            the root.
        offload_policy: FSDP2's `CPUOffloadPolicy` keeps shards, gradients and so optimizer state on the CPU, and copies
            overlap with compute; on a CPU mesh they are there anyway.
        ignored_params: parameters to leave alone: not sharded, cast, moved or reduced.
        units: the modules whose parameters are gathered together: name patterns such as `"layers.*"`, functions of
            name and module, or tuples of patterns for one unit of several modules; None finds the repeated blocks.
        reduce: how gradients are summed over ranks. None sums as FSDP2 does, in the order and the precision of the
            communication library. "exchange" casts them to `reduce_dtype`, exchanges them, and adds them in float32 in
            the order of ranks: bits depend on the number of ranks alone. "auto" lets the planner exchange where that is
            faster, and casts the sums to `reduce_dtype`.
        backend: "inductor", or "eager" for the same program without Inductor, bit for bit equal to FSDP2.
        activation: which activations units save for backward. None leaves it to AOTAutograd's partitioner; "full" saves
            the inputs of each unit and recomputes the rest; a list of operators, such as
            `[torch.ops.aten.mm.default]`, saves their results too; a number from 0 ("full") to 1 (None) is the share
            of what the partitioner would save beyond "full" that may be saved. "auto" decides that share under
            `memory_limit`, together with what stays gathered between forward and backward. Results do not change.
            Regions of `torch.utils.checkpoint` in the model are honored in any case. `saved_table()` of a program
            shows it.
        memory_limit: bytes that shards, optimizer state (two tensors like each parameter), gathered parameters,
            gradients and saved values may take on a rank, as predicted. It limits what is gathered ahead.
        hardware: the profile whose costs decide when collectives start and which travel together: a name or file as
            for `explain`, the same on all ranks. None takes GRAPHSHARD_HARDWARE, or the profile of a known device.
        dynamic_shapes: dimensions of the inputs that vary, in torch.export's format, such as
            `({0: Dim("batch"), 1: Dim("sequence", max=4096)},)` or `{"tokens": {0: Dim.AUTO}}`: one program serves all
            their sizes from 2 on. `torch._dynamo.mark_dynamic` on the inputs of the first call does the same.
        example_inputs, example_kwargs: inputs of a call; with them the program is compiled now instead of at the
            first call; programs of a module that is split are compiled when its units are called. Only shapes, dtypes
            and non-tensor values matter.
        max_captures: the number of programs that the model keeps, and so does each submodule or method that is called
            directly. Beyond it the least recently used program is evicted, with one warning, and captured again when
            a call needs it. Programs of `artifact` do not count.
        fullgraph: True makes it a `CaptureError` if forward cannot be traced whole. False splits such a module: Python
            runs its forward, and each unit inside is captured by itself; a warning names the line and the reason.
        passes: the passes between capture and lowering; see `Pipeline` for how to insert, replace and disable some.
        verify: when the rules of `graphshard.pipeline.rules` are checked: "off", "ends" (after capture and before
            lowering) or "each" (after every pass, too). None takes GRAPHSHARD_VERIFY, or "ends".
        dump: directory to write every stage, the plan, the code that runs and an HTML report to; None takes
            GRAPHSHARD_DUMP. GRAPHSHARD_DUMP_RANKS chooses ranks: "0" (default), "0,3" or "all".
        artifact: a file of `graphshard.export`. If it fits this model, mesh, machine and these arguments, its programs
            run and nothing is compiled for the calls that it was exported for: the first call of each kind is traced,
            and its graph names the program. Otherwise the module is compiled, and the log says why.
        cache: where programs are kept, so that the next launch of the job traces and does not compile: a directory,
            True for `~/.cache/graphshard`, or False for nowhere. None takes GRAPHSHARD_CACHE, which is a directory,
            "on" or "off", or True. A kept program is used for an equal trace.
        cuda_graphs: True launches the regions between two collectives as one CUDA graph, from their third call on;
            "auto" does so where it pays by the profile. Inputs and outputs of a graph are copied.

    Returns:
        The same object; of an exported program the module that was made of it, with parameters under their names.

    Raises:
        ArgumentError: an argument is wrong; nothing was changed.
        InfeasibleError: no schedule fits in memory_limit; it says the least that one needs. It is an ArgumentError,
            and comes with the capture.
        CaptureError: the module cannot be captured from the example inputs; nothing was changed.
    """
    if sharded_by_fsdp2(model):
        check_names(compile, options)
        settings = {
            "mesh": mesh, "dp_mesh_dims": dp_mesh_dims, "example_inputs": example_inputs, "dump": dump, "cache": cache,
            "example_kwargs": example_kwargs, "artifact": artifact, "cuda_graphs": cuda_graphs,
        }  # fmt: skip
        compile_sharded(model, compile, {**settings, **options})
        return compiled_module(model)
    request = resolve(model, mesh, options_given(compile, options), dp_mesh_dims=dp_mesh_dims)
    assert request.mesh is not None
    assert request.axes.data is not None
    model = request.model
    check_examples(model, example_inputs, example_kwargs)
    file = None if artifact is None else artifact_path("artifact", artifact)
    if cache is not None and not isinstance(cache, bool):
        cache = path_of("cache", cache, "a directory, True or False")
    programs_kept = cache_at(cache)
    tracer, replaying = make_tracer(request), replaying_of(cuda_graphs, request)
    records = recorder(dump_directory(dump, dist.get_rank()))
    runner = make_runner(tracer, request.axes.data, records, programs_kept, replaying)
    runner.join_parts = join_parts
    if file is None and programs_kept is None:
        begin_compiling(request.options.backend, tracer.spec.device)
    if file is not None:
        library_for(file, model, runner, request.mesh)
    prepared = None
    if example_inputs is not None or example_kwargs is not None:
        leaves, structure = flat_call(tuple(example_inputs or ()), dict(example_kwargs or {}))
        leaves = tracer.on_device(leaves, structure)
        signature = tracer.signature(model)
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        made = runner.build_or_break(ModuleCall(model, args, kwargs, signature.grad), signature)
        if isinstance(made, GraphBreak):
            runner.split.expect(made, signature, model)
        else:
            prepared = signature, made
    shard(model, runner)
    if prepared is not None:
        runner.install(model, *prepared)
    return compiled_module(model)


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    **options: Unpack[FullyShardArguments],
) -> CompiledModule: ...
@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    **options: Unpack[FullyShardArguments],
) -> list[nn.Module]: ...
@functools.partial(takes_options, without=("units",))
def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    **options: Unpack[FullyShardArguments],
) -> nn.Module | list[nn.Module]:
    """Shard a module's parameters as one unit, in place: FSDP2's `fully_shard`, for code that calls it.

    Call it on blocks and then on the modules around them, from the inside out. Each call shards what is not sharded
    yet. The module of the outermost call is the compiled model, as `compile` makes it, with the other calls' modules as
    its units; its first call captures it. Until then each is a model by itself.

    Args:
        module: a module with a forward, or a list of modules that are one unit.
        mesh, dp_mesh_dims, reshard_after_forward, shard_placement_fn, mp_policy, offload_policy, ignored_params: as
            for `compile`, but for the parameters of this unit only. `mp_policy` is one policy, and `ignored_params` may
            be one set for all calls. Parameters may be DTensors on another axis, such as mesh["tp"], of the mesh that
            `mesh` is a part of.
        reduce, backend, activation, memory_limit, hardware, dynamic_shapes, max_captures, fullgraph, passes, verify: as
            for `compile`. They are for the model as a whole: the outermost call decides, and others may not differ.

    Returns:
        The same object.

    Raises:
        ArgumentError: an argument is wrong, or the module is sharded already, or part of a model that is.
        UnsupportedError: units are to be sharded over different meshes, or to be kept on different devices.
    """
    chosen = options_given(fully_shard, options)
    if isinstance(chosen.mp_policy, Mapping):
        raise ArgumentError(
            f"mp_policy: fully_shard takes one policy for its unit, got {brief(chosen.mp_policy)}. Policies by unit "
            "are for compile."
        )
    modules = module if isinstance(module, (list, tuple)) else [module]
    if not modules:
        raise ArgumentError("module is an empty list. Give the modules that are one unit.")
    for one in modules:
        check_model(one, in_parts=True)
    mesh = mesh if mesh is not None else default_mesh()
    records = recorder(dump_directory(None, dist.get_rank()))
    shard_unit(modules, mesh, dp_mesh_dims, chosen, records, cache_at(None))
    return module


def programs(model: nn.Module) -> list[Program]:
    """Return the programs captured for a compiled module and its submodules, newest last.

    Raises:
        ArgumentError: the module was not compiled.
    """
    return list(compiled_module(model)._graphshard.programs)


def register_forward_method(model: nn.Module, method: str) -> None:
    """Let a method that is not `forward` run on the shards: its first call captures a separate program.

    It is FSDP2's `register_fsdp_forward_method`, for `encode`, `embed`, `loss`, ... A method that only calls the model
    itself, such as a loop that generates token by token, need not be registered.

    Args:
        model: a compiled module.
        method: its name; for a method of a submodule "encoder.encode".

    Raises:
        ArgumentError: the module was not compiled, or has no such method.
    """
    model = compiled_module(model)
    if not isinstance(method, str):
        raise ArgumentError(f"method must be the name of a method such as 'encode', got {brief(method)}.")
    prefix, _, name = method.rpartition(".")
    owner = dict(model.named_modules()).get(prefix)
    if owner is None:
        raise ArgumentError(
            f"method: {model._graphshard.tracer.spec.forward_class.__name__} has no submodule "
            f"{brief(prefix)}. Given was {brief(method)}."
        )
    if not callable(getattr(users_class(owner), name, None)):
        raise ArgumentError(
            f"method: {users_class(owner).__name__} has no method {brief(name)}. Given was {brief(method)}."
        )
    if method not in model._graphshard.methods:
        model._graphshard.methods.append(method)
        install_method(model, method)
