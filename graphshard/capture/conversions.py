"""Modules that forward converts to a dtype or device: nothing, where they are so already.

    self.classifier = self.classifier.to(self.dtype)        transformers, of routers

Converting goes through every parameter and its gradient, none of which changes then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from graphshard.capture.untraceable import Untraceable
from graphshard.ir.torch_internals import replaced


@contextlib.contextmanager
def idle_conversions() -> Iterator[None]:
    """In the block a conversion of a module that changes none of its tensors does nothing.

    Raises, in the block:
        Untraceable: a parameter would change.
    """
    convert = nn.Module._apply

    def convert_if_other(module: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        if any(fn(param) is not param for param in module.parameters(recurse)):
            raise Untraceable("write", f"a conversion of {type(module).__name__}")
        if all(fn(buffer) is buffer for buffer in module.buffers(recurse)):
            return module
        return convert(module, fn, recurse)

    with replaced(nn.Module, "_apply", convert_if_other):
        yield
