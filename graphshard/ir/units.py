"""Units, whose parameters are gathered together, and the mixed-precision policy of each.

A unit is a module that an FSDP2 user would call `fully_shard` on; by default, each repeated block of the model. A
parameter belongs to the innermost unit that contains it, or to the root, "".
"""

from __future__ import annotations

import fnmatch
import functools
import glob
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.torch_version import TorchVersion

from graphshard.errors import ArgumentError, UnsupportedError
from graphshard.utils.argument_validation import answer_of, check_bool
from graphshard.utils.text import brief

MODULE_SEPARATOR = ", "


# Entry of `units=`: a pattern of module names, a class, a predicate, or several patterns that form one unit.
UnitSpec = str | type[nn.Module] | Callable[[str, nn.Module], bool] | tuple[str, ...]


def find_units(module: nn.Module, specs: Sequence[UnitSpec] | None = None) -> tuple[str, ...]:
    """Return the names of the units in registration order; a unit of several modules is named "norm, head".

    Args:
        module: the root module.
        specs: shell-style patterns of module names, such as `"layers.*"`, where `*` does not cross a dot; classes of
            modules; predicates of name and module; tuples of patterns whose modules form one unit. None finds the
            elements of the outermost `ModuleList`s and `ModuleDict`s, and of the outermost `Sequential`s of
            composite modules.

    Raises:
        ArgumentError: an entry matches no module with parameters or has a wrong type, or two tuples share a module.
    """
    if specs is None:
        return tuple(_blocks(module, ""))
    named = {name: sub for name, sub in module.named_modules() if name and _holds_parameters(sub)}
    unit: dict[str, str] = {}
    for spec in specs:
        found = _select(spec, named, type(module).__name__)
        group = MODULE_SEPARATOR.join(found)
        for name in found:
            if isinstance(spec, tuple) and MODULE_SEPARATOR in unit.get(name, "") and unit[name] != group:
                raise ArgumentError(f"units: {name} is in two groups, ({unit[name]}) and ({group}). Name it once.")
            unit.setdefault(name, name)
            if isinstance(spec, tuple):
                unit[name] = group
    return tuple(dict.fromkeys(unit[name] for name in named if name in unit))


def modules_of(unit: str) -> list[str]:
    """Return the names of the modules of a unit."""
    return unit.split(MODULE_SEPARATOR)


def exact_units(
    units: Mapping[tuple[str, ...], MixedPrecisionPolicy],
) -> tuple[list[UnitSpec], dict[str, MixedPrecisionPolicy]]:
    """Return patterns that match these units alone, and their policies by pattern."""
    patterns = [tuple(map(glob.escape, paths)) for paths in units]
    policies = {glob.escape(MODULE_SEPARATOR.join(paths)): policy for paths, policy in units.items()}
    return [paths[0] if len(paths) == 1 else paths for paths in patterns], policies


def unit_of(name: str, units: Sequence[str]) -> str:
    """Return the innermost unit that contains the parameter or module `name`; "" is the root."""
    known = _unit_by_module(tuple(units))
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        prefix = ".".join(parts[:end])
        if prefix in known:
            return known[prefix]
    return ""


@functools.cache
def _unit_by_module(units: tuple[str, ...]) -> dict[str, str]:
    return {module: unit for unit in units for module in modules_of(unit)}


def units_within(name: str, units: Sequence[str]) -> tuple[str, ...]:
    """Return the units inside a submodule, by their names there."""
    prefix = f"{name}."
    inside = [[m.removeprefix(prefix) for m in modules_of(unit) if m.startswith(prefix)] for unit in units]
    return tuple(MODULE_SEPARATOR.join(found) for found in inside if found)


def _select(spec: UnitSpec, named: dict[str, nn.Module], model: str) -> list[str]:
    """Return the names of the modules that an entry of `units=` selects."""
    if isinstance(spec, type) and issubclass(spec, nn.Module):
        found = [name for name, sub in named.items() if isinstance(sub, spec)]
        if not found:
            raise ArgumentError(f"units: {model} has no submodule of class {spec.__name__} with parameters.")
        return found
    if callable(spec):
        found = [name for name, sub in named.items() if answer_of("units", spec, name, sub)]
        if not found:
            what = getattr(spec, "__name__", "") or brief(spec)
            raise ArgumentError(f"units: {what} chooses no submodule of {model}.")
        return found
    patterns = (spec,) if isinstance(spec, str) else spec
    if not isinstance(patterns, tuple) or not patterns or not all(isinstance(item, str) for item in patterns):
        raise ArgumentError(
            f"units: {brief(spec)} is neither a name pattern, nor a function of name and module, nor a tuple of "
            "patterns."
        )
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in named):
            raise ArgumentError(
                f"units: the pattern {brief(pattern)} matches no submodule with parameters of {model}. Use names as in "
                f"named_modules(), such as {brief(list(named)[:3])}."
            )
    return [name for name in named if any(_matches(name, pattern) for pattern in patterns)]


def _blocks(module: nn.Module, prefix: str) -> Iterator[str]:
    for child_name, child in module.named_children():
        name = f"{prefix}{child_name}"
        if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) and _is_block(module, child):
            yield name
        else:
            yield from _blocks(child, f"{name}.")


def _is_block(stack: nn.Module, child: nn.Module) -> bool:
    # A plain Linear or BatchNorm in a Sequential is a layer of a block, not a block.
    if isinstance(stack, nn.ModuleDict) and any(_blocks(child, "")):
        return False  # a named part of the model, such as an encoder, with blocks inside
    composite = isinstance(stack, (nn.ModuleList, nn.ModuleDict)) or any(True for _ in child.children())
    return composite and _holds_parameters(child) and not isinstance(child, (nn.ModuleList, nn.ModuleDict))


def _holds_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


# Largest number of units that a message lists.
_SHOWN = 20

# If a policy has no reduce_dtype, FSDP2 reduces in the parameter's dtype since torch 2.15, in the gradient's before.
_IN_OWN_DTYPE = TorchVersion(torch.__version__) >= "2.15"

# Value of `mp_policy=`: one policy for all units, or policies by patterns of unit names; "" is the root.
PolicySpec = MixedPrecisionPolicy | Mapping[str, MixedPrecisionPolicy] | None


@dataclass(frozen=True)
class Precision:
    """Mixed-precision policies by unit, and a default."""

    default: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    by_unit: Mapping[str, MixedPrecisionPolicy] = field(default_factory=dict)

    def of(self, unit: str) -> MixedPrecisionPolicy:
        """Return the policy of a unit; "" is the root."""
        return self.by_unit.get(unit, self.default)

    def within(self, module: str, units: Sequence[str]) -> Precision:
        """Return the policies inside a submodule, by the names of units there."""
        inside = {own: policy for unit, policy in self.by_unit.items() if unit for own in units_within(module, [unit])}
        return Precision(self.of(unit_of(module, units)), inside)


def precision_of(spec: PolicySpec, units: Sequence[str]) -> Precision:
    """Resolve `mp_policy=` for these units.

    Raises:
        ArgumentError: a pattern matches no unit.
    """
    if not isinstance(spec, Mapping):
        return Precision() if spec is None else Precision(spec)
    by_unit: dict[str, MixedPrecisionPolicy] = {}
    for pattern, policy in spec.items():
        found = fnmatch.filter(["", *units], pattern)
        if not found:
            known = ", ".join(map(brief, ["", *units][:_SHOWN]))
            more = ", ..." if len(units) >= _SHOWN else ""
            raise ArgumentError(f"mp_policy: {brief(pattern)} names no unit; there are {known}{more}.")
        by_unit.update(dict.fromkeys(found, policy))
    return Precision(by_unit=by_unit)


def reduced_in(policy: MixedPrecisionPolicy, own: torch.dtype, grad: torch.dtype) -> torch.dtype:
    """Return the dtype that the gradient of a shard of dtype `own` is reduced in, as FSDP2 of this torch decides it."""
    if _IN_OWN_DTYPE:
        return policy.reduce_dtype or own
    return grad if policy.reduce_dtype in (None, policy.param_dtype) else policy.reduce_dtype


def keeps_wider_gradients(compute: torch.dtype, reduced: torch.dtype) -> bool:
    """Return whether a gradient in a wider dtype than the parameter's stays in it.

    FSDP2 of torch 2.15 does this if gradients are reduced in a wider dtype.
    """
    floating = compute.is_floating_point and reduced.is_floating_point
    return _IN_OWN_DTYPE and floating and reduced.itemsize > compute.itemsize


def check_policy(policy: object, name: str) -> None:
    """Raise ArgumentError if `policy` is not a policy, UnsupportedError if it has an override for each parameter."""
    if not isinstance(policy, MixedPrecisionPolicy):
        dtype = policy if isinstance(policy, torch.dtype) else torch.bfloat16
        raise ArgumentError(
            f"{name} must be a torch.distributed.fsdp.MixedPrecisionPolicy, such as MixedPrecisionPolicy(param_dtype="
            f"{dtype}), got {brief(policy)}. For policies of single units pass a dict by patterns of their names, "
            "'' being the root."
        )
    for part in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, part)
        if not (dtype is None or (isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex))):
            raise ArgumentError(f"{name}.{part} must be a dtype such as torch.bfloat16, got {brief(dtype)}.")
    check_bool(f"{name}.cast_forward_inputs", policy.cast_forward_inputs)
    if getattr(policy, "param_dtype_override_fn", None) is not None:  # new in torch 2.15
        raise UnsupportedError(
            f"{name}.param_dtype_override_fn is not supported by graphshard. Make units of the modules whose "
            "parameters keep their dtype (units=), and give these a policy of their own: mp_policy={'*': policy, "
            "'norm': MixedPrecisionPolicy()}."
        )
