"""Descriptions of the values that guards read, equal in two processes if the values are: text instead of identity.

    True, 2, "sdpa", torch.float32     the value itself
    a function                         its name, and a hash of its code, defaults and closure
    a class                            its name, and a hash of the functions and plain values of its whole MRO
    a tensor                           type, dtype, sizes, strides, device, requires_grad, dispatch keys
    a module, dict or other object     its class; guards read what forward reads of it

`ValueDescriber.codes` has every code object that was hashed. A trace that ran other code of the user is not recorded.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphshard.torch_compat.dynamo import REGISTERED
from graphshard.torch_compat.torch_ops import dispatch_keys
from graphshard.utils.source_lines import is_users

_IS_HEAP_TYPE = 1 << 9
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_NATIVE = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
# Attributes of classes that are no behavior.
_NOT_COMPARED = frozenset({"__doc__", "__annotations__", "__firstlineno__", "__dict__", "__weakref__"})
# Packages whose functions answer otherwise on another rank.
_OF_RANKS = ("torch.distributed", "torch.cuda")
_ALL_DIMS: Mapping[str, Sequence[int | None]] = types.MappingProxyType({})


class UndescribedError(Exception):
    """A value has no description that is equal in two processes."""


class ValueDescriber:
    """Describes values, each function and class once."""

    def __init__(self) -> None:
        self.constant: set[str] = set()
        self.codes: set[types.CodeType] = set()
        self._known: dict[int, str] = {}
        self._kept: list[Any] = []  # so that ids stay theirs

    def exact(self, value: Any) -> Any:
        """Return the description of a value that another process may have; raise UndescribedError if there is none."""
        if type(value) in _PLAIN:
            return [type(value).__name__, repr(value)]
        if isinstance(value, _OF_TORCH):
            return str(value)
        if isinstance(value, type):
            return self.cls(value)
        if isinstance(value, enum.Enum):
            return [self.cls(type(value)), value.name]
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.CodeType):
            return ["code", self._code(value)]
        if isinstance(value, types.MethodType):
            return ["method", self.exact(value.__func__), self.type_of(value.__self__)]
        if isinstance(value, _NATIVE):
            return ["native", str(getattr(value, "__module__", "")), value.__qualname__]
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        if isinstance(value, functools.partial):
            return ["partial", self.exact(value.func), *map(self.exact, (value.args, value.keywords))]
        if type(value) in (tuple, list):
            return [type(value).__name__, *map(self.exact, value)]
        if type(value) in (set, frozenset):
            return [type(value).__name__, *sorted(map(str, map(self.exact, value)))]
        if type(value) is dict:
            return ["dict", *([self.exact(key), self.exact(item)] for key, item in value.items())]
        if isinstance(value, functools._lru_cache_wrapper):
            return ["cached", self.exact(value.__wrapped__)]
        raise UndescribedError(f"{type(value).__qualname__} cannot be compared with another process's")

    def type_of(self, value: Any) -> str:
        """Return the description of an object's class."""
        return self.cls(type(value))

    def cls(self, cls: type) -> str:
        """Return the name of a class, with a hash of what its MRO does."""
        if id(cls) in self._known:
            return self._known[id(cls)]
        self._begin(cls, f"{cls.__module__}.{cls.__qualname__}")
        found = []
        for each in cls.__mro__:
            if each.__flags__ & _IS_HEAP_TYPE or each is torch.Tensor:
                attributes = {name: value for name, value in vars(each).items() if name not in _NOT_COMPARED}
                behavior = ((name, self._behavior(value)) for name, value in attributes.items())
                found.append(
                    [f"{each.__module__}.{each.__qualname__}", *((n, b) for n, b in behavior if b is not None)]
                )
        self._known[id(cls)] += f":{_hash(found)}"
        return self._known[id(cls)]

    def _behavior(self, value: Any) -> Any:
        """Return what an attribute of a class does; None if it is no function and no plain value."""
        if isinstance(value, (staticmethod, classmethod)):
            return [type(value).__name__, self.loose(value.__func__)]
        if isinstance(value, property):
            return ["property", *map(self.loose, (value.fget, value.fset, value.fdel))]
        if isinstance(value, functools.cached_property):
            return ["cached_property", self.loose(value.func)]
        if isinstance(value, (*_PLAIN, types.FunctionType, functools.partial, functools._lru_cache_wrapper, *_NATIVE)):
            return self.loose(value)
        return None

    def loose(self, value: Any) -> Any:
        """Return the description of a value, or the name of its class."""
        try:
            return self.exact(value)
        except UndescribedError:
            return f"{type(value).__module__}.{type(value).__qualname__}"

    def _function(self, function: types.FunctionType) -> str:
        if id(function) in self._known:
            return self._known[id(function)]
        self._begin(function, f"{function.__module__}.{function.__qualname__}")
        marks = []
        if not str(function.__module__).startswith("graphshard."):  # it registers some with the first trace
            marks = [is_registered(function) for is_registered in REGISTERED]
            if getattr(function, "_dynamo_marked_constant", False):
                self.constant.add(function.__qualname__)
        content = [
            marks,
            self._code(function.__code__),
            self.loose(function.__defaults__),
            self.loose(function.__kwdefaults__),
        ]
        for cell in function.__closure__ or ():
            try:
                content.append(self.loose(cell.cell_contents))
            except ValueError:  # it is empty
                content.append("empty")
        self._known[id(function)] += f":{_hash(content)}"
        return self._known[id(function)]

    def _begin(self, value: Any, name: str) -> None:
        """Let references of a value to itself have its name for a description."""
        self._known[id(value)] = name
        self._kept.append(value)

    def _code(self, code: types.CodeType) -> Any:
        self.codes.add(code)
        constants = [
            self._code(each) if isinstance(each, types.CodeType) else _constant(each) for each in code.co_consts
        ]
        layout = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        table = getattr(code, "co_exceptiontable", b"")  # from Python 3.11 on
        return _hash([code.co_code.hex(), table.hex(), layout, names, constants])


def tensor_facts(tensor: torch.Tensor, dims: Mapping[str, Sequence[int | None]] = _ALL_DIMS) -> list[str]:
    """Return what guards of tensors compare; `dims` has sizes and strides, None where none is compared."""
    sizes, strides = (
        tuple(n for n, known in zip(found, dims.get(name, found), strict=True) if known is not None)
        for name, found in (("size", tensor.shape), ("stride", tensor.stride()))
    )
    facts = (tensor.dtype, tensor.ndim, sizes, strides, tensor.device, tensor.requires_grad, tensor.layout)
    return [*map(str, facts), str(dispatch_keys(tensor))]


def differs_by_rank(value: Any) -> bool:
    """Return whether a function or class may answer otherwise on another rank."""
    callables = (types.FunctionType, type, *_NATIVE)
    return isinstance(value, callables) and str(getattr(value, "__module__", "")).startswith(_OF_RANKS)


def must_be_described(code: types.CodeType) -> bool:
    """Return whether the version of torch or Python does not say what traced code does."""
    file = code.co_filename
    return is_users(file) or (file.startswith("<") and not file.startswith("<frozen "))


def environment_of(variables: Mapping[str, str], named: set[str]) -> dict[str, str]:
    """Return environment variables, without the ones of a launch unless code names them."""
    return {
        name: value for name, value in sorted(variables.items()) if name in named or not name.startswith(_OF_LAUNCHES)
    }


# Environment variables that differ between ranks or launches of one job.
_OF_LAUNCHES = (
    *("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "OMPI_", "PMI", "SLURM"),
    "HOSTNAME",
    *("PWD", "OLDPWD", "SHLVL", "TERM", "COLUMNS", "LINES", "TMPDIR", "SSH_", "XDG_", "DBUS_", "PYTEST_", "_"),
    *("TORCHINDUCTOR_CACHE_DIR", "GRAPHSHARD_CACHE"),
)


def _constant(value: Any) -> Any:
    """Return a constant of code; the order of a set differs between processes."""
    if isinstance(value, frozenset):
        return ["frozenset", *sorted(map(str, map(_constant, value)))]
    return (
        [type(value).__name__, *map(_constant, value)]
        if isinstance(value, tuple)
        else [type(value).__name__, repr(value)]
    )


def _hash(content: Any) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]
