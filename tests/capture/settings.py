"""A module of settings, as models read them."""

from __future__ import annotations

SCALE = 2.0
CALLS = 0


class Inner:
    """A class that nobody makes objects of."""

    scale = 2.0
    calls = 0
