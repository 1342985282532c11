"""A machine in numbers: what its chip computes and moves, what its links carry, and where each number comes from.

Profiles are JSON files, those of known machines in `graphshard/cost/profiles/`, those of your machine written by
`graphshard calibrate`. In the file every number is `{"value": 3.35e12, "source": "NVIDIA data sheet"}`; a value that
nobody has measured says "assumed" there, and between which numbers it may lie: `"range": [2.8e12, 3.2e12]`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from graphshard.cost.builtin import builtin_profiles, builtin_text
from graphshard.cost.profile_checks import check_profile
from graphshard.cost.schemas import SCHEMA, present
from graphshard.errors import ArgumentError
from graphshard.ir.plain import read, write
from graphshard.utils.argument_validation import path_of
from graphshard.utils.files import read_file
from graphshard.utils.text import brief

_REMEDY = "Write it with `graphshard calibrate`."
# A profile has some kilobytes.
_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class AttentionSpeed:
    """Fractions of the peak that a fused attention reaches at heads of 128, in long sequences."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Rate:
    """Matrix multiplication in one dtype.

    Attributes:
        peak: dense FLOP/s; a multiply-add is two.
        matmul: fraction of `peak` that the products of a tile reach, while nothing limits the clock.
        attention: by kernel; "flash" is there, and stands for those that are not.
    """

    peak: float
    matmul: float
    attention: Mapping[str, AttentionSpeed]


@dataclass(frozen=True)
class Tile:
    """A block of the result that one unit computes; `fraction` is its speed beside the best tile's."""

    rows: int
    columns: int
    fraction: float


@dataclass(frozen=True)
class Protocol:
    """How a library sends.

    Attributes:
        name: as it is shown.
        algorithm: a ring for every kind, a tree for an all-reduce, or the switch of a node (NVLS) where there is one.
        base: seconds of a collective.
        inside, outside: seconds of a step in a node and between nodes.
        posted: seconds that a ring's step in a node takes at least when the ring leaves it: the host posts each.
        fraction: of the bandwidth.
    """

    name: str
    algorithm: Literal["ring", "tree", "nvls"]
    base: float
    inside: float
    outside: float
    posted: float
    fraction: float


@dataclass(frozen=True)
class Link:
    """One kind of collective inside a node.

    Attributes:
        bandwidth: bus bandwidth, bytes/s: what a rank sends or receives, (n - 1) / n of the full tensors.
        latency: seconds, beside the protocol's.
        tensor_seconds: for every further tensor of a coalesced collective.
        switched: bus bandwidth where the node's switch multicasts and adds (NVLS); 0 where it does not.
    """

    bandwidth: float
    latency: float
    tensor_seconds: float
    switched: float = 0.0


@dataclass(frozen=True)
class Network:
    """What lies between nodes.

    Attributes:
        nics: network cards for each rank: 1, or an eighth where 8 share one.
        bandwidth: bytes/s of one card in one direction, as it is sold.
        reached: share of it that large collectives reach.
        rails: 1 where cards of the same place in all nodes have switches of their own, to which rings and trees keep,
            and all-to-alls as the library sends over the neighbour in the node; 0 elsewhere.
        crossing: share that is left to traffic that leaves its switch, as all of it may where there are no rails.
    """

    nics: float
    bandwidth: float
    reached: float
    rails: int
    crossing: float

    @property
    def of_rank(self) -> float:
        """Bytes/s that a rank moves between nodes while all its neighbours do."""
        return self.nics * self.bandwidth * self.reached * (1 if self.rails else self.crossing)


@dataclass(frozen=True)
class Profile:
    """Rates of a chip and of the links around it; seconds, bytes, bytes/s, FLOP/s.

    Attributes:
        name: short, as `hardware=` takes it.
        title: as it is shown.
        device: kind of torch device.
        memory_capacity: of one chip.
        memory_bandwidth: reachable, reads and writes together; with `kernel_seconds` it is a curve.
        host_bandwidth: between host and chip, reachable, one direction.
        kernel_seconds: a kernel with nothing to do.
        vector: elementwise operations/s, a mix of cheap and transcendental ones.
        units: what works on tiles at the same time (streaming multiprocessors); 0 for no tiles.
        split: shortest part of an inner dimension, when it is cut so that there are tiles for all units; 0 for never.
        split_seconds: what adding the parts up takes.
        tile_seconds: what the first of `tiles` takes besides its products, in proportion to the area of others.
        sustained: fraction of the peak that products reach at most when a chip trains for minutes and power limits its
            clock.
        head_power: attention slows down by this power of a head's width over 128, below that.
        host_seconds: what the host takes to call a kernel, "eager" or "compiled"; compute is no faster.
        ranks_per_node: chips that share the inside link, as many as NVLink connects: 8 on an HGX board, 72 in an NVL72.
        rates: by dtype name; what is missing runs as "float32".
        tiles: shapes that the library chooses from.
        protocols: the fastest is taken, by kind, bytes and ranks.
        inside: by kind of collective.
        outside: by the name of the network model.
        contention: share of a rank's compute that is lost while a collective is under way, as its library uses the
            same cores or multiprocessors, and memory; below 1.
        pack_below: bytes of a shard below which it may travel with others in one buffer: copies cost less than a tensor
            of its own.
        straggler: share by which all wait for the slowest rank, for every doubling of the nodes.
        made: torch version, date and number of ranks of a calibration; empty for a data sheet.
        sources: of every number, by its path.
        ranges: between which numbers one may lie that is not known well, by its path.
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
    split_seconds: float
    tile_seconds: float
    sustained: float
    head_power: float
    host_seconds: Mapping[str, float]
    ranks_per_node: int
    rates: Mapping[str, Rate]
    tiles: tuple[Tile, ...]
    protocols: tuple[Protocol, ...]
    inside: Mapping[str, Link]
    outside: Mapping[str, Network]
    contention: float
    pack_below: float
    straggler: float
    made: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @cached_property
    def hash(self) -> str:
        """Hex digest of the numbers; sources, ranges, names and dates do not count."""
        left_out = ("name", "title", "made", "sources", "ranges")
        numbers = {name: value for name, value in write(self).items() if name not in left_out}
        return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()

    def rate(self, dtype: str) -> Rate:
        """Of a dtype by its name, such as "bfloat16"."""
        return self.rates.get(dtype, self.rates["float32"])

    def to_json(self) -> str:
        """The profile file: numbers with their sources."""
        data = write(self)
        sources, ranges, made = (data.pop(name) for name in ("sources", "ranges", "made"))
        return json.dumps({"schema": SCHEMA, **_sourced(data, sources, ranges), "made": made}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str | bytes, where: str = "profile") -> Profile:
        """Inverse of `to_json`; files of an older schema are read, with what they do not say left out of the model.

        Raises:
            ArgumentError: the text is no profile; the message names `where` and the path of the fault.
        """
        try:
            data = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise ArgumentError(f"{where} is not JSON, {brief(text)}: {error}. {_REMEDY}") from None
        schema = data.pop("schema", None) if isinstance(data, dict) else None
        if type(schema) is not int or not 1 <= schema <= SCHEMA:
            found = f", it says {brief(schema)}" if schema is not None else ""
            raise ArgumentError(f"{where} is no profile of schema 1 to {SCHEMA}{found}, {brief(text)}. {_REMEDY}")
        data = present(data, schema)
        sources: dict[str, str] = {}
        ranges: dict[str, list[float]] = {}
        made = data.pop("made", {})
        plain = _plain(data, "", sources, ranges, where)
        try:
            profile = read({**plain, "made": made, "sources": sources, "ranges": ranges}, Profile)
        except ArgumentError as error:
            raise ArgumentError(f"{where} is no profile: {error}. {_REMEDY}") from None
        check_profile(profile, where)
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


def _sourced(data: Any, sources: Mapping[str, str], ranges: Mapping[str, Any], path: str = "") -> Any:
    """Numbers become `{"value": ..., "source": ...}`, with a range if there is one."""
    if isinstance(data, dict):
        return {key: _sourced(value, sources, ranges, f"{path}.{key}".lstrip(".")) for key, value in data.items()}
    if isinstance(data, list):
        return [_sourced(value, sources, ranges, f"{path}.{index}") for index, value in enumerate(data)]
    if not isinstance(data, (int, float)):
        return data
    between = {"range": list(ranges[path])} if path in ranges else {}
    return {"value": data, **between, "source": sources[path]}


def _plain(data: Any, path: str, sources: dict[str, str], ranges: dict[str, Any], where: str) -> Any:
    """Inverse of `_sourced`; a number without a source is an error."""
    if isinstance(data, dict) and data.keys() - {"range"} == {"value", "source"}:
        number, source = data["value"], data["source"]
        if not _is_number(number):
            raise ArgumentError(f"{where}: {path} must be a number that is not negative, got {brief(number)}.")
        if "range" in data:
            ranges[path] = _range(data["range"], number, f"{where}: {path}")
        sources[path] = str(source)
        return number
    if isinstance(data, dict):
        return {key: _plain(value, f"{path}.{key}".lstrip("."), sources, ranges, where) for key, value in data.items()}
    if isinstance(data, list):
        return [_plain(value, f"{path}.{index}", sources, ranges, where) for index, value in enumerate(data)]
    if isinstance(data, (int, float)):
        raise ArgumentError(f'{where}: {path} has no source. Write {{"value": {data}, "source": "..."}}.')
    return data


def _range(given: Any, number: float, what: str) -> list[float]:
    """Two numbers around a third."""
    pair = isinstance(given, list) and len(given) == 2 and all(map(_is_number, given))
    if not (pair and given[0] <= number <= given[1]):
        raise ArgumentError(
            f"{what} has the range {brief(given)}, which must be two numbers with {number} between them. Write the "
            "least and the most that it may be, or leave the range out."
        )
    return [float(given[0]), float(given[1])]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")
