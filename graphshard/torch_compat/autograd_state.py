"""State of autograd and of dispatch around a call: the running backward, transforms, autocast, modes and hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

# Use of a gradient: added to `.grad`, returned by `torch.autograd.grad`, or unused.
Fate = Literal["accumulated", "returned", "dropped"]


# Runs the operators of a graph without autocast: the graph contains its casts.
disable_autocast = torch._C._DisableAutocast
# Hides operators from dispatch modes, such as counters of FLOPs, and from a running trace.
without_dispatch_modes = _disable_current_modes
# Leaves the transforms of torch.func for the block.
without_transforms = temporarily_clear_interpreter_stack
# Number of the running backward pass, -1 outside of one, and whether it was called with `retain_graph=True`.
number_of_backward = torch._C._current_graph_task_id
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


@contextlib.contextmanager
def outside_of_trace() -> Iterator[None]:
    """Run operators for real although a trace is running, with hooks of saved tensors, which Dynamo defers."""
    deferred = torch._C._autograd._saved_tensors_hooks_set_tracing(False)
    try:
        with without_dispatch_modes():
            yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(deferred)


@contextlib.contextmanager
def leave_modes_on_error() -> Iterator[None]:
    """Leave autocast and torch.func transforms that the block entered if an error ends it.

    A graph enters and leaves them by calls. In an autocast that is never left, PyTorch computes with outdated casts.
    """
    kinds = ("cpu", "cuda")
    casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    torch.autocast_increment_nesting()
    nesting, transforms = torch.autocast_decrement_nesting(), torch._C._functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):  # torch 2.11 asserts that there is something to leave
            torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(transforms)
        torch.autocast_increment_nesting()
        while torch.autocast_decrement_nesting() > nesting:
            pass
        torch.clear_autocast_cache()
        for kind, (enabled, dtype) in zip(kinds, casts):
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        raise


def transform_of(leaves: Sequence[object]) -> str:
    """Return which transform, not backward, runs a call with these inputs, for a message; "" if none does."""
    if torch._C._functorch.maybe_current_level() is not None:
        return "a transform of torch.func"
    if forward_ad._current_level >= 0:
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
            return "forward-mode differentiation"
    return ""


def fate_at(node: torch.autograd.graph.Node) -> Fate:
    """Return what the running backward pass does with a gradient that arrives at a node."""
    try:
        return "accumulated" if torch._C._will_engine_execute_node(node) else "dropped"
    except RuntimeError:  # raised for a leaf that `torch.autograd.grad` was asked for
        return "returned"


def saved_tensors_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the innermost pack and unpack hooks of `torch.autograd.graph.saved_tensors_hooks`."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def modes_of_functions() -> list[str]:
    """Return the class names of active torch function modes, except for the default device."""
    return [type(mode).__qualname__ for mode in _get_current_function_mode_stack() if type(mode) is not DeviceContext]
