"""What a program was captured for as plain JSON: signatures of calls, and structures of inputs and outputs.

{"structure": "[1, ...]", "inputs": [...], "training": [true, ...], "grad": true, "autocast": false,
 "params": [[true, {"dtype": "float32"}], ...]}

Structures are pytree's own JSON. Reading one looks its classes up among those that are registered in this process, as
those of the model's inputs and outputs are when the model's code was imported; it imports nothing.
"""

from __future__ import annotations

import json
from typing import Any

from torch.utils import _pytree as pytree

from graphshard.capture.signature import Signature
from graphshard.codec.values import Decoder, encode, typed
from graphshard.ir.errors import ArtifactError

_CONSTANTS = {kind.__name__: kind for kind in (int, float, bool, str, type(None))}


def encode_signature(signature: Signature) -> dict[str, Any]:
    """A signature as plain JSON; raises `ArtifactError` if its structure cannot be stored."""
    return {
        "structure": encode_structure(signature.structure, "inputs"),
        "inputs": [_encode_input(key) for key in signature.inputs],
        "training": list(signature.training),
        "grad": signature.grad,
        "autocast": encode(signature.autocast),
        "params": [[trainable, encode(dtype)] for trainable, dtype in signature.params],
        "settings": [list(row) for row in signature.settings],
    }


def decode_signature(data: dict[str, Any]) -> Signature:
    """Inverse of `encode_signature`."""
    value = Decoder().value
    return Signature(
        structure=decode_structure(data["structure"], "inputs"),
        inputs=tuple(_decode_input(item, value) for item in data["inputs"]),
        training=tuple(typed(mode, bool) for mode in data["training"]),
        grad=typed(data["grad"], bool),
        autocast=value(data["autocast"]),
        params=tuple((typed(trainable, bool), value(dtype)) for trainable, dtype in data["params"]),
        settings=tuple(_decode_settings(*row) for row in data["settings"]),
    )


def _decode_settings(reshard: Any, divide_factor: Any, force_sum: Any, held: Any) -> tuple[Any, ...]:
    """See `ParamRow.settings`."""
    factor = None if divide_factor is None else typed(divide_factor, float)
    return typed(reshard, bool), factor, typed(force_sum, bool), typed(held, bool)


def encode_structure(spec: pytree.TreeSpec, what: str) -> str:
    """A structure as text.

    Raises:
        ArtifactError: a class in it says not how it is stored; `what` is the structure of what.
    """
    try:
        return pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError) as error:
        raise ArtifactError(
            f"the structure of the {what} cannot be stored: {error} Register the class with a serialized_type_name, "
            "or return and pass tuples, lists and dicts."
        ) from None


def decode_structure(text: str, what: str) -> pytree.TreeSpec:
    """Inverse of `encode_structure`.

    Raises:
        ArtifactError: it has a class that is not registered here.
    """
    _, schema = json.loads(typed(text, str))
    unknown = sorted(_types(schema) - set(pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE))
    if unknown:
        raise ArtifactError(
            f"the {what} hold a {unknown[0]}, which is not registered with torch.utils._pytree in this process. Import "
            "the module that defines it before loading."
        )
    if "__enum__" in text:
        raise ArtifactError(f"the structure of the {what} names a class to import. It is not loaded.")
    return pytree.treespec_loads(text)


def _types(schema: dict[str, Any]) -> set[str]:
    own = {schema["type"]} - {None}
    return own.union(*map(_types, schema["children_spec"]))


def _encode_input(key: tuple[Any, ...]) -> dict[str, Any]:
    if len(key) == 4:
        shape, stride, dtype, grad = key
        return {"shape": list(shape), "stride": list(stride), "dtype": encode(dtype), "requires_grad": grad}
    kind, value = key
    return {"type": kind.__name__, "value": encode(value)}


def _decode_input(data: dict[str, Any], value: Any) -> tuple[Any, ...]:
    if "shape" in data:
        sizes = (tuple(typed(size, int) for size in data[name]) for name in ("shape", "stride"))
        return (*sizes, value(data["dtype"]), typed(data["requires_grad"], bool))
    return (_CONSTANTS[data["type"]], value(data["value"]))
