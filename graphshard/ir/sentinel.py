"""Sentinel for an attribute that is not there, where None is a value."""

from __future__ import annotations

import enum


class Missing(enum.Enum):
    """Type of the sentinel."""

    MISSING = "missing"


(MISSING,) = Missing
