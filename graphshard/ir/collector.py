"""Python's search for cycles of objects, paused while graphs are made.

Graphs of torch.fx are many small objects that refer to each other and live as long as the graph. A full search visits
all of them, and is begun again and again while a graph grows: a third of the CPU seconds of a deep model's capture and
passes went there, to find nothing.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Nothing is searched for in the block, unless it asks for it. Objects in no cycle are freed as always."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
