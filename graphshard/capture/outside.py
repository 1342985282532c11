"""Random numbers and clocks that are not torch's, and files: a trace would keep one value of them, for ever.

    random.random()                 an error that names the line
    open(path), path.exists()       an error that names the line
    allow=("random", "io")          the value of the trace is kept, as the user wants it

Functions of these modules are exchanged while a forward is traced, where they are kept and in modules of the user's
that imported them by name. Draws that are made otherwise are seen by the state of a generator, which has moved on.
"""

from __future__ import annotations

import builtins
import contextlib
import datetime
import functools
import io
import os
import random
import secrets
import sys
import threading
import time
import types
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import nn

from graphshard.capture.untraceable import Untraceable, is_users

# Ask the file system; with what calls them for the user.
_OF_FILES = ("stat", "lstat", "access", "listdir", "scandir", "open")
_FILES = frozenset(f"os.{name}" for name in _OF_FILES)
_THROUGH = ("pathlib", "genericpath", "posixpath", "ntpath")
_CLOCKS = ("monotonic", "perf_counter", "process_time", "thread_time", "time")
# What `allow` may name: modules of Python, with what in them gives another value at every call; () is all.
SOURCES: dict[str, tuple[types.ModuleType, tuple[str, ...]]] = {
    "random": (random, ()),
    "numpy.random": (np.random, ()),
    "time": (time, (*_CLOCKS, *(f"{name}_ns" for name in _CLOCKS), "ctime", "gmtime", "localtime")),
    "os": (os, ("urandom", "getrandom", *_OF_FILES)),
    "io": (io, ("open", "open_code")),
    "datetime": (datetime, ()),
    "uuid": (uuid, ("uuid1", "uuid4", "uuid6", "uuid7")),
    "secrets": (secrets, ()),
}
_GENERATORS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    random.Random: ("random", lambda generator: generator.getstate()),
    np.random.RandomState: ("numpy.random", lambda generator: generator.get_state(legacy=False)),
    np.random.Generator: ("numpy.random", lambda generator: generator.bit_generator.state),
}


@contextlib.contextmanager
def no_outside_values(module: nn.Module, allow: Collection[str]) -> Iterator[None]:
    """In the block, code of the user's that asks a source of SOURCES which is not allowed is an error.

    Args:
        module: its classes say which modules of Python may have imported something by name.

    Raises, in the block or at its end:
        Untraceable: names the function.
    """
    refused = [source for source in SOURCES if source not in allow]
    within = [vars(SOURCES[source][0]) for source in refused]

    def refuse(source: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return refusing(within, function, lambda name: _refusal(source, f"{source}.{name}"))

    asked = {id(function): refuse(source, function) for source in refused for function in _functions(source)}
    if "datetime" in refused:
        asked |= {id(cls): _without_today(cls, refuse) for cls in (datetime.datetime, datetime.date)}
    python, numpy = random._inst, np.random.mtrand._rand
    states = [Generator(generator) for generator in (python, numpy)]
    with exchanged(asked, [*within, vars(builtins), *namespaces_of(module)]):
        yield
    for state in states:
        state.check(allow)


@contextlib.contextmanager
def exchanged(others: Mapping[int, Any], namespaces: Iterable[dict[str, Any]]) -> Iterator[None]:
    """In the block, other functions in the place of those with these identities."""
    with contextlib.ExitStack() as stack:
        for namespace in namespaces:
            for name, value in list(namespace.items()):
                if id(value) in others:
                    stack.callback(namespace.__setitem__, name, value)
                    namespace[name] = others[id(value)]
        yield


@contextlib.contextmanager
def named(name: str, value: Any, module: nn.Module) -> Iterator[None]:
    """In the block, code that defines the model's classes finds this under a name of Python's; its own names stay."""
    namespaces = [namespace for namespace in namespaces_of(module) if name not in namespace]
    for namespace in namespaces:
        namespace[name] = value
    try:
        yield
    finally:
        for namespace in namespaces:
            del namespace[name]


class Generator:
    """A generator of random numbers, and the state that it was in."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._source, self._state = next(value for kind, value in _GENERATORS.items() if isinstance(generator, kind))
        self._before = repr(self._state(generator))

    @staticmethod
    def is_one(value: Any) -> bool:
        """Whether a value is a generator of Python's or numpy's."""
        return isinstance(value, tuple(_GENERATORS)) and not isinstance(value, random.SystemRandom)

    def check(self, allow: Collection[str]) -> None:
        """Raise Untraceable if numbers were drawn from it, unless that is allowed."""
        if self._source not in allow and repr(self._state(self._generator)) != self._before:
            raise _refusal(self._source, f"a {type(self._generator).__name__}")


def _functions(source: str) -> Iterator[Any]:
    module, names = SOURCES[source]
    for name in names or module.__all__:
        function = getattr(module, name, None)
        if callable(function) and not isinstance(function, type):
            yield function


def namespaces_of(module: nn.Module) -> list[dict[str, Any]]:
    """Globals of the user's modules that define the model's classes and replaced forwards."""
    names = {cls.__module__ for sub in module.modules() for cls in type(sub).__mro__}
    names |= {str(getattr(vars(sub).get("forward"), "__module__", "")) for sub in module.modules()}
    found = (sys.modules.get(name) for name in sorted(names))
    return [vars(m) for m in found if m is not None and is_users(getattr(m, "__file__", None) or "<>")]


def refusing(
    through: Collection[dict[str, Any]], function: Callable[..., Any], refusal: Callable[[str], Untraceable]
) -> Callable[..., Any]:
    """The function, but not for code of the user's, which may ask through functions of modules with these globals.

    Other threads than the one that captures, such as those that load data, are answered.

    Args:
        refusal: what is raised, given the function's name.
    """
    capturing = threading.get_ident()

    @functools.wraps(function)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == capturing and asks(through):
            raise refusal(function.__name__)
        return function(*args, **kwargs)

    return refuse


def asks(through: Collection[dict[str, Any]]) -> bool:
    """Whether code of the user's calls the function that asks this, perhaps through modules with these globals."""
    frame = sys._getframe(2)
    while frame.f_back is not None and (
        any(frame.f_globals is names for names in through)
        or str(frame.f_globals.get("__name__")).partition(".")[0] in _THROUGH
    ):
        frame = frame.f_back
    return is_users(frame.f_code.co_filename)


def _without_today(cls: type, refuse: Callable[[str, Any], Any]) -> type:
    """A class of dates whose objects know no today; what it makes is of the class itself."""

    class Same(type):
        def __instancecheck__(self, instance: object) -> bool:
            return isinstance(instance, cls)

        def __subclasscheck__(self, other: type) -> bool:
            return issubclass(other, cls)

    def make(_: type, *args: Any, **kwargs: Any) -> Any:
        return cls(*args, **kwargs)

    asking = (name for name in ("now", "utcnow", "today") if hasattr(cls, name))
    methods = {name: staticmethod(refuse("datetime", getattr(cls, name))) for name in asking}
    return Same(cls.__name__, (cls,), {**methods, "__new__": make})


def _refusal(source: str, what: str) -> Untraceable:
    kind = "file" if source == "io" or what in _FILES else "outside"
    return Untraceable(kind, f"{what}; compile with allow=({source!r},) to keep the value of the capture")
