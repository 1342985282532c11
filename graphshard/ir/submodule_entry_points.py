"""Entry points into a compiled model: submodules that are called directly, and methods that are not forward."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from graphshard.utils.source_lines import MISSING
from graphshard.utils.text import users_class

# Attributes of units of a compiled model that belong to graphshard.
OF_UNITS = frozenset({"_graphshard", "_graphshard_unit"})

# Threads that trace a module now.
_tracing: set[int] = set()
# Classes with a `__getattr__` that only improves errors. Dynamo would trace it at each lookup of a submodule, so these
# classes have none while a thread traces.
explained_attributes: dict[type, Callable[..., Any]] = {}


class EntryPoint:
    """Replacement of a module's method that runs a program captured for that method.

    It is removed from its module while a module is captured. A function that replaces a module's forward may have kept
    it, to call it: `before = module.forward; module.forward = lambda x: before(x) * 2`. A trace goes through it.

    Attributes:
        replaced: the instance attribute that it replaces; MISSING if the method was the class's.
        original: the method that it stands for, bound to the module.
        name: of the module in the model; "" for the model itself.
    """

    # Not in `__dict__`, which functools.wraps copies to the function that calls this.
    __slots__ = ("__dict__", "__weakref__", "_run", "method", "module", "name", "original", "replaced")

    def __init__(self, module: nn.Module, name: str, run: Callable[..., Any], method: str = "forward") -> None:
        self.replaced = module.__dict__.get(method, MISSING)
        of_class = self.replaced is MISSING
        self.original = types.MethodType(getattr(users_class(module), method), module) if of_class else self.replaced
        self.module, self.name, self.method, self._run = module, name, method, run
        functools.update_wrapper(self, self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs) if is_traced() else self._call(args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        now = self.module.__dict__.get(self.method)
        if type(now) is EntryPoint:  # the model may have been compiled again, or as a part of another
            self.name, self._run = now.name, now._run
        return self._run(self, args, kwargs)

    @property
    def __func__(self) -> Any:
        """Function of the method, which Dynamo's guards inspect if forward calls the method."""
        return getattr(self.original, "__func__", self.original)

    @property
    def __self__(self) -> nn.Module:
        return self.module

    def __getattr__(self, name: str) -> Any:
        """Return attributes of the function that Dynamo's guards read, such as its defaults."""
        if name.startswith("__") and name.endswith("__"):
            return getattr(self.__func__, name)
        raise AttributeError(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise copy.Error(
            f"{self.name} is a part of a compiled model and cannot be copied alone: its parameters are shards of the "
            "model's. Copy the whole model, or copy the parameters."
        )


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Let entry points that forward calls be the methods that they stand for, in this thread and block."""
    torch.compiler.assume_constant_result(is_traced)
    for cls in explained_attributes:
        with contextlib.suppress(AttributeError):  # another thread traces, too
            del cls.__getattr__  # type: ignore[attr-defined]
    _tracing.add(threading.get_ident())
    try:
        yield
    finally:
        _tracing.discard(threading.get_ident())
        for cls, explain in explained_attributes.items() if not _tracing else ():
            cls.__getattr__ = explain  # type: ignore[attr-defined]


def is_traced() -> bool:
    """Return whether graphshard traces a module now. Dynamo runs this during the trace: the result is a constant."""
    return threading.get_ident() in _tracing


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is a compiled model, not a part of one."""
    return "_graphshard" in module.__dict__


def method_of(module: nn.Module, method: str) -> Any:
    """Return a method of a module as the user wrote it, or replaced it."""
    found = module.__dict__.get(method)
    if found is None:
        return types.MethodType(getattr(users_class(module), method), module)
    return found.original if type(found) is EntryPoint else found


@contextlib.contextmanager
def present(module: nn.Module, method: str, value: Any) -> Iterator[None]:
    """Let a module have an attribute, or none (MISSING), while the block is open: a method that was replaced since."""
    attributes = module.__dict__
    before = attributes.get(method, MISSING)
    _set(attributes, method, value)
    try:
        yield
    finally:
        if attributes.get(method, MISSING) is value:  # else forward has replaced it
            _set(attributes, method, before)


def _set(attributes: dict[str, Any], name: str, value: Any) -> None:
    if value is MISSING:
        attributes.pop(name, None)
    else:
        attributes[name] = value


def install_entries(root: nn.Module, run: Callable[..., Any], path: str = "") -> None:
    """Install an entry point on every submodule with parameters, and on a model whose forward the user has replaced.

    Args:
        root: the model, or a submodule that is called `path` there.
        run: receives the entry point and the inputs.
    """
    for name, module in root.named_modules(prefix=path):
        install_entry(module, name, run)


def install_entry(module: nn.Module, name: str, run: Callable[..., Any]) -> None:
    """Install an entry point on a module that is called `name` in the model, unless it has one or needs none."""
    found = module.__dict__.get("forward")
    if not name and getattr(found, "__func__", None) is type(module).forward:
        del module.__dict__["forward"]  # the compiled model's forward, which was put back
        return
    implements_forward = bool(name) and type(module).forward is not nn.Module.forward
    needs = (implements_forward or found is not None) and type(found) is not EntryPoint
    if needs and any(True for _ in module.parameters()):
        entry = EntryPoint(module, name, run)
        attributes = {key: value for key, value in module.__dict__.items() if key != "forward"}
        module.__dict__.clear()
        # First, so that copying the module fails here and not at a shard.
        module.__dict__.update({"forward": entry, **attributes})


def without_entries(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes as they were before `install_entries`."""
    found = {**module.__dict__, **dict(replaced_by_entries(module))}
    return {name: value for name, value in found.items() if value is not MISSING and name not in OF_UNITS}


def replaced_by_entries(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module that are entry points, as they were before; MISSING of a method of its class."""
    for name, value in module.__dict__.items():
        if type(value) is EntryPoint:
            yield name, value.replaced if name == value.method else value.original  # Accelerate's `_old_forward`
