"""Machines in numbers: what a chip computes and moves, what its links carry, and the source of each number.

Profiles are JSON files: known machines in `graphshard/cost/profiles/`, yours written by `graphshard calibrate`. In the
file every number is `{"value": 3.35e12, "source": "NVIDIA data sheet"}`; a value that was not measured says "assumed",
and between which numbers it may lie: `"range": [2.8e12, 3.2e12]`. A file with `"like": "h100"` has only what differs
from that known machine. Costs are generic over numbers, expressions and
arrays, so a profile with an array of samples for each number with a range gives all samples of a prediction at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from importlib import resources
from typing import Any, Literal

from graphshard.errors import ArgumentError
from graphshard.utils.argument_validation import path_of
from graphshard.utils.files import read_file
from graphshard.utils.json_dataclasses import read, write
from graphshard.utils.text import brief

SCHEMA = 3
# Kinds of collectives.
KINDS = ("gather", "reduce", "all_reduce", "all_to_all")
# Enough for the tenth and ninetieth percentile of a step within half a percent.
SAMPLES = 200
_REMEDY = "Write it with `graphshard calibrate`."
# A profile has some kilobytes.
_MOST_BYTES = 16 << 20
# Fields of a profile that are not numbers of the machine.
_NOTES = ("words", "made", "sources", "ranges")
# Words in the name of a GPU whose links are not those of its family.
_OTHER_LINKS = frozenset({"pcie", "nvl"})

# Numbers that nothing divides by, and that may be 0.
_MAY_BE_ZERO = frozenset(
    {
        *("kernel_seconds", "units", "split", "split_seconds", "tile_seconds", "head_power", "contention", "straggler"),
        *("host_seconds", "latency", "tensor_seconds", "base", "inside", "outside", "posted", "switched", "rails"),
    }
)
# The largest value by the last name of a path; a larger one is in other units, or no machine.
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


@dataclass(frozen=True)
class AttentionSpeed:
    """Fractions of the peak that a fused attention reaches at heads of 128, in long sequences."""

    forward: float
    backward: float


@dataclass(frozen=True)
class MatmulRate:
    """Matrix multiplication in one dtype.

    Attributes:
        peak: dense FLOP/s; a multiply-add is two.
        matmul: fraction of `peak` that the products of a tile reach, while nothing limits the clock.
        attention: by kernel; "flash" is required, and stands for missing ones.
    """

    peak: float
    matmul: float
    attention: Mapping[str, AttentionSpeed]


@dataclass(frozen=True)
class GemmTile:
    """A block of the result that one unit computes; `fraction` is its speed compared with the best tile."""

    rows: int
    columns: int
    fraction: float


@dataclass(frozen=True)
class Protocol:
    """How a library sends.

    Attributes:
        name: for reports.
        algorithm: a ring for every kind, a tree for an all-reduce, or the switch of a node (NVLS) if there is one.
        base: seconds of a collective.
        inside, outside: seconds of a step in a node and between nodes.
        posted: least seconds of a ring's step in a node if the ring leaves it: the host posts each step.
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
class NodeLink:
    """One kind of collective inside a node.

    Attributes:
        bandwidth: bus bandwidth, bytes/s: what a rank sends or receives, (n - 1) / n of the full tensors.
        latency: seconds, in addition to the protocol's.
        tensor_seconds: for every further tensor of a coalesced collective.
        switched: bus bandwidth if the node's switch multicasts and adds (NVLS); 0 if it does not.
    """

    bandwidth: float
    latency: float
    tensor_seconds: float
    switched: float = 0.0


@dataclass(frozen=True)
class Network:
    """The network between nodes.

    Attributes:
        nics: network cards for each rank: 1, or an eighth where 8 share one.
        bandwidth: nominal bytes/s of one card in one direction.
        reached: fraction of it that large collectives reach.
        rails: 1 if cards of the same position in all nodes have their own switches, which rings and trees keep to, and
            all-to-alls that are sent over the neighbor in the node; 0 otherwise.
        crossing: fraction that is left to traffic that leaves its switch, as all of it may without rails.
    """

    nics: float
    bandwidth: float
    reached: float
    rails: int
    crossing: float

    @property
    def of_rank(self) -> float:
        """Return the bytes/s that a rank moves between nodes while all its neighbors do."""
        return self.nics * self.bandwidth * self.reached * (1 if self.rails else self.crossing)


@dataclass(frozen=True)
class Profile:
    """Rates of a chip and of the links around it; seconds, bytes, bytes/s, FLOP/s.

    Attributes:
        name: short, as `hardware=` takes it.
        title: for reports.
        device: kind of torch device.
        memory_capacity: of one chip.
        memory_bandwidth: reachable, reads and writes together; with `kernel_seconds` it is a curve.
        host_bandwidth: between host and chip, reachable, one direction.
        kernel_seconds: a kernel with nothing to do.
        vector: elementwise operations/s, a mix of cheap and transcendental ones.
        units: streaming multiprocessors, which work on tiles at the same time; 0 for no tiles.
        split: shortest part of an inner dimension that is cut so that there are tiles for all units; 0 for never.
        split_seconds: of adding up the parts.
        tile_seconds: of the first of `tiles` in addition to its products, in proportion to the area of others.
        sustained: largest fraction of the peak that products reach when a chip trains for minutes and power limits its
            clock.
        head_power: attention slows down by this power of a head's width over 128, below that.
        host_seconds: of the host to call a kernel, "eager" or "compiled"; compute is no faster.
        ranks_per_node: chips that share the inside link, which NVLink connects: 8 on an HGX board, 72 in an NVL72.
        rates: by dtype name; a missing one runs as "float32".
        tiles: shapes that the library chooses from.
        protocols: the fastest is taken, by kind, bytes and ranks.
        inside: by kind of collective.
        outside: by the name of the network model.
        contention: fraction of a rank's compute that is lost while a collective is under way, as its library uses the
            same cores or multiprocessors, and memory; below 1.
        pack_below: bytes of a shard below which it may travel with others in one buffer: copies cost less than a
            separate tensor.
        straggler: fraction by which all wait for the slowest rank, for every doubling of the nodes.
        words: which are all in the name that the driver gives to the GPU, in lower case; none if it has no such name.
        made: torch version, date and number of ranks of a calibration; empty for a data sheet.
        sources: of every number, by its path.
        ranges: of numbers that are not known well, by path.
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
    rates: Mapping[str, MatmulRate]
    tiles: tuple[GemmTile, ...]
    protocols: tuple[Protocol, ...]
    inside: Mapping[str, NodeLink]
    outside: Mapping[str, Network]
    contention: float
    pack_below: float
    straggler: float
    words: tuple[str, ...] = ()
    made: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @cached_property
    def hash(self) -> str:
        """Hex digest of the numbers; sources, ranges, names and dates do not count."""
        numbers = {name: value for name, value in write(self).items() if name not in ("name", "title", *_NOTES)}
        return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()

    def rate(self, dtype: str) -> MatmulRate:
        """Return the rate of a dtype by its name, such as "bfloat16"."""
        return self.rates.get(dtype, self.rates["float32"])

    def to_json(self) -> str:
        """Return the profile file: numbers with their sources."""
        data = write(self)
        sources, ranges, made = (data.pop(name) for name in ("sources", "ranges", "made"))
        return json.dumps({"schema": SCHEMA, **_with_sources(data, sources, ranges), "made": made}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str | bytes, where: str = "profile") -> Profile:
        """Read a profile file, the inverse of `to_json`.

        Raises:
            ArgumentError: the text is not a profile; the message names `where` and the path of the fault.
        """
        try:
            data = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise ArgumentError(f"{where} is not JSON, {brief(text)}: {error}. {_REMEDY}") from None
        schema = data.pop("schema", None) if isinstance(data, dict) else None
        if type(schema) is not int or schema != SCHEMA:
            found = f", it says {brief(schema)}" if schema is not None else ""
            raise ArgumentError(f"{where} is not a profile of schema {SCHEMA}{found}, {brief(text)}. {_REMEDY}")
        if (like := data.pop("like", None)) is not None:
            if like not in builtin_profiles():
                raise ArgumentError(f"{where}: like must be one of {', '.join(builtin_profiles())}, got {brief(like)}.")
            data = _changed(json.loads(_builtin_text(like)), data)
            data.pop("schema")
        made, words = data.pop("made", {}), data.pop("words", [])
        entries: dict[str, Any] = {}
        plain = _without_sources(data, where, entries, "")
        sources = {path: str(entry["source"]) for path, entry in entries.items()}
        ranges = {path: list(map(float, entry["range"])) for path, entry in entries.items() if "range" in entry}
        try:
            profile = read({**plain, "words": words, "made": made, "sources": sources, "ranges": ranges}, Profile)
        except ArgumentError as error:
            raise ArgumentError(f"{where} is not a profile: {error}. {_REMEDY}") from None
        _check(profile, {path: entry["value"] for path, entry in entries.items()}, where)
        return profile


# What names a profile: a known machine, a file, or the profile itself.
Hardware = str | os.PathLike[str] | Profile


def builtin_profiles() -> list[str]:
    """Return the names that `hardware=` takes in addition to paths of profile files."""
    names = (entry.name for entry in (resources.files("graphshard.cost") / "profiles").iterdir())
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))


def profile_of_gpu(name: str, capacity: int | None = None) -> Profile | None:
    """Return the known profile of a GPU by the name that its driver gives; None for others.

    Its words are all in the name, and of several the most. Memory of `capacity` bytes decides between equal ones.
    """
    given = set(re.findall(r"[a-z0-9]+", name.lower()))
    fitting = [
        profile
        for profile in map(load_profile, builtin_profiles())
        if profile.words and given.issuperset(profile.words) and given & _OTHER_LINKS <= set(profile.words)
    ]

    def rank(profile: Profile) -> tuple[int, float]:
        return len(profile.words), -abs(profile.memory_capacity - capacity) if capacity is not None else 0

    return max(fitting, key=rank, default=None)


def load_profile(hardware: Hardware) -> Profile:
    """Load a profile by the name of a known machine, or by the path of a file.

    Raises:
        ArgumentError: there is no such machine or file, or the file is not a profile.
    """
    if isinstance(hardware, Profile):
        return hardware
    path = path_of("hardware", hardware, "a name, a file or a Profile")
    known = builtin_profiles()
    if isinstance(hardware, str) and hardware.lower() in known:
        return Profile.from_json(_builtin_text(hardware.lower()), f"profile {hardware}")
    if not path.is_file():
        raise ArgumentError(
            f"hardware {brief(str(hardware))} is neither a file nor one of {', '.join(known)}. Measure this machine "
            "with `graphshard calibrate --out FILE` and pass the file."
        )
    try:
        return Profile.from_json(read_file(path, _MOST_BYTES), str(path))
    except ArgumentError as error:
        raise ArgumentError(f"hardware: {error}") from None


def _builtin_text(name: str) -> str:
    return (resources.files("graphshard.cost") / "profiles" / f"{name}.json").read_text("utf-8")


def _changed(data: Any, changes: Any) -> Any:
    """Return data of a file with changes; a number is exchanged together with its source and range."""
    if not isinstance(data, dict) or not isinstance(changes, dict) or "value" in changes:
        return changes
    return {**data, **{key: _changed(data.get(key), value) for key, value in changes.items()}}


def _with_sources(
    data: Any, sources: Mapping[str, str], ranges: Mapping[str, Any], path: str = "", source: str = ""
) -> Any:
    """Turn numbers into `{"value": ..., "source": ...}`, with a range if there is one.

    The source of a path is of all numbers below it that have none.
    """
    source = sources.get(path, source)
    if isinstance(data, (dict, list)):
        pairs = data.items() if isinstance(data, dict) else enumerate(data)
        found = {k: _with_sources(v, sources, ranges, f"{path}.{k}".lstrip("."), source) for k, v in pairs}
        return found if isinstance(data, dict) else list(found.values())
    if not isinstance(data, (int, float)):
        return data
    assert source, f"{path} has no source"
    between = {"range": list(ranges[path])} if path in ranges else {}
    return {"value": data, **between, "source": source}


def _without_sources(data: Any, where: str, found: dict[str, Any], path: str) -> Any:
    """Return plain data, the inverse of `_with_sources`; collect numbers with their sources by path."""
    if isinstance(data, dict) and data.keys() - {"range"} == {"value", "source"}:
        number, between = data["value"], data.get("range")
        if not _is_number(number):
            raise ArgumentError(f"{where}: {path} must be a number that is not negative, got {brief(number)}.")
        if "range" in data:
            pair = between if isinstance(between, list) and len(between) == 2 and all(map(_is_number, between)) else ()
            if not pair or not pair[0] <= number <= pair[1]:
                raise ArgumentError(
                    f"{where}: {path} has the range {brief(between)}, which must be two numbers with {number} between "
                    "them. Write the least and the most that it may be, or leave the range out."
                )
        found[path] = data
        return number
    if isinstance(data, (dict, list)):
        pairs = data.items() if isinstance(data, dict) else enumerate(data)
        plain = {key: _without_sources(value, where, found, f"{path}.{key}".lstrip(".")) for key, value in pairs}
        return plain if isinstance(data, dict) else list(plain.values())
    if isinstance(data, (int, float)):
        raise ArgumentError(f'{where}: {path} has no source. Write {{"value": {data}, "source": "..."}}.')
    return data


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")


def _check(profile: Profile, numbers: Mapping[str, float], where: str) -> None:
    """Raise ArgumentError for a missing entry that costs look up, a zero that they divide by, or an absurd number."""
    missing = [f"inside.{kind}" for kind in KINDS if kind not in profile.inside]
    if "float32" not in profile.rates or not profile.protocols or not profile.outside:
        missing.append("rates.float32, a protocol or a network in outside")
    missing += [f"host_seconds.{mode}" for mode in ("eager", "compiled") if mode not in profile.host_seconds]
    missing += [f"rates.{dtype}.attention.flash" for dtype, r in profile.rates.items() if "flash" not in r.attention]
    if not any(protocol.algorithm == "ring" for protocol in profile.protocols):
        missing.append("a protocol whose algorithm is ring, which every kind of collective has")
    if missing:
        raise ArgumentError(f"{where} lacks {missing[0]}.")
    if profile.units and not profile.tiles:
        raise ArgumentError(f"{where}: units is {profile.units}, so tiles must have at least one. Set units to 0.")
    if profile.contention >= 1:
        raise ArgumentError(f"{where}: contention must be below 1, got {profile.contention}.")
    for path, value in numbers.items():
        names = path.split(".")
        zero = names[0] in _MAY_BE_ZERO if len(names) == 1 or names[0] == "host_seconds" else names[-1] in _MAY_BE_ZERO
        if value <= 0 and not zero:
            raise ArgumentError(f"{where}: {path} must be positive, got {value}.")
        most = _MOST.get(names[-1], float("inf"))
        if value > most:
            raise ArgumentError(f"{where}: {path} must be at most {most:g}, got {value:g}. Write it in SI units.")


def sampled(profile: Profile, count: int = SAMPLES) -> Profile:
    """Return the profile with `count` samples of every number that has a range; the same ones each time.

    A number is below its value as often as above it, and evenly spread on both sides (a Latin hypercube).
    """
    import numpy as np

    draw = np.random.default_rng(0)
    found = {}
    for path, (low, high) in profile.ranges.items():
        value = number_at(profile, path)
        places = (draw.permutation(count) + 0.5) / count
        found[path] = np.interp(places, [0, 0.5, 1], [low, value, high])
    return with_numbers(profile, found)


def number_at(profile: Profile, path: str) -> float:
    """Return the number at a path, as in messages and `ranges`: "rates.bfloat16.matmul"."""
    found: Any = profile
    for name in path.split("."):
        if isinstance(found, Mapping):
            found = found[name]
        else:
            found = found[int(name)] if isinstance(found, tuple) else getattr(found, name)
    return float(found)


def with_numbers(profile: Profile, numbers: Mapping[str, Any]) -> Profile:
    """Return a profile with other numbers, or arrays of them, by their paths."""
    changed: Profile = _with(profile, numbers, "")
    return changed


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
        names = [each.name for each in fields(value) if each.name not in _NOTES]
        return replace(value, **{name: _with(getattr(value, name), numbers, f"{inside}{name}") for name in names})
    return value
