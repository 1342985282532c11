"""Guards on state that a trace depends on and that Dynamo's guards leave out.

Block.forward = other, nn.Linear.forward = other     functions of the classes of modules and of objects that are read
os.environ["SCALE"]                                  environment variables, if forward reads one
self.rates.move_to_end("a")                          order of an OrderedDict
register_module_forward_hook(...)                    hooks of all modules
id(x)                                                a graph break: no guard can say it of other tensors
"""

from __future__ import annotations

import gc
import os
import re
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.guards import dict_version
from torch.nn.modules import module as torch_module

# Flags of classes whose attributes may be set.
_IS_HEAP_TYPE, _IS_IMMUTABLE = 1 << 9, 1 << 8
_ENVIRON = re.compile(r"\b(environ|getenv)\b")
# What modules hold themselves; their classes are known without.
_OF_MODULES = re.compile(r"_parameters|_buffers|_hooks|_modules(?:'\])?(?:\['[^']+'\])?$")
_GLOBAL_HOOKS: tuple[dict[int, Any], ...] = tuple(
    value for name, value in vars(torch_module).items() if name.startswith("_global_") and isinstance(value, dict)
)
# Guards by ==, which -0.0 passes for 0.0.
_EQUAL = ("CONSTANT_MATCH", "EQUALS_MATCH")
_FUNCTIONS = (types.FunctionType, staticmethod, classmethod, property)


class ExtraGuards:
    """Checks of one program, made when it is installed.

    Args:
        module: that is called.
        guards: expressions that guards read, and kinds of the guards.
        values: what the names in sources stand for.
    """

    def __init__(self, module: nn.Module, guards: Sequence[tuple[str, str]], values: Mapping[str, Any]) -> None:
        sources = {source for source, _ in guards}
        found = dict(read({each for each in sources if not _OF_MODULES.search(each)}, values))
        objects = [*module.modules(), *found.values(), torch.empty(0)]
        classes = {cls: None for each in objects for cls in type(each).__mro__ if _may_change(cls)}
        self._classes = [(cls, _attributes_of(cls)) for cls in classes]
        self._functions = [_functions_of(attributes) for _, attributes in self._classes]
        self._versions = self._versions_now()
        self._hooks = _hooks_now()
        self._environment = dict(os.environ) if any(map(_ENVIRON.search, sources)) else None
        equal = {source for source, kind in guards if kind in _EQUAL}
        names = {name: value for name, value in values.items() if name != "L"}
        # Expressions, with what they read, what is compared of that, and what it was.
        self._compared: list[tuple[str, Callable[..., Any], Callable[[Any], Any], Any]] = []
        for source, value in found.items():
            compared = list if isinstance(value, OrderedDict) else repr if source in equal and _is_zero(value) else None
            if compared is not None:
                self._compared.append((source, eval(f"lambda L: {source}", {**names}), compared, compared(value)))

    def change(self, scope: Mapping[str, Any]) -> str:
        """Return what is another than when the program was traced, in words; "" if nothing is.

        Args:
            scope: module, args and kwargs of the call.
        """
        versions = self._versions_now()
        if versions != self._versions:
            for (cls, attributes), was in zip(self._classes, self._functions):
                now = _functions_of(attributes)
                changed = next((key for key in {**was, **now} if now.get(key) is not was.get(key)), None)
                if changed is not None:
                    return f"{cls.__qualname__}.{changed} was replaced"
            self._versions = versions
        if _hooks_now() != self._hooks:
            return "hooks of all modules were changed"
        if self._environment is not None and self._environment != os.environ:
            names = sorted({*self._environment, *os.environ})
            name = next(name for name in names if self._environment.get(name) != os.environ.get(name))
            return f"the environment variable {name} was changed"
        for source, value_in, compared, before in self._compared:
            if compared(value_in(scope)) != before:
                return f"{source} was {before} and is {compared(value_in(scope))}"
        return ""

    def _versions_now(self) -> list[int]:
        return [dict_version(attributes) for _, attributes in self._classes]


def read(sources: Iterable[str], values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of sources that can be read."""
    for source in sources:
        if source:
            try:
                yield source, eval(source, {**values})
            except Exception:
                continue


def _is_zero(value: object) -> bool:
    """Return whether a number may equal another one with another sign."""
    if isinstance(value, complex):
        return value.real == 0 or value.imag == 0
    return isinstance(value, float) and value == 0


def _may_change(cls: type) -> bool:
    return bool(cls.__flags__ & _IS_HEAP_TYPE) and not cls.__flags__ & _IS_IMMUTABLE


def _attributes_of(cls: type) -> dict[str, Any]:
    """Return the dict of a class, whose version changes when an attribute is set."""
    (found,) = [each for each in gc.get_referents(cls.__dict__) if type(each) is dict]
    return found


def _functions_of(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if isinstance(value, _FUNCTIONS) or callable(value)}


def _hooks_now() -> list[list[Any]]:
    return [list(hooks.values()) for hooks in _GLOBAL_HOOKS]
