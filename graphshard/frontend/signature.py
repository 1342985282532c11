"""What a program was captured for: which calls it serves."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphshard.ir.params import Settings


@dataclass(frozen=True)
class Signature:
    """Description of the calls that a program is for, besides what guards look at.

    Attributes:
        structure, inputs: of a call; guards look at them, and messages say how two calls differ.
        extended: what programs rely on of parameters that decide themselves what is gathered of them.
        casts_once: autocast keeps its casts of parameters.
    """

    structure: pytree.TreeSpec
    inputs: tuple[tuple[Any, ...], ...]
    training: tuple[bool, ...]
    grad: bool
    autocast: Hashable
    params: tuple[tuple[bool, torch.dtype], ...]
    settings: tuple[Settings, ...] = ()
    extended: tuple[Any, ...] = ()
    casts_once: bool = True

    def __hash__(self) -> int:
        # What is left out has an entry per module or parameter, and is rarely what signatures differ in.
        return hash((self.inputs, self.training[:1], self.grad, self.autocast))

    def changes_besides_inputs(self, other: Signature) -> list[str]:
        """Return how this signature differs from another one apart from structure and inputs, in words."""
        reasons = {
            "training": "train() or eval() was called",
            "grad": "gradients are " + ("on" if self.grad else "off"),
            "autocast": "autocast changed",
            "params": "dtype or requires_grad of a parameter changed",
            "extended": "attributes or methods of a parameter that is a tensor subclass, or what they read, changed",
            "casts_once": "autocast has another cache_enabled",
            "settings": "resharding, the divisor of gradients, or what is gathered by hand was changed",
        }
        return [why for name, why in reasons.items() if getattr(self, name) != getattr(other, name)]


def leaf_key(leaf: Any) -> tuple[Any, ...]:
    """What programs distinguish of an input: four things of a tensor, type and value of anything else.

    The value is something that can be hashed, and is equal where it is the same: of a slice its parts, and the text of
    numbers for which == does not say that, such as 0.0 and -0.0.
    """
    if isinstance(leaf, torch.Tensor):
        return (leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad)
    if isinstance(leaf, slice):
        return (slice, (leaf.start, leaf.stop, leaf.step))
    if isinstance(leaf, complex) or is_numpys(leaf) or (isinstance(leaf, float) and repr(leaf) in ("-0.0", "nan")):
        return (type(leaf), repr(leaf))
    return (type(leaf), leaf)


def is_numpys(leaf: Any) -> bool:
    """Whether an input is a number of numpy's, such as np.float32(3), and no array."""
    kind = type(leaf)
    return kind.__module__ == "numpy" and getattr(leaf, "shape", None) == () and not hasattr(kind, "__setitem__")
