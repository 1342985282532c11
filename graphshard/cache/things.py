"""Visit things one by one: containers, tensors, objects, modules; `walk.py` adds code."""

from __future__ import annotations

import collections
import hashlib
import os
import types
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from graphshard.cache.origins import origin_of_module
from graphshard.capture.entry import without_entries
from graphshard.capture.hooks import HOOKS, is_ours
from graphshard.capture.outer import OF_PARAMETERS, slots_of
from graphshard.capture.witness import PLAIN
from graphshard.ir.classes import users_class

# Things that are visited at most.
_MOST = 400_000
# Bytes of a tensor that is compared by its values.
_LARGEST = 64 << 20
# Attributes of modules that are torch's own; hooks are looked at for themselves.
_TORCHS = frozenset(vars(nn.Module())) | OF_PARAMETERS
# Attributes that say what FSDP2, or this package in its place, knows of a module; their names are random.
_OF_FULLY_SHARD = "__composable_api_state_key"
# What calls of a hook depend on besides.
_KINDS_OF_HOOKS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
# Code with these names may look at all attributes.
_LISTS = {"__dict__", "vars", "dir", "getmembers", "getattr", "attrgetter", "__getattribute__"}
# Bases of classes that read no attributes of their objects by themselves.
_READ_NOTHING = {"builtins.object", "abc.ABC", "typing.Generic", "typing.Protocol", "torch.nn.modules.module.Module"}

_CLOCKS = {"now", "today", "utcnow"}
# Of transformers' GenerationConfig: its hash(), another at each launch, by which it knows whether it was changed.
_HASHES = {"_original_object_hash"}


class _Contents(NamedTuple):
    """A module of the model's, to be visited now."""

    of: nn.Module


class Things:
    """Visits what code can read.

    Args:
        ran: digests of the code of functions that ran, whose globals are followed.
        names: that those functions name; what cannot be compared is a problem under one of them.

    Attributes:
        items: digests by what was visited first, for messages.
        problems: why no digest is one of all that matters.
        reached: digests of the code of functions that were visited.
    """

    def __init__(self, ran: Collection[str] = (), names: Collection[str] | None = None) -> None:
        self._ran = set(ran)
        self._names = None if names is None or _LISTS & set(names) else names
        self._unread = _HASHES.difference(names or ())
        self.items: dict[str, str] = {}
        self.problems: list[str] = []
        self.reached: set[str] = set()
        self._known: dict[int, str] = {}
        self._alive: list[Any] = []
        self._own: dict[int, str] = {}
        self._modules: dict[int, str] = {}
        self._count = 0
        self._hash = hashlib.sha256()
        self._label = self._name = ""

    @property
    def digest(self) -> str:
        """Of all that was visited."""
        return hashlib.sha256("\n".join(f"{k} {v}" for k, v in self.items.items()).encode()).hexdigest()[:32]

    def visit(self, label: str, *values: Any) -> None:
        """Add an item: values with all that they can read."""
        self._label, self._hash = label, hashlib.sha256()
        try:
            for value in values:
                self._write(self._token(value))
        except RecursionError:
            self.problems.append(f"{label} holds objects in objects without end")
        except Exception as error:  # objects of others may refuse to be looked at
            self.problems.append(f"{label} cannot be compared: {type(error).__name__}: {error}")
        known = self.items.get(label, "")
        self.items[label] = self._hash.hexdigest()[:16] if not known else f"{known[:8]}{self._hash.hexdigest()[:8]}"

    def know(self, model: nn.Module) -> None:
        """From now on modules of the model, and what they own, count by their names."""
        for name, module in model.named_modules():
            for kind in ("_parameters", "_buffers"):
                for key, tensor in vars(module)[kind].items():
                    self._own.setdefault(id(tensor), f"{name}.{key}")
        self._modules = {id(module): name for name, module in model.named_modules()}
        self._alive += list(model.modules())

    def visit_model(self, model: nn.Module) -> None:
        """Add an item for each module."""
        for name, module in model.named_modules():
            self.visit(f"module {name or '(model)'}", _Contents(module))

    # --- values ------------------------------------------------------------------------------------------------

    def _write(self, text: str) -> None:
        self._hash.update(text.encode("utf-8", "surrogatepass"))
        self._hash.update(b"\n")

    def _problem(self, what: str) -> str:
        self.problems.append(f"{self._label}: {what}")
        return "?"

    def _token(self, value: Any) -> str:
        kind = type(value)
        if kind in (bool, int, str, bytes, type(None)):
            return f"{kind.__name__} {value!r}"
        if kind is float:
            return f"float {value.hex()}"
        if id(value) in self._modules:
            return f"the model's module {self._modules[id(value)]!r}"
        if kind is _Contents:
            return self._module(value.of)
        if id(value) in self._known:
            return self._known[id(value)]
        if isinstance(value, PLAIN) and not hasattr(value, "__dict__"):
            return f"{kind.__name__} {value!r}"
        if self._count > _MOST:
            raise RecursionError
        self._count += 1
        self._known[id(value)] = number = f"#{self._count}"
        self._alive.append(value)
        self._write(f"{number} {self._content(value)}")
        return number

    def _content(self, value: Any) -> str:
        """What a thing is, in words that are the same where it is."""
        raise NotImplementedError

    def _class_name(self, cls: type) -> str:
        """A class by its name, and by its contents if it is not torch's or Python's."""
        raise NotImplementedError

    def _tokens(self, values: Iterable[Any]) -> str:
        return f"[{', '.join(self._token(value) for value in values)}]"

    def _container(self, value: Any) -> str:
        kind = self._class_name(type(value))
        beside = "" if type(value) in (list, tuple, dict, set, frozenset) else self._attributes(value)
        if isinstance(value, (set, frozenset)):
            return f"{kind} {sorted(map(self._token, sorted(value, key=repr)))} {beside}"
        if isinstance(value, collections.defaultdict):
            beside += self._token(value.default_factory)
        if isinstance(value, dict):
            return f"{kind} {self._tokens([part for item in dict.items(value) for part in item])} {beside}"
        return f"{kind} {self._tokens(value)} {beside}"

    def _mapping(self, value: Any) -> str:
        return f"mapping {self._tokens([part for item in value.items() for part in item])}"

    def _array(self, value: Any) -> str:
        if value.dtype.hasobject:
            return self._opaque(value)
        return f"array {value.dtype} {value.shape} {hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()}"

    def _tensor(self, value: torch.Tensor) -> str:
        if id(value) in self._own:
            return f"the model's {self._own[id(value)]}"
        kind = self._class_name(type(value)) if type(value) not in (torch.Tensor, nn.Parameter) else "tensor"
        layout = value.stride() if value.layout == torch.strided else value.layout
        about = f"{kind} {value.dtype} {tuple(value.shape)} {layout} {value.device} {value.requires_grad}"
        if value.is_meta:
            return about
        dense = value.layout == torch.strided and type(value) in (torch.Tensor, nn.Parameter)
        if not dense or value.numel() * value.element_size() > _LARGEST:
            return about + self._opaque(value)
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return f"{about} {hashlib.sha256(raw.tobytes()).hexdigest()}"

    def _opaque(self, value: Any) -> str:
        where = f"{self._name} holds " if self._name else ""
        return self._problem(f"{where}a {type(value).__module__}.{type(value).__qualname__}, which cannot be compared")

    # --- objects -----------------------------------------------------------------------------------------------

    def _object(self, value: Any) -> str:
        kind = type(value)
        module = kind.__module__
        if module.partition(".")[0] == "typing" or isinstance(value, types.GenericAlias):
            return repr(value)
        if module == "datetime" and self._names is not None and not _CLOCKS.isdisjoint(self._names):
            return self._opaque(value)  # it may be asked for the time
        if module in ("datetime", "decimal", "fractions", "ipaddress", "uuid"):
            return f"{module} {value!r}"
        if kind is object:  # told from others by what it is not
            return "a sentinel"
        if origin_of_module(module) == "graphshard":  # its own source is compared as a whole
            return f"{module}.{kind.__qualname__}"
        if isinstance(value, (torch.Generator, torch.distributed.ProcessGroup)):
            return self._opaque(value)
        for plain in (int, float, complex, str, bytes):
            if isinstance(value, plain):
                return f"{self._class_name(kind)} {plain.__repr__(value)} {self._attributes(value)}"
        if isinstance(value, type(os.environ)):  # what is read of it is recorded
            return "environ"
        if not isinstance(getattr(value, "__dict__", None), dict) and not _slots_of(kind):
            return self._opaque(value)
        return f"{self._class_name(kind)} {self._attributes(value)}"

    def _attributes(self, value: Any) -> str:
        found = dict(getattr(value, "__dict__", None) or {})
        for name in _slots_of(type(value)):
            try:
                found[name] = object.__getattribute__(value, name)
            except AttributeError:
                continue
        return self._named(found, all_=not _is_read_by_users(type(value)))

    def _named(self, attributes: Mapping[str, Any], *, all_: bool = False) -> str:
        """Attributes by name. One that cannot be compared does not matter if no code that ran has its name.

        Args:
            all_: other code than that may read them.
        """
        parts = []
        for name, value in attributes.items():
            if name in self._unread:
                continue
            before, known, self._name = len(self.problems), len(self._known), name
            parts.append(f"{name} {self._token(value)}")
            unnamed = not all_ and self._names is not None and name not in self._names
            if len(self.problems) > before and unnamed:
                del self.problems[before:]
                for key in list(self._known)[known:]:  # where it has another name, it is visited again
                    del self._known[key]
        return f"{{{', '.join(parts)}}}"

    def _module(self, module: nn.Module) -> str:
        """A module of the model's, or one that something holds; other modules in it are visited in their places."""
        own = without_entries(module)
        parts = [self._class_name(users_class(module)), f"training {module.training}"]
        parts.append(f"parameters {[(name, value is None) for name, value in own['_parameters'].items()]}")
        buffers = own["_buffers"].items()
        parts += [
            f"buffer {name} {None if b is None else (b.dtype, tuple(b.shape), b.stride())}" for name, b in buffers
        ]
        parts.append(f"not kept {sorted(own.get('_non_persistent_buffers_set', ()))}")
        for kind in HOOKS:
            users = {key: hook for key, hook in own[kind].items() if not is_ours(hook)}
            marks = [[key in own.get(other, ()) for other in _KINDS_OF_HOOKS] for key in users]
            parts.append(f"{kind} {self._tokens(users.values())} {marks}")
        theirs = {n: v for n, v in own.items() if n not in _TORCHS and not n.startswith(_OF_FULLY_SHARD)}
        parts.append(self._named(theirs, all_=not _is_read_by_users(users_class(module))))
        parts.append(self._named(own["_modules"]))
        return " ".join(parts)


def _slots_of(cls: type) -> list[str]:
    """Names that objects of a class have in slots, private ones as Python stores them."""
    private = (
        (f"_{base.__name__.lstrip('_')}{name}", name)
        for base in cls.__mro__
        for names in [vars(base).get("__slots__", ())]
        for name in ([names] if isinstance(names, str) else names)
    )
    return [*slots_of(cls), *(stored for stored, name in private if name.startswith("__") and not name.endswith("__"))]


def _is_read_by_users(cls: type) -> bool:
    """Whether attributes of a class's objects are read by code of the user's alone."""
    return all(
        origin_of_module(base.__module__) == "users" or f"{base.__module__}.{base.__qualname__}" in _READ_NOTHING
        for base in cls.__mro__
    )
