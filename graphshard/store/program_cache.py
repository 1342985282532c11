"""Compile cache: finds the program of a trace that an earlier launch compiled, and writes one.

* A stale hit would be a silently wrong result. So each launch traces, and the key has the digest of the whole graph
  and everything else in `fingerprint.key_facts`. A program whose key cannot be written down is not cached.
* Guards come from this launch's trace. The file has what passes and compilation made of the graph.
* All ranks or none: ranks compare what they found, and compile together if one of them found something else.

The log `graphshard.cache` tells of each step.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphshard.codec.graph_format import short_name
from graphshard.codec.program_format import (
    decode_lowered,
    decode_partitioned,
    encode_lowered,
    encode_partitioned,
    graph_digest,
)
from graphshard.frontend.signature import Signature
from graphshard.ir.program import Program
from graphshard.lower.aoti_package import Package
from graphshard.lower.regions import RegionCall
from graphshard.module.program_compiler import CachedProgram, ProgramCompiler
from graphshard.pipeline.pipeline import Partitioned
from graphshard.store.artifact_file import ArtifactWriter, CompiledProgram, MeshPrograms, artifact_of, to_bytes
from graphshard.store.artifact_manifest import CacheLabel
from graphshard.store.cache_directory import (
    ENDING,
    VARIABLE,
    HomelessError,
    directory_of,
    entries,
    limit_of,
    shrink,
)
from graphshard.store.fingerprint import describe_options, environment, key_facts, model_facts, why_not_cached
from graphshard.store.program_library import read_region
from graphshard.utils.archive import is_being_written, others_can_write, read_private, remove, touch

log = logging.getLogger("graphshard.cache")

_ELSEWHERE = f"{VARIABLE}=DIRECTORY, or compile(..., cache=DIRECTORY)"
_REMEDY = (
    f"Make it writable, give another directory ({_ELSEWHERE}), or switch the cache off ({VARIABLE}=off, or "
    "cache=False)."
)


@dataclass
class ProgramCache:
    """A directory of compiled programs.

    Attributes:
        directory: it need not exist.
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
    ) -> CacheLookup | None:
        """Return the lookup for the program of a trace; None if it cannot be cached, and the log says why.

        Args:
            program: of the trace, before passes.
        """
        tracer = maker.tracer
        with contextlib.suppress(OSError):  # it does not exist, or reading it says more
            if others_can_write(self.directory):
                why = "other users could put code there"
                self.warn("cache: %s is not used: %s. Give one of your own (%s).", self.directory, why, _ELSEWHERE)
                return None
        text = ""
        try:
            problem = why_not_cached(tracer) or _why_graph_is_not_cached(program)
            if not problem:
                facts = {**key_facts(module, tracer, signature), "graph": graph_digest(program)}
                text = json.dumps(facts, sort_keys=True, allow_nan=False)
        except Exception as error:  # values that no file can hold
            problem = f"{type(error).__name__}: {error}"
        if problem:
            log.info("cache: %s is neither looked for nor kept: %s", tracer.label, problem)
            return None
        key = hashlib.sha256(text.encode()).hexdigest()[:32]
        return CacheLookup(self, maker, module, signature, tensors, json.loads(text), key)

    def warn(self, message: str, *args: Any) -> None:
        """Log a problem of the directory once."""
        if not self._warned:
            self._warned = True
            log.warning(message, *args)


def _why_graph_is_not_cached(program: Program) -> str:
    if program.sizes:
        return "it has dynamic sizes"
    if any(axis.role == "inner" for axis in program.mesh.axes):
        return "the model communicates in process groups of its own"
    return ""


@dataclass
class CacheLookup:
    """One program that may be in the cache, or is to be put there.

    Attributes:
        tensors: of the call.
        facts: everything that the program depends on, by name.
        key: their hash.
    """

    cache: ProgramCache
    maker: ProgramCompiler
    module: nn.Module
    signature: Signature
    tensors: Sequence[torch.Tensor]
    facts: dict[str, Any]
    key: str

    @property
    def _path(self) -> Path:
        return self.cache.directory / f"{self.key}{ENDING}"

    @property
    def _label(self) -> str:
        return self.maker.tracer.label

    def find(self) -> CachedProgram | None:
        """Return the program, ready to be installed; None if there is none, and the log says why."""
        start, path = time.perf_counter(), self._path
        try:
            kept = self._read(path)
        except FileNotFoundError:
            log.info("cache: %s is not in %s: %s", self._label, self.cache.directory, self._difference())
            return None
        except OSError as error:
            self.cache.warn("cache: %s cannot be read (%s): compiling. %s", self.cache.directory, error, _REMEDY)
            return None
        except Exception as error:
            what = "removed, and the program is compiled again" if remove(path) else _REMEDY
            self.cache.warn("cache: %s: %s: %s. It is %s", path, type(error).__name__, error, what)
            return None
        touch(path)
        log.info("cache: %s found in %s in %.2f s", self._label, path, time.perf_counter() - start)
        return kept

    def _read(self, path: Path) -> CachedProgram:
        tracer, artifact = self.maker.tracer, artifact_of(read_private(path))
        backend, device = tracer.options.backend, tracer.spec.device
        ((entry,),) = (mesh.programs for mesh in artifact.manifest.meshes)
        data = artifact.archive.json(f"{entry.file}.json")
        compiled = dict(tracer.compiled)
        for key in data["regions"]:
            if key not in compiled:
                compiled[key] = RegionCall(read_region(artifact, key, backend, device)[0])
        program = decode_lowered(data, compiled, self.module, device)
        program.model, program.reason = tracer.label, "kept"
        partitioned: Callable[[], Partitioned] | None = None
        for file in entry.partitioned_files:
            content = artifact.archive.members[file]
            partitioned = functools.partial(_partitioned, content, program, self.maker)
        return CachedProgram(program, partitioned, {key: compiled[key] for key in data["regions"]})

    def _difference(self) -> str:
        """Return what differs from the most recently used program of the same model."""
        for entry in entries(self.cache.directory):
            if entry.label.get("model") == self.facts["model"] and entry.label.get("key") != self.key:
                with contextlib.suppress(Exception):
                    facts = read_private(entry.path).json("key.json")
                    names = [name for name in self.facts if facts.get(name) != self.facts[name]]
                    return f"{', '.join(names)}: another than in {entry.path.name}"
        return "nothing was kept of this model"

    def keep(self, program: Program, partitioned: Partitioned | None) -> None:
        """Write a program; if it cannot be written, the log says why."""
        try:
            self._write(program, partitioned)
        except OSError as error:
            where = self.cache.directory
            self.cache.warn("cache: %s cannot be written (%s): nothing is kept there. %s", where, error, _REMEDY)
        except Exception as error:  # values that no file can hold
            log.info("cache: %s is not kept: %s: %s", self._label, type(error).__name__, error)

    def _write(self, program: Program, partitioned: Partitioned | None) -> None:
        path, tracer = self._path, self.maker.tracer
        data = encode_lowered(program, self.module)
        start = None if partitioned is None else encode_partitioned(partitioned, program)
        # Another rank has written it, or does: a thousand of them would, on a file system of all machines.
        if path.exists() or is_being_written(path):
            return
        writer = ArtifactWriter({"key.json": to_bytes(self.facts)})
        for key, region in program.regions.items():
            fn = tracer.compiled[key].fn
            generated = bool(getattr(fn, "source_code", ""))
            kernels = None
            if generated:
                from graphshard.lower import inductor  # it has compiled the region

                kernels = inductor.kernels_of(fn)
            writer.add_region(key, region, kernels or Package(), otherwise="later" if generated else "operators")
        compiled = CompiledProgram.of(
            data,
            entry=tracer.name,
            digests=[self.facts["graph"]],
            signature=self.signature,
            partitioned=start,
        )
        mesh, params = tracer.spec.mesh, tracer.current_spec().params
        writer.add_mesh(MeshPrograms(mesh, mesh.shape, describe_options(tracer), params, (compiled,)))
        here = environment(tracer.spec.device, native=True)
        inputs = ", ".join(f"{short_name(each.dtype)}{list(each.shape)}" for each in self.tensors)
        label = CacheLabel(
            self.key, self.facts["model"], self._label, inputs, str(mesh), tracer.options.backend, here.torch
        )
        writer.write(path, here, model_facts(self.module), cached=label)
        removed = shrink(self.cache.directory, self.cache.limit, path)
        log.info("cache: %s kept in %s%s", self._label, path, f", {removed} older removed" if removed else "")


def _partitioned(content: bytes, program: Program, maker: ProgramCompiler) -> Partitioned:
    return decode_partitioned(json.loads(content), program, maker.passes, maker.tracer.spec.device)


@functools.cache
def _warn_once(message: str) -> None:
    """`fully_shard` asks for the cache once for each unit."""
    log.warning("%s", message)


def cache_at(chosen: Any) -> ProgramCache | None:
    """Return the cache of a directory; None if nothing is to be cached.

    Args:
        chosen: as `compile` takes it.

    Raises:
        ArgumentError: the limit in the environment is no size.
    """
    try:
        directory = directory_of(chosen)
    except HomelessError as error:
        _warn_once(f"{error} Nothing is kept.")
        return None
    return None if directory is None else ProgramCache(directory, limit_of())
