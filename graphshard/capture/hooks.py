"""Hooks of modules: which there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from graphshard.capture.changes import attributes_of
from graphshard.capture.witness import text_at, witness_of
from graphshard.ir.state import Place, Read

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def users_hooks(module: nn.Module, place: Place) -> Iterator[tuple[Place, Any]]:
    """The hooks of a module that are not graphshard's own, with their places."""
    for kind in HOOKS:
        hooks = attributes_of(module)[kind].values()
        users = [hook for hook in hooks if not _is_ours(getattr(hook, "__func__", hook))]
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


def _is_ours(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("graphshard.")
