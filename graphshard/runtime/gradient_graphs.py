"""Gradients that have a graph, so that they can be differentiated again (`create_graph=True`).

    forces = -torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
    (forces - wanted).square().mean().backward()

A program's backward is one node of autograd, whose operators autograd does not see. When gradients are to have a graph,
the call runs again by eager operators, on full parameters that are gathered once, and autograd differentiates these.
The next calls run this way from the start, until one is differentiated without a graph. So they have the numbers of
plain torch, and nothing runs twice.

    shards -- gather --> full parameters -- eager operators --> results
    shards <- reduce -- gradients     the gradient of a gather is a reduction; the gradient of a reduction is a gather
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from graphshard.errors import InputError
from graphshard.ir.program import EagerForward, Slot
from graphshard.runtime.bound_program import SlotValues
from graphshard.torch_compat.autograd_state import Fate

log = logging.getLogger(__name__)


@dataclass
class GivenValues:
    """What a call was given that is not a parameter.

    Attributes:
        tensors: inputs of the program.
        versions: of these, and of the buffers that forward only reads.
        overwritten: copies of buffers that forward has overwritten.
        autocast: whether it was enabled, and its dtype.
        random: states of the generators of the CPU and of the device, if forward draws.
        results: leaves of the results of the eager operators, when they have run.
    """

    tensors: Sequence[torch.Tensor]
    versions: list[int]
    overwritten: dict[str, torch.Tensor]
    autocast: tuple[bool, torch.dtype]
    random: tuple[torch.Tensor, ...] = ()
    results: list[Any] | None = None


@dataclass(eq=False)
class EagerCalls:
    """Calls of a program by eager operators.

    Args:
        gather: returns the full parameters by their names in the program, as results of autograd, of shards that are
            given by their names in the model; by default of the present ones.

    Attributes:
        preferred: the next calls run this way, as gradients of the last one had a graph.
        full: the last call's full parameters, while autograd keeps them.
    """

    forward: EagerForward
    values: SlotValues
    gather: Callable[[Mapping[str, nn.Parameter] | None], Mapping[str, torch.Tensor]]
    preferred: bool = False
    full: Mapping[str, Callable[[], torch.Tensor | None]] = field(default_factory=dict)
    _function: Callable[[Callable[[Slot], Any]], list[Any]] | None = None
    _warned: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        phase, constants = self.values.program.phases["forward"], self.values.program.constants
        self._written = [slot.name for slot in phase.outputs if slot.kind == "mutation" and slot.of == "buffer"]
        read = (slot.name for slot in phase.inputs if slot.kind == "buffer")
        self._read = [name for name in read if name not in self._written and name not in constants]

    def call(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Run a call; return the leaves of its results."""
        leaves, with_graph = self._run(tensors), list[bool]()

        def note(_: torch.Tensor) -> None:
            if torch.is_grad_enabled():
                with_graph.append(True)
            elif not with_graph:
                self.preferred = False

        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(note)
        return leaves

    def given(self, tensors: Sequence[torch.Tensor]) -> GivenValues:
        """Keep what is needed to run a call again, before it runs."""
        kind = self.values.program.device.type
        return GivenValues(
            tensors,
            self._versions(tensors),
            {name: self.values.buffer(name).clone() for name in self.forward.overwritten},
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
            self._random_states() if self.forward.draws else (),
        )

    def again(self, given: GivenValues, params: Mapping[str, nn.Parameter]) -> list[Any]:
        """Run a call again, once, as it was; return the leaves of its results."""
        if given.results is None:
            if self._versions(given.tensors) != given.versions:
                raise InputError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"an input or a buffer of {self.values.program.model} was written to after forward, and gradients "
                    "that have a graph (create_graph=True) need it as it was. Pass a copy, x.clone(), or write to it "
                    "later."
                )
            written = {name: self.values.buffer(name).clone() for name in self._written}
            device = self.values.program.device.type
            enabled, dtype = given.autocast
            with self._drawing(given.random), torch.autocast(device, dtype, enabled=enabled):
                given.results = self._run(given.tensors, {**written, **given.overwritten}, params)
            self.preferred = True
            if not self._warned:
                self._warned = True
                log.warning(
                    "gradients of %s have a graph (create_graph=True): such calls run operator by operator, on full "
                    "parameters, as no program can be differentiated twice.",
                    self.values.program.title,
                )
        return given.results

    def _run(
        self,
        tensors: Sequence[torch.Tensor],
        buffers: Mapping[str, torch.Tensor] = MappingProxyType({}),
        params: Mapping[str, nn.Parameter] | None = None,
    ) -> list[Any]:
        if self._function is None:
            self._function = self.forward.function()
        full, sizes = self.gather(params), self.values.sizes(tensors)
        self.full = {name: weakref.ref(value) for name, value in full.items()}

        def value(slot: Slot) -> Any:
            if slot.kind == "param":
                return full[slot.name] if slot.name in full else self.values.params[slot.name].param
            if slot.kind == "input":
                return tensors[int(slot.name)]
            if slot.kind == "size":
                return sizes[slot]
            return buffers[slot.name] if slot.name in buffers else self.values.buffer(slot.name)

        return self._function(value)

    def _versions(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        read = (*tensors, *map(self.values.buffer, self._read))
        return [-1 if tensor.is_inference() else tensor._version for tensor in read]

    def _random_states(self) -> tuple[torch.Tensor, ...]:
        device = self.values.program.device
        states = [torch.get_rng_state()]
        if device.type != "cpu":
            states.append(torch.get_device_module(device).get_rng_state())
        return tuple(states)

    @contextlib.contextmanager
    def _drawing(self, states: Sequence[torch.Tensor]) -> Iterator[None]:
        """Draw from generators in these states, and leave them as they are now."""
        if not states:
            yield
            return
        now = self._random_states()
        self._set_random_states(states)
        try:
            yield
        finally:
            self._set_random_states(now)

    def _set_random_states(self, states: Sequence[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        for state in states[1:]:
            torch.get_device_module(self.values.program.device).set_rng_state(state)


class Reduction(torch.autograd.Function):
    """Gradients of full parameters, reduced to gradients of shards: the backward of a program that gathers parameters.

        mean over ranks of the gradients of full parameters    ->   shards of gradients
        gradient of what this rank computed, all of it        <-   shards of the gradient of these

    A loss is the mean of the ranks' losses: a gradient of shards is gathered, not divided by the number of ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        executable: Any,
        saved: Mapping[Slot, Any],
        names: tuple[str, ...],
        fates: Sequence[Fate],
        *tangents: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.executable, ctx.names = executable, names
        ctx.set_materialize_grads(False)
        return tuple(executable.backward(dict(saved), dict(zip(names, tangents)), fates, None))

    @staticmethod
    def backward(ctx: Any, *grads: DTensor | None) -> tuple[Any, ...]:
        executable = ctx.executable
        by_name = dict(zip((slot.name for slot in executable.grads), grads, strict=True))
        found = [by_name.get(executable.values.refs[int(name)].row.name) for name in ctx.names]
        names = tuple(name for name, grad in zip(ctx.names, found) if grad is not None)
        full = iter(Gathered.apply(executable, names, *(grad for grad in found if grad is not None)))
        return (None, None, None, None, *(None if grad is None else next(full) for grad in found))


class Gathered(torch.autograd.Function):
    """Full gradients of parameters from their shards: the backward of a reduction, see `Reduction`."""

    @staticmethod
    def forward(ctx: Any, executable: Any, names: tuple[str, ...], *shards: DTensor) -> tuple[torch.Tensor, ...]:
        ctx.executable, ctx.names = executable, names
        ctx.set_materialize_grads(False)
        refs = [executable.values.refs[int(name)] for name in names]
        placed = [shard.redistribute(placements=ref.param.placements) for ref, shard in zip(refs, shards)]
        full = executable.gather_shards({ref.row.name: shard for ref, shard in zip(refs, placed)})
        return tuple(full[ref.row.name] for ref in refs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        executable = ctx.executable
        given = {name: grad for name, grad in zip(ctx.names, grads) if grad is not None}
        found = Reduction.apply(executable, {}, tuple(given), (), *given.values())
        by_name = dict(zip((slot.name for slot in executable.grads), found, strict=True))
        return (None, None, *(by_name[executable.values.refs[int(name)].row.name] for name in ctx.names))
