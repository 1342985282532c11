"""What a model's graph depends on besides its parameters: the code of its modules and their plain attributes.

Code is compared as Python understands it, so comments and layout do not matter: the classes of all modules up to
torch's own, and the functions of the user's that they refer to by name, as far as they can be followed.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import textwrap
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_TORCHS_OWN = frozenset(vars(nn.Module())) | {"_graphshard"}
# How deep attributes are followed, such as `self.config.rope.theta`.
_DEPTH = 4


def code_hash(model: nn.Module) -> str:
    """Hex digest of the source of a model's classes and of what they call."""
    sources: dict[str, str] = {}
    todo: list[Any] = list(dict.fromkeys(type(module) for module in model.modules()))
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


def attributes(model: nn.Module) -> dict[str, str]:
    """Numbers, strings and collections of them that modules hold as attributes, as text: `{"layers.0.drop.p": "0.1"}`.

    `training` is left out: every program says for itself in which modes it was captured.
    """
    found: dict[str, str] = {}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            text = None if name in _TORCHS_OWN else _text(value, _DEPTH)
            if text is not None:
                found[f"{prefix}.{name}" if prefix else name] = text
    return found


def _is_users(item: Any) -> bool:
    root = str(item.__module__).partition(".")[0]
    return root not in {"torch", "builtins", "graphshard", "typing", "collections", "functools", "math", "numpy"}


def _source(item: Any) -> str:
    """The code without comments and layout; "" where there is none to read, as in an interactive session."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(item)))
    except (OSError, TypeError, SyntaxError):
        return ""
    return ast.dump(tree)


def _used_by(item: Any) -> Iterator[Any]:
    """Bases of a class, and the functions and classes that its methods (or a function) refer to by name.

    Methods that were put in after the class was made are not in its source, so they count as used.
    """
    if isinstance(item, type):
        yield from item.__bases__
        yield from (f for f in _functions(item) if not f.__qualname__.startswith(f"{item.__qualname__}."))
    for function in _functions(item):
        for code in _codes(function.__code__):
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


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of the functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _text(value: Any, depth: int) -> str | None:
    """A value that is plain through and through as text that is the same in every process; None for others."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if depth == 0 or isinstance(value, (torch.Tensor, nn.Module, type)) or callable(value):
        return None
    if isinstance(value, (list, tuple)):
        items = [_text(item, depth - 1) for item in value]
        return None if None in items else f"[{', '.join(filter(None, items))}]"
    if isinstance(value, (set, frozenset)):
        items = [_text(item, depth - 1) for item in value]
        return None if None in items else f"{{{', '.join(sorted(filter(None, items)))}}}"
    if not isinstance(value, dict):
        if not (dataclasses.is_dataclass(value) or hasattr(value, "__dict__")):
            return None
        value = vars(value)
    # Hashes of objects, which transformers keeps of its generation_config, differ from process to process.
    kept = {str(key): item for key, item in value.items() if not str(key).endswith("_hash")}
    pairs = ((key, _text(item, depth - 1)) for key, item in kept.items())
    return f"{{{', '.join(f'{key}: {item}' for key, item in sorted((k, t) for k, t in pairs if t is not None))}}}"
