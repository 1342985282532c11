"""Everything that can be wrong with the arguments of `compile`, found before anything is changed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from graphshard.errors import ArgumentError
from graphshard.observe import Level
from graphshard.params import named_parameters
from graphshard.passes import ActivationCheckpointing
from graphshard.pipeline import Pipeline

_BACKENDS = ("inductor", "eager")


def check_arguments(mesh: Any, reshard_after_forward: Any, mp_policy: Any, backend: Any, max_captures: Any) -> None:
    """Raise ArgumentError for the first wrong argument; the message names it and the remedy."""
    _check_mesh(mesh)
    if not (reshard_after_forward is None or isinstance(reshard_after_forward, bool)):
        raise ArgumentError(
            f"reshard_after_forward must be True, False or None, got {reshard_after_forward!r}. Gathering again "
            "over a smaller group (an int in FSDP2) is not supported yet."
        )
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise ArgumentError(
            f"mp_policy must be a torch.distributed.fsdp.MixedPrecisionPolicy, got {type(mp_policy).__name__}."
        )
    if backend not in _BACKENDS:
        raise ArgumentError(f"backend must be one of {', '.join(map(repr, _BACKENDS))}, got {backend!r}.")
    if not isinstance(max_captures, int) or max_captures < 1:
        raise ArgumentError(f"max_captures must be a positive int, got {max_captures!r}.")


def check_debugging(passes: Any, verify: Any, dump: Any) -> Level:
    """Raise ArgumentError for wrong passes, level of verification or directory; return the level that holds."""
    if not (passes is None or isinstance(passes, Pipeline)):
        raise ArgumentError(
            f"passes must be a graphshard.Pipeline, got {type(passes).__name__}. Start from graphshard.Pipeline() and "
            "use insert, replace and disable."
        )
    if not (dump is None or isinstance(dump, (str, os.PathLike))):
        raise ArgumentError(f"dump must be a directory, got {type(dump).__name__}.")
    where = "verify" if verify is not None else "GRAPHSHARD_VERIFY"
    level = verify if verify is not None else os.environ.get("GRAPHSHARD_VERIFY", "ends")
    if level not in get_args(Level):
        raise ArgumentError(f"{where} must be one of {', '.join(map(repr, get_args(Level)))}, got {level!r}.")
    return cast(Level, level)


def with_activation(pipeline: Pipeline, activation: Any) -> Pipeline:
    """The pipeline with this policy of activation checkpointing in front.

    Raises:
        ArgumentError: it is no policy, or the pipeline has one already.
    """
    if activation is None:
        return pipeline
    if isinstance(activation, (list, tuple, set, frozenset)):
        for op in activation:
            if not isinstance(op, torch._ops.OpOverload):
                raise ArgumentError(
                    f"activation lists operators whose results are saved, such as torch.ops.aten.mm.default, got {op!r}"
                    + (f". Choose one of its overloads: {_overloads(op)}." if hasattr(op, "overloads") else ".")
                )
        policy: Any = tuple(sorted(activation, key=str))
    elif activation == "full" and isinstance(activation, str):
        policy = activation
    elif isinstance(activation, (int, float)) and not isinstance(activation, bool) and 0 <= activation <= 1:
        policy = float(activation)
    else:
        raise ArgumentError(
            "activation must be None, 'full', a list of operators to save, or the share of memory from 0 to 1 "
            f"that activations may take, got {activation!r}."
        )
    if ActivationCheckpointing.name in {step.name for step in pipeline}:
        raise ArgumentError(f"activation: passes has {ActivationCheckpointing.name!r} already. Give one of the two.")
    return Pipeline((ActivationCheckpointing(policy), *pipeline))


def _overloads(packet: Any) -> str:
    return ", ".join(f"torch.ops.{packet}.{name}" for name in packet.overloads())


def check_activation_units(model: nn.Module, activation: Any, units: Sequence[str]) -> None:
    """Raise ArgumentError if there is nothing that activation checkpointing could apply to."""
    if activation is not None and not units:
        raise ArgumentError(
            f"activation={activation!r} is about the units of {type(model).__name__}, and none were found. Name them "
            "with units=, such as units=['layers.*']."
        )


def check_examples(units: Any, example_inputs: Any, example_kwargs: Any, dynamic_shapes: Any = None) -> None:
    """Raise ArgumentError where a container was forgotten."""
    if isinstance(units, str):
        raise ArgumentError(f"units must be a sequence of name patterns, got one string. Pass [{units!r}].")
    if not (example_inputs is None or isinstance(example_inputs, (tuple, list))):
        raise ArgumentError(
            f"example_inputs must be a tuple of the call's positional inputs, got {type(example_inputs).__name__}"
        )
    if not (dynamic_shapes is None or isinstance(dynamic_shapes, (tuple, list, Mapping))):
        raise ArgumentError(
            "dynamic_shapes must be a tuple with an entry for each input, or a dict by the inputs' names, as for "
            f"torch.export.export, got {type(dynamic_shapes).__name__}."
        )
    if not (example_kwargs is None or isinstance(example_kwargs, Mapping)):
        raise ArgumentError(
            f"example_kwargs must be a dict of the call's keyword inputs, got {type(example_kwargs).__name__}"
        )


def _check_mesh(mesh: Any) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentError(
            f"mesh must be a torch.distributed DeviceMesh, got {type(mesh).__name__}. Make one with "
            "torch.distributed.device_mesh.init_device_mesh('cuda', (world_size,))."
        )
    if mesh.ndim != 1:
        named = mesh.mesh_dim_names or "no axis names"
        advice = (
            f"Pass the axis to shard over, such as mesh[{mesh.mesh_dim_names[-1]!r}]."
            if mesh.mesh_dim_names
            else "Name its axes with mesh_dim_names and pass the one to shard over."
        )
        raise ArgumentError(
            f"mesh must have one axis, got {mesh.ndim} ({named}): replication over a second axis (HSDP) is not "
            f"supported yet. {advice}"
        )
    if mesh.device_type not in ("cpu", "cuda"):
        raise ArgumentError(f"mesh must be of 'cpu' or 'cuda' devices, got {mesh.device_type!r}.")
    if mesh.device_type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(
            "mesh is of 'cuda' devices, but torch.cuda.is_available() is False here. Use a 'cpu' mesh on this machine."
        )
    if mesh.get_coordinate() is None:
        raise ArgumentError("mesh does not contain this rank. Call compile on the ranks of the mesh only.")


def check_device(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise ArgumentError if a parameter is neither on the CPU, nor on meta, nor on the mesh's kind of device."""
    for name, param in model.named_parameters():
        if param.device.type not in ("cpu", "meta", mesh.device_type):
            raise ArgumentError(
                f"parameter {name} is on {param.device}, but mesh is of {mesh.device_type!r} devices. Move the model "
                f"to the CPU first, or use a mesh of {param.device.type!r} devices."
            )


def check_model(model: Any) -> None:
    """Raise ArgumentError if the module cannot be compiled."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model must be an nn.Module, got {type(model).__name__}.")
    cls = type(model)
    for name, sub in model.named_modules():
        if "_graphshard" in sub.__dict__:
            what = f"its submodule {name!r} is" if name else "it is"
            raise ArgumentError(
                f"{cls.__name__} cannot be compiled: {what} already compiled. Compile the root module, once."
            )
    if cls.forward is nn.Module.forward:
        raise ArgumentError(
            f"{cls.__name__} has no forward, so there is nothing to compile. Compile the module that calls it, or "
            "give it a forward."
        )
    _check_params(model)


def _check_params(model: nn.Module) -> None:
    trainable: dict[torch.dtype, str] = {}
    for (name, *_), param in named_parameters(model).items():
        if isinstance(param, DTensor):
            raise ArgumentError(
                f"parameter {name} is a DTensor already (fully_shard or parallelize_module was applied). Compile "
                "the plain module."
            )
        if param.dim() == 0:
            raise ArgumentError(
                f"parameter {name} is a scalar, which cannot be sharded. Change {name} to a 1D tensor with numel "
                "equal to 1."
            )
        if param.requires_grad:
            trainable.setdefault(param.dtype, name)
    if len(trainable) > 1:
        listed = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in trainable.items())
        raise ArgumentError(
            f"trainable parameters must have one dtype, but {listed}. Convert the model with .to(dtype), and set "
            "mp_policy for the dtype to compute in."
        )
