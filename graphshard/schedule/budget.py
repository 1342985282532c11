"""How much a search may do, in steps that are the same on every machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Budget:
    """Steps that are left; a step takes about a microsecond.

    Attributes:
        left: steps; below zero if the last ones were more than there were.
    """

    left: float

    def spend(self, steps: float) -> None:
        """Count steps that are taken."""
        self.left -= steps

    @property
    def ended(self) -> bool:
        """Whether nothing is left."""
        return self.left <= 0

    def part(self, parts: int) -> Budget:
        """One of so many equal parts of what is left; what is left of it can be given back with `take`."""
        part = Budget(max(self.left, 0.0) / parts)
        self.left -= part.left
        return part

    def take(self, rest: Budget) -> None:
        """Add what is left of a part."""
        self.left += rest.left
