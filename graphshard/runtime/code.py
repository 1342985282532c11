"""Which code a phase of an installed program runs: bound to process groups, with launches replayed, or measured."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager

from torch.autograd import profiler
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule

from graphshard.ir.graph import is_collective, kind_of
from graphshard.ir.mesh import Mesh
from graphshard.ir.program import Phase, Program
from graphshard.lower.executor import Boxed, Executor
from graphshard.lower.replays import Replays
from graphshard.runtime.custom import Custom
from graphshard.runtime.gloo import exchange_reductions, gather_into_buffers
from graphshard.runtime.groups import bind_groups, on_gloo
from graphshard.runtime.in_place import reduce_in_place
from graphshard.runtime.peers import Peers
from graphshard.runtime.recording import current_recording
from graphshard.runtime.replays import Replaying

_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class Codes:
    """Of the phases of a program, and of its backwards for other tangents and microbatches.

    Args:
        program: lowered; the names of the mesh's process groups take the place of its axis names.
        mesh: the mesh the parameters are sharded over.
        groups: names of the process groups by the names of the axes.
        peers: the other ranks; None where there are none.
        custom: collectives that the user runs.
        replaying: what launches runs of regions by one launch each; None leaves them to themselves.
    """

    def __init__(
        self,
        program: Program,
        mesh: DeviceMesh,
        groups: Mapping[str, str],
        peers: Peers | None,
        custom: Custom | None,
        replaying: Replaying | None,
    ) -> None:
        self._program = program
        self._mesh = mesh
        self._groups = groups
        self._peers = peers
        self._custom = custom
        self._replaying = replaying
        # Programs that are a backward alone.
        self._others: dict[GraphModule, Program] = {}
        self._replayed: dict[GraphModule, Boxed] = {}
        self._ranged: dict[GraphModule, Boxed] = {}
        # What each phase that communicates is called, and what it sends.
        self._sent: dict[GraphModule, tuple[str, str]] = {}
        for name, phase in program.phases.items():
            self._bind(name, phase)

    def other_backward(self, program: Program) -> Phase:
        """The backward of another program, bound like the phases of the first."""
        phase = program.phases["backward"]
        self._bind("backward", phase)
        self._others[phase.module] = program
        return phase

    @property
    def other_programs(self) -> list[Program]:
        """Programs that are a backward alone."""
        return list(self._others.values())

    def _bind(self, name: str, phase: Phase) -> None:
        launches = [node for node in phase.module.graph.nodes if is_collective(node)]
        if launches:
            counts = Counter(kind_of(node) for node in launches)
            kinds = ", ".join(f"{kind}: {count}" for kind, count in counts.items())
            sent = "\n".join(f"{node.meta.get('bucket')} over {node.args[-1]}" for node in launches)
            self._sent[phase.module] = f"{name} of {self._program.model} ({kinds})", sent
        bind_groups(phase.module.graph, self._groups)
        if self._custom is not None:
            self._custom.bind(phase, Mesh.of(self._mesh))
        reduce_in_place(phase)  # knows what reductions make, not what takes their place on gloo
        exchange_reductions(phase)
        if on_gloo(self._mesh.get_group(0), self._mesh.device_type):
            gather_into_buffers(phase)
        phase.module.recompile()

    def of(self, phase: Phase) -> Boxed:
        """The phase's code; while it is measured or a profiler runs, one that shows: other steps pay nothing."""
        executor, recording = phase.module, current_recording()
        if recording is None and not profiling():
            return executor.forward if self._replaying is None else self._with_replays(executor)
        assert isinstance(executor, Executor)
        if recording is not None:
            return recording.code(executor, self._others.get(executor, self._program), phase)
        if executor not in self._ranged:
            self._ranged[executor] = executor.with_ranges()
        return self._ranged[executor]

    def _with_replays(self, executor: GraphModule) -> Boxed:
        if executor not in self._replayed:
            replays = self.replays(executor)
            assert isinstance(executor, Executor)
            assert replays is not None
            self._replayed[executor] = executor.with_replays(replays)
        return self._replayed[executor]

    def replays(self, executor: GraphModule) -> Replays | None:
        """Who launches the executor's runs of regions, if anybody does."""
        if self._replaying is None:
            return None
        assert isinstance(executor, Executor)
        return self._replaying.of(self._others.get(executor, self._program), executor)

    def step(self, phase: Phase, how: str = "") -> AbstractContextManager[None]:
        """What others are told while a phase runs; those that do not communicate are nobody's business."""
        sent = self._sent.get(phase.module)
        if self._peers is None or sent is None:
            return _NOTHING
        label, text = sent
        return self._peers.step(label + how, text + how)


def profiling() -> bool:
    """Whether a profiler runs."""
    return bool(profiler._is_profiler_enabled)
