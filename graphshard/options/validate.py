"""What each option may be by itself, whatever the model and the mesh; found before anything is done."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.export import Dim

from graphshard.errors import ArgumentError, UnsupportedError, visible
from graphshard.ir.entry import OF_UNITS, Entry, is_compiled
from graphshard.ir.mesh import Mesh
from graphshard.ir.param_table import named_parameters
from graphshard.ir.precision import check_policy
from graphshard.ir.subclasses import POST, PRE, is_subclass, missing_methods
from graphshard.lower.backends import Backend
from graphshard.passes import ActivationCheckpointing
from graphshard.pipeline.observe import Level
from graphshard.pipeline.pipeline import Pipeline
from graphshard.runtime.shown_parameter import WholeParameter
from graphshard.torch_compat.dtensor import ShardPlacementResult, is_replicated
from graphshard.torch_compat.operators import OpOverload, pytree
from graphshard.utils.argument_validation import answer_of, check_bool, check_choice, check_count, is_int
from graphshard.utils.text import brief, users_class

_VERIFY = "GRAPHSHARD_VERIFY"


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ArgumentError for the first option that is wrong by itself; the message names it and the remedy.

    Args:
        options: all fields of `Options` by name.
    """
    for name, check in CHECKS.items():
        check(options[name])
    if options["activation"] == "auto" and options["memory_limit"] is None:
        raise ArgumentError(
            'activation="auto" is decided under a limit of memory. Give memory_limit= in bytes, such as what the '
            "device has less what other things on it take."
        )
    if options["activation"] is not None and options["passes"] is not None:
        name = ActivationCheckpointing.name
        if name in {step.name for step in options["passes"]}:
            raise ArgumentError(f"activation: passes has {name!r} already. Give one of the two.")


def level_of(verify: Any) -> Any:
    """When rules are verified: as given, or by GRAPHSHARD_VERIFY."""
    return verify if verify is not None else os.environ.get(_VERIFY, "ends")


def _reshard_after_forward(value: Any) -> None:
    if not (value is None or isinstance(value, int)):
        raise ArgumentError(
            "reshard_after_forward must be True, False, None, or a number of ranks that gather again in backward, "
            f"got {brief(value)}."
        )


def _shard_placement_fn(value: Any) -> None:
    if not (value is None or callable(value)):
        raise ArgumentError(
            f"shard_placement_fn must be a function from a parameter to Shard(dim) or None, got {type(value).__name__}."
        )


def _mp_policy(value: Any) -> None:
    if isinstance(value, Mapping):
        for unit, policy in value.items():
            if not isinstance(unit, str):
                raise ArgumentError(f"mp_policy must have patterns of names of units for keys, got {brief(unit)}.")
            check_policy(policy, f"mp_policy[{brief(unit)}]")
    elif value is not None:
        check_policy(value, "mp_policy")


def _offload_policy(value: Any) -> None:
    if not (value is None or isinstance(value, OffloadPolicy)):
        raise ArgumentError(
            f"offload_policy must be a torch.distributed.fsdp.CPUOffloadPolicy or None, got {type(value).__name__}."
        )
    if value is not None:
        check_bool("offload_policy.pin_memory", getattr(value, "pin_memory", True))


def _ignored_params(value: Any) -> None:
    if isinstance(value, (nn.Parameter, str)) or not (value is None or isinstance(value, Iterable)):
        raise ArgumentError(f"ignored_params must be a set of the model's parameters, got a {type(value).__name__}.")


def _units(value: Any) -> None:
    if isinstance(value, str):
        raise ArgumentError(f"units must be a sequence of name patterns, got one string. Pass [{brief(value)}].")
    if not (value is None or (isinstance(value, Sequence) and not isinstance(value, bytes))):
        raise ArgumentError(f"units must be a sequence of name patterns such as ['layers.*'], got {brief(value)}.")


def _backend(value: Any) -> None:
    check_choice("backend", value, get_args(Backend))


def _activation(value: Any) -> None:
    if isinstance(value, (list, tuple, set, frozenset)):
        for op in value:
            if not isinstance(op, OpOverload):
                raise ArgumentError(
                    "activation lists operators whose results are saved, such as torch.ops.aten.mm.default, got "
                    + (str(op)[:60] if hasattr(op, "overloads") else brief(op))
                    + (f". Choose one of its overloads: {_overloads(op)}." if hasattr(op, "overloads") else ".")
                )
        return
    share = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1
    if not (value is None or (isinstance(value, str) and value in ("full", "auto")) or share):
        raise ArgumentError(
            "activation must be None, 'full', 'auto', a list of operators to save, or the share of memory from 0 to 1 "
            f"that activations may take, got {brief(value)}."
        )


def _overloads(packet: Any) -> str:
    return ", ".join(f"torch.ops.{packet}.{name}" for name in packet.overloads())


def _memory_limit(value: Any) -> None:
    if not (value is None or (is_int(value) and value > 0)):
        raise ArgumentError(f"memory_limit must be a positive number of bytes, got {brief(value)}.")


def _dynamic_shapes(value: Any) -> None:
    if not (value is None or isinstance(value, (tuple, list, Mapping))):
        raise ArgumentError(
            "dynamic_shapes must be a tuple with an entry for each input, or a dict by the inputs' names, as for "
            f"torch.export.export, got {type(value).__name__}."
        )
    for leaf in pytree.tree_leaves(value):
        if not isinstance(leaf, (int, type(None), Dim, type(Dim.AUTO))):
            raise ArgumentError(
                f"dynamic_shapes: {brief(leaf)} is no dimension. Give None, an int, a torch.export.Dim, Dim.AUTO, "
                "Dim.STATIC or Dim.DYNAMIC."
            )


def _max_captures(value: Any) -> None:
    check_count("max_captures", value)


def _fullgraph(value: Any) -> None:
    check_bool("fullgraph", value)


def _passes(value: Any) -> None:
    if not (value is None or isinstance(value, Pipeline)):
        raise ArgumentError(
            f"passes must be a graphshard.Pipeline, got {type(value).__name__}. Start from graphshard.Pipeline() and "
            "use insert, replace and disable."
        )


def _verify(value: Any) -> None:
    check_choice("verify" if value is not None else _VERIFY, level_of(value), get_args(Level))


# By option, what raises ArgumentError if a value is wrong by itself. `hardware` is checked where its file is read.
CHECKS: Mapping[str, Callable[[Any], None]] = {
    "reshard_after_forward": _reshard_after_forward,
    "shard_placement_fn": _shard_placement_fn,
    "mp_policy": _mp_policy,
    "offload_policy": _offload_policy,
    "ignored_params": _ignored_params,
    "units": _units,
    "backend": _backend,
    "activation": _activation,
    "memory_limit": _memory_limit,
    "dynamic_shapes": _dynamic_shapes,
    "max_captures": _max_captures,
    "fullgraph": _fullgraph,
    "passes": _passes,
    "verify": _verify,
}


# What gloo and NCCL add up.
_REDUCIBLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_containers(inputs: Any, kwargs: Any, names: tuple[str, str] = ("example_inputs", "example_kwargs")) -> None:
    """Raise ArgumentError where a container of a call's inputs was forgotten; `names` are those of the arguments."""
    if not (inputs is None or isinstance(inputs, (tuple, list))):
        more = f". Pass ({'tensor' if isinstance(inputs, torch.Tensor) else '...'},)."
        raise ArgumentError(
            f"{names[0]} must be a tuple of the call's positional inputs, got {type(inputs).__name__}{more}"
        )
    if not (kwargs is None or isinstance(kwargs, Mapping)):
        raise ArgumentError(f"{names[1]} must be a dict of the call's keyword inputs, got {type(kwargs).__name__}.")
    for name in kwargs or ():
        if not isinstance(name, str):
            raise ArgumentError(f"{names[1]} must have names of inputs for keys, got {brief(name)}.")


def check_examples(
    model: nn.Module, inputs: Any, kwargs: Any, names: tuple[str, str] = ("example_inputs", "example_kwargs")
) -> None:
    """Raise ArgumentError for inputs that forward does not take: another container, too many, or others by name."""
    check_containers(inputs, kwargs, names)
    if inputs is None and kwargs is None:
        return
    try:
        signature = inspect.signature(model.forward)
        signature.bind(*(inputs or ()), **(kwargs or {}))
    except TypeError as error:
        given = ", ".join([*map(brief, inputs or ()), *(f"{brief(key)}: {brief(kwargs[key])}" for key in kwargs or ())])
        raise ArgumentError(
            f"{names[0]} and {names[1]} do not fit {type(model).__name__}.forward: "
            f"{visible(str(error), lines=False)[:200]}. Given were ({given[:200]})."
        ) from None


def default_mesh() -> DeviceMesh:
    """All ranks on one axis, of CUDA devices where there are any.

    Raises:
        ArgumentError: there is no process group yet.
    """
    if not dist.is_initialized():
        raise ArgumentError(
            "without a mesh, compile shards over all ranks, but there is no process group. Call "
            "torch.distributed.init_process_group() first, or pass a mesh."
        )
    return init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (dist.get_world_size(),))


def check_mesh(mesh: Any) -> Mesh:
    """The axes of a mesh; raise ArgumentError if it is none to compile for."""
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentError(
            f"mesh must be a torch.distributed DeviceMesh, got {type(mesh).__name__}. Make one with "
            "torch.distributed.device_mesh.init_device_mesh('cuda', (world_size,))."
        )
    axes = Mesh.of(mesh)
    if mesh.device_type not in ("cpu", "cuda"):
        raise ArgumentError(f"mesh must be of 'cpu' or 'cuda' devices, got {mesh.device_type!r}.")
    if mesh.device_type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(
            "mesh is of 'cuda' devices, but torch.cuda.is_available() is False here. Use a 'cpu' mesh on this machine."
        )
    if mesh.get_coordinate() is None:
        raise ArgumentError("mesh does not contain this rank. Call compile on the ranks of the mesh only.")
    return axes


def check_model(model: Any, *, in_parts: bool = False) -> None:
    """Raise ArgumentError if the module cannot be compiled; submodules may have been, if it is sharded in parts."""
    what = "module" if in_parts else "model"
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"{what} must be an nn.Module, got {type(model).__name__}.")
    cls = users_class(model)
    named = (*model.named_modules(), *model.named_parameters(), *model.named_buffers())
    for name in (name for name, _ in named):
        try:
            name.encode()
        except UnicodeEncodeError:
            shown = brief(name)
            raise ArgumentError(f"{what}: the name {shown} has a character that no file takes. Rename it.") from None
    for name, sub in (("", model),) if in_parts else model.named_modules():
        if is_compiled(sub) or (name and not OF_UNITS.isdisjoint(sub.__dict__)):
            which = f"its submodule {name!r} is" if name else "it is"
            raise ArgumentError(
                f"{what}: {cls.__name__} cannot be compiled: {which} already compiled. Compile the root module, once."
            )
    for name, sub in model.named_modules():
        if is_replicated(sub):
            which = f"its submodule {name!r}" if name else "it"
            raise ArgumentError(
                f"{what}: {cls.__name__} cannot be compiled: torch's replicate was applied to {which}, whose gradients "
                "it reduces in hooks. Apply replicate to a module around the compiled one, or leave it out."
            )
        if isinstance(sub, torch.jit.ScriptModule):
            which = f"its submodule {name!r}" if name else "it"
            raise ArgumentError(
                f"{what}: {cls.__name__} cannot be compiled: {which} was made by torch.jit, which holds its parameters "
                "and code where nobody can exchange them. Leave torch.jit.script or trace out: the module runs as it "
                "is written. Functions that torch.jit.script made may stay."
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
            raise ArgumentError(
                f"{what}: {cls.__name__} cannot be compiled: {name} of {owner} has no shape yet. Call the model once "
                "with an example of its inputs, before graphshard.compile and the optimizer."
            )
        if isinstance(tensor, WholeParameter):
            raise ArgumentError(
                f"{what}: {cls.__name__} cannot be compiled: it is, and {name} is gathered within "
                "graphshard.uncompiled. Leave the block, or compile a copy.deepcopy of it."
            )
    if cls.forward is nn.Module.forward:
        raise ArgumentError(
            f"{what}: {cls.__name__} has no forward, so there is nothing to compile. Compile the module that calls it, "
            "or give it a forward."
        )
    if isinstance(model.__dict__.get("forward"), Entry):
        raise ArgumentError(f"{what}: {cls.__name__} is a part of a compiled model. Compile the root module, once.")
    if "forward" in model.__dict__:
        raise ArgumentError(
            f"{what}: {cls.__name__} has a forward of its own as an attribute, which hides that of its class. Compile "
            "the model before whatever replaced its forward is applied, or subclass it."
        )


def check_ignored(model: nn.Module, ignored: Iterable[nn.Parameter] | None) -> frozenset[nn.Parameter]:
    """The parameters to leave alone; raise ArgumentError if they are not the model's."""
    own = {id(param) for param in model.parameters()}
    found = tuple(ignored or ())
    for item in found:
        if id(item) not in own:
            what = f"a tensor of shape {list(item.shape)}" if isinstance(item, torch.Tensor) else brief(item)
            raise ArgumentError(
                f"ignored_params holds {what}, which is no parameter of {type(model).__name__}. Pass the objects in "
                "model.parameters(), before any conversion."
            )
    return frozenset(found)


def check_params(
    model: nn.Module,
    device_type: str,
    ignored: frozenset[nn.Parameter],
    known: Container[nn.Parameter] = (),
    *,
    distributed: bool = False,
    num_ranks: int | None = None,
) -> None:
    """Raise ArgumentError for the first parameter that cannot be sharded over a mesh of devices of a type.

    UnsupportedError for one whose gradients are to be of another dtype.

    Those that are `known` are sharded over it already; DTensors may be `distributed` over a tensor axis, and were
    looked at, as those were that all ranks of the mesh have whole.
    """
    for (name, *_), param in named_parameters(model).items():
        if param in known:
            continue
        if isinstance(param, DTensor) and not distributed and not _is_whole(param, num_ranks):
            raise ArgumentError(
                f"parameter {name} is a DTensor already (fully_shard or parallelize_module was applied). Pass the "
                "plain module, and to cut it along a tensor axis parallelize=, a function of (model, mesh); or, where "
                "there are process groups, the DeviceMesh that its axis is of."
            )
        if not isinstance(param, DTensor):
            _check_class(name, param, ignored=param in ignored)
        if getattr(param, "grad_dtype", param.dtype) != param.dtype:  # torch 2.11 may have none
            raise UnsupportedError(
                f"parameter {name} is of {param.dtype} and wants gradients of another dtype (grad_dtype="
                f"{param.grad_dtype}). Leave grad_dtype as it is: gradients are reduced in reduce_dtype of mp_policy, "
                "and are then of the parameter's dtype."
            )
        if param in ignored:
            continue
        if param.device.type not in ("cpu", "meta", device_type):
            raise ArgumentError(
                f"parameter {name} is on {param.device}, but mesh is of {device_type!r} devices. Move the model "
                f"to the CPU first, or use a mesh of {param.device.type!r} devices."
            )
        if param.requires_grad and param.dtype not in _REDUCIBLE:
            raise ArgumentError(
                f"parameter {name} is trainable and of {param.dtype}, whose gradients cannot be reduced. Use one of "
                f"{', '.join(str(dtype) for dtype in _REDUCIBLE)}, freeze it, or pass it in ignored_params."
            )


def _is_whole(param: DTensor, num_ranks: int | None) -> bool:
    return param.device_mesh.size() == num_ranks and all(placement.is_replicate() for placement in param.placements)


def _check_class(name: str, param: nn.Parameter, *, ignored: bool) -> None:
    """Raise ArgumentError for a tensor subclass that does not say how it is gathered.

    On the meta device it may say so later, when there are shards to set methods on.
    """
    if not is_subclass(param):
        return
    kind, missing = type(param).__name__, missing_methods(param)
    if ignored:
        raise ArgumentError(
            f"parameter {name} is a {kind}, a tensor subclass, and in ignored_params, which a program takes for a "
            f"plain tensor. Shard it, with {PRE} and {POST}, or replace it by a plain tensor."
        )
    if missing and not param.is_meta:
        raise ArgumentError(
            f"parameter {name} is a {kind}, a tensor subclass, and has no {missing}: sharded, it would become a plain "
            f"tensor, and what else it holds would be lost. Give {kind} both methods, FSDP2's protocol for "
            f"subclasses, or replace the parameter by a plain tensor before graphshard.compile."
        )


def placements_of(model: nn.Module, placement_fn: Any, left_out: Container[nn.Parameter]) -> dict[str, Any]:
    """What `shard_placement_fn` answers for parameters, by their first names, where that is not None.

    It is asked once for each, as FSDP2 does it, and not for scalars and those to leave out.

    Raises:
        ArgumentError: it raised something.
    """
    if placement_fn is None:
        return {}
    named = {name: param for (name, *_), param in named_parameters(model).items()}
    asked = {name: param for name, param in named.items() if param not in left_out and param.dim() > 0}
    answers = {name: answer_of("shard_placement_fn", placement_fn, param) for name, param in asked.items()}
    return {name: answer for name, answer in answers.items() if answer is not None}


def check_placements(model: nn.Module, answers: Mapping[str, Any]) -> dict[str, int]:
    """The dim of each parameter that is to be sharded along a certain one, by its first name.

    Args:
        answers: those of `placements_of`.

    Raises:
        ArgumentError: an answer is something else than a dim of the parameter.
    """
    dims: dict[str, int] = {}
    for name, answer in answers.items():
        placement, param = answer, model.get_parameter(name)
        if ShardPlacementResult is not None and isinstance(answer, ShardPlacementResult):
            placement = answer.placement
        if placement is None:
            continue
        if not isinstance(placement, Shard):
            raise ArgumentError(
                f"shard_placement_fn returned {brief(placement)} for parameter {name}. It must return Shard(dim), "
                "FSDP2's ShardPlacementResult, or None."
            )
        if not -param.dim() <= placement.dim < param.dim():
            raise ArgumentError(
                f"shard_placement_fn returned Shard({placement.dim}) for parameter {name}, which is invalid for a "
                f"{param.dim()}D tensor of shape {list(param.shape)}."
            )
        dims[name] = placement.dim % param.dim()
    return dims
