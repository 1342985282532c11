"""The code that a model's graph depends on, as a hash.

Code is compared as Python understands it, so comments and layout do not matter: the classes of all modules up to
torch's own, and the functions of the user's that they refer to by name, as far as they can be followed.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import linecache
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from graphshard.ir.classes import users_class
from graphshard.ir.codes import codes_of

# Where pip and Debian put packages; their files are compared as bytes.
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_STANDARD = sysconfig.get_path("stdlib")


def code_hash(model: nn.Module) -> str:
    """Hex digest of the source of a model's classes and of what they call."""
    return hash_of(dict.fromkeys(users_class(module) for module in model.modules()))


def hash_of(items: Iterable[Any]) -> str:
    """Hex digest of the source of classes and functions and of what they call."""
    seen: dict[int, Any] = {}
    # Without the modules' names: what a script defines is in __main__ there, and elsewhere for who imports it.
    found: set[tuple[str, str]] = set()
    todo = list(items)
    while todo:
        item = todo.pop()
        key = getattr(item, "__code__", item)
        if id(key) not in seen and _is_users(item):
            seen[id(key)] = key
            found.add((item.__qualname__, _source(item)))
            todo += _used_by(item)
    text = "\n".join(f"{name}\n{source}" for name, source in sorted(found))
    return hashlib.sha256(text.encode()).hexdigest()


def _is_users(item: Any) -> bool:
    root = str(item.__module__).partition(".")[0]
    return root not in {"torch", "builtins", "graphshard", "typing", "collections", "functools", "math", "numpy"}


def _source(item: Any) -> str:
    """The code without comments and layout; what it is compiled to where there is none, as in an interactive session.

    Of an installed package it is the whole file, which is read and not parsed: a model of a library refers to hundreds
    of its functions. Of Python's own library it is nothing. A line may hold several lambdas, and a file several
    functions of a name, so those are told apart by what they are compiled to.
    """
    code = getattr(item, "__code__", None)
    compiled = "" if code is None else _compiled(code)
    if_unnamed = compiled if item.__name__ == "<lambda>" else ""
    try:
        file = inspect.getsourcefile(item) or ""
        if not _INSTALLED.isdisjoint(Path(file).parts):
            return _digest(file, Path(file).stat().st_mtime_ns) + compiled
        if file.startswith(_STANDARD):
            return if_unnamed
        linecache.checkcache(file)
        named = _definitions("".join(linecache.getlines(file, vars(sys.modules[item.__module__]))))
    except (OSError, TypeError, KeyError, SyntaxError):
        return compiled
    nodes = named.get(item.__qualname__ if code is None else code.co_firstlineno)
    if nodes is None:
        return compiled
    return "".join(map(ast.dump, nodes)) + if_unnamed


@functools.cache
def _digest(file: str, _modified: int) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


@functools.lru_cache(maxsize=256)
def _definitions(text: str) -> dict[str | int, list[ast.AST]]:
    """A file's classes by their qualified names, and its functions by their first lines."""
    found: dict[str | int, list[ast.AST]] = {}
    todo: list[tuple[ast.AST, str]] = [(ast.parse(text), "")]
    while todo:
        node, prefix = todo.pop()
        if isinstance(node, ast.ClassDef):
            found.setdefault(prefix + node.name, []).append(node)
            prefix += f"{node.name}."
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min(part.lineno for part in (node, *node.decorator_list))
            found.setdefault(first, []).append(node)
            prefix += f"{node.name}.<locals>."
        elif isinstance(node, ast.Lambda):
            found.setdefault(node.lineno, []).append(node)
        todo += ((child, prefix) for child in reversed(list(ast.iter_child_nodes(node))))
    return found


def _compiled(code: types.CodeType) -> str:
    """What a function and those within it are compiled to. Sets are sorted: their order differs between processes."""
    parts = [
        (part.co_code, part.co_names, [_constant(c) for c in part.co_consts if not isinstance(c, types.CodeType)])
        for part in codes_of(code)
    ]
    return repr(parts)


def _constant(value: Any) -> str:
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)


def _used_by(item: Any) -> Iterator[Any]:
    """Bases of a class, and the functions and classes that its methods (or a function) refer to by name.

    Methods that were put in after the class was made are not in its source, so they count as used. So do what wraps a
    function, and what is wrapped.
    """
    if isinstance(item, type):
        yield from item.__bases__
        own = f"{item.__qualname__}."
        yield from (f for f in _functions(item) if hasattr(f, "__wrapped__") or not f.__qualname__.startswith(own))
    else:
        yield from _functions(item)
    for function in _functions(item):
        for code in codes_of(function.__code__):
            for name in code.co_names:
                value = function.__globals__.get(name)
                if isinstance(value, (types.FunctionType, type)):
                    yield value


def _functions(item: Any) -> Iterator[types.FunctionType]:
    values = vars(item).values() if isinstance(item, type) else [item]
    for value in values:
        value = getattr(value, "__func__", getattr(value, "fget", value))  # static and class methods, properties
        if isinstance(value, types.FunctionType):
            yield from _layers(value)


def _layers(function: Any) -> list[types.FunctionType]:
    """A function, and those that it wraps."""
    found: list[types.FunctionType] = []
    while isinstance(function, types.FunctionType) and function not in found:
        found.append(function)
        function = getattr(function, "__wrapped__", None)
    return found
