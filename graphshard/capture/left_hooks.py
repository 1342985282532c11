"""Hooks of submodules that a forward registers or removes, as what it leaves.

if not self.watched:
    self.layer.register_forward_hook(collect)    layer._forward_hooks[7]    Write "set", of the function
    self.watched = True                          watched                    Write "set"

Without the first, the next capture would find that it has been done, and no hook.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import nn

from graphshard.capture.changes import attributes_of
from graphshard.capture.hooks import ALL_HOOKS, HOOKS, is_ours
from graphshard.capture.outer import reached
from graphshard.capture.untraceable import Located
from graphshard.capture.witness import PLAIN
from graphshard.ir.state import Constant, Place, Write


class LeftHooks:
    """The hooks of a module and its submodules before forward runs."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._before = {
            (name, kind): dict(attributes_of(module)[kind])
            for name, module in root.named_modules()
            for kind in ALL_HOOKS
        }

    def writes(self, known: Collection[int]) -> Iterator[Write]:
        """What makes the hooks of now from those before.

        Args:
            known: identities of what modules could reach before.

        Raises:
            Located: a hook keeps something that forward has made, which would be another thing at each call.
        """
        held_now = {name: attributes_of(self._root.get_submodule(name)) for name in {name for name, _ in self._before}}
        for (name, kind), before in self._before.items():
            held = Place(name).then("attribute", kind)
            now = held_now[name][kind]
            if not now and not before:
                continue
            users = [number for number, hook in before.items() if not is_ours(hook)]
            # Handles have other numbers in other processes. The last first, as positions are those before.
            for position, number in reversed(list(enumerate(users if kind in HOOKS else ()))):
                if number not in now:
                    yield Write(held.then("value", position), "delete")
            for number in now.keys() - before.keys():
                self._check(now[number], name, known)
                yield Write(held.then("item", number), "set", (Constant(now[number]),))

    def _check(self, hook: Any, name: str, known: Collection[int]) -> None:
        kept = _made_by_forward(hook, known)
        if kept:
            raise Located(
                f"graphshard cannot capture {type(self._root).__name__}.forward: it registers a hook of "
                f"{name or 'the module'}, {getattr(hook, '__qualname__', repr(hook))}, that keeps {kept}, which "
                f"forward has made. Register the hook before the first call, or keep {kept} in an attribute."
            )


def _made_by_forward(value: Any, known: Collection[int], name: str = "itself") -> str:
    """What a hook keeps that was made while forward ran, by name; "" if there is nothing."""
    if isinstance(value, (*PLAIN, type, types.ModuleType, types.BuiltinFunctionType)) or id(value) in known:
        return ""
    parts = _parts(value)
    if parts is None:
        return name
    known = {*known, id(value)}  # a function may close over itself
    return next((made for part, item in parts if (made := _made_by_forward(item, known, part))), "")


def _parts(value: Any) -> Iterable[tuple[str, Any]] | None:
    """What a function is made of, by names; None of anything else."""
    if isinstance(value, types.MethodType):
        return [("its object", value.__self__), ("its function", value.__func__)]
    if isinstance(value, functools.partial):
        arguments = [*enumerate(value.args), *value.keywords.items()]
        return [("its function", value.func), *((f"its argument {key}", item) for key, item in arguments)]
    if isinstance(value, types.FunctionType):
        cells = [(name, item) for kind, name, item in reached(value) if kind == "cell"]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [*cells, *(("a default", item) for item in defaults)]
    return None
