"""Evict the programs that a model has over its limit, with the memory that only they hold."""

from __future__ import annotations

from graphshard.ir.program import Program
from graphshard.lower.region_call import drop_regions
from graphshard.module.executables import Executables
from graphshard.module.tracer import Tracer
from graphshard.runtime.accumulation import Accumulation
from graphshard.runtime.replays import Replaying


def evict_programs(
    executables: Executables,
    programs: list[Program],
    tracer: Tracer,
    accumulation: Accumulation,
    replaying: Replaying | None,
) -> None:
    """Remove the least recently used programs over `max_captures`, and the regions that no other program calls.

    Args:
        executables: of the model, or of the entry that has a new program.
        programs: of the model and all its entries.
        accumulation: tells which programs are still needed for gradients.
        replaying: holds the device's graphs of programs.
    """
    most = tracer.options.max_captures
    evicted = executables.evict(most, accumulation.may_be_left())
    if not evicted:
        return
    used = [installed.executable for known in executables.known.values() for installed in known]
    unused = [
        installed.executable for installed in evicted if installed.executable not in used
    ]  # equal traces share one
    gone = [program for executable in unused for program in executable.programs]
    programs[:] = [program for program in programs if not any(program is other for other in gone)]
    drop_regions(tracer.compiled, gone)
    if replaying is not None:
        replaying.forget(gone)
    executables.log.eviction(tracer.label, [installed.executable.program.title for installed in evicted], most)
