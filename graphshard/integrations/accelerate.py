"""Hugging Face Accelerate with graphshard instead of its FSDP2 preparation.

    accelerator = use_graphshard(Accelerator())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

`prepare` compiles the model and lets the optimizer update its shards. Everything else is Accelerate's, in its state for
FSDP2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.optim import Optimizer

from graphshard.api import compile
from graphshard.errors import ArgumentError, UnsupportedError
from graphshard.module.compiled_module import CompiledModule
from graphshard.options.options import check_names


def _check_optimizers(model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Raise ArgumentError if an optimizer updates other tensors than the model's, or has state already."""
    known = {id(param) for param in model.parameters()}
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            strange = [tuple(param.shape) for param in group["params"] if id(param) not in known]
            if strange:
                raise ArgumentError(
                    f"optimizer: group {number} of {type(optimizer).__name__} holds a tensor of shape "
                    f"{list(strange[0])} that is not a parameter of {type(model).__name__}. Make the optimizer from "
                    "the parameters that the model has now."
                )
        if any(optimizer.state.values()):
            raise ArgumentError(
                f"optimizer: {type(optimizer).__name__} has state of whole parameters already. Prepare it before the "
                "first step, and load its state afterwards."
            )


AcceleratorT = TypeVar("AcceleratorT")


def use_graphshard(
    accelerator: AcceleratorT, mesh: DeviceMesh | None = None, *, plugin: Any = None, **options: Any
) -> AcceleratorT:
    """Let an accelerator's `prepare` compile the model instead of sharding it with FSDP2.

    The plugin's policies of precision, offloading, resharding, wrapping and checkpointing hold, unless an option says
    otherwise. `save_state`, `load_state`, `accumulate`, `no_sync`, `clip_grad_norm_` and `get_state_dict` work as with
    FSDP2; a checkpoint of one loads into the other.

    Args:
        accelerator: an `accelerate.Accelerator` of several processes, on GPUs or with `cpu=True`.
        mesh: as for `graphshard.compile`; None is Accelerate's, if it has one, or all ranks.
        plugin: a `FullyShardedDataParallelPlugin(fsdp_version=2)`; None is the accelerator's, or the default one. On
            the CPU an accelerator forgets its plugin.
        options: of `graphshard.compile`.

    Returns:
        The same accelerator.

    Raises:
        ArgumentError: there is one process only, the plugin is not of version 2, or an option is unknown to `compile`.
        UnsupportedError: the accelerator is for DeepSpeed, Megatron-LM or XLA, for float8 or `torch.compile`, or for
            tensor, context or sequence parallelism.
    """
    check_names(compile, options)
    _check_accelerator(accelerator)
    become_fsdp2(accelerator, plugin)
    given: Any = accelerator
    given.prepare = functools.partial(_prepare, given, given.prepare, {"mesh": mesh, **options})
    return accelerator


def _check_accelerator(accelerator: Any) -> None:
    state = getattr(accelerator, "state", None)
    if state is None or not hasattr(accelerator, "prepare"):
        raise ArgumentError(f"accelerator must be an accelerate.Accelerator, got {type(accelerator).__name__}.")
    kind = state.distributed_type.value
    if kind == "NO":
        raise ArgumentError(
            "accelerator: there is one process only. Start the script with torchrun or accelerate launch, and on CPUs "
            "make it with Accelerator(cpu=True)."
        )
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
        raise UnsupportedError(f"accelerator: it is for {kind}, which shards models itself. Make it without.")
    if accelerator.mixed_precision == "fp8":
        raise UnsupportedError(
            "accelerator: mixed_precision='fp8' converts the model after it was compiled. Convert it with torchao's "
            "convert_to_float8_training before prepare, and use mixed_precision='bf16' or 'no'."
        )
    if state.dynamo_plugin.backend.value != "NO":
        raise UnsupportedError("accelerator: graphshard compiles the model; make it without dynamo_backend.")
    parallel = accelerator.parallelism_config
    if parallel is not None and not set(parallel.active_mesh_dims) <= {"dp_replicate", "dp_shard"}:
        raise UnsupportedError(
            f"accelerator: parallelism_config has {', '.join(parallel.active_mesh_dims)}. Supported are dp_replicate "
            "and dp_shard."
        )


def become_fsdp2(accelerator: Any, plugin: Any = None) -> None:
    """Put an accelerator into the state that it has on GPUs when it is given a plugin for FSDP2.

    Raises:
        ArgumentError: the plugin is not of version 2, or wants what graphshard does not do.
    """
    from accelerate import DistributedType, FullyShardedDataParallelPlugin, PartialState

    state = accelerator.state
    if plugin is None:
        plugin = getattr(state, "fsdp_plugin", None) or FullyShardedDataParallelPlugin(fsdp_version=2)
    if plugin.fsdp_version != 2:
        raise ArgumentError("plugin is for FSDP1. Make it as FullyShardedDataParallelPlugin(fsdp_version=2, ...).")
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)  # a policy that it has stays
    state.fsdp_plugin = plugin
    state.distributed_type = PartialState().distributed_type = DistributedType.FSDP


def _prepare(
    accelerator: Any, prepare: Callable[..., Any], options: dict[str, Any], *objects: Any, **placement: Any
) -> Any:
    """Compile the model, let the optimizers update its shards, and call the accelerator's `prepare`."""
    models = [each for each in objects if isinstance(each, nn.Module)]
    if not models:
        return prepare(*objects, **placement)
    if len(models) > 1:
        raise ArgumentError("accelerator.prepare: there are several models, and FSDP2's state is for one. Pass one.")
    (model,) = models
    optimizers = [each for each in objects if isinstance(each, Optimizer)]
    if not isinstance(model, CompiledModule):
        _compile(accelerator, model, optimizers, options)
    if not optimizers:  # to evaluate: Accelerate takes a model without one for a mistake
        model._is_accelerate_prepared = True  # type: ignore[assignment]
        kept = [accelerator.prepare_model(each) if each is model else prepare(each) for each in objects]
        return tuple(kept) if len(kept) > 1 else kept[0]
    groups = [[list(group["params"]) for group in each.param_groups] for each in optimizers]
    result = prepare(*objects, **placement)
    for optimizer, lists in zip(optimizers, groups, strict=True):
        for group, params in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = params
    return result


def _compile(accelerator: Any, model: nn.Module, optimizers: list[Optimizer], options: dict[str, Any]) -> None:
    """Compile the model as the plugin says, and let the optimizers update its shards."""
    _check_optimizers(model, optimizers)
    if accelerator.mixed_precision != "no":
        for param in model.parameters():
            if param.requires_grad and param.is_floating_point():
                param.data = param.data.float()  # the precision in which FSDP2's preparation lets optimizers work
    before = dict(model.named_parameters())
    compile(model, **{**_options_of(accelerator, model), **{k: v for k, v in options.items() if v is not None}})
    moved = {param: model.get_parameter(name) for name, param in before.items()}
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["params"] = [moved[param] for param in group["params"]]


def _options_of(accelerator: Any, model: nn.Module) -> dict[str, Any]:
    """Return the arguments of `compile` that follow from the plugin and the mesh of an accelerator."""
    from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy, get_parameters_from_modules

    plugin, mesh = accelerator.state.fsdp_plugin, accelerator.torch_device_mesh
    if plugin.cpu_ram_efficient_loading:
        raise UnsupportedError(
            "plugin: with cpu_ram_efficient_loading the ranks but the first have no weights. Make the model on the "
            "meta device, and after prepare call graphshard.integrations.safetensors.load_safetensors(model, folder)."
        )
    options: dict[str, Any] = {}
    if mesh is not None:
        options["mesh"] = mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]
    if not plugin.reshard_after_forward:
        options["reshard_after_forward"] = False
    if plugin.mixed_precision_policy is not None:
        options["mp_policy"] = plugin.mixed_precision_policy
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        options["offload_policy"] = plugin.cpu_offload
    if plugin.ignored_modules is not None:
        options["ignored_params"] = get_parameters_from_modules(plugin.ignored_modules, model, accelerator.device)
    if plugin.activation_checkpointing_offload:
        raise UnsupportedError(
            "plugin: activation_checkpointing_offload is not supported. Leave it out, or pass memory_limit=<bytes>."
        )
    if plugin.activation_checkpointing:
        options["activation"] = "full"
        plugin.activation_checkpointing = False  # or Accelerate would wrap the compiled model
    plugin.set_auto_wrap_policy(model)
    policy = fsdp2_prepare_auto_wrap_policy(plugin, model)
    if policy is not None:
        options["units"] = [lambda name, module: policy(module)]
    return options
