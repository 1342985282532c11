"""The class of the user's behind that of a compiled module."""

from __future__ import annotations

from typing import Any

# Where the class of a compiled module says of which class it was made.
MADE_OF = "graphshard_made_of"


def users_class(owner: object) -> Any:
    """The class that an object has, or had before it became part of a compiled model."""
    return vars(type(owner)).get(MADE_OF, type(owner))
