"""The parts of a dumped stage that can be read without torch: its format and its plan."""

from __future__ import annotations

import json
from typing import Any

from graphshard.errors import ArgumentError
from graphshard.ir.plan import Plan
from graphshard.utils.json_dataclasses import read

FORMAT = 8


def plan_of(text: str) -> Plan | None:
    """Return the plan of a stage, without reading the program."""
    data = load_stage(text).get("plan")
    return None if data is None else read(data, Plan)


def load_stage(text: str) -> dict[str, Any]:
    """Parse a stage's JSON.

    Raises:
        ArgumentError: it is something else, or of another version of graphshard.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"not JSON, cut off perhaps: {error}") from error
    if not isinstance(data, dict) or "format" not in data:
        raise ArgumentError('not a stage: it has no "format"')
    if data["format"] != FORMAT:
        raise ArgumentError(f"format {data['format']!r} is not {FORMAT}, which this version of graphshard reads")
    return data
