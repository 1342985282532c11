"""Stub by the lead until the helper writes this file; overwrite it."""

from __future__ import annotations

from typing import Any


def program_to_json(program: Any, *, next_pass: Any = None) -> str:
    return "{}"
