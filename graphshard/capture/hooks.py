"""Hooks of modules: which there are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from graphshard.capture.changes import attributes_of
from graphshard.capture.untraceable import is_users
from graphshard.capture.witness import text_at, witness_of
from graphshard.ir.errors import CaptureError
from graphshard.ir.state import Place, Read
from graphshard.ir.torch_internals import hooks_of_all_modules

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Besides: which of them are called in another way.
ALL_HOOKS = (*HOOKS, "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def users_hooks(module: nn.Module, place: Place) -> Iterator[tuple[Place, Any]]:
    """The hooks of a module that are not graphshard's own, with their places."""
    for kind in HOOKS:
        hooks = attributes_of(module)[kind].values()
        users = [hook for hook in hooks if not is_ours(hook)]
        for number, hook in enumerate(users):
            yield place.then("attribute", kind).then("value", number), hook


def users_hook_of_all_modules() -> Any:
    """A hook of the user's for all modules there are; None if there is none. Torch has some of its own, to count."""
    hooks = (hook for hooks in hooks_of_all_modules() for hook in hooks.values())
    return next((hook for hook in hooks if is_users(_file_of(hook))), None)


def refuse_hooks_of_all_modules() -> None:
    """Raise CaptureError for a hook of the user's for all modules."""
    hook = users_hook_of_all_modules()
    if hook is not None:
        name = getattr(hook, "__qualname__", type(hook).__name__)
        raise CaptureError(
            f"graphshard cannot capture a model while there is a hook for all modules, {name} ({_file_of(hook)}): it "
            "would run for the model itself, and not for what is in it. Register it on the modules that it is for "
            "(module.register_forward_hook), or remove it before the call."
        )


@contextlib.contextmanager
def without_hooks_of_all_modules() -> Iterator[None]:
    """In the block they do not run: around the compiled module they do."""
    kept = [(hooks, dict(hooks)) for hooks in hooks_of_all_modules()]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, content in kept:
            hooks.update(content)


def _file_of(hook: Any) -> str:
    function = getattr(hook, "__func__", hook)
    code = getattr(function, "__code__", getattr(type(hook).__call__, "__code__", None))
    return "<>" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def hooks_of(root: nn.Module) -> tuple[Read, ...]:
    """The hooks of submodules; those of the root run around the program."""
    names = {id(module): name for name, module in root.named_modules()}
    found = []
    for name, module in root.named_modules():
        for kind in HOOKS if name else ():
            hooks = tuple(attributes_of(module)[kind].values())
            if hooks:
                place = Place(name, (("attribute", kind),))
                found.append(Read(place, text_at(place, hooks, names), (), witness_of(hooks)))
    return tuple(found)


def is_ours(hook: Any) -> bool:
    """Whether a hook is graphshard's own."""
    return str(getattr(getattr(hook, "__func__", hook), "__module__", "")).startswith("graphshard.")
