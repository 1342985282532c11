"""What a program was captured for: which calls it serves."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from graphshard.capture.asked import attributes_of
from graphshard.ir.params import Settings


@dataclass(frozen=True)
class Signature:
    """What a program was captured for. Programs differ where signatures do.

    Of parameters that decide themselves what is gathered of them, `extended` has what programs rely on. `replaced` says
    which functions of torch's were others. `attributes` are what somebody has set on inputs, see `facts_of`, and `same`
    tells which are one tensor, see `same_of`. `casts_once` is whether autocast keeps its casts of parameters.
    """

    structure: pytree.TreeSpec
    inputs: tuple[tuple[Any, ...], ...]
    training: tuple[bool, ...]
    grad: bool
    autocast: Hashable
    params: tuple[tuple[bool, torch.dtype], ...]
    settings: tuple[Settings, ...] = ()
    extended: tuple[Any, ...] = ()
    replaced: tuple[str, ...] = ()
    attributes: tuple[tuple[int, str], ...] = ()
    same: tuple[int, ...] = ()
    casts_once: bool = True

    def loose(self) -> Signature:
        """The signature without shapes and strides."""
        inputs = tuple(key[2:] if len(key) == 4 else key for key in self.inputs)
        return dataclasses.replace(self, inputs=inputs)

    def __hash__(self) -> int:
        # What is left out has an entry per module or parameter, and is rarely what signatures differ in.
        return hash((self.inputs, self.training[:1], self.grad, self.autocast))

    def changes_from(self, other: Signature) -> str:
        """What differs from another signature, in words."""
        reasons = {
            "structure": "new structure of the inputs",
            "inputs": "new shapes, dtypes or values of the inputs",
            "training": "train() or eval() was called",
            "grad": "gradients are " + ("on" if self.grad else "off"),
            "autocast": "autocast changed",
            "params": "dtype or requires_grad of a parameter changed",
            "extended": "attributes or methods of a parameter that is a tensor subclass, or what they read, changed",
            "attributes": "attributes were set on inputs, or an input is an nn.Parameter and was none",
            "casts_once": "autocast has another cache_enabled",
            "same": "inputs that were several tensors are one, or the other way round",
            "replaced": "functions of torch.nn.functional were replaced or put back",
            "settings": "resharding, the divisor of gradients, or what is gathered by hand was changed",
        }
        changed = [why for name, why in reasons.items() if getattr(self, name) != getattr(other, name)]
        return ", ".join(changed)

    def details(self, other: Signature) -> str:
        """What differs from another signature, with both values where they are inputs."""
        if self.structure == other.structure and self.inputs != other.inputs:
            pairs = enumerate(zip(other.inputs, self.inputs))
            index, (was, now) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
            return f"input {index} was {_shown(was)} and is {_shown(now)}"
        return self.changes_from(other)


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


def is_constant(kind: type, value: Any) -> bool:
    """Whether `leaf_key` makes such a key of an input that is no tensor."""
    written = {slice: tuple, complex: str}.get(kind, kind)
    return type(value) is written or (kind is float and value in ("-0.0", "nan"))


def facts_of(leaves: Sequence[Any]) -> tuple[tuple[int, str], ...]:
    """What programs distinguish of inputs besides: which are parameters, and attributes that somebody has set."""
    return tuple(
        (index, fact)
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and (type(leaf) is not torch.Tensor or vars(leaf))
        for fact in (*attributes_of(leaf), *(["nn.Parameter"] if isinstance(leaf, nn.Parameter) else ()))
    )


def same_of(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Of each tensor the number of the first that is the very same one; nothing where all are different."""
    tensors = [id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return () if len(set(tensors)) == len(tensors) else tuple(map(tensors.index, tensors))


def _shown(key: tuple[Any, ...]) -> str:
    if len(key) == 4:
        shape, stride, dtype, grad = key
        return f"{str(dtype).removeprefix('torch.')}{list(shape)} with strides {list(stride)}" + (
            ", requires_grad" if grad else ""
        )
    return repr(key[1])
