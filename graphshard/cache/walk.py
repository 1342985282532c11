"""A digest of code and of what it can read: equal where the same would run, and read the same.

    model                     classes, attributes, hooks of all modules, and the objects that they hold
    functions that ran        their code, defaults, what they close over, and the globals that they name
    ... and what these name   other functions, classes, objects, containers, down to numbers and strings

Each thing is visited once, in an order that follows from the things themselves; a second visit is its number, so that
what is one object is told from what is two. Parameters and buffers count by what a trace knows of them, other tensors
by their values, too. What cannot be compared, such as a generator or a file, is a problem if code that ran names it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import contextvars
import functools
import inspect
import logging
import pathlib
import re
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from graphshard.cache.codes import codes_that_ran, digest_of, named_function, names_in
from graphshard.cache.origins import origin_of_code, origin_of_module
from graphshard.cache.purity import UNCOMPARED, impure_function, impure_names
from graphshard.cache.things import Things
from graphshard.cache.watching import CACHED, Ran
from graphshard.capture.outer import following, imported, named_in
from graphshard.capture.witness import PLAIN, is_container
from graphshard.ir.classes import MADE_OF
from graphshard.ir.codes import codes_of
from graphshard.ir.state import MISSING

# Of classes: made by Python, or compared otherwise.
_OF_CLASSES = frozenset(
    {
        *("__module__", "__dict__", "__weakref__", "__doc__", "__annotations__", "__abstractmethods__", "_abc_impl"),
        *("__dataclass_params__", "__dataclass_fields__", "__firstlineno__", "__static_attributes__", "__orig_bases__"),
        *("__parameters__", "__slots__", "__match_args__", "__annotate_func__", "__annotations_cache__"),
    }
)
# Of loggers: what every one has, and what asks for the level.
_OF_LOGGERS = frozenset({*vars(logging.Logger("")), "manager"})
_OF_LEVELS = frozenset({"level", "isEnabledFor", "getEffectiveLevel"})
# Built-in functions that reach what code does not name.
_REACH_ALL = frozenset({"eval", "exec", "globals", "__import__", "compile", "open", "input"})
# ... and those that return something else at each launch.
_OF_A_PROCESS = frozenset({"id", "hash"})
_IGNORED_TYPES = (type(threading.Lock()), type(threading.RLock()))


class Walk(Things):
    """Visits what code can read; functions that ran with the globals that they name."""

    def __init__(self, ran: Collection[str] = (), names: Collection[str] | None = None) -> None:
        super().__init__(ran, names)
        self._all = 0
        self._read: set[int] = set()

    def _content(self, value: Any) -> str:
        for kinds, describe in _DESCRIBE:
            if isinstance(value, kinds):
                return describe(self, value)
        return self._object(value)

    def _class_name(self, cls: type) -> str:
        """A class by its name, and by its contents if it is not torch's or Python's."""
        cls = vars(cls).get(MADE_OF, cls)
        name = f"{cls.__module__}.{cls.__qualname__}"
        is_users = origin_of_module(cls.__module__) == "users"
        return f"{name} {self._token(cls) if is_users or issubclass(cls, nn.Module) else ''}"

    def _put_in(self, cls: type) -> str:
        """Settings in a class of torch's modules: it has some, and somebody may have put others there."""
        found = vars(cls).items() if issubclass(cls, nn.Module) else ()
        kept = {n: v for n, v in found if n not in _OF_CLASSES and (isinstance(v, PLAIN) or is_container(v))}
        return self._named(kept) if kept else ""

    def _class(self, cls: type) -> str:
        cls = vars(cls).get(MADE_OF, cls)
        name = f"class {cls.__module__}.{cls.__qualname__}"
        if origin_of_module(cls.__module__) != "users":
            return f"{name} {self._put_in(cls)}"
        bases = [self._class_name(base) for base in cls.__bases__]
        own = {key: value for key, value in vars(cls).items() if key not in _OF_CLASSES}
        fields = list(vars(cls).get("__dataclass_fields__", ()))
        made = self._annotations(vars(cls).get("__annotate_func__"))
        return f"{name} {bases} {self._class_name(type(cls))} {fields} {made} {self._named(own)}"

    def _annotations(self, made_by: Any) -> str:
        """What makes annotations from Python 3.14 on, if it ran: torch asks for those of modules."""
        if not isinstance(made_by, types.FunctionType) or digest_of(made_by.__code__) not in self._ran:
            return ""
        self.reached.update(map(digest_of, codes_of(made_by.__code__)))
        return digest_of(made_by.__code__)

    def _function(self, function: types.FunctionType) -> str:
        name = f"function {function.__module__}.{function.__qualname__}"
        if origin_of_code(function.__code__, str(function.__globals__.get("__name__", ""))) != "users":
            if not function.__closure__:
                return name
            return f"{name} {self._cells(function)}" if self._closes_over_users(function) else name
        digest = digest_of(function.__code__)
        self.reached.update(map(digest_of, codes_of(function.__code__)))
        parts = [name, digest, self._tokens(function.__defaults__ or ()), self._named(function.__kwdefaults__ or {})]
        parts += [self._cells(function), self._named(vars(function))]
        parts.append(self._annotations(getattr(function, "__annotate__", None)))
        if digest in self._ran or self._all:
            self._read.add(id(function))
            parts.append(self._read_by(function))
        return " ".join(parts)

    def _token(self, value: Any) -> str:
        found = super()._token(value)
        if self._all and type(value) is types.FunctionType and id(value) not in self._read:
            self._read.add(id(value))  # it was visited as one that did not run
            if origin_of_code(value.__code__, str(value.__globals__.get("__name__", ""))) == "users":
                self._write(f"{found} {self._read_by(value)}")
        return found

    def _context(self, value: Any) -> str:
        """A context manager that a generator makes: before it runs, it is what it is made of."""
        if inspect.getgeneratorstate(value.gen) != inspect.GEN_CREATED:
            return self._opaque(value)
        return f"context {self._tokens((value.func, value.args, value.kwds))}"

    def _cached(self, function: Any) -> str:
        """What it returns may have been computed before: its code, and all that it calls, counts as if it ran."""
        self._all += 1
        try:
            return f"cached {self._token(function.__wrapped__)}"
        finally:
            self._all -= 1

    def _logger(self, logger: logging.Logger) -> str:
        own = {name: value for name, value in vars(logger).items() if name not in _OF_LOGGERS}
        # Methods of somebody's: that of transformers warns once.
        added = {n: v for n, v in vars(logging.Logger).items() if getattr(v, "__module__", "logging") != "logging"}
        own |= {n: v for n, v in added.items() if origin_of_module(str(v.__module__)) == "users"}
        asked = self._names is None or not _OF_LEVELS.isdisjoint(self._names)
        return f"logger {logger.name} {logger.getEffectiveLevel() if asked else ''} {self._named(own)}"

    def _variable(self, variable: contextvars.ContextVar[Any]) -> str:
        try:
            return f"variable {variable.name} {self._token(variable.get())}"
        except LookupError:
            return f"variable {variable.name}, not set"

    def _cells(self, function: types.FunctionType) -> str:
        found = {}
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                found[name] = cell.cell_contents
            except ValueError:  # not filled yet
                continue
        return self._named(found)

    def _closes_over_users(self, function: types.FunctionType) -> bool:
        """Whether a function of torch's or Python's, such as a decorator's, runs one of the user's."""
        for cell in function.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:
                continue
            inner = inspect.unwrap(held) if callable(held) and hasattr(held, "__wrapped__") else held
            inner = getattr(inner, "__func__", inner)
            code = getattr(inner, "__code__", None)
            if code is not None and origin_of_code(code, getattr(inner, "__module__", "") or "") == "users":
                return True
        return False

    def _read_by(self, function: types.FunctionType) -> str:
        """The globals that a function names, with the attributes that it names of them."""
        parts = []
        for (kind, name), chains in named_in(function.__code__).items():
            if kind != "global":
                continue
            value = function.__globals__.get(name, MISSING)
            if value is MISSING:
                value = getattr(sys.modules["builtins"], name, MISSING)
                if name in _OF_A_PROCESS:
                    self._problem(f"{function.__qualname__} calls {name}(), which is another at each launch")
                if name in _REACH_ALL:
                    self._problem(f"{function.__qualname__} calls {name}(), which may reach anything")
            if value is MISSING:
                parts.append(f"{name} missing")
            elif isinstance(value, types.ModuleType):
                parts.append(f"{name} {self._namespace(value, chains, function.__qualname__)}")
            else:
                why = impure_function(value)
                if why:
                    self._problem(f"{function.__qualname__} {why}")
                parts.append(f"{name} {self._token(value)}")
        for module, names in imported(function):
            parts.append(f"import {self._namespace(module, names, function.__qualname__)}")
        return f"reads {{{', '.join(parts)}}}"

    def _namespace(self, module: types.ModuleType, chains: Collection[tuple[str, ...]], by: str) -> str:
        """What code names of a module."""
        name = module.__name__
        whose = origin_of_module(name)
        if whose == "python":
            for chain in impure_names(name, chains):
                self._problem(f"{by} uses {'.'.join((name, *chain))}, which may be another at each launch")
        if whose != "users":
            return f"{name} {[(chain, self._at(module, chain)) for chain in chains if whose != 'graphshard']}"
        parts = [name]
        if any(not chain for chain in chains):  # it may be asked for anything
            own = {key: value for key, value in vars(module).items() if not key.startswith("__")}
            return f"{name} {self._named({k: v for k, v in own.items() if not isinstance(v, types.ModuleType)})}"
        for first in dict.fromkeys(chain[0] for chain in chains):
            value = getattr(module, first, MISSING)
            if isinstance(value, types.ModuleType):
                parts.append(f"{first} {self._namespace(value, following(chains, first) or [()], by)}")
            else:
                parts.append(f"{first} {'missing' if value is MISSING else self._token(value)}")
        return " ".join(parts)

    def _at(self, module: types.ModuleType, chain: Sequence[str]) -> str:
        """What is at a place in a module of torch's or Python's: a setting by its value."""
        value: Any = module
        for name in chain:
            value = getattr(value, name, MISSING)
            if not isinstance(value, types.ModuleType):
                break
        if isinstance(value, (*PLAIN, types.FunctionType, torch.Tensor, np.ndarray)) or is_container(value):
            return self._token(value)
        if origin_of_module(type(value).__module__) == "users" or isinstance(value, type):
            return self._token(value)
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"

    def _python_module(self, module: types.ModuleType) -> str:
        return self._namespace(module, [()], "an attribute")


_Describe = Callable[[Walk, Any], str]
_FIELD: Any = type(vars(inspect.Attribute)["name"])  # of a named tuple
# How things are described, the first that fits.
_DESCRIBE: tuple[tuple[Any, _Describe], ...] = (
    (torch.Tensor, Walk._tensor),
    (nn.Module, Walk._module),
    (type, Walk._class),
    (types.FunctionType, Walk._function),
    (types.MethodType, lambda walk, m: f"method {walk._tokens((m.__func__, m.__self__))}"),
    (
        types.BuiltinFunctionType,
        lambda walk, f: (
            f"builtin {f.__module__}.{f.__qualname__} "
            f"{'' if isinstance(f.__self__, (types.ModuleType, type(None))) else walk._token(f.__self__)}"
        ),
    ),
    ((types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType), lambda _, f: repr(f)),
    (types.MethodWrapperType, lambda walk, f: f"{f.__name__} of {walk._token(f.__self__)}"),
    ((types.MemberDescriptorType, types.GetSetDescriptorType), lambda _, f: f"slot {f.__name__}"),
    (_FIELD, lambda _, field: f"field {field.__reduce__()[1][0]}"),
    (functools.partial, lambda walk, p: f"partial {walk._tokens((p.func, p.args, p.keywords))}"),
    (CACHED, lambda walk, f: walk._cached(f)),
    (property, lambda walk, p: f"property {walk._tokens((p.fget, p.fset, p.fdel))}"),
    ((staticmethod, classmethod), lambda walk, m: f"{type(m).__name__} {walk._token(m.__func__)}"),
    (functools.cached_property, lambda walk, p: f"cached property {walk._token(p.func)}"),
    (types.CodeType, lambda _, code: digest_of(code)),
    (types.ModuleType, Walk._python_module),
    (types.MappingProxyType, Walk._mapping),
    (logging.Logger, Walk._logger),
    (re.Pattern, lambda _, pattern: f"pattern {pattern.pattern!r} {pattern.flags}"),
    (np.ndarray, Walk._array),
    ((np.generic, np.dtype), lambda _, value: f"{type(value).__name__} {value!r}"),
    (pathlib.PurePath, lambda _, path: f"path {path}"),
    ((torch._ops.OpOverload, torch._ops.OpOverloadPacket), lambda _, op: f"operator {op}"),
    (types.UnionType, lambda walk, kind: f"union {walk._tokens(kind.__args__)}"),
    (contextvars.ContextVar, Walk._variable),
    (contextlib._GeneratorContextManager, Walk._context),
    (argparse.Namespace, lambda walk, value: f"namespace {walk._named(vars(value))}"),
    (_IGNORED_TYPES, lambda _, value: f"a {type(value).__name__}"),
)


def _described(walk: Walk, value: Any) -> str:
    return walk._container(value) if is_container(value) else walk._object(value)


_DESCRIBE += (((list, tuple, dict, set, frozenset, collections.deque), _described),)


def walk_of(model: nn.Module, codes: Sequence[Sequence[str]], names: Collection[str] | None) -> Walk:
    """The walk from a model and from functions that ran.

    Args:
        codes: module, qualified name and digest of each; none looks at the model's objects alone.
        names: that these functions name.
    """
    walk = Walk({digest for _, _, digest in codes}, names)
    walk.know(model)
    for asked in sorted(UNCOMPARED & set(names or ())):
        walk.problems.append(f"forward asks for {asked}, which is not compared")
    for module, name, digest in codes:
        if "<" in name:  # it is within another, or something holds it
            continue
        found = [f for f in named_function(module, name) if digest_of(f.__code__) == digest]
        walk.visit(f"function {module}.{name}", *(found if found else (f"not {digest}",)))
    walk.visit_model(model)
    return walk


def not_reached(model: nn.Module, ran: Ran, roots: Iterable[tuple[str, Any]]) -> list[str]:
    """Functions that ran, and that neither the model nor these roots lead to.

    Somebody has given such a function to torch or Python, as an implementation of an operator for instance, and may
    give it another one at another launch.
    """
    codes = codes_that_ran(ran)
    walk = Walk({digest for _, _, digest in codes}, names_in(ran))
    walk.know(model)
    for name, value in roots:
        walk.visit(name, value)
    walk.visit_model(model)
    within = {digest_of(part) for code, _ in ran.codes.values() for part in codes_of(code) if part is not code}
    return [
        f"{module}.{name} ran, and nothing says where it comes from"
        for module, name, digest in codes
        if digest not in walk.reached and digest not in within
    ]
