"""The options of an export: what a file says of them, how they are compared, and how they come back for `load`.

Options are compared where they have worked, so that other ways to say the same are no difference: by the rows of the
parameter table (`ROWS`), and by `FACTS` about the units that were found, the passes that ran, and so on. Every field of
`Options` is in one of the two, or in `NOT_COMPARED` with the reason.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.export import Dim

from graphshard.artifact.facts import Policy
from graphshard.artifact.fingerprint import differences, refuse, table_differences
from graphshard.codec.passes import encode_pass
from graphshard.codec.values import Decoder, encode
from graphshard.errors import ArtifactError
from graphshard.ir.param_table import ParamTable, places_of
from graphshard.ir.units import modules_of
from graphshard.module.tracer import Tracer
from graphshard.passes import MakePlan, OffloadParameters, Pass
from graphshard.schedule.by_cost import PlanByCost
from graphshard.utils.text import brief

# Fields of a parameter's row, in the order in which they are compared, and the options that decide them.
ROWS = {
    "dim": "shard_placement_fn",
    "ignored": "ignored_params",
    "unit": "units",
    "reshard": "reshard_after_forward",
    "compute_dtype": "mp_policy",
    "reduce_dtype": "mp_policy",
}

NOT_COMPARED = {
    "max_captures": "limits what is captured later, and is the same program",
    "fullgraph": "is about modules that cannot be captured, and this was",
    "verify": "checks the program, and is the same program",
}


@dataclass(frozen=True)
class Fact:
    """What a file says of one or several options.

    Attributes:
        name: of the entry, and of the field that a difference is reported for.
        options: the fields of `Options` that decide it.
        describe: the entry, as plain JSON, from a tracer made with the options.
        done: they have done their work when a program is stored, so `load` compares them only if one is given.
    """

    name: str
    options: tuple[str, ...]
    describe: Callable[[Tracer], Any]
    done: bool = False

    @property
    def by_rows(self) -> bool:
        """Whether rows of parameters show the rest of it."""
        return set(self.options) <= set(ROWS.values())


def describe_options(tracer: Tracer) -> dict[str, Any]:
    """The options that a tracer was made with, as far as parameters do not show them."""
    return {fact.name: fact.describe(tracer) for fact in FACTS}


def check_same_options(
    path: Path, stored: Mapping[str, Any], rows: ParamTable, tracer: Tracer, given: Collection[str] | None = None
) -> None:
    """Raise ArtifactError for the first option of a tracer that is another than at the export.

    Args:
        stored: what `describe_options` said then.
        rows: the parameter table of then.
        given: names of options; of those that have done their work only these are compared. None compares all.
    """
    here = describe_options(tracer)

    def compare(facts: Iterable[Fact]) -> None:
        refuse(path, differences({fact.name: stored[fact.name] for fact in facts}, here))

    compare(fact for fact in FACTS if fact.by_rows)
    refuse(path, table_differences(rows, tracer.spec.params, ROWS))
    wanted = [fact for fact in FACTS if given is None or not fact.done or set(fact.options) & set(given)]
    compare(fact for fact in wanted if not fact.by_rows)


def restored_options(stored: Mapping[str, Any], model: nn.Module, rows: ParamTable) -> dict[str, Any]:
    """The options of the export as arguments of `Options`, but for those that have done their work."""
    value = Decoder().value
    named = places_of(model)
    dims = {id(named[row.name]): row.dim for row in rows}

    def policy(of: Mapping[str, Any]) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(**{name: value(item) for name, item in of.items()})

    reshard = {row.reshard if row.reshard or row.shown else None for row in rows}
    offload = stored["offload_policy"]
    units = [tuple(map(glob.escape, modules_of(unit))) for unit in stored["units"]]
    return {
        "mp_policy": {glob.escape(unit): policy(of) for unit, of in stored["mp_policies"].items()}
        or policy(stored["mp_policy"]),
        "reshard_after_forward": stored["reshard_after_forward"] or (reshard.pop() if len(reshard) == 1 else None),
        "shard_placement_fn": lambda param: Shard(dims[id(param)]),
        "offload_policy": None if offload is None else CPUOffloadPolicy(pin_memory=offload["pin_memory"]),
        "ignored_params": [named[row.name] for row in rows if row.ignored],
        "units": [unit if len(unit) > 1 else unit[0] for unit in units],
        "backend": stored["backend"],
        **({} if stored["dims"] is None else {"dynamic_shapes": decode_shapes(stored["dims"])}),
    }


def _units(tracer: Tracer) -> list[str]:
    return list(tracer.spec.units)


def _policy(policy: MixedPrecisionPolicy) -> dict[str, Any]:
    return {field.name: encode(getattr(policy, field.name)) for field in fields(Policy)}


def _policies(tracer: Tracer) -> dict[str, Any]:
    return {unit: _policy(policy) for unit, policy in tracer.spec.precision.by_unit.items()}


def _regathered(tracer: Tracer) -> int | None:
    """Among how many ranks, if that is not all of the axis; the rest of it is in the rows of the parameters."""
    return tracer.spec.mesh.regather.size if tracer.spec.mesh.regather is not None else None


def _offload(tracer: Tracer) -> dict[str, Any] | None:
    offloads = any(step.name == OffloadParameters.name for step in tracer.pipeline)
    return {"pin_memory": tracer.storage.pinned} if offloads else None


def _passes(tracer: Tracer) -> dict[str, str]:
    steps = list(tracer.pipeline)
    return {
        **{step.name: _settings(step) for step in steps},
        "(classes)": ", ".join(encode_pass(step)["class"] for step in steps),
        "(order)": ", ".join(step.name for step in steps),
    }


def _settings(step: Pass) -> str:
    """A pass's options as text; of a planner by cost the machine's hash.

    The mesh and the units are fields of their own, and `load` names the units, which `export` may have found.
    """
    planner = step.planner if isinstance(step, MakePlan) else None
    if isinstance(planner, PlanByCost):
        plain = replace(planner, constraints=replace(planner.constraints, units=False))
        options = {field.name: str(getattr(plain, field.name)) for field in fields(plain) if field.name != "costs"}
        return json.dumps({**options, "profile": planner.costs.profile.hash}, sort_keys=True)
    return json.dumps(encode_pass(step)["options"], sort_keys=True)


def _shapes(shapes: Any) -> str | None:
    """`dynamic_shapes` as text: dims by name and range."""
    if shapes is None:
        return None
    if isinstance(shapes, Mapping):
        return f"{{{', '.join(f'{key}: {_shapes(value)}' for key, value in shapes.items())}}}"
    if isinstance(shapes, (list, tuple)):
        return f"[{', '.join(str(_shapes(value)) for value in shapes)}]"
    name = getattr(shapes, "__name__", None)
    return f"{name}({getattr(shapes, 'min', None)}, {getattr(shapes, 'max', None)})" if name else str(shapes)


def encode_shapes(shapes: Any) -> str | None:
    """Return `dynamic_shapes` as JSON that `decode_shapes` reads; None for none, or where one is computed of another.

    {"x": {0: Dim("n", max=8)}, "y": None}   ->   {"dict": [["x", {"dict": [[0, {"dim": ["n", 0, 8]}]]}], ["y", null]]}
    """
    try:
        return None if shapes is None else json.dumps(_shapes_as_data(shapes))
    except TypeError:
        return None


def _shapes_as_data(shapes: Any) -> Any:
    if shapes is None or type(shapes) in (int, str):
        return shapes
    if isinstance(shapes, Mapping):
        return {"dict": [[key, _shapes_as_data(value)] for key, value in shapes.items()]}
    if isinstance(shapes, (list, tuple)):
        return {type(shapes).__name__: list(map(_shapes_as_data, shapes))}
    if isinstance(shapes, type(Dim.AUTO)):
        hint = next((name for name in _HINTS if shapes == getattr(Dim, name)), None)
        if hint is not None:
            return {"hint": hint}
    if type(shapes) is Dim:
        ends = (shapes.min, shapes.max if type(shapes.max) is int else None)
        return {"dim": [shapes.__name__, *ends]}
    raise TypeError(type(shapes).__name__)


def decode_shapes(text: str) -> Any:
    """Inverse of `encode_shapes`. Dimensions of one name are one `Dim`.

    Raises:
        ArtifactError: nothing is written so.
    """
    dims: dict[tuple[str, int, int | None], Any] = {}

    def shapes_of(data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        ((kind, content),) = data.items()
        if kind == "dict":
            return {key: shapes_of(value) for key, value in content}
        if kind in ("list", "tuple"):
            return {"list": list, "tuple": tuple}[kind](map(shapes_of, content))
        if kind == "hint" and content in _HINTS:
            return getattr(Dim, content)
        name, least, most = content
        return dims.setdefault((name, least, most), Dim(name, min=least, max=most))

    try:
        return shapes_of(json.loads(text))
    except Exception as error:
        raise ArtifactError(f"dims {brief(text)} are no dynamic shapes ({error!r}).") from error


_HINTS = ("AUTO", "DYNAMIC", "STATIC")

FACTS = (
    Fact("units", ("units",), _units),
    Fact("mp_policy", ("mp_policy",), lambda tracer: _policy(tracer.spec.precision.default)),
    Fact("mp_policies", ("mp_policy",), _policies),
    Fact("reshard_after_forward", ("reshard_after_forward",), _regathered),
    Fact("offload_policy", ("offload_policy",), _offload),
    Fact("backend", ("backend",), lambda tracer: tracer.options.backend),
    Fact("passes", ("passes", "activation", "memory_limit", "hardware"), _passes, done=True),
    Fact("dynamic_shapes", ("dynamic_shapes",), lambda tracer: _shapes(tracer.options.dynamic_shapes), done=True),
    Fact("dims", ("dynamic_shapes",), lambda tracer: encode_shapes(tracer.options.dynamic_shapes), done=True),
)
