"""Run an installed program: forward and backward of one call.

Executable.forward    parameters, buffers and inputs -> outputs, and what backward needs
Executable.backward   saved values and tangents -> gradients, as DTensors like their parameters
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graphshard.errors import UnsupportedError
from graphshard.ir.graph import fake, restride
from graphshard.ir.operators import finish_copies
from graphshard.ir.program import Phase, Program, Slot
from graphshard.ir.sizes import evaluate, expression, sizes_in, with_sizes
from graphshard.ir.split import Sum
from graphshard.lower.executor import Boxed
from graphshard.passes import AccumulateGradients
from graphshard.runtime.accumulation import LEFT, Accumulation
from graphshard.runtime.ahead import Ahead
from graphshard.runtime.apart import check_apart
from graphshard.runtime.call import Call, watch_results
from graphshard.runtime.code import Codes, profiling
from graphshard.runtime.custom import Custom
from graphshard.runtime.recording import current_recording
from graphshard.runtime.shards import Alias, ParamRef
from graphshard.runtime.shown import places_of
from graphshard.runtime.unsharded import Unsharded, landed, start_gathering
from graphshard.runtime.values import Values
from graphshard.torch_compat.aot_autograd import without_selective_checkpoints
from graphshard.torch_compat.autograd_state import Fate, disable_autocast

# Which tangents arrive, and what is done about microbatches.
Variant = tuple[frozenset[str], AccumulateGradients | None]
# Of the tangents that arrive, by name; in any order.
Strides = frozenset[tuple[str, tuple[int, ...]]]
# Makes a program of its own that is a backward alone.
BackwardFactory = Callable[[Variant, Strides], Program]


class Executable:
    """A lowered program bound to a module and a mesh.

    Args:
        program: lowered, and bound by `codes`.
        codes: what its phases run.
        values: what its names stand for.
        make_backward: makes the backward for another variant than the likely one; None if there is no backward.
        accumulation: what is shared with the other programs of the model.
        names: names of the parameters in the model by their names in the program.
        unsharded: parameters that were gathered by hand.
        groups: names of the process groups by the names of the axes.
        custom: collectives that the user runs.
        aliases: names under which tied parameters are known besides.
        follows_strides: each layout of tangents has a backward of its own, as in eager mode; otherwise they are copied.
        defers: gradients of several calls that one backward goes through are added up before they are reduced.
    """

    def __init__(
        self,
        program: Program,
        codes: Codes,
        values: Values,
        make_backward: BackwardFactory | None,
        accumulation: Accumulation,
        names: Mapping[str, str],
        unsharded: Unsharded,
        groups: Mapping[str, str],
        custom: Custom,
        aliases: Sequence[Alias],
        *,
        follows_strides: bool,
        defers: bool,
    ) -> None:
        self.program = program
        self._codes = codes
        self._values = values
        # Not where backwards are in a file: it has none that leave gradients to each other.
        self.defers = defers
        self._make_backward = make_backward
        self.accumulation = accumulation
        self.names_in_model = names
        self._unsharded = unsharded
        self._groups = groups
        self._custom = custom
        self._forward = program.phases["forward"]
        outputs_of_inputs = (slot for slot in self._forward.outputs if slot.kind == "mutation" and slot.of == "input")
        self._written = [int(slot.name) for slot in outputs_of_inputs]
        outputs = zip(self._forward.results, self._forward.outputs)
        self._results = [(value, slot.name) for value, slot in outputs if slot.kind == "output"]
        self._shown = {
            slot: places_of(self._values.params[slot.name], aliases, names[slot.name])
            for slot in self._forward.outputs
            if (slot.of == "gathered" or slot.kind == "shown") and program.params[slot.name].shows
        }
        # Names of the outputs that are computed, tensors and dynamic sizes; the others are constants.
        self.names = [name for value, name in self._results if isinstance(value, Node)]
        self._grads: tuple[Slot, ...] = ()
        # Of each gradient, the parameter that it is of; None for an input.
        self._wrt: list[ParamRef | None] = []
        # Of each backward, where its gradients are among its outputs, and which of the others are left or kept.
        self._ends: dict[GraphModule, tuple[list[int | None], list[tuple[int, Slot]]]] = {}
        # The parameters that backward computes gradients of, by their names in the model.
        self.trained: dict[str, ParamRef] = {}
        self._ahead: Ahead | None = None
        self._follows_strides = follows_strides
        self._backwards: dict[tuple[Variant, Strides], Phase] = {}
        if "backward" in program.phases:
            phase = program.phases["backward"]
            self._grads = tuple(slot for slot in phase.outputs if slot.kind == "grad")
            self._wrt = [self._values.params[slot.name] if slot.of == "param" else None for slot in self._grads]
            self.trained.update((names[ref.row.name], ref) for ref in self._wrt if ref is not None)
            slots = phase.slot_of().items()
            expected = {slot.name: fake(node) for node, slot in slots if slot.kind == "tangent"}
            self._follows_strides &= all(type(s) is int for t in expected.values() for s in (*t.shape, *t.stride()))
            self._backwards[(frozenset(expected), None), self._strides(expected)] = phase

    @property
    def differentiated(self) -> tuple[str, ...]:
        """Of what backward computes gradients, in their order: "param" or "input"."""
        return tuple(slot.of or "" for slot in self._grads)

    @property
    def programs(self) -> list[Program]:
        """The program, and those of its other backwards."""
        return [self.program, *self._codes.other_programs]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Run the program on the tensors it is given; return the leaves of the result, and what follows them."""
        if self._backwards:
            self.accumulation.begin()
            wrt = [tensors[int(s.name)] if ref is None else ref.param for s, ref in zip(self._grads, self._wrt)]
            made = Call.apply(self, tensors, *wrt)
            watch_results(self, made)
            results = iter(made)
        else:
            with torch.no_grad():
                results = iter(self.forward(tensors)[0])
        flat = [next(results) if isinstance(value, Node) else value for value, _ in self._results]
        for check in reversed(self.program.checks):
            check(flat.pop())
        return flat

    def forward(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor | int, ...], dict[Slot, Any]]:
        """Run the forward executor; return the module's results and the values saved for backward."""
        self.hide()
        if self._written:
            check_apart(tensors, self._written)
        run, taken = self._forward_code()
        with disable_autocast(), without_selective_checkpoints(), self._codes.step(self._forward, taken):
            values = run(self._values.inputs(tensors))
        if self.program.offloaded:  # or the user, who may write to a shard now, would change what is still copied
            finish_copies(self.program.device)
        results: list[torch.Tensor | int] = []
        saved: dict[Slot, Any] = {}
        mutations: dict[Slot, torch.Tensor] = {}
        for value, node, slot in zip(values, self._forward.results, self._forward.outputs, strict=True):
            if slot.kind == "mutation":
                assert slot.of is not None
                mutations[Slot(slot.of, slot.name)] = value
            elif slot.kind != "output":
                saved[slot] = value
            elif isinstance(node, Node):
                results.append(value)
        for slot, value in mutations.items():
            self._values.read(slot, tensors).copy_(value)
        return tuple(results), saved

    def backward(
        self,
        saved: dict[Slot, Any],
        tangents: dict[str, torch.Tensor],
        fates: Sequence[Fate] = (),
        deferred: Collection[str] = (),
    ) -> list[torch.Tensor | None]:
        """Run the backward executor for the tangents at hand; `saved` is emptied.

        Args:
            fates: what becomes of each gradient; by default it is accumulated.
            deferred: parameters, by their names in the model, whose gradients another call's backward returns.
        """
        variant = frozenset(tangents), self._microbatches(fates, deferred)
        strides = self._strides(tangents)
        phase = self._backwards.get((variant, strides))
        if phase is None:
            assert self._make_backward is not None
            other = self._make_backward(variant, strides)
            phase = self._backwards[variant, strides] = self._codes.other_backward(other)

        def read(slot: Slot, node: Node) -> Any:
            if slot.kind == "tangent":
                tangent = tangents.pop(slot.name)
                if self._follows_strides and _layout(tangent) == _layout(fake(node)):
                    return tangent
                return restride(tangent, self._stride(node, tangent, saved))
            if slot.kind in LEFT:
                return restride(
                    self.accumulation.take(slot, self.names_in_model, self._summand(slot)), fake(node).stride()
                )
            return self._values.buffer(slot.name)

        slots = zip(phase.inputs, phase.placeholders, strict=True)
        inputs = [read(slot, node) if (kept := saved.get(slot)) is None else kept for slot, node in slots]
        saved.clear()
        with disable_autocast(), self._codes.step(phase):
            values = self._run_backward(phase, inputs)
        self._unsharded.end()
        if self.program.offloaded:
            finish_copies(self.program.device)
        places, others = self._end_of(phase)
        for place, slot in others:
            if slot.kind in LEFT:
                self.accumulation.put(slot, self.names_in_model, values[place], self._summand(slot))
            elif values[place] is not None:
                self._values.buffer(slot.name).copy_(values[place])
        return [
            None if place is None or values[place] is None else self._values.as_gradient(values[place], slot, ref)
            for place, slot, ref in zip(places, self._grads, self._wrt)
        ]

    def _end_of(self, phase: Phase) -> tuple[list[int | None], list[tuple[int, Slot]]]:
        if phase.module not in self._ends:
            places = {slot: place for place, slot in enumerate(phase.outputs)}
            others = [(place, slot) for slot, place in places.items() if slot.kind in LEFT or slot.of == "late"]
            self._ends[phase.module] = [places.get(slot) for slot in self._grads], others
        return self._ends[phase.module]

    def _run_backward(self, phase: Phase, inputs: list[Any]) -> Any:
        """What the executor returns; None for gradients that somebody takes where they arrive."""
        taker = self.accumulation.taker
        if taker is None or current_recording() is not None:
            return self._codes.of(phase)(inputs)
        of_params = [slot.kind == "grad" and slot.of == "param" for slot in phase.outputs]
        names = [self.names_in_model[slot.name] if own else "" for slot, own in zip(phase.outputs, of_params)]
        refs = [self.trained[name] if name in taker.params else None for name in names]
        replays = self._codes.replays(phase.module)
        to_host = self.program.device if self.program.offloaded else None
        return taker.run(
            phase,
            inputs,
            refs,
            names,
            self._values.local_gradient,
            ranges=profiling(),
            replays=replays,
            to_host=to_host,
        )

    def reduce_left(self) -> list[torch.Tensor | None]:
        """Gradients of `trained` as a backward returns them that has none of its own to add."""
        sizes: dict[Slot, Any] = {Slot("size", size.name): 0 for size in self.program.sizes}  # which nothing reads
        grads = zip(self._grads, self.backward(sizes, {}), strict=True)
        return [grad for slot, grad in grads if slot.of == "param"]

    def gather(self, slots: Iterable[Slot]) -> dict[Slot, torch.Tensor]:
        """Full parameters that forward left to backward, from the shards as they are now."""
        wanted = {slot.name: slot for slot in slots}
        pairs = [(self.program.params[name], self._values.params[name].param) for name in wanted]
        device = self.program.device
        arriving = start_gathering(pairs, self.program.mesh, self._groups, device) if pairs else {}
        return {wanted[name]: value.wait(wanted[name].index) for name, value in arriving.items()}

    def show(self, full: Mapping[Slot, torch.Tensor]) -> None:
        """Let modules show full parameters that forward has kept for that, until the next forward or backward."""
        if self._shown:
            left = [(places, landed(full[slot], places.ref.row, slot.index)) for slot, places in self._shown.items()]
            self._unsharded.shown.show_left(left)

    def hide(self) -> None:
        """Let modules show shards again; raises UnsupportedError if somebody wrote to what they showed."""
        self._unsharded.shown.hide_left(self.names_in_model.values())

    def _microbatches(self, fates: Sequence[Fate], deferred: Collection[str]) -> AccumulateGradients | None:
        """What is done about microbatches; nothing in a backward that is asked for no parameter's gradient."""
        step = self.accumulation.step(self.names_in_model, deferred if self.defers else ())
        other = {slot: fate for slot, fate in zip(self._grads, fates) if slot.of == "param" and fate != "accumulated"}
        if step is None or (len(other) == len(self.trained) and set(other.values()) == {"dropped"}):
            return None
        summed = step.unsynced | step.unreplicated | step.accumulated | step.partial
        lost = min((self.names_in_model[slot.name] for slot in other if slot.name in summed), default=None)
        if lost is not None:
            raise UnsupportedError(
                f"inputs: the gradient of {lost} is added up over microbatches, and this backward is to return it, or "
                "leave it out while others are computed (torch.autograd.grad, backward(inputs=...), zero-bubble "
                "schedules of torch.distributed.pipelining). Ask for the gradients of all parameters, or of none."
            )
        return step

    def _summand(self, slot: Slot) -> tuple[Sum, ...]:
        """What ranks of the tensor axes are yet to add up of what backwards leave of a gradient."""
        split = self.program.params[slot.name].split
        return split.sums if split and slot.kind in ("accumulated", "pending") else ()

    def sizes(self, tensors: Sequence[torch.Tensor]) -> dict[Slot, int]:
        """The dynamic sizes of a call."""
        return self._values.sizes(tensors)

    def _strides(self, tangents: Mapping[str, torch.Tensor]) -> Strides:
        """What tells layouts of tangents apart, where that matters."""
        pairs = tangents.items() if self._follows_strides else ()
        return frozenset((name, _layout(tangent)) for name, tangent in pairs)

    def _stride(self, node: Node, tangent: torch.Tensor, known: dict[Slot, Any]) -> tuple[int, ...]:
        stride = fake(node).stride()
        if all(type(size) is int for size in stride):
            return stride
        env = {size.symbol: known[Slot("size", size.name)] for size in self.program.sizes}
        env |= sizes_in(fake(node), tangent)
        return tuple(evaluate(with_sizes(expression(size), fake(node), tangent), env) for size in stride)

    def ahead(self) -> Ahead | None:
        """What forward gathers first, so that it can be started before; None if there is nothing of the kind."""
        if self.program.offloaded or self._custom.gathers:
            return None
        if self._ahead is None:
            replays = self._codes.replays(self._forward.module)
            self._ahead = Ahead(self._forward, self._values.params, lambda slot: self._values.read(slot, ()), replays)
        return self._ahead if self._ahead else None

    def _forward_code(self) -> tuple[Boxed, str]:
        """Forward's code, which takes what was gathered ahead if that still holds; and what others are told of it."""
        ahead, ranges = self.accumulation.ahead, profiling()
        if ahead is not None and ahead is self._ahead and current_recording() is None and ahead.holds():
            self.accumulation.ahead = None
            return (lambda inputs: ahead.run(inputs, ranges=ranges)), ", beginning with what was gathered ahead"
        self.accumulation.drop_ahead()
        return self._codes.of(self._forward), ""


def _layout(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides, but those of dims of size 1, which say nothing."""
    return tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride()))
