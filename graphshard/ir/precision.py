"""FSDP2's mixed-precision policy for each unit."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.torch_version import TorchVersion

from graphshard.errors import ArgumentError, UnsupportedError
from graphshard.ir.units import unit_of, units_within
from graphshard.utils.argument_validation import check_bool
from graphshard.utils.text import brief

# How many names of units a message lists.
_SHOWN = 20

# From 2.15 on FSDP2 reduces in the parameter's own dtype where a policy names none; before, in that of the gradient.
_IN_OWN_DTYPE = TorchVersion(torch.__version__) >= "2.15"

# What `mp_policy=` takes: one policy for all units, or policies by patterns of their names, "" being the root.
PolicySpec = MixedPrecisionPolicy | Mapping[str, MixedPrecisionPolicy] | None


@dataclass(frozen=True)
class Precision:
    """The policy of each unit, and that of units which have none of their own."""

    default: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    by_unit: Mapping[str, MixedPrecisionPolicy] = field(default_factory=dict)

    def of(self, unit: str) -> MixedPrecisionPolicy:
        """The policy of a unit by its name; "" is the root."""
        return self.by_unit.get(unit, self.default)

    def within(self, module: str, units: Sequence[str]) -> Precision:
        """The policies inside a submodule, by the names of the units there."""
        inside = {own: policy for unit, policy in self.by_unit.items() if unit for own in units_within(module, [unit])}
        return Precision(self.of(unit_of(module, units)), inside)


def precision_of(spec: PolicySpec, units: Sequence[str]) -> Precision:
    """What `mp_policy=` means for these units.

    Raises:
        ArgumentError: a pattern is the name of no unit.
    """
    if isinstance(spec, Mapping):
        by_unit: dict[str, MixedPrecisionPolicy] = {}
        for pattern, policy in spec.items():
            found = fnmatch.filter(["", *units], pattern)
            if not found:
                known = ", ".join(map(brief, ["", *units][:_SHOWN]))
                more = ", ..." if len(units) >= _SHOWN else ""
                raise ArgumentError(f"mp_policy: {brief(pattern)} names no unit; there are {known}{more}.")
            by_unit.update(dict.fromkeys(found, policy))
        return Precision(by_unit=by_unit)
    if spec is None:
        return Precision()
    return Precision(spec)


def reduced_in(policy: MixedPrecisionPolicy, own: torch.dtype, grad: torch.dtype) -> torch.dtype:
    """The dtype that a gradient is reduced in, as FSDP2 of the torch at hand does it.

    Args:
        own: that of the parameter's shard.
        grad: that of the gradient.
    """
    if _IN_OWN_DTYPE:
        return policy.reduce_dtype or own
    return grad if policy.reduce_dtype in (None, policy.param_dtype) else policy.reduce_dtype


def keeps_wider_gradients(compute: torch.dtype, reduced: torch.dtype) -> bool:
    """Whether a gradient that autograd has in a wider dtype than the parameter's is not cast to that first.

    As FSDP2 of torch 2.15 does it, where gradients are reduced in a wider dtype anyway.
    """
    floating = compute.is_floating_point and reduced.is_floating_point
    return _IN_OWN_DTYPE and floating and reduced.itemsize > compute.itemsize


def check_policy(policy: object, name: str) -> None:
    """Raise ArgumentError if the policy called `name` is none, UnsupportedError if it chooses by parameter."""
    if not isinstance(policy, MixedPrecisionPolicy):
        raise ArgumentError(
            f"{name} must be a torch.distributed.fsdp.MixedPrecisionPolicy, got {type(policy).__name__}. For policies "
            "of single units pass a dict by patterns of their names, '' being the root."
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
