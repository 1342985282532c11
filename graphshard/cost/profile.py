"""A machine in numbers: what its chip computes and moves, what its links carry, and where each number comes from.

Profiles are JSON files, those of known machines in `graphshard/profiles/`, those of your machine written by `graphshard
calibrate`. In the file every number is `{"value": 3.35e12, "source": "NVIDIA data sheet"}`; a value that nobody has
measured says "assumed" there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from graphshard.cost.builtin import builtin_profiles, builtin_text
from graphshard.ir.errors import ArgumentError
from graphshard.ir.files import read_file
from graphshard.ir.given import path_of
from graphshard.ir.plain import read, write
from graphshard.ir.text import brief

SCHEMA = 1
_REMEDY = "Write it with `graphshard calibrate`."
# A profile has some kilobytes.
_MOST_BYTES = 16 << 20
KINDS = ("gather", "reduce", "all_reduce", "all_to_all")


@dataclass(frozen=True)
class Rate:
    """Matrix multiplication in one dtype.

    Attributes:
        peak: dense FLOP/s; a multiply-add is two.
        matmul: fraction of `peak` that a large multiplication reaches.
        attention: fraction of `peak` that a fused attention reaches.
    """

    peak: float
    matmul: float
    attention: float


@dataclass(frozen=True)
class Tile:
    """A block of the result that one unit computes; `fraction` is its speed beside the best tile's."""

    rows: int
    columns: int
    fraction: float


@dataclass(frozen=True)
class Protocol:
    """How a library sends: `base` seconds, `inside` or `outside` seconds per step, a fraction of the bandwidth."""

    name: str
    base: float
    inside: float
    outside: float
    fraction: float


@dataclass(frozen=True)
class Link:
    """One kind of collective inside a node.

    Attributes:
        bandwidth: bus bandwidth, bytes/s: what a rank sends or receives, (n - 1) / n of the full tensors.
        latency: seconds, beside the protocol's.
        tensor_seconds: for every further tensor of a coalesced collective.
    """

    bandwidth: float
    latency: float
    tensor_seconds: float


@dataclass(frozen=True)
class Profile:
    """Rates of a chip and of the links around it; seconds, bytes, bytes/s, FLOP/s.

    Attributes:
        name: short, as `hardware=` takes it.
        title: as it is shown.
        device: kind of torch device.
        memory_capacity: of one chip.
        memory_bandwidth: reachable, reads and writes together.
        host_bandwidth: between host and chip, reachable, one direction.
        kernel_seconds: a kernel with nothing to do.
        vector: elementwise operations/s, a mix of cheap and transcendental ones.
        units: what works on tiles at the same time (streaming multiprocessors); 0 for no tiles.
        split: longest inner dimension of a tile's work, beyond which it is split among units.
        ranks_per_node: chips that share the inside link.
        rates: by dtype name; what is missing runs as "float32".
        tiles: shapes that the library chooses from.
        protocols: the fastest is taken.
        inside: by kind of collective.
        outside: bytes/s that a rank moves between nodes, by the name of the network model.
        contention: share of a rank's compute that is lost while a collective is under way, as its library uses the
            same cores; below 1.
        made: torch version, date and number of ranks of a calibration; empty for a data sheet.
        sources: of every number, by its path.
    """

    name: str
    title: str
    device: str
    memory_capacity: float
    memory_bandwidth: float
    host_bandwidth: float
    kernel_seconds: float
    vector: float
    units: int
    split: int
    ranks_per_node: int
    rates: Mapping[str, Rate]
    tiles: tuple[Tile, ...]
    protocols: tuple[Protocol, ...]
    inside: Mapping[str, Link]
    outside: Mapping[str, float]
    contention: float
    made: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def hash(self) -> str:
        """Hex digest of the numbers; sources, names and dates do not count."""
        numbers = {
            name: value for name, value in write(self).items() if name not in ("name", "title", "made", "sources")
        }
        return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()

    def rate(self, dtype: str) -> Rate:
        """Of a dtype by its name, such as "bfloat16"."""
        return self.rates.get(dtype, self.rates["float32"])

    def to_json(self) -> str:
        """The profile file: numbers with their sources."""
        data = write(self)
        sources, made = data.pop("sources"), data.pop("made")
        return json.dumps({"schema": SCHEMA, **_sourced(data, sources), "made": made}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str | bytes, where: str = "profile") -> Profile:
        """Inverse of `to_json`.

        Raises:
            ArgumentError: the text is no profile; the message names `where` and the path of the fault.
        """
        try:
            data = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise ArgumentError(
                f"{where} is not JSON, {brief(text)}: {error}. Write it with `graphshard calibrate`."
            ) from None
        if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
            raise ArgumentError(
                f"{where} is no profile of schema {SCHEMA}, {brief(text)}. Write it with `graphshard calibrate`."
            )
        sources: dict[str, str] = {}
        made = data.pop("made", {})
        plain = _plain(data, "", sources, where)
        try:
            profile = read({**plain, "made": made, "sources": sources}, Profile)
        except ArgumentError as error:
            raise ArgumentError(f"{where} is no profile: {error}. {_REMEDY}") from None
        _check(profile, where)
        return profile


# What names a profile: a known machine, a file, or the profile itself.
Hardware = str | os.PathLike[str] | Profile


def load_profile(hardware: Hardware) -> Profile:
    """A profile by the name of a known machine, or by the path of a file.

    Raises:
        ArgumentError: there is no such machine or file, or the file is no profile.
    """
    if isinstance(hardware, Profile):
        return hardware
    path = path_of("hardware", hardware, "a name, a file or a Profile")
    known = builtin_profiles()
    if isinstance(hardware, str) and hardware.lower() in known:
        return Profile.from_json(builtin_text(hardware.lower()), f"profile {hardware}")
    if not path.is_file():
        raise ArgumentError(
            f"hardware {brief(str(hardware))} is neither a file nor one of {', '.join(known)}. Measure this machine "
            "with `graphshard calibrate --out FILE` and pass the file."
        )
    try:
        return Profile.from_json(read_file(path, _MOST_BYTES), str(path))
    except ArgumentError as error:
        raise ArgumentError(f"hardware: {error}") from None


def _sourced(data: Any, sources: Mapping[str, str], path: str = "") -> Any:
    """Numbers become `{"value": ..., "source": ...}`."""
    if isinstance(data, dict):
        return {key: _sourced(value, sources, f"{path}.{key}".lstrip(".")) for key, value in data.items()}
    if isinstance(data, list):
        return [_sourced(value, sources, f"{path}.{index}") for index, value in enumerate(data)]
    return {"value": data, "source": sources[path]} if isinstance(data, (int, float)) else data


def _plain(data: Any, path: str, sources: dict[str, str], where: str) -> Any:
    """Inverse of `_sourced`; a number without a source is an error."""
    if isinstance(data, dict) and data.keys() == {"value", "source"}:
        number, source = data["value"], data["source"]
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < float("inf"):
            raise ArgumentError(f"{where}: {path} must be a number that is not negative, got {brief(number)}.")
        sources[path] = str(source)
        return number
    if isinstance(data, dict):
        return {key: _plain(value, f"{path}.{key}".lstrip("."), sources, where) for key, value in data.items()}
    if isinstance(data, list):
        return [_plain(value, f"{path}.{index}", sources, where) for index, value in enumerate(data)]
    if isinstance(data, (int, float)):
        raise ArgumentError(f'{where}: {path} has no source. Write {{"value": {data}, "source": "..."}}.')
    return data


def _check(profile: Profile, where: str) -> None:
    """What costs divide by is positive, and what they look up is there."""
    missing = [kind for kind in KINDS if kind not in profile.inside]
    if missing or "float32" not in profile.rates or not profile.protocols or not profile.outside:
        what = f"inside.{missing[0]}" if missing else "rates.float32, a protocol or a network in outside"
        raise ArgumentError(f"{where} lacks {what}.")
    divisors = {
        "memory_bandwidth": profile.memory_bandwidth,
        "host_bandwidth": profile.host_bandwidth,
        "vector": profile.vector,
        "ranks_per_node": profile.ranks_per_node,
        **{f"rates.{n}.{f}": v for n, r in profile.rates.items() for f, v in dataclasses.asdict(r).items()},
        **{f"inside.{kind}.bandwidth": link.bandwidth for kind, link in profile.inside.items()},
        **{f"outside.{name}": bandwidth for name, bandwidth in profile.outside.items()},
        **{f"tiles.{i}.fraction": tile.fraction for i, tile in enumerate(profile.tiles)},
        **{f"protocols.{i}.fraction": protocol.fraction for i, protocol in enumerate(profile.protocols)},
    }
    for path, value in divisors.items():
        if value <= 0:
            raise ArgumentError(f"{where}: {path} must be positive, got {value}.")
    if profile.contention >= 1:
        raise ArgumentError(f"{where}: contention must be below 1, got {profile.contention}.")
