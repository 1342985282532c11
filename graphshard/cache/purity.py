"""What of Python's own library returns the same at every launch, if its arguments are the same."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Any

from graphshard.cache.origins import origin_of_module

# Modules of Python whose functions return the same for the same arguments, or draw what capture refuses.
_PURE = frozenset(
    {
        *("math", "cmath", "functools", "itertools", "operator", "collections", "dataclasses", "enum", "typing", "abc"),
        *("types", "copy", "contextlib", "warnings", "logging", "re", "string", "numbers", "fractions", "decimal"),
        *("statistics", "bisect", "heapq", "textwrap", "builtins", "weakref", "random", "hashlib", "json", "pprint"),
        *("reprlib", "keyword", "struct", "array", "contextvars", "__future__", "posixpath", "ntpath", "copyreg"),
        *("_abc", "_bisect", "_collections", "_collections_abc", "_contextvars", "_decimal", "_functools", "_heapq"),
        *("_json", "_operator", "_pydecimal", "_sre", "_statistics", "_struct", "_weakref", "_weakrefset"),
    }
)
_PURE_OF = {
    "os": {"environ", "getenv", "sep", "linesep", "fspath", "name", "PathLike"},
    "sys": {
        "version_info",
        "version",
        "maxsize",
        "platform",
        "float_info",
        "byteorder",
        "implementation",
        "maxunicode",
    },
    "pathlib": {"PurePath", "PurePosixPath"},
    "datetime": {"timedelta", "timezone"},
    "threading": {"Lock", "RLock"},
    "_thread": {"lock", "RLock", "allocate_lock"},
    "inspect": {
        *("signature", "Signature", "Parameter", "isfunction", "isclass", "ismethod", "isbuiltin", "isabstract"),
        *("isgeneratorfunction", "iscoroutinefunction", "getattr_static", "unwrap", "getfullargspec"),
    },
}
# What may be asked of functions and classes, and is no part of their digest.
UNCOMPARED = frozenset(
    {
        *("__doc__", "__annotations__", "__subclasses__", "__dataclass_fields__", "__closure__"),
        *("getsource", "getsourcelines", "getdoc", "get_type_hints", "annotation", "metadata"),
        *("co_filename", "co_firstlineno", "co_lnotab", "co_linetable", "co_lines", "co_positions"),
        *("f_lineno", "tb_lineno", "f_back", "tb_frame", "gi_frame"),
    }
)
_PURE_PATHS = {"join", "basename", "dirname", "splitext", "split", "sep"}


def impure_function(value: Any) -> str:
    """Why a function or class that was imported by name may return something else; "" if it does not."""
    kinds = (types.FunctionType, types.BuiltinFunctionType, type)
    module = getattr(value, "__module__", None) if isinstance(value, kinds) else None
    if not isinstance(module, str):
        return ""
    root = module.partition(".")[0]
    if root == "genericpath":
        return f"asks the file system ({value.__name__})"
    if origin_of_module(root) != "python" or root in _PURE:
        return ""
    if value.__name__ in _PURE_OF.get(root, ()):
        return ""
    return f"calls {module}.{value.__name__}, which may return another value at each launch"


def impure_names(module: str, chains: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Attributes that code names of a module of Python's, which may be others at another launch."""
    if module.partition(".")[0] not in _PURE:
        allowed = _PURE_OF.get(module, set())
        for chain in chains:
            of_path = chain[:1] == ("path",) and chain[1:2] and chain[1] in _PURE_PATHS
            if not chain or not (chain[0] in allowed or of_path):
                yield chain
