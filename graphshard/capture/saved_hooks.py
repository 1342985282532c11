"""The user's own hooks of tensors that autograd saves, within a forward: they are traced, as what they compute counts.

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = x.exp()                                              backward multiplies by unpack(pack(y))

AOTAutograd switches such hooks off while it traces. Within a checkpointed region they take the place of the region's,
as in eager mode. Around a region eager mode packs what the region is given, and runs it again with what is unpacked;
unless that is known to be the same, it is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from graphshard.capture.untraceable import Untraceable
from graphshard.ir.torch_internals import hooks_while_tracing, replaced


class SavedHooks:
    """The hooks of the user's that are in force while a forward is traced."""

    def __init__(self) -> None:
        self._open: list[tuple[saved_tensors_hooks, contextlib.ExitStack]] = []

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """In the block such hooks are called, although it is traced."""
        enter, leave = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__

        def enter_traced(hooks: saved_tensors_hooks) -> None:
            stack = contextlib.ExitStack()
            if type(hooks) is not save_on_cpu:  # which changes where values are; programs keep them on the device
                stack.enter_context(hooks_while_tracing())
            self._open.append((hooks, stack))
            enter(hooks)

        def leave_traced(hooks: saved_tensors_hooks, *error: Any) -> None:
            leave(hooks, *error)
            self._open.pop()[1].close()

        owner = saved_tensors_hooks
        with replaced(owner, "__enter__", enter_traced), replaced(owner, "__exit__", leave_traced):
            yield

    def check_region(self) -> None:
        """Raise Untraceable where a checkpointed region begins, if there are hooks that may change its inputs."""
        if torch.is_grad_enabled() and any(type(hooks) is not save_on_cpu for hooks, _ in self._open):
            raise Untraceable("saved hooks", "torch.autograd.graph.saved_tensors_hooks")
