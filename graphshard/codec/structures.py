"""Structures of inputs and outputs as text: pytree's own JSON.

Reading one looks its classes up among those that are registered in this process, as those of the model's inputs and
outputs are when the model's code was imported; it imports nothing, though pytree would.
"""

from __future__ import annotations

import json
from typing import Any

from graphshard.errors import ArtifactError
from graphshard.ir.plain import typed
from graphshard.torch_compat.operators import pytree

_OWN = frozenset({"builtins.list", "builtins.tuple", "builtins.dict", "collections.OrderedDict"})


class UnknownOutput:
    """Stands in a treespec for classes that could not be stored; its context is the text."""


def describe_structure(spec: pytree.TreeSpec) -> str:
    """A structure as text, whatever is in it."""
    if spec.type is UnknownOutput:
        return str(spec.context)
    try:
        return pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError):
        return f"not stored: {spec}"


def described_structure(text: Any) -> pytree.TreeSpec:
    """The structure if it is of Python's own classes, otherwise one that stands for it."""
    try:
        if "__enum__" not in typed(text, str) and _types(text) <= _OWN:
            return pytree.treespec_loads(text)
    except ValueError:
        pass
    return pytree.TreeSpec(UnknownOutput, typed(text, str), [])


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


def decode_structure(text: Any, what: str) -> pytree.TreeSpec:
    """Inverse of `encode_structure`.

    Raises:
        ArtifactError: it has a class that is not registered here.
    """
    unknown = sorted(_types(typed(text, str)) - set(pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE))
    if unknown:
        raise ArtifactError(
            f"the {what} hold a {unknown[0]}, which is not registered with torch.utils._pytree in this process. Import "
            "the module that defines it before loading."
        )
    if "__enum__" in text:
        raise ArtifactError(f"the structure of the {what} names a class to import. It is not loaded.")
    return pytree.treespec_loads(text)


def _types(text: str) -> set[str]:
    """The classes in a structure, by pytree's names for them."""
    _, schema = json.loads(text)
    return _types_in(schema)


def _types_in(schema: dict[str, Any]) -> set[str]:
    own = {schema["type"]} - {None}
    return own.union(*map(_types_in, schema["children_spec"]))
