"""What parametrizations remember within `torch.nn.utils.parametrize.cached()`, around a call or in it.

    with parametrize.cached():
        model(x)                    a weight that is used twice is computed once, and has one gradient

Each run of the trace remembers for itself. So does each call of a program: a second one in the same block computes the
weights again, which is the same up to the rounding of their gradients, unless that writes to buffers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch import nn
from torch.nn.utils import parametrize

from graphshard.capture.untraceable import Located
from graphshard.ir.classes import users_class
from graphshard.ir.program import Slot
from graphshard.ir.torch_internals import replaced

_PART = ".parametrizations."


def are_remembered() -> bool:
    """Whether weights that parametrizations compute are remembered now."""
    return bool(parametrize._cache_enabled)


@contextlib.contextmanager
def remembered_within() -> Iterator[None]:
    """In the block, a run of a forward, parametrizations remember what they compute in it, if they do at all."""
    with replaced(parametrize, "_cache", {}) if are_remembered() else contextlib.nullcontext():
        yield


def check_computed_once(module: nn.Module, written: Iterable[Slot]) -> None:
    """Raise Located where another call in the block would write to buffers again.

    Args:
        module: that was traced.
        written: what its forward has written to.
    """
    for slot in written if are_remembered() else ():
        if slot.kind == "buffer" and _PART in f".{slot.name}":
            raise Located(
                f"graphshard cannot capture {users_class(module).__name__}.forward within parametrize.cached(): what "
                f"computes a weight writes to buffer {slot.name}, which would happen at each call in the block, and "
                "not at the first alone. Open parametrize.cached() in forward."
            )
