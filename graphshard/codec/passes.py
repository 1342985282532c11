"""A pass and its options as plain JSON, so that a dumped stage says what runs on it next.

    {"name": "plan", "class": "graphshard.passes.make_plan:MakePlan", "options": {"planner":
        {"dataclass": {"class": "graphshard.schedule.by_unit:PlanByUnit", "options": {"pack_gathers_below": 65536}}}}}

Options are the fields of a pass. Only graphshard's own passes and planners are made again; a file can name no other
class, so that reading one imports nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from graphshard.codec.values import Decoder, encode
from graphshard.cost.costs import Costs
from graphshard.cost.profile import Profile
from graphshard.ir.errors import ArgumentError
from graphshard.ir.mesh import Axis, Mesh
from graphshard.passes import AccumulateGradients, ActivationCheckpointing, Pass
from graphshard.schedule.agreed import AgreedPlanner
from graphshard.schedule.build import Constraints
from graphshard.schedule.by_cost import PlanByCost
from graphshard.schedule.by_unit import PlanByUnit


@dataclass(frozen=True)
class NextPass:
    """The pass that ran on a stage.

    Attributes:
        name: its name.
        class_name: as "package.module:ClassName".
        step: the pass itself, or None where it cannot be made from the file.
        problem: why not.
    """

    name: str
    class_name: str
    step: Pass | None
    problem: str = ""


def encode_pass(step: Pass) -> dict[str, Any]:
    """The pass as plain JSON; options that cannot be stored are marked."""
    return {"name": step.name, **_encode_fields(step)}


def decode_pass(data: dict[str, Any]) -> NextPass:
    """Inverse of `encode_pass`.

    Raises:
        ArgumentError: this is no pass at all.
    """
    try:
        name, class_name = str(data["name"]), str(data["class"])
    except (KeyError, TypeError):
        raise ArgumentError('not a stage that can be read: "next" is no pass') from None
    try:
        step = _decode_fields(data)
    except ArgumentError as error:
        return NextPass(name, class_name, None, str(error))
    except Exception as error:  # whatever a class says of options it does not have
        return NextPass(name, class_name, None, f"{type(error).__name__}: {error}")
    return NextPass(name, class_name, step)


def class_name(kind: type) -> str:
    """How a class is named in a file: "package.module:ClassName"."""
    return f"{kind.__module__}:{kind.__qualname__}"


def _known() -> dict[str, type]:
    from graphshard.pipeline.pipeline import DEFAULT_PASSES  # which imports this module, to dump

    passes = (*map(type, DEFAULT_PASSES), ActivationCheckpointing, AccumulateGradients)
    kinds = (*passes, PlanByUnit, PlanByCost, Constraints, Costs, Mesh, Axis)
    return {class_name(kind): kind for kind in kinds}


def _encode_fields(value: Any) -> dict[str, Any]:
    options = {field.name: _encode_option(getattr(value, field.name)) for field in fields(value)}
    return {"class": class_name(type(value)), "options": options}


def _encode_option(value: Any) -> Any:
    if isinstance(value, AgreedPlanner):
        return _encode_option(value.planner)
    if isinstance(value, Profile):
        return {"profile": value.to_json()}
    if is_dataclass(value) and not isinstance(value, type):
        return {"dataclass": _encode_fields(value)}
    if isinstance(value, Mapping):
        return {"mapping": {str(key): _encode_option(item) for key, item in value.items()}}
    if isinstance(value, tuple):
        return {"tuple": [_encode_option(item) for item in value]}
    if isinstance(value, (set, frozenset)):
        return {"frozenset": sorted(map(_encode_option, value), key=str)}
    return encode(value)


def _decode_fields(data: dict[str, Any]) -> Any:
    kind = _known().get(data["class"])
    if kind is None:
        raise ArgumentError(f"{data['class']} is not graphshard's own")
    options = {name: _decode_option(name, option) for name, option in data["options"].items()}
    return kind(**options)


def _decode_option(name: str, data: Any) -> Any:
    if isinstance(data, dict) and len(data) == 1:
        ((tag, content),) = data.items()
        if tag == "dataclass":
            return _decode_fields(content)
        if tag == "frozenset":
            return frozenset(_decode_option(name, item) for item in content)
        if tag == "tuple":
            return tuple(_decode_option(name, item) for item in content)
        if tag == "mapping":
            return {key: _decode_option(name, item) for key, item in content.items()}
        if tag == "profile":
            return Profile.from_json(content, f"the profile of option {name}")
        if tag == "unsupported":
            raise ArgumentError(f"its option {name} is a {content}, which a file cannot hold")
    return Decoder().value(data)
