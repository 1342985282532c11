"""`Options`: the arguments of `compile` that decide which program is made, as one value.

    compile(model, mesh, units=["layers.*"])  ->  Options(units=["layers.*"])  ->  parameter table, pipeline, capture

A new option is a field of `Options`, the same key of `OptionArguments`, and a paragraph in the docstring of `compile`.
Every public function that takes options takes it then: the signatures that `help` shows are made of the fields, mypy
and IDEs read the keys, and a test holds them together. What it means goes into `options/resolve.py`, if it is about
parameters, or into `options/resolve.py`; how a file is compared with it into `artifact/stored_options.py`.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, cast

from torch import nn
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.tensor import Shard

from graphshard.cost.profile import Hardware
from graphshard.errors import ArgumentError
from graphshard.ir.precision import PolicySpec
from graphshard.ir.units import UnitSpec
from graphshard.lower.backends import Backend
from graphshard.options.validate import check_options, level_of
from graphshard.pipeline.observe import Level
from graphshard.pipeline.pipeline import Pipeline
from graphshard.torch_compat.operators import OpOverload
from graphshard.utils.argument_validation import answer_of
from graphshard.utils.text import brief

# Or a ShardPlacementResult, which torch has from 2.12 on.
PlacementFn: TypeAlias = Callable[[nn.Parameter], Shard | Any | None]
Activation: TypeAlias = Literal["full", "auto"] | Sequence[OpOverload] | float
DynamicShapes: TypeAlias = Mapping[str, Any] | Sequence[Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """What a user chooses, as given; the docstring of `graphshard.compile` says what each field means.

    Raises:
        ArgumentError: one of them is wrong by itself. Whether they fit a model and a mesh is checked where they meet.
    """

    reshard_after_forward: bool | int | None = None
    shard_placement_fn: PlacementFn | None = None
    mp_policy: PolicySpec = None
    offload_policy: OffloadPolicy | None = None
    ignored_params: Iterable[nn.Parameter] | None = None
    units: Sequence[UnitSpec] | None = None
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


class _OfModel(TypedDict, total=False):
    """Options that are for a model as a whole."""

    backend: Backend
    activation: Activation | None
    memory_limit: int | None
    dynamic_shapes: DynamicShapes | None
    max_captures: int
    fullgraph: bool
    passes: Pipeline | None
    verify: Level | None


class ModelArguments(_OfModel, total=False):
    """The fields of `Options` that FSDP2's `fully_shard` has not, as keyword arguments."""

    hardware: Hardware | None


class OptionArguments(_OfModel, total=False):
    """The fields of `Options` as keyword arguments, but for `hardware`, which `explain` takes in a sense of its own."""

    reshard_after_forward: bool | int | None
    shard_placement_fn: PlacementFn | None
    mp_policy: PolicySpec
    offload_policy: OffloadPolicy | None
    ignored_params: Iterable[nn.Parameter] | None
    units: Sequence[UnitSpec] | None


class CompileArguments(OptionArguments, total=False):
    """All fields of `Options` as keyword arguments."""

    hardware: Hardware | None


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def takes_options(function: FunctionT, without: Collection[str] = (), also: Sequence[type] = ()) -> FunctionT:
    """Write out the options in the signature of a function that takes them as `**options`, behind its own arguments.

    Args:
        without: names of options that it does not take.
        also: dataclasses whose fields it takes, too.
    """
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    known = {*signature.parameters, *without}
    fields = [f for kind in (*also, Options) for f in dataclasses.fields(kind) if f.name not in known]
    options = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type) for f in fields
    ]
    function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return function


def options_given(function: Callable[..., Any], given: Mapping[str, Any]) -> Options:
    """The options that a function was given as `**options`.

    Raises:
        ArgumentError: one of them is none, or its value is wrong.
    """
    check_names(function, given)
    return Options(**given)


def check_names(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise ArgumentError for the first name that is no argument of a function; it says which one may be meant."""
    check_known(f"{function.__name__}()", given, list(inspect.signature(function).parameters))


def check_known(what: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raise ArgumentError for the first of the names given to something that it does not know."""
    for name in given:
        if name not in known:
            longer = [other for other in known if other.startswith(name)]
            close = [*longer, *difflib.get_close_matches(name, known, 1)]
            hint = f"Did you mean {close[0]!r}?" if close else f"It takes {', '.join(known)}."
            raise ArgumentError(f"{what} got an unexpected keyword argument {brief(name)}. {hint}")
