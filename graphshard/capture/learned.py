"""What runs of a forward have shown about attributes, and that another run is needed."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from graphshard.ir.state import Expression, Place


class Rerun(BaseException):
    """Forward is to be run again, as something was learned about its attributes. No code of the user's catches it."""


@dataclass
class Learned:
    """What runs of a forward have shown about its attributes, for the next one.

    Attributes:
        tensors: those that are inputs, with the places where each was found, by identity.
        followed: places of numbers and lists that forward changes, which are followed.
        numbers: what is computed of those that are followed and an input of the trace, with its value.
        may_be_inputs: whether numbers may be inputs; if operators must know one of them, none is.
        refused: places of such that cannot be followed, because forward looks at them in other ways.
        required: tensors of the call, by number, that forward makes require a gradient.
        decides: what forward may ask of the values of inputs and buffers: 0 nothing, 1 what it decides by, 2 numbers,
            3 sizes.
        wanted: what it would have asked.
    """

    tensors: dict[int, tuple[torch.Tensor, list[Place]]] = field(default_factory=dict)
    followed: set[Place] = field(default_factory=set)
    numbers: dict[Expression, int | float] = field(default_factory=dict)
    may_be_inputs: bool = True
    refused: set[Place] = field(default_factory=set)
    required: set[int] = field(default_factory=set)
    decides: int = 0
    wanted: int = 0

    def fix_numbers(self) -> bool:
        """Let no number be an input; False if there was none."""
        had = bool(self.numbers)
        self.numbers.clear()
        self.may_be_inputs = False
        return had

    def decide_more(self) -> bool:
        """Let forward ask for more values; False if it has asked for no other."""
        if self.wanted <= self.decides:
            return False
        self.decides, self.wanted = self.decides + 1, 0
        return True

    def refuse(self, places: set[Place]) -> None:
        """Follow these no more."""
        self.refused |= places
        self.followed -= places
