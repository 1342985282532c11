"""Which module's parameters are gathered together: the units.

A unit is what an FSDP2 user would call `fully_shard` on. The default finds the repeated blocks of a model; a
parameter belongs to the innermost unit above it, and what lies in no unit belongs to the root, "".
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence

from torch import nn

from graphshard.errors import ArgumentError


def find_units(module: nn.Module, patterns: Sequence[str] | None = None) -> tuple[str, ...]:
    """Names of the unit modules in registration order.

    Args:
        module: the root module.
        patterns: shell-style patterns of module names, such as `"layers.*"`; None finds the elements of
            the outermost `ModuleList`s and of the outermost `Sequential`s of composite modules. A `*` does
            not cross a dot.

    Raises:
        ArgumentError: a pattern matches no module that holds parameters.
    """
    if patterns is None:
        return tuple(_blocks(module, ""))
    names = [name for name, sub in module.named_modules() if name and _holds_parameters(sub)]
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in names):
            raise ArgumentError(
                f"units: the pattern {pattern!r} matches no submodule with parameters of "
                f"{type(module).__name__}. Use names as in named_modules(), such as {names[:3]}."
            )
    return tuple(name for name in names if any(_matches(name, p) for p in patterns))


def unit_of(name: str, units: Sequence[str]) -> str:
    """The innermost unit that contains the parameter or module `name`, or "" for the root."""
    known = set(units)
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        prefix = ".".join(parts[:end])
        if prefix in known:
            return prefix
    return ""


def _blocks(module: nn.Module, prefix: str) -> Iterator[str]:
    for child_name, child in module.named_children():
        name = f"{prefix}{child_name}"
        if _is_stack(module) and _is_block(module, child):
            yield name
        else:
            yield from _blocks(child, f"{name}.")


def _is_stack(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.Sequential))


def _is_block(stack: nn.Module, child: nn.Module) -> bool:
    # A bare Linear or BatchNorm in a Sequential is a layer of a block, not a block.
    composite = isinstance(stack, nn.ModuleList) or any(True for _ in child.children())
    return composite and _holds_parameters(child) and not isinstance(child, (nn.ModuleList, nn.ModuleDict))


def _holds_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))
