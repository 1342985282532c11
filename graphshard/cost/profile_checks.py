"""What the numbers of a profile must be, so that costs are seconds and bytes of a machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from graphshard.errors import ArgumentError

KINDS = ("gather", "reduce", "all_reduce", "all_to_all")

# What nothing divides by, and may be 0.
_MAY_BE_ZERO = frozenset(
    {
        *("kernel_seconds", "units", "split", "split_seconds", "tile_seconds", "head_power", "contention", "straggler"),
        *("host_seconds", "latency", "tensor_seconds", "base", "inside", "outside", "posted", "switched", "rails"),
    }
)

# By the last name of a path the most that a number may be; what is more is in other units, or no machine.
_MOST = {
    **dict.fromkeys(("matmul", "forward", "backward", "fraction", "sustained"), 1.0),
    **dict.fromkeys(("reached", "rails", "crossing"), 1.0),
    **dict.fromkeys(("memory_bandwidth", "host_bandwidth", "bandwidth", "switched"), 1e15),  # bytes/s
    **dict.fromkeys(("kernel_seconds", "tile_seconds", "split_seconds", "latency", "tensor_seconds", "base"), 10.0),
    # Seconds of a protocol's step, and of the host.
    **dict.fromkeys(("inside", "outside", "posted", "eager", "compiled"), 10.0),
    "nics": 64.0,
    "memory_capacity": 1e15,
    "peak": 1e20,
    "straggler": 1.0,
    "head_power": 4.0,
    "ranks_per_node": 1e6,
}


def check_profile(profile: Any, where: str) -> None:
    """What costs divide by is positive, what they look up is there, and no number is absurd.

    Args:
        profile: a `Profile`, whose module reads files with this.
        where: what messages begin with.

    Raises:
        ArgumentError: it names the path of the number, and what it may be.
    """
    missing = [kind for kind in KINDS if kind not in profile.inside]
    if missing or "float32" not in profile.rates or not profile.protocols or not profile.outside:
        what = f"inside.{missing[0]}" if missing else "rates.float32, a protocol or a network in outside"
        raise ArgumentError(f"{where} lacks {what}.")
    for mode in ("eager", "compiled"):
        if mode not in profile.host_seconds:
            raise ArgumentError(f"{where} lacks host_seconds.{mode}.")
    for dtype, rate in profile.rates.items():
        if "flash" not in rate.attention:
            raise ArgumentError(f"{where} lacks rates.{dtype}.attention.flash.")
    if profile.units and not profile.tiles:
        raise ArgumentError(f"{where}: units is {profile.units}, so tiles must have at least one. Set units to 0.")
    if not any(protocol.algorithm == "ring" for protocol in profile.protocols):
        raise ArgumentError(f"{where} lacks a protocol whose algorithm is ring, which every kind of collective has.")
    if profile.contention >= 1:
        raise ArgumentError(f"{where}: contention must be below 1, got {profile.contention}.")
    for path, value in _numbers(profile):
        _check(path, value, where)


def _check(path: str, value: float, where: str) -> None:
    names = path.split(".")
    zero = names[0] in _MAY_BE_ZERO if len(names) == 1 or names[0] == "host_seconds" else names[-1] in _MAY_BE_ZERO
    if value <= 0 and not zero:
        raise ArgumentError(f"{where}: {path} must be positive, got {value}.")
    most = _MOST.get(names[-1], float("inf"))
    if value > most:
        raise ArgumentError(f"{where}: {path} must be at most {most:g}, got {value:g}. Write it in SI units.")


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a profile, with its path."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, value
    elif is_dataclass(value):
        for field in fields(value):
            if field.name not in ("made", "sources", "ranges"):
                yield from _numbers(getattr(value, field.name), f"{path}.{field.name}".lstrip("."))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, f"{path}.{key}".lstrip("."))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _numbers(item, f"{path}.{index}")
