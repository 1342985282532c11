"""What a function of the user's reaches besides its arguments, and how that is looked up and changed.

seen = []
layer.register_forward_hook(lambda module, args, out: seen.append(out))        cell "seen"
SCALE = 2.0
def forward(self, x): return x * SCALE                                         global "SCALE"
def forward(self, x): return x * config.SCALE                                  attribute of a module or class
def forward(self, x, cache=[]): cache.append(x)                                default of an argument
def forward(self, x): return x * type(self).SCALE                              attribute of the object's class
def forward(self, x): return x * CONTEXT.get()                                 value of a ContextVar
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dis
import functools
import importlib.util
import itertools
import queue
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from graphshard.capture.entry import OF_UNITS
from graphshard.capture.untraceable import HERE, is_users
from graphshard.capture.witness import ARRAYS, PLAIN, is_container
from graphshard.ir.codes import codes_of
from graphshard.ir.state import MISSING, StepKind

# What nn.LSTM and its like keep of their parameters besides, and renew when these are others, as traced ones are.
OF_PARAMETERS = frozenset({"_flat_weights", "_flat_weight_refs"})
# What torch's modules themselves keep in their instances, and what is put there where they are compiled.
OF_TORCH = frozenset(vars(nn.Module())) | OF_UNITS | OF_PARAMETERS
# Larger ones are taken for tables, which do not change.
_LARGEST = 1024
# Classes of Python whose objects hold what users set.
_SETTINGS = (
    *(types.SimpleNamespace, argparse.Namespace, collections.UserDict, collections.UserList, collections.ChainMap),
    *(queue.Queue, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
)
# Python's own, as others may be filled when somebody looks.
_CONTAINERS = (
    *(list, tuple, dict, set, frozenset),
    *(collections.deque, collections.OrderedDict, collections.defaultdict, collections.Counter),
)
_VARIABLES = ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_DEREF")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR")
# What newer versions of Python write between reading a variable and its attribute.
_BETWEEN = ("CACHE", "COPY", "DUP_TOP", "PUSH_NULL", "EXTENDED_ARG")
Found = Iterator[tuple[StepKind, str, Any]]


def reached(owner: Any) -> Found:
    """Variables, globals, attributes and defaults that a function has; attributes of an object with slots."""
    if not isinstance(owner, types.FunctionType):
        for name in (*slots_of(type(owner)), *getattr(owner, "__dict__", ())):
            value = getter(owner, "attribute", name)(name, MISSING)
            if value is not MISSING:
                yield "attribute", name, value
        return
    for name in owner.__code__.co_freevars:
        value = getter(owner, "cell", name)(name, MISSING)
        if value is not MISSING:
            yield "cell", name, value
    for (kind, name), chains in named_in(owner.__code__).items():
        value = owner.__globals__.get(name, MISSING) if kind == "global" and not name.startswith("__") else MISSING
        if value is not MISSING and (_may_change(value) or (is_namespace(value) and any(reached_in(value, chains)))):
            yield "global", name, value
    for name, value in vars(owner).items():
        if not name.startswith("__") and _may_change(value):
            yield "attribute", name, value
    for name in _defaults(owner):
        value = getter(owner, "default", name)(name, MISSING)
        if not isinstance(value, PLAIN) and _may_change(value):
            yield "default", name, value


def reached_in(namespace: Any, chains: Collection[tuple[str, ...]]) -> Found:
    """What the code that names these attributes of a module or class reaches there."""
    for name in dict.fromkeys(chain[0] for chain in chains if chain):
        value = MISSING if _is_computed(namespace, name) else getattr(namespace, name, MISSING)
        further = is_namespace(value) and any(reached_in(value, following(chains, name)))
        if value is not MISSING and not name.startswith("__") and (further or _may_change(value)):
            yield "attribute", name, value


def _is_computed(namespace: Any, name: str) -> bool:
    """Whether a descriptor stands for an attribute of a class: it is not to be replaced."""
    bases = namespace.__mro__ if isinstance(namespace, type) else ()
    found = next((vars(base)[name] for base in bases if name in vars(base)), None)
    return hasattr(type(found), "__get__") and not isinstance(found, (types.FunctionType, staticmethod, classmethod))


def chains_of(function: types.FunctionType, kind: StepKind, name: str) -> Collection[tuple[str, ...]]:
    """The attributes that a function names of a variable: ("model", "SCALE") of `config.model.SCALE`."""
    return named_in(function.__code__).get((kind, name), ())


def imported(function: types.FunctionType) -> Iterator[tuple[types.ModuleType, Collection[tuple[str, ...]]]]:
    """The user's modules that a function imports when it is called, with all attributes that it could name of them."""
    package = function.__globals__.get("__package__") or ""
    for level, name, names in _imports(function.__code__):
        module = sys.modules.get(importlib.util.resolve_name("." * level + name, package) if level else name)
        if module is not None and is_namespace(module):
            own = [attribute for attribute in names if hasattr(module, attribute)]
            within = [attribute for attribute in own if is_namespace(getattr(module, attribute))]
            yield module, [*((attribute,) for attribute in own), *itertools.product(within, names)]


def following(chains: Collection[tuple[str, ...]], name: str) -> list[tuple[str, ...]]:
    """What is named of an attribute."""
    return [chain[1:] for chain in chains if chain[:1] == (name,) and len(chain) > 1]


def getter(owner: Any, kind: StepKind, name: str) -> Callable[[str, Any], Any]:
    """What looks a variable up: called with its name and a default."""
    if kind == "cell":
        return _Cell(owner, name).get
    if kind == "global":
        found: Callable[[str, Any], Any] = owner.__globals__.get
        return found
    if kind == "default":
        return functools.partial(_default, owner)
    if kind == "context":
        return functools.partial(_in_context, owner)
    return functools.partial(getattr, owner) if is_namespace(owner) else functools.partial(_attribute, owner)


def put(owner: Any, kind: StepKind, name: str, value: Any) -> None:
    """Give a variable another value."""
    if kind == "cell":
        _Cell(owner, name).cell.cell_contents = value
    elif kind == "global":
        owner.__globals__[name] = value
    elif kind == "context":
        if value is not MISSING:  # Python cannot take a value back that others have set
            owner.set(value)
    elif kind == "default":
        by_name = _defaults(owner)
        if isinstance(by_name[name], str):
            owner.__kwdefaults__ = {**owner.__kwdefaults__, name: value}
        else:
            index = by_name[name]
            owner.__defaults__ = tuple(value if i == index else v for i, v in enumerate(owner.__defaults__))
    elif is_namespace(owner):
        setattr(owner, name, value)
    else:
        object.__setattr__(owner, name, value)  # of a frozen dataclass, too


def is_namespace(value: Any) -> bool:
    """Whether a value is a module or class of the user's, whose attributes may be settings."""
    if isinstance(value, types.ModuleType):
        return is_users(getattr(value, "__file__", None) or "<>")
    return isinstance(value, type) and _is_users_class(value)


def descriptor(cls: type, name: str, default: Any = MISSING) -> Any:
    """What a class has under a name, itself and not what it says there."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), default)


def descriptors_of(cls: type) -> Iterator[tuple[str, Any]]:
    """Attributes of a class that objects of a class of the user's compute."""
    for base in cls.__mro__:
        for name, found in vars(base).items() if is_namespace(base) else ():
            computes = hasattr(type(found), "__get__") and is_namespace(type(found))
            if computes and descriptor(cls, name) is found:
                yield name, found


def attributes_of(owner: Any) -> dict[str, Any]:
    """Attributes of an object, around whoever watches them."""
    found: dict[str, Any] = object.__getattribute__(owner, "__dict__")
    return found


def names_of(owner: Any) -> tuple[str, ...]:
    """Names of an object's attributes, of a module those that are not torch's or graphshard's."""
    names = attributes_of(owner)
    if not isinstance(owner, nn.Module):
        return tuple(names)
    hidden = OF_TORCH | {"forward"}
    return tuple(name for name in names if name not in hidden and not name.startswith("__"))


def slots_of(cls: type) -> tuple[str, ...]:
    """Names of the attributes that objects of a class keep in slots."""
    bases = [base for base in cls.__mro__ if base is not object and "__slots__" in vars(base)]
    found = ([base.__slots__] if isinstance(base.__slots__, str) else base.__slots__ for base in bases)  # type: ignore[attr-defined]
    return tuple(name for names in found for name in names if not name.startswith("__"))


class _Cell:
    """A variable that a function closes over."""

    def __init__(self, function: types.FunctionType, name: str) -> None:
        assert function.__closure__ is not None
        self.cell = function.__closure__[function.__code__.co_freevars.index(name)]

    def get(self, _: str, default: Any) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:  # not filled yet
            return default


def _attribute(owner: Any, name: str, default: Any) -> Any:
    """Around whoever watches attributes."""
    with contextlib.suppress(AttributeError):
        return object.__getattribute__(owner, name)
    return default


def _in_context(variable: ContextVar[Any], _: str, default: Any) -> Any:
    try:
        return variable.get()  # which knows a default of its own
    except LookupError:
        return default


def _defaults(function: types.FunctionType) -> dict[str, int | str]:
    """Arguments that have a default: which one it is, or the name of a keyword."""
    code, values = function.__code__, function.__defaults__ or ()
    first = code.co_argcount - len(values)
    places: dict[str, int | str] = {code.co_varnames[first + i]: i for i in range(len(values))}
    return {**places, **{name: name for name in function.__kwdefaults__ or ()}}


def _default(function: types.FunctionType, name: str, default: Any) -> Any:
    place = _defaults(function).get(name)
    if isinstance(place, int):
        return (function.__defaults__ or ())[place]
    return (function.__kwdefaults__ or {}).get(name, default)


@functools.cache
def named_in(code: types.CodeType) -> dict[tuple[str, str], tuple[tuple[str, ...], ...]]:
    """The variables that a function names, by kind and name, with the attributes that it names of them."""
    found: dict[tuple[str, str], dict[tuple[str, ...], None]] = {}
    for part in codes_of(code):
        steps = [step for step in dis.get_instructions(part) if step.opname not in _BETWEEN]
        for index, step in enumerate(steps):
            if step.opname in _VARIABLES:
                chain: list[str] = []
                while steps[index + 1 + len(chain)].opname in _ATTRIBUTES:
                    chain.append(steps[index + 1 + len(chain)].argval)
                kind = "cell" if step.opname == "LOAD_DEREF" else "global"
                found.setdefault((kind, step.argval), {})[tuple(chain)] = None
    return {variable: tuple(chains) for variable, chains in found.items()}


@functools.cache
def named_beside_classes(code: types.CodeType) -> tuple[str, ...]:
    """What a function could name of an object's class: all names, and text, of code that asks for one."""
    found: dict[str, None] = {}
    for part in codes_of(code):
        if {"type", "__class__"} & {*part.co_names, *part.co_freevars} or part.co_varnames[:1] == ("cls",):
            found |= dict.fromkeys((*part.co_names, *(text for text in part.co_consts if isinstance(text, str))))
    return tuple(found)


@functools.cache
def _imports(code: types.CodeType) -> tuple[tuple[int, str, tuple[str, ...]], ...]:
    """The modules that a function imports, as levels up and names, with all names in the code that does."""
    found = []
    for part in codes_of(code):
        steps = list(dis.get_instructions(part))
        found += [
            (steps[index - 2].argval, step.argval, part.co_names)
            for index, step in enumerate(steps)
            if step.opname == "IMPORT_NAME"
        ]
    return tuple(found)


def _may_change(value: Any) -> bool:
    """Whether a variable is something that a program may set: modules, classes and loggers are not."""
    if is_container(value):
        return type(value) in _CONTAINERS and len(value) <= _LARGEST
    if isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
        return True
    if isinstance(value, types.FunctionType) and value.__code__.co_filename.startswith(HERE):
        return False  # it stands in for another while a forward is traced, see `outside.exchanged`
    if isinstance(value, (*PLAIN, torch.Tensor, nn.Module, types.FunctionType, ContextVar, *ARRAYS, *_SETTINGS)):
        return True
    has_attributes = hasattr(value, "__dict__") or bool(slots_of(type(value)))
    return has_attributes and not isinstance(value, (type, types.ModuleType)) and _is_users_class(type(value))


def _is_users_class(cls: type) -> bool:
    module = sys.modules.get(cls.__module__)
    return cls.__module__ == "__main__" or is_users(getattr(module, "__file__", None) or "<>")
