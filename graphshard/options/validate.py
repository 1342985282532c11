"""Checks of the arguments of `compile`, made before anything is changed: options, inputs, model, parameters, mesh."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.export import Dim

from graphshard.errors import ArgumentError, UnsupportedError, visible
from graphshard.ir.mesh import DATA, TENSOR, Mesh, axes_of_mesh
from graphshard.ir.subclasses import POST, PRE, is_subclass, missing_methods
from graphshard.ir.submodule_entry_points import OF_UNITS, EntryPoint, is_compiled
from graphshard.ir.units import check_policy
from graphshard.lower.backends import Backend
from graphshard.passes import ActivationCheckpointing
from graphshard.pipeline.instrumentation import Level
from graphshard.pipeline.pipeline import Pipeline
from graphshard.runtime.shown_parameters import WholeParameter
from graphshard.torch_compat.dtensor import ShardPlacementResult, root_of, was_applied
from graphshard.torch_compat.fsdp2 import state_of
from graphshard.torch_compat.torch_ops import OpOverload, pytree
from graphshard.utils.argument_validation import answer_of, check_bool, check_choice, check_count, is_int
from graphshard.utils.text import brief, users_class

_VERIFY = "GRAPHSHARD_VERIFY"

# Dtypes that gloo and NCCL reduce.
_REDUCIBLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)

# --- options -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rule:
    """A rule that the value of an option is None or fits, and the words of its message."""

    expected: str
    fits: Callable[[Any], bool]
    shown: Callable[[Any], str] = brief
    remedy: str = ""


def _class_name(value: object) -> str:
    return type(value).__name__


_RULES: Mapping[str, _Rule] = {
    "reshard_after_forward": _Rule(
        "True, False, None, or a number of ranks that gather again in backward", lambda value: isinstance(value, int)
    ),
    "shard_placement_fn": _Rule("a function from a parameter to Shard(dim) or None", callable, _class_name),
    "offload_policy": _Rule(
        "a torch.distributed.fsdp.CPUOffloadPolicy or None", lambda value: isinstance(value, OffloadPolicy), _class_name
    ),
    "ignored_params": _Rule(
        "a set of the model's parameters",
        lambda value: isinstance(value, Iterable) and not isinstance(value, (nn.Parameter, str)),
        lambda value: f"a {_class_name(value)}",
    ),
    "units": _Rule(
        "a sequence of name patterns such as ['layers.*']",
        lambda value: isinstance(value, Sequence) and not isinstance(value, (str, bytes)),
        lambda value: f"one string. Pass [{brief(value)}]" if isinstance(value, str) else brief(value),
    ),
    "reduce": _Rule("None, 'exchange' or 'auto'", lambda v: isinstance(v, str) and v in ("exchange", "auto")),
    "activation": _Rule(
        "None, 'full', 'auto', a list of operators to save, or the share of memory from 0 to 1 that activations may "
        "take",
        lambda value: (
            isinstance(value, (list, tuple, set, frozenset))
            or (isinstance(value, str) and value in ("full", "auto"))
            or (isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1)
        ),
    ),
    "memory_limit": _Rule(
        "a positive whole number of bytes, such as 70 * 10**9", lambda value: is_int(value) and value > 0
    ),
    "dynamic_shapes": _Rule(
        "a tuple with an entry for each input, or a dict by the inputs' names, as for torch.export.export",
        lambda value: isinstance(value, (tuple, list, Mapping)),
        _class_name,
    ),
    "passes": _Rule(
        "a graphshard.Pipeline",
        lambda value: isinstance(value, Pipeline),
        _class_name,
        " Start from graphshard.Pipeline() and use insert, replace and disable.",
    ),
}


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ArgumentError for an option that is wrong whatever the model and the mesh; `hardware` is read later."""
    for name, rule in _RULES.items():
        value = options[name]
        if value is not None and not rule.fits(value):
            raise ArgumentError(f"{name} must be {rule.expected}, got {rule.shown(value)}.{rule.remedy}")
    _check_mp_policy(options["mp_policy"])
    check_bool("offload_policy.pin_memory", getattr(options["offload_policy"], "pin_memory", True))
    check_choice("backend", options["backend"], get_args(Backend))
    activation, passes = options["activation"], options["passes"]
    for op in activation if isinstance(activation, (list, tuple, set, frozenset)) else ():
        _check_operator(op)
    for leaf in pytree.tree_leaves(options["dynamic_shapes"]):
        if not isinstance(leaf, (int, type(None), Dim, type(Dim.AUTO))):
            raise ArgumentError(
                f"dynamic_shapes: {brief(leaf)} is not a dimension. Give None, an int, a torch.export.Dim, Dim.AUTO, "
                "Dim.STATIC or Dim.DYNAMIC."
            )
    check_count("max_captures", options["max_captures"])
    check_bool("fullgraph", options["fullgraph"])
    verify = options["verify"]
    check_choice("verify" if verify is not None else _VERIFY, level_of(verify), get_args(Level))
    if activation == "auto" and options["memory_limit"] is None:
        raise ArgumentError(
            'activation="auto" is decided under a limit of memory. Give memory_limit= in bytes, such as what the '
            "device has less what other things on it take."
        )
    if activation is not None and passes is not None and ActivationCheckpointing.name in {step.name for step in passes}:
        raise ArgumentError(f"activation: passes has {ActivationCheckpointing.name!r} already. Give one of the two.")


def level_of(verify: Any) -> Any:
    """Return when rules are verified: as given, or by GRAPHSHARD_VERIFY."""
    return verify if verify is not None else os.environ.get(_VERIFY, "ends")


def _check_mp_policy(value: Any) -> None:
    if isinstance(value, Mapping):
        for unit, policy in value.items():
            if not isinstance(unit, str):
                raise ArgumentError(f"mp_policy must have patterns of names of units for keys, got {brief(unit)}.")
            check_policy(policy, f"mp_policy[{brief(unit)}]")
    elif value is not None:
        check_policy(value, "mp_policy")


def _check_operator(op: Any) -> None:
    if isinstance(op, OpOverload):
        return
    found = brief(op)
    if hasattr(op, "overloads"):
        overloads = ", ".join(f"torch.ops.{op}.{name}" for name in op.overloads())
        found = f"{str(op)[:60]}. Choose one of its overloads: {overloads}"
    raise ArgumentError(
        f"activation lists operators whose results are saved, such as torch.ops.aten.mm.default, got {found}."
    )


# --- inputs ------------------------------------------------------------------------------------------------------

_EXAMPLES = ("example_inputs", "example_kwargs")


def check_containers(inputs: Any, kwargs: Any, names: tuple[str, str] = _EXAMPLES) -> None:
    """Raise ArgumentError unless a call's inputs are in a tuple or list and in a dict; `names` are the arguments'."""
    if not (inputs is None or isinstance(inputs, (tuple, list))):
        more = f". Pass ({'tensor' if isinstance(inputs, torch.Tensor) else '...'},)."
        more = f". Pass it as {names[1]}=." if isinstance(inputs, dict) else more
        raise ArgumentError(
            f"{names[0]} must be a tuple of the call's positional inputs, got {type(inputs).__name__}{more}"
        )
    if not (kwargs is None or isinstance(kwargs, Mapping)):
        raise ArgumentError(f"{names[1]} must be a dict of the call's keyword inputs, got {type(kwargs).__name__}.")
    for name in kwargs or ():
        if not isinstance(name, str):
            raise ArgumentError(f"{names[1]} must have names of inputs for keys, got {brief(name)}.")


def check_examples(model: nn.Module, inputs: Any, kwargs: Any, names: tuple[str, str] = _EXAMPLES) -> None:
    """Raise ArgumentError for inputs that forward does not take."""
    check_containers(inputs, kwargs, names)
    if inputs is None and kwargs is None:
        return
    try:
        inspect.signature(model.forward).bind(*(inputs or ()), **(kwargs or {}))
    except TypeError as error:
        given = ", ".join([*map(brief, inputs or ()), *(f"{brief(key)}: {brief(kwargs[key])}" for key in kwargs or ())])
        raise ArgumentError(
            f"{names[0]} and {names[1]} do not fit {type(model).__name__}.forward: "
            f"{visible(str(error), lines=False)[:200]}. Given were ({given[:200]})."
        ) from None


# --- mesh --------------------------------------------------------------------------------------------------------


def default_mesh(params: Iterable[nn.Parameter] = ()) -> DeviceMesh:
    """Return a mesh of all ranks, of CUDA devices where there are any.

    It has one axis, or is the mesh that DTensors among the parameters are on axes of, without further axes of size 1.
    """
    if not dist.is_initialized():
        raise ArgumentError(
            "without a mesh, compile shards over all ranks, but there is no process group. Call "
            "torch.distributed.init_process_group() first, or pass a mesh. Start the script with torchrun, which sets "
            "what it reads."
        )
    of_params = next((root_of(param.device_mesh) for param in params if isinstance(param, DTensor)), None)
    names = () if of_params is None else of_params.mesh_dim_names or ()
    if of_params is not None and set(names).intersection(DATA) and set(names).intersection(TENSOR):
        sizes = dict(zip(names, of_params.shape))
        data = next(name for name in reversed(names) if name in DATA)
        return axes_of_mesh(of_params, [n for n in names if sizes[n] > 1 or n == data or n in TENSOR])
    return init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (dist.get_world_size(),))


def check_mesh(mesh: Any) -> Mesh:
    """Return the data axes of a mesh by role; raise ArgumentError if it is not one to compile for."""
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentError(
            f"mesh must be a torch.distributed DeviceMesh, got {brief(mesh)}. Make one with "
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


# --- model -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ModelContents:
    """Modules, parameters and buffers of a model, listed once.

    Modules and buffers have their first name, parameters all their names, in the order of registration.
    """

    model: nn.Module
    modules: Mapping[str, nn.Module]
    params: Mapping[tuple[str, ...], nn.Parameter]
    buffers: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> ModelContents:
        params: dict[nn.Parameter, list[str]] = {}
        for name, param in nn.Module.named_parameters(model, remove_duplicate=False):
            params.setdefault(param, []).append(name)
        by_names = {tuple(names): param for param, names in params.items()}
        return cls(model, dict(model.named_modules()), by_names, dict(nn.Module.named_buffers(model)))

    @functools.cached_property
    def named(self) -> Mapping[str, nn.Parameter]:
        """Parameters by their first names."""
        return {name: param for (name, *_), param in self.params.items()}


def check_model(model: Any, *, in_parts: bool = False, again: bool = False) -> ModelContents:
    """Return the contents of a model; raise ArgumentError if it cannot be compiled.

    With `in_parts` it is sharded from the inside out, so that submodules may have been; with `again`, it was itself.
    """
    what = "module" if in_parts else "model"
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise ArgumentError(f"{what} must be a module, got the class {model.__name__}. Pass {model.__name__}(...).")
    if not isinstance(model, nn.Module):
        swapped = " The model is the first argument, the mesh the second." if isinstance(model, DeviceMesh) else ""
        raise ArgumentError(f"{what} must be an nn.Module, got {type(model).__name__}.{swapped}")
    if torch.is_inference_mode_enabled():
        raise ArgumentError(
            f"{what}: parameters made within torch.inference_mode() cannot be trained. Call graphshard outside of it."
        )
    contents = ModelContents.of(model)
    for problem in _model_problems(contents, in_parts=in_parts, again=again):
        raise ArgumentError(f"{what}: {problem}")
    return contents


# Attributes that hold the wrapped module, by the class of the wrapper.
_WRAPPERS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
}


def _wrapper_of(module: nn.Module) -> str | None:
    """Return the name of torch's class if a module wraps another to parallelize or compile it."""
    for cls in type(module).__mro__:
        if cls.__module__.startswith("torch.") and _WRAPPERS.get(cls.__name__) in module._modules:
            return cls.__name__
    return None


def _model_problems(contents: ModelContents, *, in_parts: bool, again: bool) -> Iterator[str]:
    """Yield sentences that say why a model cannot be compiled, and what to do."""
    model, cls = contents.model, users_class(contents.model)
    cannot = f"{cls.__name__} cannot be compiled"
    for name in (*contents.modules, *contents.named, *contents.buffers):
        try:
            name.encode()
        except UnicodeEncodeError:
            yield f"the name {brief(name)} has a character that no file takes. Rename it."
    for name, module in contents.modules.items():
        which = f"its submodule {name!r}" if name else "it"
        known = is_compiled(module) or (name and not OF_UNITS.isdisjoint(module.__dict__))
        if known and not (in_parts and (name or again)):
            yield f"{cannot}: {which} is already compiled. Compile the root module, once."
        if state_of(module) is not None:
            yield (
                f"{cannot}: {which} is sharded by FSDP2. Call torch's fully_shard on the model, too, and then "
                "graphshard.compile, which takes it over; or call graphshard.fully_shard everywhere instead."
            )
        wrapper = _wrapper_of(module)
        if wrapper == "OptimizedModule" and not name:  # a submodule runs as a plain one
            yield f"{cannot}: it is what torch.compile returned. Leave torch.compile out; Inductor compiles the model."
        elif wrapper not in (None, "OptimizedModule"):
            yield f"{cannot}: {which} is a {wrapper}. Compile the module in it, without this wrapper."
        if was_applied("replicate", module):
            yield (
                f"{cannot}: torch's replicate was applied to {which}, whose gradients it reduces in hooks. Apply "
                "replicate to a module around the compiled one, or leave it out."
            )
        if isinstance(module, torch.jit.ScriptModule):
            yield (
                f"{cannot}: {which} was made by torch.jit, which holds its parameters and code where nobody can "
                "exchange them. Leave torch.jit.script or trace out: the module runs as it is written. Functions that "
                "torch.jit.script made may stay."
            )
    for name, tensor in (*contents.named.items(), *contents.buffers.items()):
        if nn.parameter.is_lazy(tensor):
            owner = type(contents.modules[name.rpartition(".")[0]]).__name__
            yield (
                f"{cannot}: {name} of {owner} has no shape yet. Call the model once with an example of its inputs, "
                "before graphshard.compile and the optimizer."
            )
        if isinstance(tensor, WholeParameter):
            yield (
                f"{cannot}: it is, and {name} is gathered within graphshard.uncompiled. Leave the block, or compile a "
                "copy.deepcopy of it."
            )
    if cls.forward is nn.Module.forward and "forward" not in model.__dict__:
        yield (
            f"{cls.__name__} has no forward, so there is nothing to compile. Compile the module that calls it, or give "
            "it a forward."
        )
    if isinstance(model.__dict__.get("forward"), EntryPoint) and not again:
        remedy = "Call fully_shard on the inner modules first" if in_parts else "Compile the root module, once"
        yield f"{cls.__name__} is a part of a compiled model. {remedy}."


# --- parameters --------------------------------------------------------------------------------------------------


def check_ignored(contents: ModelContents, ignored: Iterable[nn.Parameter] | None) -> frozenset[nn.Parameter]:
    """Return the parameters to leave alone; raise ArgumentError if one is not the model's."""
    known = {id(param) for param in contents.params.values()}
    found = tuple(ignored or ())
    for item in found:
        if id(item) not in known:
            what = f"a tensor of shape {list(item.shape)}" if isinstance(item, torch.Tensor) else brief(item)
            raise ArgumentError(
                f"ignored_params holds {what}, which is not a parameter of {type(contents.model).__name__}. Pass the "
                "objects in model.parameters(), before any conversion."
            )
    return frozenset(found)


def check_params(
    contents: ModelContents,
    device_type: str,
    ignored: frozenset[nn.Parameter],
    known: Container[nn.Parameter],
    *,
    distributed: bool,
    num_ranks: int,
) -> None:
    """Check that parameters can be sharded over a mesh of `num_ranks` devices, except `known` ones, which are already.

    Where `distributed`, DTensors on tensor or expert axes are expected; `mesh_axes` has checked them.
    """
    for name, param in contents.named.items():
        if param in known:
            continue
        if isinstance(param, DTensor):
            replicated = all(placement.is_replicate() for placement in param.placements)
            if not distributed and not (replicated and param.device_mesh.size() == num_ranks):
                raise ArgumentError(
                    f"parameter {name} is a DTensor already (fully_shard or parallelize_module was applied). Pass the "
                    "plain module, and to cut it along a tensor axis parallelize=, a function of (model, mesh); or, "
                    "where there are process groups, the DeviceMesh that its axis is of."
                )
        elif is_subclass(param):
            _check_subclass(name, param, ignored=param in ignored)
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
                f"{', '.join(map(str, _REDUCIBLE))}, freeze it, or pass it in ignored_params."
            )


def _check_subclass(name: str, param: nn.Parameter, *, ignored: bool) -> None:
    """Raise ArgumentError for a tensor subclass without the methods that say how it is gathered.

    On the meta device it may get them later, when there are shards to set methods on.
    """
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


def placements_of(contents: ModelContents, placement_fn: Any, left_out: Container[nn.Parameter]) -> dict[str, Any]:
    """Return what `shard_placement_fn` chooses for parameters, by first name, where that is not None.

    It is called once for each, as FSDP2 does, and not for scalars and those to leave out.
    """
    if placement_fn is None:
        return {}
    asked = {name: param for name, param in contents.named.items() if param not in left_out and param.dim() > 0}
    chosen = {name: answer_of("shard_placement_fn", placement_fn, param) for name, param in asked.items()}
    return {name: placement for name, placement in chosen.items() if placement is not None}


def shard_dims(contents: ModelContents, placements: Mapping[str, Any]) -> dict[str, int]:
    """Return the dim to shard along, by first name, of parameters for which `shard_placement_fn` chose one."""
    dims: dict[str, int] = {}
    for name, placement in placements.items():
        param = contents.named[name]
        if ShardPlacementResult is not None and isinstance(placement, ShardPlacementResult):
            placement = placement.placement
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
