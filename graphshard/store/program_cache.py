"""Compile cache: finds the program of a trace that an earlier launch compiled, and writes one.

* A stale hit would be a silently wrong result. So each launch traces, and the key has the digest of the whole graph
  and everything else in `fingerprint.key_facts`. A program whose key cannot be written down is not cached.
* Guards come from this launch's trace. The file has what passes and compilation made of the graph.
* All ranks or none: ranks compare what they found, and compile together if one of them found something else.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
from graphshard.lower.region_store import KeptRegion, Package
from graphshard.lower.regions import RegionCall
from graphshard.module.program_compiler import LoweredProgram, ProgramCompiler
from graphshard.pipeline.pipeline import Partitioned
from graphshard.store.artifact_file import ArtifactWriter, CompiledProgram, artifact_of, to_bytes
from graphshard.store.artifact_manifest import CacheLabel, MeshEntry
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
from graphshard.store.program_library import StoredProgram, read_region
from graphshard.torch_compat.torch_ops import pytree
from graphshard.utils.archive import is_being_written, others_can_write, read_private, remove, touch

log = logging.getLogger("graphshard.cache")

_ELSEWHERE = f"{VARIABLE}=DIRECTORY, or compile(..., cache=DIRECTORY)"
_REMEDY = (
    f"Make it writable, give another directory ({_ELSEWHERE}), or switch the cache off ({VARIABLE}=off, or "
    "cache=False)."
)


@dataclass
class ProgramCache:
    """A directory of compiled programs, which need not exist, and the bytes that it may have."""

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
        """Return the lookup for a traced program, before passes; None if it cannot be cached, and the log says why."""
        tracer = maker.tracer
        with contextlib.suppress(OSError):  # it does not exist, or reading it says more
            if others_can_write(self.directory):
                why = "other users could put code there"
                self.warn("cache: %s is not used: %s. Give one of your own (%s).", self.directory, why, _ELSEWHERE)
                return None
        text = ""
        try:
            problem = why_not_cached(tracer, program)
            if not problem:
                facts = {**key_facts(module, tracer, signature), "graph": graph_digest(program)}
                text = json.dumps(facts, sort_keys=True, allow_nan=False)
        except Exception as error:  # values that no file can hold
            problem = f"{type(error).__name__}: {error}"
        if problem:
            log.info("cache: %s is neither looked for nor kept: %s", tracer.label, problem)
            return None
        key = hashlib.sha256(text.encode()).hexdigest()[:32]
        return CacheLookup(self, maker, module, signature, tensors, json.loads(text), self.directory / f"{key}{ENDING}")

    def warn(self, message: str, *args: Any) -> None:
        """Log a problem of the directory once."""
        if not self._warned:
            self._warned = True
            log.warning(message, *args)


@dataclass
class CacheLookup:
    """One program that may be in the cache, or is to be put there, of a call with tensors.

    `facts` are everything that it depends on, by name, and `path` is named by their hash.
    """

    cache: ProgramCache
    maker: ProgramCompiler
    module: nn.Module
    signature: Signature
    tensors: Sequence[torch.Tensor]
    facts: dict[str, Any]
    path: Path

    def find(self) -> LoweredProgram | None:
        """Return the program, ready to be installed; None if there is none, and the log says why."""
        start, path, label = time.perf_counter(), self.path, self.maker.tracer.label
        try:
            kept = self._read()
        except FileNotFoundError:
            log.info("cache: %s is not in %s: %s", label, path.parent, self._difference())
            return None
        except OSError as error:
            self.cache.warn("cache: %s cannot be read (%s): compiling. %s", path.parent, error, _REMEDY)
            return None
        except Exception as error:
            what = "removed, and the program is compiled again" if remove(path) else _REMEDY
            self.cache.warn("cache: %s: %s: %s. It is %s", path, type(error).__name__, error, what)
            return None
        touch(path)
        log.info("cache: %s found in %s in %.2f s", label, path, time.perf_counter() - start)
        return kept

    def _read(self) -> LoweredProgram:
        maker, artifact = self.maker, artifact_of(read_private(self.path))
        tracer, device = maker.tracer, maker.tracer.spec.device
        ((entry,),) = (mesh.programs for mesh in artifact.manifest.meshes)
        stored, compiled = StoredProgram.of(artifact, entry), dict(tracer.compiled)
        for key in stored.regions:
            if key not in compiled:
                fn, _ = read_region(artifact, key, tracer.options.backend, device)
                # Damage is found before the code is needed.
                compiled[key] = RegionCall(fn.load() if isinstance(fn, KeptRegion) else fn)
        program = decode_lowered(stored.data, compiled, self.module, device)
        program.regions = {key: artifact.region(key, device) for key in program.regions}
        starts = [artifact.archive.members[file] for file in entry.partitioned_files]

        def partitioned() -> Partitioned:
            return decode_partitioned(json.loads(starts[0]), program, maker.passes, device)

        make_backward = maker.backward_factory(program, partitioned if starts else None)
        return LoweredProgram(program, make_backward, {key: compiled[key] for key in stored.regions})

    def _difference(self) -> str:
        """Return what differs from the most recently used program of the same model."""
        for entry in entries(self.cache.directory):
            if entry.label.get("model") == self.facts["model"] and entry.label.get("key") != self.path.stem:
                with contextlib.suppress(Exception):
                    facts = read_private(entry.path).json("key.json")
                    names = [name for name in self.facts if facts.get(name) != self.facts[name]]
                    return f"{', '.join(names)}: another than in {entry.path.name}"
        return "nothing was kept of this model"

    def keep(self, program: Program, partitioned: Partitioned | None) -> None:
        """Write a program; if it cannot be written, the log says why."""
        path, label = self.path, self.maker.tracer.label
        try:
            if self._write(program, partitioned):
                removed = shrink(path.parent, self.cache.limit, path)
                log.info("cache: %s kept in %s%s", label, path, f", {removed} older removed" if removed else "")
        except OSError as error:
            warning = "cache: %s cannot be written (%s): nothing is kept there. %s"
            self.cache.warn(warning, path.parent, error, _REMEDY)
        except Exception as error:  # values that no file can hold
            log.info("cache: %s is not kept: %s: %s", label, type(error).__name__, error)

    def _write(self, program: Program, partitioned: Partitioned | None) -> bool:
        path, tracer = self.path, self.maker.tracer
        # The structure of the outputs is the trace's: its classes need not say how they are stored.
        data = encode_lowered(replace(program, out_spec=pytree.tree_structure(())), self.module)
        start = None if partitioned is None else encode_partitioned(partitioned, program)
        # Another rank has written it, or does: a thousand of them would, on a file system of all machines.
        if path.exists() or is_being_written(path):
            return False
        writer = ArtifactWriter({"key.json": to_bytes(self.facts)})
        for key, region in program.regions.items():
            fn = tracer.compiled[key].fn
            generated = bool(getattr(fn, "source_code", ""))
            kernels = None
            if generated:
                from graphshard.lower import inductor  # it has compiled the region

                kernels = inductor.kernels_of(fn)
            writer.add_region(key, region, Package(kernels), otherwise="later" if generated else "operators")
        digests = [self.facts["graph"]]
        compiled = CompiledProgram.of(
            data, entry=tracer.name, digests=digests, signature=self.signature, partitioned=start
        )
        mesh, params = tracer.spec.mesh, tracer.current_spec().params
        writer.add_mesh(MeshEntry(mesh, mesh.shape, None, describe_options(tracer), params, []), [compiled])
        here = environment(tracer.spec.device, native=True)
        inputs = ", ".join(f"{short_name(each.dtype)}{list(each.shape)}" for each in self.tensors)
        of_call = tracer.label, inputs, str(mesh), tracer.options.backend, here.torch
        label = CacheLabel(path.stem, self.facts["model"], *of_call)
        writer.write(path, here, model_facts(self.module), cached=label)
        return True


@functools.cache
def _warn_once(message: str) -> None:
    """`fully_shard` asks for the cache once for each unit."""
    log.warning("%s", message)


def cache_at(chosen: Any) -> ProgramCache | None:
    """Return the cache of a directory, as `compile` takes it; None if nothing is to be cached."""
    try:
        directory = directory_of(chosen)
    except HomelessError as error:
        _warn_once(f"{error} Nothing is kept.")
        return None
    return None if directory is None else ProgramCache(directory, limit_of())
