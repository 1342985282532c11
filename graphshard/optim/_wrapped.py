"""What an optimizer must be to be wrapped by another one."""

from __future__ import annotations

from typing import Any

from torch.optim import LBFGS, Optimizer

from graphshard.errors import ArgumentError, UnsupportedError
from graphshard.utils.text import brief


def check_wrapped(optimizer: Any, wrapper: Optimizer, example: str) -> None:
    """Check that an optimizer can be wrapped.

    Raises:
        ArgumentError: it is none, or a wrapper of the same kind.
        UnsupportedError: its step computes losses.
    """
    name = type(wrapper).__name__
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, type(wrapper)):
        raise ArgumentError(f"optimizer must be a torch.optim.Optimizer such as {example}, got {brief(optimizer)}.")
    if isinstance(optimizer, LBFGS):
        raise UnsupportedError(
            f"{name}: LBFGS computes the loss several times in one step, over all parameters together. Call "
            "optimizer.step(closure) of the LBFGS itself."
        )


def check_hooks(optimizer: Optimizer, wrapper: Optimizer) -> None:
    """Raise UnsupportedError if a hook is registered on the step of a wrapped optimizer."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        name = type(wrapper).__name__
        raise UnsupportedError(
            f"{name}: a hook is registered on the step of {type(optimizer).__name__}, which runs for some parameters "
            f"at a time. Register it on the {name}."
        )
