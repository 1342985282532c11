"""Profiles whose numbers are samples: what a prediction may be, as far as constants are not known.

Costs are generic over numbers, expressions and arrays, so a profile with an array in the place of each number that has
a range makes all samples of a prediction at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from graphshard.cost.profile import Profile

# Enough for the tenth and ninetieth percentile of a step within half a per cent.
SAMPLES = 200


def sampled(profile: Profile, count: int = SAMPLES) -> Profile:
    """The profile with `count` samples of every number that has a range; the same ones each time.

    A number is as likely below its value as above it, and evenly spread on both sides (a Latin hypercube).
    """
    draw = np.random.default_rng(0)
    found = {}
    for path, (low, high) in profile.ranges.items():
        value = number_at(profile, path)
        places = (draw.permutation(count) + 0.5) / count
        found[path] = np.interp(places, [0, 0.5, 1], [low, value, high])
    return with_numbers(profile, found)


def with_numbers(profile: Profile, numbers: Mapping[str, Any]) -> Profile:
    """A profile with other numbers, or arrays of them, by their paths."""
    changed: Profile = _with(profile, numbers, "")
    return changed


def number_at(profile: Profile, path: str) -> float:
    """The number at a path, as messages and `ranges` have it: "rates.bfloat16.matmul"."""
    found: Any = profile
    for name in path.split("."):
        if isinstance(found, Mapping):
            found = found[name]
        else:
            found = found[int(name)] if isinstance(found, tuple) else getattr(found, name)
    return float(found)


def _with(value: Any, numbers: Mapping[str, Any], path: str) -> Any:
    if path in numbers:
        return numbers[path]
    inside = f"{path}." if path else ""
    if not any(name.startswith(inside) for name in numbers):
        return value
    if isinstance(value, Mapping):
        return {key: _with(item, numbers, f"{inside}{key}") for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_with(item, numbers, f"{inside}{index}") for index, item in enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        own = [field.name for field in fields(value) if field.name not in ("made", "sources", "ranges")]
        return replace(value, **{name: _with(getattr(value, name), numbers, f"{inside}{name}") for name in own})
    return value
