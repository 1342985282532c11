"""Which operators a function runs, as far as it matters to what becomes of padding and of random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphshard.ir.torch_internals import FakeTensor

# Operators that are not element by element, but leave elements in front of those that padding adds.
_KEEP_ORDER = frozenset(
    {
        *("empty", "empty_like", "empty_strided", "new_empty", "new_zeros", "zeros", "zeros_like", "full"),
        *("_to_copy", "clone", "copy_", "copy", "detach", "alias", "lift_fresh", "constant_pad_nd"),
        *("slice", "slice_scatter", "split", "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "as_strided"),
    }
)


class ShardOperators(TorchDispatchMode):
    """Notes operators on plain tensors while it is on.

    Attributes:
        random: the first that draws random numbers; "" for none.
        mixing: the first that computes across rows, such as a sum.
        communicating: the first that communicates and is not functional.
    """

    def __init__(self) -> None:
        super().__init__()
        self.random = self.mixing = self.communicating = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is not FakeTensor for kind in types):  # what a subclass makes of it comes here again
            return NotImplemented
        if func.namespace == "c10d":
            self.communicating = self.communicating or str(func)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random = self.random or str(func)
        if torch.Tag.pointwise not in func.tags and func._opname not in _KEEP_ORDER and func.namespace != "prim":
            self.mixing = self.mixing or str(func)
        return func(*args, **(kwargs or {}))
