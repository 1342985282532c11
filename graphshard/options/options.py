"""`Options`: the arguments of `compile` that decide which program is made, as one value.

    compile(model, mesh, units=["layers.*"])  ->  Options(units=["layers.*"])  ->  parameter table, pipeline, capture

A new option is a field of `Options`, the same key of `OptionArguments`, and a paragraph in the docstring of `compile`.
Every public function that takes options takes it then: the signatures that `help` shows are made of the fields, mypy
and IDEs read the keys, and a test holds them together. What it means goes into `options/table.py`, if it is about
parameters, or into `options/passes.py`; how a file is compared with it into `artifact/stored_options.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypedDict, cast

from torch import nn
from torch._ops import OpOverload
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.tensor import Shard

from graphshard.cost.profile import Hardware
from graphshard.ir.given import answer_of
from graphshard.ir.precision import PolicySpec
from graphshard.ir.units import UnitSpec
from graphshard.lower.backends import Backend
from graphshard.options.values import check_options, level_of
from graphshard.pipeline.observe import Level
from graphshard.pipeline.pipeline import Pipeline

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
