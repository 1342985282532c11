"""`Options`: the arguments of `compile` that decide which program is made, as one value.

    compile(model, mesh, units=["layers.*"])  ->  Options(units=["layers.*"])  ->  CompileRequest

A new option is a field of `Options`, a key of a `TypedDict` here, a check in `validate.py` and a paragraph in the
docstring of `compile`. `resolve.py` applies it, and `store/fingerprint.py` says how a file is compared with it.

    @takes_options
    def load(path, model, mesh=None, **options: Unpack[CompileArguments]): ...

    help(load):  load(path, model, mesh=None, *, reshard_after_forward: bool | int | None = None, ...)
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, cast

from torch import nn
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.tensor import Shard

from graphshard.cost.profile import Hardware
from graphshard.errors import ArgumentError
from graphshard.ir.units import PolicySpec, UnitSpec
from graphshard.lower.backends import Backend
from graphshard.options.validate import check_options, level_of
from graphshard.pipeline.instrumentation import Level
from graphshard.pipeline.pipeline import Pipeline
from graphshard.torch_compat.torch_ops import OpOverload
from graphshard.utils.argument_validation import answer_of
from graphshard.utils.text import brief

# Or a ShardPlacementResult, which torch has from 2.12 on.
PlacementFn: TypeAlias = Callable[[nn.Parameter], Shard | Any | None]
Activation: TypeAlias = Literal["full", "auto"] | Sequence[OpOverload] | float
DynamicShapes: TypeAlias = Mapping[str, Any] | Sequence[Any]
Reduce: TypeAlias = Literal["exchange", "auto"]
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """Options as the user gave them; the docstring of `graphshard.compile` describes each field.

    A value that is wrong by itself is an ArgumentError. `resolve` checks that they fit a model and a mesh.
    """

    reshard_after_forward: bool | int | None = None
    shard_placement_fn: PlacementFn | None = None
    mp_policy: PolicySpec = None
    offload_policy: OffloadPolicy | None = None
    ignored_params: Iterable[nn.Parameter] | None = None
    units: Sequence[UnitSpec] | None = None
    reduce: Reduce | None = None
    backend: Backend = "inductor"
    activation: Activation | None = None
    memory_limit: int | None = None
    hardware: Hardware | None = None
    dynamic_shapes: DynamicShapes | None = None
    max_captures: int = 32
    fullgraph: bool = False
    passes: Pipeline | None = None
    verify: Level | None = None

    def __post_init__(self) -> None:
        check_options(vars(self))
        if self.ignored_params is not None:  # it may be an iterator, and is read for every mesh
            object.__setattr__(self, "ignored_params", answer_of("ignored_params", list, self.ignored_params))

    @property
    def level(self) -> Level:
        """When rules are verified: as given, or by GRAPHSHARD_VERIFY."""
        return cast(Level, level_of(self.verify))

    @property
    def is_local(self) -> bool:
        """Whether the effect of passes on a block depends on its neighbors at most."""
        by_budget = isinstance(self.activation, (int, float)) or self.activation == "auto"
        return self.passes is None and not by_budget and self.dynamic_shapes is None


class _UnitOptions(TypedDict, total=False):
    """Options of one unit, or of a model as a whole."""

    reshard_after_forward: bool | int | None
    shard_placement_fn: PlacementFn | None
    mp_policy: PolicySpec
    offload_policy: OffloadPolicy | None
    ignored_params: Iterable[nn.Parameter] | None
    reduce: Reduce | None
    backend: Backend
    activation: Activation | None
    memory_limit: int | None
    dynamic_shapes: DynamicShapes | None
    max_captures: int
    fullgraph: bool
    passes: Pipeline | None
    verify: Level | None


class FullyShardArguments(_UnitOptions, total=False):
    """Fields of `Options` as keyword arguments, except `units`."""

    hardware: Hardware | None


class OptionArguments(_UnitOptions, total=False):
    """Fields of `Options` as keyword arguments, except `hardware`, which has another meaning in `explain`."""

    units: Sequence[UnitSpec] | None


class CompileArguments(OptionArguments, total=False):
    """All fields of `Options` as keyword arguments."""

    hardware: Hardware | None


def takes_options(function: FunctionT, without: Collection[str] = (), also: Sequence[type] = ()) -> FunctionT:
    """Write options, and fields of other dataclasses, into the signature of a function that takes `**options`."""
    signature = inspect.signature(function)
    explicit = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    known = {*signature.parameters, *without}
    options = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
        for kind in (*also, Options)
        for f in fields(kind)
        if f.name not in known
    ]
    function.__signature__ = signature.replace(parameters=[*explicit, *options])  # type: ignore[attr-defined]
    return function


# Arguments of FSDP1, DDP, DeepSpeed and torch.compile, and what has their effect here.
_ELSEWHERE = {
    "auto_wrap_policy": "Name the modules to gather together with units=, by patterns, classes or functions.",
    "backward_prefetch": "Prefetching is planned; passes= takes a planner with another order.",
    "bucket_cap_mb": "Buckets are planned; units= says what may share one.",
    "cpu_offload": "Use offload_policy=torch.distributed.fsdp.CPUOffloadPolicy().",
    "device_id": "The mesh has the device: init_device_mesh('cuda', (world_size,)).",
    "device_mesh": "It is the argument mesh.",
    "disable": "Leave out the call of compile; graphshard.uncompiled(model) runs single calls without programs.",
    "dynamic": "Sizes that change become symbols by themselves; dynamic_shapes= declares them.",
    "find_unused_parameters": "Parameters without gradients need no setting.",
    "forward_prefetch": "Prefetching is planned; passes= takes a planner with another order.",
    "limit_all_gathers": "Memory is planned; memory_limit= sets the bytes.",
    "mixed_precision": "Use mp_policy=torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16).",
    "mode": "backend= is 'inductor' or 'eager', cuda_graphs=True replays steps; torch._inductor.config has the rest.",
    "options": "Set torch._inductor.config before the first call.",
    "param_dtype": "Use mp_policy=torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=...).",
    "precision": "Use mp_policy=torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16).",
    "process_group": "Use mesh=, such as DeviceMesh.from_group(group, 'cuda').",
    "sharding_strategy": "FULL_SHARD is the default, SHARD_GRAD_OP is reshard_after_forward=False, HYBRID_SHARD a mesh "
    "of two axes, NO_SHARD a mesh of shape (n, 1).",
    "sync_module_states": "Load or initialize the model alike on all ranks, as with FSDP2.",
    "use_orig_params": "Parameters always keep their names.",
}


def options_given(function: Callable[..., Any], given: Mapping[str, Any]) -> Options:
    """Return the options that a function was given as `**options`."""
    check_names(function, given)
    return Options(**given)


def check_names(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise ArgumentError for the first name that is not an argument of a function."""
    check_known(f"{function.__name__}()", given, list(inspect.signature(function).parameters))


def check_known(what: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raise ArgumentError for the first unknown name; it suggests the one that may be meant."""
    for name in given:
        if name not in known:
            if name in _ELSEWHERE:
                raise ArgumentError(f"{what} has no argument {name!r}. {_ELSEWHERE[name]}")
            longer = [other for other in known if other.startswith(name)]
            close = [*longer, *difflib.get_close_matches(name, known, 1)]
            hint = f"Did you mean {close[0]!r}?" if close else f"It takes {', '.join(known)}."
            raise ArgumentError(f"{what} got an unexpected keyword argument {brief(name)}. {hint}")
