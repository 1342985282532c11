"""Find a program that was kept, and keep one."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphshard.cache import entries
from graphshard.cache.codes import codes_that_ran, names_in
from graphshard.cache.surroundings import facts_of, files_of, problem_of, put_into_torch
from graphshard.cache.walk import Walk, not_reached, walk_of
from graphshard.cache.watching import Ran, watching
from graphshard.capture.signature import Signature
from graphshard.codec.lowered import decode_lowered, decode_region, encode_lowered, encode_region
from graphshard.codec.partitioned import decode_partitioned, encode_partitioned
from graphshard.ir import checked_files
from graphshard.ir.program import Program
from graphshard.lower.libraries import KeptRegion, Kernels
from graphshard.lower.operators import compile_eager, compile_operators
from graphshard.lower.regions import Boxed, RegionCall
from graphshard.module.guard import Guard
from graphshard.module.guard import differences as state_differences
from graphshard.module.maker import Kept, Maker
from graphshard.pipeline.pipeline import Partitioned

log = logging.getLogger(__name__)

# Files under one key, of other code, that are looked at.
_CANDIDATES = 8
_ELSEWHERE = f"{entries.VARIABLE}=DIRECTORY, or compile(..., cache=DIRECTORY)"
_REMEDY = (
    f"Make it writable, give another directory ({_ELSEWHERE}), or switch the cache off ({entries.VARIABLE}=off, or "
    "cache=False)."
)


@dataclass
class ProgramCache:
    """A directory of programs that were compiled.

    Attributes:
        directory: where files are; it need not be there.
        limit: bytes that it may have.
    """

    directory: Path
    limit: int
    _warned: bool = field(default=False, init=False)

    def search(
        self, maker: Maker, module: nn.Module, signature: Signature, tensors: Sequence[torch.Tensor]
    ) -> Search | None:
        """What is to be found or kept for a call; None if nothing can be, and the log says why."""
        tracer = maker.tracer
        with contextlib.suppress(OSError):  # of one that is not there, or that reading it says more of
            if checked_files.others_can_write(self.directory):
                why = "other users could put code there"
                self.warn("cache: %s is not used: %s. Give one of your own (%s).", self.directory, why, _ELSEWHERE)
                return None
        try:
            problem, put, facts = problem_of(module, tracer), [], {}
            if not problem:
                put = put_into_torch()
                facts = facts_of(module, tracer, signature, put)
                text = json.dumps(facts, sort_keys=True, allow_nan=False)
        except Exception as error:  # of values that no file can hold
            problem = f"{type(error).__name__}: {error}"
        if problem:
            log.info("cache: %s is neither looked for nor kept: %s", tracer.label, problem)
            return None
        key = hashlib.sha256(text.encode()).hexdigest()[:32]
        return Search(self, maker, module, signature, tensors, json.loads(text), key, put)

    def warn(self, message: str, *args: Any) -> None:
        """Say once what is wrong with the directory."""
        if not self._warned:
            self._warned = True
            log.warning(message, *args)


@dataclass
class Search:
    """One program, which may be in the cache, or is to be put there.

    Attributes:
        tensors: of the call.
        facts: what is known before the capture, by name.
        key: their hash.
        put: what others have put into torch.
    """

    cache: ProgramCache
    maker: Maker
    module: nn.Module
    signature: Signature
    tensors: Sequence[torch.Tensor]
    facts: dict[str, Any]
    key: str
    put: list[tuple[str, Any]]
    _ran: Ran | None = field(default=None, init=False)
    _before: dict[str, str] = field(default_factory=dict, init=False)

    # --- finding -----------------------------------------------------------------------------------------------

    def find(self) -> Kept | None:
        """The program, ready to be installed; None if there is none, and the log says why."""
        start, why = time.perf_counter(), ""
        try:
            paths = entries.candidates(self.cache.directory, self.key)[:_CANDIDATES]
        except OSError as error:
            self.cache.warn("cache: %s cannot be read (%s): compiling. %s", self.cache.directory, error, _REMEDY)
            return None
        for path in paths:
            try:
                _, members = checked_files.read(path)
                why = self._misfit(path, members)
                if why:
                    log.debug("cache: %s does not fit: %s", path.name, why)
                    continue
                kept = self._decoded(members)
            except FileNotFoundError:  # another job has removed it
                continue
            except Exception as error:
                removed = checked_files.remove(path)
                what = "removed, and the program is compiled again" if removed else _REMEDY
                self.cache.warn("cache: %s: %s: %s. It is %s", path, type(error).__name__, error, what)
                continue
            why = self._state_misfit(kept.program)
            if not why:
                checked_files.touch(path)
                log.info("cache: %s found in %s in %.2f s", self._label, path, time.perf_counter() - start)
                return kept
        log.info("cache: %s is not in %s: %s", self._label, self.cache.directory, why or self._difference())
        return None

    @property
    def _label(self) -> str:
        return self.maker.tracer.label

    def _misfit(self, path: Path, members: Mapping[str, bytes]) -> str:
        """Why an entry was made of something else; "" if it was not."""
        made_of = json.loads(members["made_of.json"])
        codes, names = made_of["codes"], made_of["names"]
        walk = self._walk(codes, frozenset(names), made_of["files"])
        if entries.name_of(self.key, walk.digest) == path.name and not walk.problems:
            return ""
        differing = (
            name for name in (*made_of["items"], *walk.items) if made_of["items"].get(name) != walk.items.get(name)
        )
        return f"{next(differing, next(iter(walk.problems), 'something'))} is another than when it was compiled"

    def _walk(self, codes: list[list[str]], names: frozenset[str], files: list[str]) -> Walk:
        walk = walk_of(self.module, codes, names)
        for name, value in self.put:
            walk.visit(f"put into torch: {name}", value)
        walk.items["files of torch and Python"] = files_of(files)
        return walk

    def _decoded(self, members: Mapping[str, bytes]) -> Kept:
        tracer = self.maker.tracer
        data = json.loads(members["program.json"])
        codes = json.loads(members["regions.json"])
        compiled = dict(tracer.compiled)
        for key in data["regions"]:
            if key not in compiled:
                compiled[key] = RegionCall(self._region(key, codes[key], members))
        program = decode_lowered(data, compiled, self.module, tracer.spec.device)
        program.model, program.reason = tracer.label, "kept"
        partitioned: Callable[[], Partitioned] | None = None
        if "partitioned.json" in members:
            content = members["partitioned.json"]
            partitioned = functools.partial(_partitioned, content, program, self.maker)
        return Kept(program, partitioned, {key: compiled[key] for key in data["regions"]})

    def _region(self, key: str, code: Mapping[str, Any], members: Mapping[str, bytes]) -> Boxed:
        if code["code"] == "kernels":
            libraries = {name: members[f"regions/{key}/{name}.so"] for name in code["libraries"]}
            return KeptRegion(key, Kernels(members[f"regions/{key}.py"].decode(), libraries))
        region = decode_region(key, json.loads(members[f"regions/{key}.json"]), self.maker.tracer.spec.device)
        if code["code"] == "operators":
            return (compile_eager if self.maker.tracer.options.backend == "eager" else compile_operators)(region)
        from graphshard.lower import inductor  # takes seconds to import

        ((_, fn),) = inductor.compile_all({key: region}, lambda _: None)
        return fn

    def _state_misfit(self, program: Program) -> str:
        """Why what the program recorded of the module is another now."""
        for place, was, now in state_differences(program.state, self.module):
            return f"{place} was {was} and is {now}"
        return Guard(program.state, self.module, self._label).change(self.tensors)

    def _difference(self) -> str:
        """What is another than for the newest entry of the same model."""
        for entry in entries.entries(self.cache.directory):
            if entry.facts.get("model") == self.facts["model"] and entry.facts.get("key") != self.key:
                with contextlib.suppress(Exception):
                    facts = json.loads(checked_files.read(entry.path)[1]["made_of.json"])["facts"]
                    names = [name for name in self.facts if facts.get(name) != self.facts[name]]
                    return f"{', '.join(names)}: another than in {entry.path.name}"
        return "nothing was kept of this model"

    # --- keeping -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch a capture, which runs in the block: one of few blocks at first, and one of all if those differ."""
        self._before = self._before or walk_of(self.module, [], frozenset()).items
        with watching() as ran:
            yield
        self._ran = ran if self._ran is None else self._ran.and_(ran)

    def keep(self, program: Program, partitioned: Partitioned | None) -> None:
        """Write a program that was captured while watched; if it cannot be kept, the log says why."""
        problem = ""
        try:
            problem = self._keep(program, partitioned)
        except OSError as error:
            where = self.cache.directory
            self.cache.warn("cache: %s cannot be written (%s): nothing is kept there. %s", where, error, _REMEDY)
        except Exception as error:  # of values that no file can hold
            problem = f"{type(error).__name__}: {error}"
        if problem:
            log.info("cache: %s is not kept: %s", self._label, problem)

    def _keep(self, program: Program, partitioned: Partitioned | None) -> str:
        ran = self._ran
        if ran is None or program.sizes:
            return "it has dynamic sizes"
        if any(axis.role == "inner" for axis in program.mesh.axes):
            return "the model communicates in process groups of its own"
        if ran.problems:
            return ran.problems[0]
        now = walk_of(self.module, [], frozenset()).items
        changed = [name for name in (*now, *self._before) if now.get(name) != self._before.get(name)]
        if changed:
            return f"its capture changes {changed[0]}"
        self.put = put_into_torch()
        codes, names = [list(code) for code in codes_that_ran(ran)], names_in(ran)
        walk = self._walk(codes, names, sorted(ran.files))
        problems = [*walk.problems, *not_reached(self.module, ran, self.put)]
        if problems:
            log.debug("cache: %s is not kept: %s", self._label, "; ".join(problems))
            return problems[0]
        made_of = {"facts": self.facts, "codes": codes, "names": sorted(names), "files": sorted(ran.files)}
        members = self._encoded(program, partitioned)
        members["made_of.json"] = _json({**made_of, "items": walk.items})
        path = self.cache.directory / entries.name_of(self.key, walk.digest)
        # Another rank has written it, or does: a thousand of them would, on a file system of all machines.
        if path.exists() or checked_files.is_being_written(path):
            return ""
        facts = {
            "model": self.facts["model"],
            "label": self._label,
            "key": self.key,
            "mesh": str(self.maker.tracer.spec.mesh),
            "backend": self.maker.tracer.options.backend,
            "torch": self.facts["versions"]["torch"],
            "graphshard": self.facts["versions"]["graphshard"],
            "inputs": [f"{shape[2]}{list(shape[0])}" for shape in self.signature.inputs if len(shape) == 4],
        }
        checked_files.write(path, facts, members)
        removed = entries.shrink(self.cache.directory, self.cache.limit, path)
        log.info("cache: %s kept in %s%s", self._label, path, f", {removed} older removed" if removed else "")
        return ""

    def _encoded(self, program: Program, partitioned: Partitioned | None) -> dict[str, bytes]:
        members = {"program.json": _json(encode_lowered(program, self.module))}
        codes: dict[str, dict[str, Any]] = {}
        if partitioned is not None:
            members["partitioned.json"] = _json(encode_partitioned(partitioned, program))
        for key, region in program.regions.items():
            fn = self.maker.tracer.compiled[key].fn
            members[f"regions/{key}.json"] = _json(encode_region(region))
            kernels = _kernels(fn)
            codes[key] = {"code": "later" if getattr(fn, "source_code", "") else "operators", "libraries": []}
            if kernels is not None:
                codes[key] = {"code": "kernels", "libraries": list(kernels.libraries)}
                members[f"regions/{key}.py"] = kernels.source.encode()
                members |= {f"regions/{key}/{name}.so": content for name, content in kernels.libraries.items()}
        return {**members, "regions.json": _json(codes)}


def _kernels(fn: Boxed) -> Kernels | None:
    if not getattr(fn, "source_code", ""):
        return None
    from graphshard.lower import inductor  # it has compiled the region

    return inductor.kernels_of(fn)


def _partitioned(content: bytes, program: Program, maker: Maker) -> Partitioned:
    return decode_partitioned(json.loads(content), program, maker.passes, maker.tracer.spec.device)


def _json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False).encode()


@functools.cache
def _say_once(message: str) -> None:
    """`fully_shard` asks for the cache once for each unit."""
    log.warning("%s", message)


def cache_at(chosen: Any) -> ProgramCache | None:
    """The cache of a directory; None if nothing is to be kept.

    Args:
        chosen: as `compile` takes it.

    Raises:
        ArgumentError: the environment says something else than a size of it.
    """
    try:
        directory = entries.directory_of(chosen)
    except entries.HomelessError as error:
        _say_once(f"{error} Nothing is kept.")
        return None
    return None if directory is None else ProgramCache(directory, entries.limit_of())
