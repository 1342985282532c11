"""The code that a model's graph depends on, as a hash.

Code is compared as Python understands it, so comments and layout do not matter: the classes of all modules up to
torch's own, and the functions of the user's that they refer to by name, as far as they can be followed.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from graphshard.ir.classes import users_class


def code_hash(model: nn.Module) -> str:
    """Hex digest of the source of a model's classes and of what they call."""
    return hash_of(dict.fromkeys(users_class(module) for module in model.modules()))


def hash_of(items: Iterable[Any]) -> str:
    """Hex digest of the source of classes and functions and of what they call."""
    sources: dict[str, str] = {}
    todo = list(items)
    while todo:
        item = todo.pop()
        name = f"{item.__module__}:{item.__qualname__}"
        if name not in sources and _is_users(item):
            sources[name] = _source(item)
            todo += _used_by(item)
    # Without the modules' names: what a script defines is in __main__ there, and elsewhere for who imports it.
    found = sorted((name.rpartition(":")[2], source) for name, source in sources.items())
    text = "\n".join(f"{name}\n{source}" for name, source in found)
    return hashlib.sha256(text.encode()).hexdigest()


def _is_users(item: Any) -> bool:
    root = str(item.__module__).partition(".")[0]
    return root not in {"torch", "builtins", "graphshard", "typing", "collections", "functools", "math", "numpy"}


def _source(item: Any) -> str:
    """The code without comments and layout; "" where there is none to read, as in an interactive session.

    A line may hold several lambdas, so those are told apart by what they are compiled to.
    """
    code = getattr(item, "__code__", None)
    compiled = (
        "" if code is None else repr((code.co_code, code.co_names, [c for c in code.co_consts if not _nested(c)]))
    )
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(item)))
    except (OSError, TypeError, SyntaxError):
        return compiled
    return ast.dump(tree) + (compiled if item.__name__ == "<lambda>" else "")


def _nested(constant: Any) -> bool:
    return isinstance(constant, types.CodeType)


def _used_by(item: Any) -> Iterator[Any]:
    """Bases of a class, and the functions and classes that its methods (or a function) refer to by name.

    Methods that were put in after the class was made are not in its source, so they count as used.
    """
    if isinstance(item, type):
        yield from item.__bases__
        yield from (f for f in _functions(item) if not f.__qualname__.startswith(f"{item.__qualname__}."))
    for function in _functions(item):
        for code in codes_of(function.__code__):
            for name in code.co_names:
                value = function.__globals__.get(name)
                if isinstance(value, (types.FunctionType, type)):
                    yield inspect.unwrap(value) if isinstance(value, types.FunctionType) else value


def _functions(item: Any) -> Iterator[types.FunctionType]:
    values = vars(item).values() if isinstance(item, type) else [item]
    for value in values:
        value = getattr(value, "__func__", getattr(value, "fget", value))  # static and class methods, properties
        if isinstance(value, types.FunctionType):
            yield value


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of the functions within it."""
    yield code
    for constant in code.co_consts:
        if _nested(constant):
            yield from codes_of(constant)
