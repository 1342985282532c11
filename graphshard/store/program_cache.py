"""Compile cache: finds the program of a trace that an earlier launch compiled, and writes one.

* A stale hit would be a silently wrong result. So the key has the digest of the whole traced graph, and everything else
  in `fingerprint.key_facts`. A program whose key cannot be written down is not cached.
* A launch traces unless it can be sure of the graph: `_trace_record.py` compares everything that the trace has read,
  and all code that it ran. Guards come from the trace, or are built anew from such a record.
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

from graphshard.codec.converter import decode_structure, encode_structure, write
from graphshard.codec.graph_format import short_name
from graphshard.codec.program_format import (
    decode_lowered,
    decode_partitioned,
    encode_lowered,
    encode_partitioned,
    graph_digest,
    own_names,
)
from graphshard.exported.exported_program import joint_of
from graphshard.frontend.dynamo_capture import DynamoTrace
from graphshard.frontend.dynamo_patches import without_torchs_hooks
from graphshard.frontend.signature import Signature
from graphshard.ir.program import EagerForward, Program, Size
from graphshard.ir.submodule_entry_points import method_of
from graphshard.lower.region_store import KeptRegion, Package
from graphshard.lower.regions import RegionCall
from graphshard.module.program_compiler import LoweredProgram, ProgramCompiler
from graphshard.module.tracer import ModuleCall, Tracer
from graphshard.pipeline.pipeline import Partitioned
from graphshard.store._trace_record import global_state, record_of, restore
from graphshard.store.artifact_file import ArtifactWriter, CompiledProgram, artifact_of, to_bytes
from graphshard.store.artifact_manifest import CacheLabel, MeshEntry
from graphshard.store.cache_directory import (
    ENDING,
    OF_TRACES,
    VARIABLE,
    HomelessError,
    directory_of,
    entries,
    limit_of,
    shrink,
)
from graphshard.store.fingerprint import describe_options, environment, key_facts, model_facts, why_not_cached
from graphshard.store.program_library import StoredProgram, read_region, within_of
from graphshard.torch_compat.torch_ops import pytree
from graphshard.utils.archive import is_being_written, others_can_write, read_private, remove, touch, write_archive

log = logging.getLogger("graphshard.cache")

# Records of one call that are compared.
_MOST_RECORDS = 8
_ELSEWHERE = f"{VARIABLE}=DIRECTORY, or compile(..., cache=DIRECTORY)"
_REMEDY = (
    f"Make it writable, give another directory ({_ELSEWHERE}), or switch the cache off ({VARIABLE}=off, or "
    "cache=False)."
)


class _OtherSizesError(Exception):
    """A stored program does not hold at the sizes of the call."""


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
        path = self.directory / f"{key}{ENDING}"
        return CacheLookup(self, maker, module, signature, tensors, json.loads(text), path, program.sizes)

    def recall(self, maker: ProgramCompiler, call: ModuleCall, of_inputs: Signature) -> LoweredProgram | None:
        """Return the program of a trace that this call would repeat; None if there is none, and the log says why."""
        tracer, module = maker.tracer, call.module
        try:
            if others_can_write(self.directory) or why_not_cached(tracer) or joint_of(module) is not None:
                return None
            facts = _facts_of_call(module, tracer, of_inputs)
            scope = {"module": module, "args": call.args, "kwargs": dict(call.kwargs)}
            forward, why = method_of(module, tracer.spec.method), "no trace was kept"
            known = [*_records(self.directory, facts), *_records(self.directory, _with_any_sizes(facts, of_inputs))]
            for path in known[:_MOST_RECORDS]:
                content = read_private(path).json("trace.json")
                with without_torchs_hooks():
                    trace = restore(content["trace"], tracer.traced, forward, scope)
                if isinstance(trace, str):
                    why = trace
                    continue
                touch(path)
                return self._recalled(maker, call, of_inputs, facts, content, trace)
        except OSError:
            return None  # the search after the trace says why
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        log.info("cache: %s is traced: %s", tracer.label, why)
        return None

    def _recalled(
        self,
        maker: ProgramCompiler,
        call: ModuleCall,
        of_inputs: Signature,
        facts: dict[str, Any],
        content: dict[str, Any],
        trace: DynamoTrace,
    ) -> LoweredProgram | None:
        """Return the program of a record, with what a trace knows of it."""
        file = self.directory / f"{content['program']}{ENDING}"
        found = CacheLookup(self, maker, call.module, of_inputs, (), facts, file).find()
        if found is not None:
            program, again = found.program, maker.tracer.recapture(call)
            program.trace, program.digest, program.taken = trace, content["digest"], tuple(content["taken"])
            program.out_spec = decode_structure(content["out_spec"], "outputs")
            if content["eager"] is not None:
                draws, overwritten = content["eager"]
                program.eager = EagerForward(lambda: again().eager.function(), draws, tuple(overwritten))  # type: ignore[union-attr]
        return found

    def warn(self, message: str, *args: Any) -> None:
        """Log a problem of the directory once."""
        if not self._warned:
            self._warned = True
            log.warning(message, *args)


@dataclass
class CacheLookup:
    """One program that may be in the cache, or is to be put there, of a call with tensors.

    `facts` are everything that it depends on, by name, and `path` is named by their hash. Conditions of the program on
    dynamic sizes are added to the guards of the trace, which has `sizes`; None if a record of the trace has them.
    """

    cache: ProgramCache
    maker: ProgramCompiler
    module: nn.Module
    signature: Signature
    tensors: Sequence[torch.Tensor]
    facts: dict[str, Any]
    path: Path
    sizes: Sequence[Size] | None = None

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
        except _OtherSizesError as error:
            log.info("cache: %s in %s is for other sizes: %s", label, path, error)
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
        if self.sizes is not None and (otherwise := stored.conflict(self.sizes)):
            raise _OtherSizesError(otherwise)
        for key in stored.regions:
            if key not in compiled:
                fn, _ = read_region(artifact, key, tracer.options.backend, device)
                # Damage is found before the code is needed.
                compiled[key] = RegionCall(fn.load() if isinstance(fn, KeptRegion) else fn, within_of(key))
        program = decode_lowered(stored.data, compiled, self.module, device)
        program.regions = {key: artifact.region(key, device) for key in program.regions}
        starts = [artifact.archive.members[file] for file in entry.partitioned_files]

        def partitioned() -> Partitioned:
            return decode_partitioned(json.loads(starts[0]), program, maker.passes, device)

        make_backward = maker.backward_factory(program, partitioned if starts else None)
        return LoweredProgram(program, make_backward, {key: compiled[key] for key in stored.regions})

    def remember(self, of_inputs: Signature, program: Program, trace: DynamoTrace) -> None:
        """Keep a trace next to its program, so that a later launch need not repeat it."""
        tracer = self.maker.tracer
        try:
            if not self.path.exists():
                return
            eager = program.eager and (program.eager.draws, program.eager.overwritten)
            record = record_of(trace, tracer.traced)
            content = {
                "program": self.path.stem,
                "digest": program.digest,
                "taken": list(program.taken),
                "out_spec": encode_structure(program.out_spec, "outputs"),
                "eager": eager,
                "trace": record,
            }
            facts = _facts_of_call(self.module, tracer, of_inputs)
            if record["dims"]:
                facts = _with_any_sizes(facts, of_inputs)
            distinct = [record[name] for name in ("facts", "conditions", "branches")]
            stem = _hash(facts) + _hash([self.path.stem, *distinct])
            path = self.path.with_name(f"{stem}{OF_TRACES}")
            if not path.exists() and not is_being_written(path):
                write_archive(path, {"model": facts["model"]}, {"trace.json": to_bytes(content)})
                shrink(path.parent, self.cache.limit, path)
        except Exception as error:  # of many kinds, for values that cannot be described or written
            log.info("cache: the trace of %s is not kept, so each launch traces: %s", tracer.label, error)

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
        names = own_names(program, tracer.compiled, path.stem)
        data = encode_lowered(replace(program, out_spec=pytree.tree_structure(())), self.module, names)
        start = None if partitioned is None else encode_partitioned(partitioned, program)
        # Another rank has written it, or does: a thousand of them would, on a file system of all machines.
        if path.exists() or is_being_written(path):
            return False
        writer = ArtifactWriter({"key.json": to_bytes(self.facts)})
        for key, region in program.regions.items():
            fn = tracer.compiled[key].fn
            generated = bool(getattr(fn, "source_code", ""))
            kernels = fn.kernels if isinstance(fn, KeptRegion) and not fn.kernels.on_gpu else None
            if generated and not isinstance(fn, KeptRegion):
                from graphshard.lower import inductor  # it has compiled the region

                kernels = inductor.kernels_of(fn)
                if kernels is None and names[key] != key:
                    raise ValueError(f"region {key} has dynamic sizes, and code that only Inductor can load")
            writer.add_region(names[key], region, Package(kernels), otherwise="later" if generated else "operators")
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


def _facts_of_call(module: nn.Module, tracer: Tracer, of_inputs: Signature) -> dict[str, Any]:
    """Return all that a trace depends on, except what its guards read."""
    return {**key_facts(module, tracer, of_inputs), "state": global_state(), "device": str(tracer.spec.device)}


def _with_any_sizes(facts: dict[str, Any], of_inputs: Signature) -> dict[str, Any]:
    """Return facts of a call without the sizes and strides of its inputs, for traces of dynamic sizes."""
    inputs = (((torch.Size([0] * len(key[0])), (), *key[2:]) if len(key) == 4 else key) for key in of_inputs.inputs)
    return {**facts, "call": write(replace(of_inputs, inputs=tuple(inputs)))}


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, allow_nan=False).encode()).hexdigest()[:16]


def _records(directory: Path, facts: dict[str, Any]) -> list[Path]:
    """Return the records of traces of a call, the most recently used first."""
    found = [(path.stat().st_mtime, path) for path in directory.glob(f"{_hash(facts)}*{OF_TRACES}")]
    return [path for _, path in sorted(found, reverse=True)]


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
