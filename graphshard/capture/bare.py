"""The module as the user wrote it, for as long as it is traced."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from graphshard.capture.entry import is_compiled, without_entries
from graphshard.capture.hooks import ALL_HOOKS
from graphshard.ir.classes import users_class


@contextlib.contextmanager
def bare(module: nn.Module, method: str) -> Iterator[None]:
    """The module as the user wrote it; undone on exit, with whatever forward has done to attributes meanwhile.

    Hooks of the root are left out: they run around the compiled forward. So does a forward that somebody has put in the
    place of a compiled model's, which calls the one before.

    Args:
        method: what takes the place of `forward`.
    """
    is_model = is_compiled(module)
    with contextlib.ExitStack() as stack:
        for owner in module.modules():
            stack.callback(_restore, owner, dict(owner.__dict__))
            _restore(owner, without_entries(owner))
            stack.callback(object.__setattr__, owner, "__class__", type(owner))
            object.__setattr__(owner, "__class__", users_class(owner))
            for attribute in ("_parameters", "_buffers"):
                owner.__dict__[attribute] = copy.copy(owner.__dict__[attribute])
            for attribute in ALL_HOOKS:  # not a copy: handles, by which hooks are removed, know the very dict
                stack.callback(_refill, owner.__dict__[attribute], dict(owner.__dict__[attribute]))
        for attribute in ALL_HOOKS:
            module.__dict__[attribute] = type(getattr(module, attribute))()
        if is_model:
            module.__dict__.pop("forward", None)
        if method != "forward":
            module.__dict__["forward"] = _as_forward(module, method)
        yield


def _as_forward(module: nn.Module, method: str) -> Callable[..., Any]:
    """A method of the module in the place of its forward, which it may call."""
    run = getattr(module, method)

    @functools.wraps(run)
    def forward(*args: Any, **kwargs: Any) -> Any:
        module.__dict__.pop("forward")
        try:
            return run(*args, **kwargs)
        finally:
            module.__dict__["forward"] = forward

    return forward


def _refill(hooks: dict[int, Any], content: dict[int, Any]) -> None:
    hooks.clear()
    hooks.update(content)


def _restore(module: nn.Module, attributes: dict[str, Any]) -> None:
    """Undo what tracing the forward did to a module's attributes."""
    module.__dict__.clear()
    module.__dict__.update(attributes)
