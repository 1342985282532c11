"""Find a program that was kept, and keep one."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphshard.cache import entries
from graphshard.cache.surroundings import facts_of, problem_of
from graphshard.codec.graph_digest import graph_digest
from graphshard.codec.lowered import decode_lowered, decode_region, encode_lowered, encode_region
from graphshard.codec.partitioned import decode_partitioned, encode_partitioned
from graphshard.frontend.signature import Signature
from graphshard.ir import checked_files
from graphshard.ir.program import Program
from graphshard.lower.eager import compile_eager, compile_operators
from graphshard.lower.region_store import KeptRegion, Kernels
from graphshard.lower.regions import Boxed, RegionCall
from graphshard.module.program_compiler import CachedProgram, ProgramCompiler
from graphshard.pipeline.pipeline import Partitioned

log = logging.getLogger(__name__)

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
        self,
        maker: ProgramCompiler,
        module: nn.Module,
        signature: Signature,
        tensors: Sequence[torch.Tensor],
        program: Program,
    ) -> Search | None:
        """Return what looks for the program of a trace, or keeps it; None if nothing can, and the log says why.

        Args:
            program: of the trace, before passes.
        """
        tracer = maker.tracer
        with contextlib.suppress(OSError):  # of one that is not there, or that reading it says more of
            if checked_files.others_can_write(self.directory):
                why = "other users could put code there"
                self.warn("cache: %s is not used: %s. Give one of your own (%s).", self.directory, why, _ELSEWHERE)
                return None
        try:
            problem, facts = problem_of(module, tracer) or problem_of_graph(program), {}
            if not problem:
                facts = {**facts_of(module, tracer, signature), "graph": graph_digest(program)}
                text = json.dumps(facts, sort_keys=True, allow_nan=False)
        except Exception as error:  # of values that no file can hold
            problem = f"{type(error).__name__}: {error}"
        if problem:
            log.info("cache: %s is neither looked for nor kept: %s", tracer.label, problem)
            return None
        key = hashlib.sha256(text.encode()).hexdigest()[:32]
        return Search(self, maker, module, tensors, json.loads(text), key)

    def warn(self, message: str, *args: Any) -> None:
        """Say once what is wrong with the directory."""
        if not self._warned:
            self._warned = True
            log.warning(message, *args)


@dataclass
class Search:
    """One program, which may be in the cache, or is to be put there.

    Dynamo traces each launch, which takes a fraction of the time that passes and compilation take. The guards are those
    of this launch's trace, and the key has the graph that AOTAutograd made of it.

    Attributes:
        tensors: of the call.
        facts: what the program depends on, by name.
        key: their hash.
    """

    cache: ProgramCache
    maker: ProgramCompiler
    module: nn.Module
    tensors: Sequence[torch.Tensor]
    facts: dict[str, Any]
    key: str

    # --- finding -----------------------------------------------------------------------------------------------

    def find(self) -> CachedProgram | None:
        """The program, ready to be installed; None if there is none, and the log says why."""
        start, path = time.perf_counter(), self._path
        try:
            kept = self._decoded(checked_files.read(path)[1])
        except FileNotFoundError:
            log.info("cache: %s is not in %s: %s", self._label, self.cache.directory, self._difference())
            return None
        except OSError as error:
            self.cache.warn("cache: %s cannot be read (%s): compiling. %s", self.cache.directory, error, _REMEDY)
            return None
        except Exception as error:
            removed = checked_files.remove(path)
            what = "removed, and the program is compiled again" if removed else _REMEDY
            self.cache.warn("cache: %s: %s: %s. It is %s", path, type(error).__name__, error, what)
            return None
        checked_files.touch(path)
        log.info("cache: %s found in %s in %.2f s", self._label, path, time.perf_counter() - start)
        return kept

    @property
    def _path(self) -> Path:
        return self.cache.directory / entries.name_of(self.key)

    @property
    def _label(self) -> str:
        return self.maker.tracer.label

    def _decoded(self, members: Mapping[str, bytes]) -> CachedProgram:
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
        return CachedProgram(program, partitioned, {key: compiled[key] for key in data["regions"]})

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

    def keep(self, program: Program, partitioned: Partitioned | None) -> None:
        """Write a program; if it cannot be kept, the log says why."""
        try:
            self._write({**self._encoded(program, partitioned), "made_of.json": _json({"facts": self.facts})})
        except OSError as error:
            where = self.cache.directory
            self.cache.warn("cache: %s cannot be written (%s): nothing is kept there. %s", where, error, _REMEDY)
        except Exception as error:  # of values that no file can hold
            log.info("cache: %s is not kept: %s: %s", self._label, type(error).__name__, error)

    def _write(self, members: dict[str, bytes]) -> None:
        path = self._path
        # Another rank has written it, or does: a thousand of them would, on a file system of all machines.
        if path.exists() or checked_files.is_being_written(path):
            return
        facts = {
            "model": self.facts["model"],
            "label": self._label,
            "key": self.key,
            "mesh": str(self.maker.tracer.spec.mesh),
            "backend": self.maker.tracer.options.backend,
            "torch": self.facts["versions"]["torch"],
            "graphshard": self.facts["versions"]["graphshard"],
            "inputs": [f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in self.tensors],
        }
        checked_files.write(path, facts, members)
        removed = entries.shrink(self.cache.directory, self.cache.limit, path)
        log.info("cache: %s kept in %s%s", self._label, path, f", {removed} older removed" if removed else "")

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


def problem_of_graph(program: Program) -> str:
    """Return why a traced program is not kept; "" if it may be."""
    if program.sizes:
        return "it has dynamic sizes"
    if any(axis.role == "inner" for axis in program.mesh.axes):
        return "the model communicates in process groups of its own"
    return ""


def _kernels(fn: Boxed) -> Kernels | None:
    if not getattr(fn, "source_code", ""):
        return None
    from graphshard.lower import inductor  # it has compiled the region

    return inductor.kernels_of(fn)


def _partitioned(content: bytes, program: Program, maker: ProgramCompiler) -> Partitioned:
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
