"""What an attribute was when a program was captured, and whether it still is.

    numbers, strings, dtypes, ...    equal, and of the same type
    lists, tuples, dicts, sets       the same items, item by item
    tensors                          the same shape, strides, dtype, device and requires_grad: values are inputs
    arrays of numpy's and Python's   the same bytes, up to 64 KiB; larger ones are compared as objects
    modules, functions, objects      the very same one; what forward reads of an object is compared for itself

A program from a file has no witnesses, only their text: it is equal in every process where these things are. Functions
are told apart by their source there, and objects by their class.
"""

from __future__ import annotations

import array
import enum
import functools
import hashlib
import types
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from graphshard.capture.code import hash_of
from graphshard.ir.state import MISSING, Path, Place

# Immutable, and equal where they are the same.
PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), range, slice, enum.Enum, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
SEQUENCES = (list, tuple, deque)
SETS = (set, frozenset)
# They hold numbers that others than torch may change.
ARRAYS = (bytearray, array.array, np.ndarray)
# Containers in containers are followed so far.
_DEPTH = 8
_LARGEST_ARRAY = 64 * 1024  # bytes


class OfType(NamedTuple):
    """Witness of something of which only the type matters."""

    kind: type


class TensorLike(NamedTuple):
    """Witness of a tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


class Items(NamedTuple):
    """Witness of a container: its type, keys if it has some, and witnesses of what is in it."""

    kind: type
    keys: tuple[Any, ...]
    items: tuple[Any, ...]


class Bytes(NamedTuple):
    """Witness of an array: its type, what its items are, and its bytes."""

    kind: type
    items: str
    data: bytes


def is_container(value: Any) -> bool:
    """Whether a value is compared item by item."""
    return isinstance(value, (*SEQUENCES, *SETS, dict)) and not isinstance(value, torch.Size)


def witness_of(value: Any, depth: int = _DEPTH, *, free: Collection[Path] = ()) -> Any:
    """What to remember of a value; it keeps objects alive, so that no other has their identity.

    Args:
        free: ways within the value to what only the type matters of.
    """
    if () in free:
        return OfType(type(value))
    if isinstance(value, torch.Tensor):
        return tensor_like(value)
    if isinstance(value, ARRAYS):
        return bytes_of(value) or value
    if isinstance(value, PLAIN) or not is_container(value) or depth == 0:
        return value
    if isinstance(value, dict):
        items = (witness_of(item, depth - 1, free=_within(free, key)) for key, item in value.items())
        return Items(type(value), tuple(value), tuple(items))
    if isinstance(value, SETS):
        return Items(type(value), (frozenset(value),), ())
    return Items(type(value), (), tuple(witness_of(v, depth - 1, free=_within(free, i)) for i, v in enumerate(value)))


def _within(free: Collection[Path], key: Any) -> Collection[Path]:
    """The ways that go on in an item."""
    return [path[1:] for path in free if path and path[0] == ("item", key)] if free else ()


def tensor_like(tensor: torch.Tensor) -> TensorLike:
    """What programs distinguish of a tensor."""
    stride = tensor.stride() if tensor.layout == torch.strided else ()
    return TensorLike(tensor.shape, stride, tensor.dtype, tensor.device, tensor.requires_grad)


def bytes_of(array: Any) -> Bytes | None:
    """What an array has; None of a large one, or one of objects."""
    values = array if isinstance(array, np.ndarray) else np.frombuffer(array, getattr(array, "typecode", "B"))
    if values.dtype.hasobject or values.nbytes > _LARGEST_ARRAY:
        return None
    return Bytes(type(array), f"{values.dtype}{list(values.shape)}", values.tobytes())


def same(witness: Any, value: Any) -> bool:
    """Whether a value is what it was."""
    if witness is value:
        return True
    if isinstance(witness, OfType):
        return type(value) is witness.kind
    if isinstance(witness, TensorLike):
        return isinstance(value, torch.Tensor) and tensor_like(value) == witness
    if isinstance(witness, Bytes):
        return type(value) is witness.kind and bytes_of(value) == witness
    if isinstance(witness, Items):
        return type(value) is witness.kind and _same_items(witness, value)
    if type(value) is not type(witness):
        return False
    if isinstance(witness, (float, complex)):
        return repr(witness) == repr(value)  # tells 0.0 from -0.0, and nan is nan
    if isinstance(witness, (*PLAIN, types.MethodType)):
        return bool(witness == value)
    return False


def _same_items(witness: Items, value: Any) -> bool:
    if isinstance(value, SETS):
        return bool(witness.keys[0] == value)
    if len(value) != len(witness.items):
        return False
    if isinstance(value, dict):
        if tuple(value) != witness.keys:
            return False
        value = value.values()
    return all(map(same, witness.items, value))


def text_at(place: Place, value: Any, names: Mapping[int, str], free: Collection[Path] = ()) -> str:
    """What a read says of a value at a place. The code of classes and their modules is compared as a whole."""
    if place.path[-1][0] in ("class", "global") and isinstance(value, types.FunctionType):
        return value.__qualname__
    return describe(value, names, free=free)


def describe(value: Any, names: Mapping[int, str], depth: int = _DEPTH, *, free: Collection[Path] = ()) -> str:
    """A value as text; `names` are those of the model's modules, by identity; `free` as for `witness_of`."""
    if () in free:
        return f"any {type(value).__name__}"
    if value is MISSING:
        return "missing"
    if isinstance(value, torch.Tensor):
        value = tensor_like(value)
    if isinstance(value, ARRAYS):
        value = bytes_of(value) or value
    if isinstance(value, Bytes):
        return f"{value.kind.__name__} of {value.items} ({hashlib.sha256(value.data).hexdigest()[:12]})"
    if isinstance(value, TensorLike):
        grad = ", requires_grad" if value.requires_grad else ""
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}{list(value.shape)} with strides {list(value.stride)}{grad}"
    if isinstance(value, enum.Enum) or (isinstance(value, PLAIN) and type(value).__module__ in ("builtins", "torch")):
        return str(value) if isinstance(value, enum.Enum) else repr(value)
    if is_container(value) and depth:
        return _describe_items(value, names, depth, free)
    if isinstance(value, nn.Module):
        return f"module {names.get(id(value), type(value).__qualname__)}"
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords)
        return f"partial({', '.join(describe(part, names, depth - 1) for part in parts)})" if depth else "partial"
    if isinstance(value, types.MethodType):
        owner = describe(value.__self__, names, depth - 1) if depth else ""
        return f"{describe(value.__func__, names, depth - 1)} of {owner}"
    if isinstance(value, types.FunctionType):
        return _describe_function(value)
    if isinstance(value, (type, types.BuiltinFunctionType)):
        return value.__qualname__
    return f"a {type(value).__qualname__}"


def _describe_items(value: Any, names: Mapping[int, str], depth: int, free: Collection[Path]) -> str:
    kind = "" if type(value) in (list, tuple, dict, set) else type(value).__name__
    if isinstance(value, dict):
        values = (describe(item, names, depth - 1, free=_within(free, key)) for key, item in value.items())
        return f"{kind}{{{', '.join(f'{describe(key, names)}: {text}' for key, text in zip(value, values))}}}"
    items = [describe(item, names, depth - 1, free=_within(free, i)) for i, item in enumerate(value)]
    if isinstance(value, SETS):
        return f"{kind}{{{', '.join(sorted(items))}}}"
    return f"{kind}({', '.join(items)})" if isinstance(value, tuple) else f"{kind}[{', '.join(items)}]"


def _describe_function(function: types.FunctionType) -> str:
    """A function of the user's by its name and its source; what it closes over is compared for itself."""
    if (function.__module__ or "").partition(".")[0] == "torch":
        return f"{function.__module__}.{function.__qualname__}"
    return f"{function.__qualname__} ({hash_of([function])[:12]})"
