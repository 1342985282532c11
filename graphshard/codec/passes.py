"""A pass and its options as plain JSON, so that a dumped stage says what runs on it next.

    {"name": "plan", "class": "graphshard.passes.make_plan:MakePlan", "options": {"planner": {...}}}

Options are the fields of a pass, see `codec/converter.py`. Only the passes of the catalogue are made again; a file can
name no other class, so that reading one imports nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from graphshard.codec.converter import PASSES, class_name, read, write
from graphshard.codec.values import to_json, unsupported
from graphshard.errors import ArgumentError
from graphshard.passes import Pass


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
    try:
        options = json.loads(to_json(write(step)))
    except Exception:  # whatever a user's pass has for fields
        options = {field.name: unsupported(getattr(step, field.name)) for field in fields(step)}
    return {"name": step.name, "class": class_name(type(step)), "options": options}


def decode_pass(data: dict[str, Any]) -> NextPass:
    """Inverse of `encode_pass`.

    Raises:
        ArgumentError: this is no pass at all.
    """
    try:
        name, kind, options = str(data["name"]), str(data["class"]), data["options"]
    except (KeyError, TypeError):
        raise ArgumentError('not a stage that can be read: "next" is no pass') from None
    try:
        return NextPass(name, kind, _make(kind, options))
    except ArgumentError as error:
        return NextPass(name, kind, None, str(error))


def _make(kind: str, options: Any) -> Pass:
    if kind not in PASSES:
        raise ArgumentError(f"{kind} is not graphshard's own")
    for name, option in options.items() if isinstance(options, dict) else ():
        if isinstance(option, dict) and "unsupported" in option:
            raise ArgumentError(f"its option {name} is a {option['unsupported']}, which a file cannot hold")
    return read(options, PASSES[kind])
