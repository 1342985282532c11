"""Hooks of modules: which there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from graphshard.capture.changes import attributes_of
from graphshard.capture.witness import text_at, witness_of
from graphshard.ir.state import Place, Read

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
