"""Program bound to a model and a mesh: the code that its phases run, and the values that its names stand for."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd import profiler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node

from graphshard.ir.graph import base_of, is_collective, kind_of
from graphshard.ir.mesh import ExpertMeshes, Mesh
from graphshard.ir.program import Phase, Program, Slot
from graphshard.ir.sizes import given_sizes
from graphshard.ir.strides import strides_without_gaps
from graphshard.ir.subclasses import padded_to, parts_of, shard_in
from graphshard.lower.executor import Boxed, Executor, Line, profiler_range
from graphshard.runtime.collective_launches import (
    UserCollectives,
    exchange_reductions,
    gather_into_buffers,
    group_downloads,
    launch_together,
    reduce_in_place,
)
from graphshard.runtime.cuda_graphs import ModelGraphs
from graphshard.runtime.peers import Peers
from graphshard.runtime.process_groups import bind_groups, on_gloo, shard_index
from graphshard.runtime.shards import ParamRef, dense, padded_shard, place_of
from graphshard.runtime.step_recorder import current_recording
from graphshard.runtime.unsharded import Unsharded
from graphshard.torch_compat.dtensor import sharded_like

CodeT = TypeVar("CodeT")
_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


@dataclass(eq=False)
class BoundProgram:
    """Code of a lowered program's phases, and of its backwards for other tangents and microbatches.

    Names of process groups, by the names of the axes in `groups`, replace those in the executors of the program.

    Attributes:
        others: programs that are a backward alone, by the code of that.
    """

    program: Program
    mesh: DeviceMesh
    groups: Mapping[str, str]
    peers: Peers | None
    collectives: UserCollectives
    graphs: ModelGraphs | None
    others: dict[GraphModule, Program] = field(default_factory=dict)
    _codes: dict[tuple[Hashable, bool], Any] = field(default_factory=dict)
    # Label and communication of each phase that communicates.
    _sent: dict[GraphModule, tuple[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, phase in self.program.phases.items():
            self._bind(name, phase, self.program)

    def bind_backward(self, program: Program) -> Phase:
        """Bind the backward of another program like the phases of this one."""
        phase = program.phases["backward"]
        self._bind("backward", phase, program)
        self.others[phase.module] = program
        return phase

    def _bind(self, name: str, phase: Phase, program: Program) -> None:
        launches = [node for node in phase.module.graph.nodes if is_collective(node)]
        if launches:
            counts = Counter(kind_of(node) for node in launches)
            kinds = ", ".join(f"{kind}: {count}" for kind, count in counts.items())
            sent = [line.removeprefix(f"{name}: ") for line in program.communication if line.startswith(f"{name}: ")]
            self._sent[phase.module] = f"{name} of {self.program.model} ({kinds})", "\n".join(sent)
        bind_groups(phase.module.graph, self.groups)
        self.collectives.bind(phase, Mesh.of(self.mesh))
        group_downloads(phase, program.params)
        reduce_in_place(phase)  # before gloo's rewrite: it recognizes the results of reductions
        exchange_reductions(phase)
        if on_gloo(self.mesh.get_group(0), self.mesh.device_type):
            gather_into_buffers(phase)
        launch_together(phase)
        phase.module.recompile()

    def code(self, phase: Phase) -> Boxed:
        """Return the phase's code; while it is recorded or a profiler runs, code that shows what runs."""
        executor, recording = phase.module, current_recording()
        if recording is not None:
            assert isinstance(executor, Executor)
            return recording.code(executor, self.others.get(executor, self.program), phase)
        if self.graphs is None and not profiling():
            return executor.forward
        return self.cached(executor, lambda: self.function(phase))

    def cached(self, key: Hashable, make: Callable[[], CodeT]) -> CodeT:
        """Return code that was made for a key before; there is separate code while a profiler runs."""
        place = key, profiling()
        if place not in self._codes:
            self._codes[place] = make()
        found: CodeT = self._codes[place]
        return found

    def function(self, phase: Phase, lines: Sequence[Line] | None = None, **known: Any) -> Boxed:
        """Compile lines of the phase's executor: with ranges while a profiler runs, else with CUDA graphs if any."""
        executor = phase.module
        assert isinstance(executor, Executor)
        if profiling():
            return executor.function(lines, profiler_range, **known)
        if self.graphs is None:
            return executor.function(lines, **known)
        return self.graphs.function(self.others.get(executor, self.program), executor, lines, **known)

    def step(self, phase: Phase, how: str = "") -> AbstractContextManager[None]:
        """Return the context in which a phase runs, which tells the other ranks, if it communicates."""
        sent = self._sent.get(phase.module)
        if self.peers is None or sent is None:
            return _NOTHING
        label, text = sent
        return self.peers.step(label + how, text + how)


def profiling() -> bool:
    """Return whether torch's profiler runs."""
    return bool(profiler._is_profiler_enabled)


@dataclass(eq=False)
class SlotValues:
    """Values of the slots of a program: parameters, and their names in the model, by their names in the program."""

    program: Program
    module: nn.Module
    refs: Sequence[ParamRef]
    mesh: DeviceMesh
    unsharded: Unsharded
    experts: ExpertMeshes | None = None

    def __post_init__(self) -> None:
        self.params = {ref.row.name: ref for ref in self.refs}
        self.names = {ref.row.name: ref.name for ref in self.refs}
        self._rank = shard_index(self.mesh)
        self._expert_rank = shard_index(self.experts.data) if self.experts is not None else 0
        # For each buffer the buffers of its module, and its key there.
        self._owners: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {}
        forward = self.program.phases["forward"]
        # Buffers and inputs that a step updates in place, and of which it saves the old value, or a view of it.
        slots, results = forward.slot_of(), list(zip(forward.results, forward.outputs, strict=True))
        updated = {Slot(slot.of, slot.name) for _, slot in results if slot.kind == "mutation" and slot.of}
        saved = [node for node, slot in results if slot.kind not in ("output", "mutation") and isinstance(node, Node)]
        self._updated = updated.intersection(slots.get(base_of(node)) for node in saved)
        # Inputs of forward, each with the parameter if it is a padded shard, and is not copied.
        self._inputs: list[tuple[Slot, ParamRef | None]] = []
        for slot in forward.inputs:
            ref = self.params[slot.name] if slot.kind == "param" and slot not in self._updated else None
            self._inputs.append((slot, None if ref is None or ref.row.ignored else ref))

    def inputs(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Return the inputs of forward in a call with these tensors."""
        return [
            padded_shard(ref.param, ref.row) if ref is not None else self._input(slot, tensors)
            for slot, ref in self._inputs
        ]

    def sizes(self, tensors: Sequence[torch.Tensor]) -> dict[Slot, int]:
        """Return the dynamic sizes of a call."""
        return {Slot("size", name): size for name, size in given_sizes(self.program.sizes, tensors).items()}

    def _input(self, slot: Slot, tensors: Sequence[torch.Tensor]) -> Any:
        """Return an input of forward; a copy of what a step updates later, if backward must see the old value."""
        value = self.read(slot, tensors)
        if slot.kind == "input" and self.program.sizes and value.stride() != (strides := strides_without_gaps(value)):
            return value.new_empty_strided(value.shape, strides).copy_(value)
        return value.new_empty_strided(value.shape, value.stride()).copy_(value) if slot in self._updated else value

    def read(self, slot: Slot, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the value of a slot in a call with these tensors."""
        if slot.kind == "param":
            ref = self.params[slot.name]
            return shard_in(ref.param.detach()) if ref.row.ignored else padded_shard(ref.param, ref.row)
        if slot.kind == "part":
            ref = self.params[slot.name]
            return parts_of(padded_to(shard_in(ref.param), ref.row.padded_shape, ref.row.dim))[slot.index]
        if slot.kind == "gathered":
            return self.unsharded.read(self.names[slot.name])
        if slot.kind == "input":
            return tensors[int(slot.name)].detach()
        if slot.kind == "size":
            return self.sizes(tensors)[slot]
        return self.buffer(slot.name)

    def buffer(self, name: str) -> torch.Tensor:
        """Return a buffer of the module, or a constant of the program."""
        constant = self.program.constants.get(name)
        if constant is not None:
            return constant
        if name not in self._owners:  # the guard checks that modules are the captured ones
            owner, key = place_of(self.module, name)
            self._owners[name] = owner._buffers, key
        buffers, key = self._owners[name]
        buffer = buffers[key]
        assert buffer is not None
        return buffer

    def as_gradient(self, value: torch.Tensor, slot: Slot, ref: ParamRef | None) -> torch.Tensor:
        """Convert a result of backward for autograd; `ref` is the parameter that it is a gradient of."""
        if ref is None:
            return value
        param = ref.param
        return sharded_like(self.local_gradient(value, slot, param), param) if isinstance(param, DTensor) else value

    def local_gradient(self, value: torch.Tensor, slot: Slot, param: nn.Parameter) -> torch.Tensor:
        """Cut the padding off a parameter's gradient."""
        row = self.params[slot.name].row
        if row.ignored or not isinstance(param, DTensor):
            return value
        if value.shape == param._local_tensor.shape:  # a view of all of it would cost as much as the rest
            return value
        local = row.without_padding(value, self._expert_rank if row.expert else self._rank)
        if row.memory_dim > 0 and local.shape != value.shape:
            local = dense(local, row, local.device)
        return local
