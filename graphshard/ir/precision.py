"""FSDP2's mixed-precision policy for each unit."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch.distributed.fsdp import MixedPrecisionPolicy

from graphshard.ir.errors import ArgumentError
from graphshard.ir.units import unit_of, units_within

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
                known = ", ".join(map(repr, ["", *units]))
                raise ArgumentError(f"mp_policy: {pattern!r} names no unit; there are {known}.")
            by_unit.update(dict.fromkeys(found, policy))
        return Precision(by_unit=by_unit)
    if spec is None:
        return Precision()
    return Precision(spec)


def check_policy(policy: object, name: str) -> None:
    """Raise ArgumentError if the policy called `name` is none."""
    if not isinstance(policy, MixedPrecisionPolicy):
        raise ArgumentError(
            f"{name} must be a torch.distributed.fsdp.MixedPrecisionPolicy, got {type(policy).__name__}. For policies "
            "of single units pass a dict by patterns of their names, '' being the root."
        )
