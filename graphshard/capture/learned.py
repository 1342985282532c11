"""What runs of a forward have shown about attributes, and that another run is needed."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from graphshard.ir.state import Place


class Rerun(BaseException):
    """Forward is to be run again, as something was learned about its attributes. No code of the user's catches it."""


@dataclass
class Learned:
    """What runs of a forward have shown about its attributes, for the next one.

    Attributes:
        tensors: those that are inputs, with the places where each was found, by identity.
        followed: places of numbers and lists that forward changes, which are followed.
        refused: places of such that cannot be followed, because forward looks at them in other ways.
    """

    tensors: dict[int, tuple[torch.Tensor, list[Place]]] = field(default_factory=dict)
    followed: set[Place] = field(default_factory=set)
    refused: set[Place] = field(default_factory=set)

    def refuse(self, places: set[Place]) -> None:
        """Follow these no more."""
        self.refused |= places
        self.followed -= places
