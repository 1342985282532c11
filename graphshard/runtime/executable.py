"""Run an installed program: forward and backward of one call, and its node in autograd's graph.

What forward saves is autograd's, except for full parameters: `reshard()` frees these, and backward gathers them again.
"""

from __future__ import annotations

import functools
import heapq
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node

from graphshard.errors import UnsupportedError
from graphshard.ir.graph import fake, restride
from graphshard.ir.operators import finish_copies
from graphshard.ir.param_table import ParamSpec
from graphshard.ir.program import Phase, Program, Slot
from graphshard.ir.sizes import evaluate, expression, sizes_in, with_sizes
from graphshard.ir.subclasses import shard_in
from graphshard.lower.executor import Boxed
from graphshard.passes import AccumulateGradients
from graphshard.runtime._backward_checks import accumulate_checked, check_backward, looks_for_nan
from graphshard.runtime.bound_program import BoundProgram, SlotValues
from graphshard.runtime.gradient_accumulation import LEFT, Accumulation, LeftGradient
from graphshard.runtime.gradient_graphs import EagerCalls, GivenValues, Reduction
from graphshard.runtime.parameter_writes import ReadParameters
from graphshard.runtime.shards import ParamRef
from graphshard.runtime.step_overlap import GatherPrefetch
from graphshard.runtime.step_recorder import current_recording
from graphshard.runtime.unsharded import Gathering, landed, start_gathering
from graphshard.torch_compat.aot_autograd import without_selective_checkpoints
from graphshard.torch_compat.autograd_state import Fate, disable_autocast, fate_at, keeps_graph, number_of_backward

# Names of the tangents that arrive, and what is done about microbatches.
Variant = tuple[frozenset[str], AccumulateGradients | None]
# Strides of the tangents that arrive, by name; in any order.
Strides = frozenset[tuple[str, tuple[int, ...]]]
# Parameters that attributes show after each call, which takes some microseconds each: a head is among the largest.
_MOST_ATTRIBUTES = 16
# Makes a program that is a backward alone.
BackwardFactory = Callable[[Variant, Strides], Program]


@dataclass(eq=False)
class Executable:
    """A lowered program bound to a module and a mesh.

    Args:
        make_backward: makes the backward for another variant than the likely one; None if there is no backward.
        eager: calls by eager operators, which can be differentiated again; None if there are none.
        gathers: the program gathers its parameters, and does nothing else.
        follows_strides: each layout of tangents has a separate backward, as in eager mode; otherwise they are copied.
        defers: gradients of several calls that one backward goes through are added up before they are reduced. Not
            where backwards are in a file: it has none that leave gradients to each other.

    Attributes:
        names: of the outputs that are computed, tensors and dynamic sizes; the others are constants.
        names_in_model: names of the parameters in the model by their names in the program.
        trained: parameters that backward computes gradients of, by their names in the model.
        summands: sums over tensor axes that the program leaves to the reduction of these gradients.
        grads: slots of the gradients that backward computes.
        wrt: for each gradient its parameter; None for an input's.
        differentiated: whether these are of a "param" or an "input", for each gradient that backward computes.
    """

    bound: BoundProgram
    values: SlotValues
    make_backward: BackwardFactory | None
    accumulation: Accumulation
    follows_strides: bool
    defers: bool
    eager: EagerCalls | None = None
    gathers: bool = False

    def __post_init__(self) -> None:
        self.program = program = self.bound.program
        self.names_in_model = names = self.values.names
        self._forward = program.phases["forward"]
        outputs = zip(self._forward.results, self._forward.outputs)
        self._results = [(value, slot.name) for value, slot in outputs if slot.kind == "output"]
        self._shown = {
            slot: self.values.params[slot.name]
            for slot in self._forward.outputs
            if (slot.of == "gathered" or slot.kind == "shown") and program.params[slot.name].shows
        }
        slots = (slot for node, slot in self._forward.slot_of().items() if node.users)
        self._read = {slot.name for slot in slots if slot.is_of_shard or slot.kind == "gathered"}
        self._attributes = [] if self.gathers else self._find_attributes()
        self._shown_too = self._find_shown_too()
        at_attributes = {ref.row.name for ref in self._attributes}
        returned = [slot for slot in self._forward.outputs if slot.is_full or slot.kind == "shown"]
        self._kept = [slot for slot in returned if slot.name in at_attributes]
        self._steps_left = {slot.name: slot.index for slot in self._kept}
        self.names = [name for value, name in self._results if isinstance(value, Node)]
        # For each backward, where its gradients are among its outputs, and which of the others are left or kept.
        self._ends: dict[GraphModule, tuple[list[int | None], list[tuple[int, Slot]]]] = {}
        self._prefetch: GatherPrefetch | None = None
        self._backwards: dict[tuple[Variant, Strides], Phase] = {}
        phase = program.phases.get("backward")
        self.grads = tuple(slot for slot in phase.outputs if slot.kind == "grad") if phase is not None else ()
        self.wrt = [self.values.params[slot.name] if slot.of == "param" else None for slot in self.grads]
        self.trained = {names[ref.row.name]: ref for ref in self.wrt if ref is not None}
        splits = {name: program.params[ref.row.name].split for name, ref in self.trained.items()}
        self.summands = {name: split.sums if split else () for name, split in splits.items()}
        if phase is not None:
            expected = {slot.name: fake(node) for node, slot in phase.slot_of().items() if slot.kind == "tangent"}
            self.follows_strides &= all(type(s) is int for t in expected.values() for s in (*t.shape, *t.stride()))
            self._backwards[(frozenset(expected), None), self._strides(expected)] = phase
        self.differentiated = tuple(slot.of or "" for slot in self.grads)
        # Parameters whose values backward reads again, or forward has kept for it.
        left = [slot for slot in self._forward.outputs if slot.is_of_shard or slot.is_full]
        self.read_again = [self.values.params[name] for name in dict.fromkeys(slot.name for slot in left)]
        if self.gathers:  # what is computed with them reads them again
            self.read_again = list(self.values.refs)

    @property
    def runs_eagerly(self) -> bool:
        """Whether the next call runs by eager operators, as gradients of the last one had a graph."""
        return self.eager is not None and self.eager.preferred

    @property
    def programs(self) -> list[Program]:
        """The program, and the programs of its other backwards."""
        return [self.program, *self.bound.others.values()]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Run the program on tensors, and return the leaves of the result."""
        if self._backwards:
            self.accumulation.begin()
            if self.runs_eagerly:
                assert self.eager is not None
                self.hide()
                leaves = self.eager.call(tensors)
                self._show_attributes(self.eager.full, {})
                self.values.unsharded.shown.connect()
                return leaves
            wrt = [tensors[int(s.name)] if ref is None else ref.param for s, ref in zip(self.grads, self.wrt)]
            made = _Call.apply(self, tensors, *wrt)
            if len(self.program.tangents) > 1:  # backward looks for hooks on them
                named = [(name, r) for name, r in zip(self.names, made, strict=True) if isinstance(r, torch.Tensor)]
                node: Any = next((r.grad_fn for _, r in named if r.grad_fn is not None), None)
                if node is not None:
                    node.results = [(name, weakref.ref(r)) for name, r in named if r.grad_fn is not None]
            results = iter(made)
        else:
            with torch.no_grad():
                results = iter(self.forward(tensors)[0])
            self.show({})
        flat = [next(results) if isinstance(value, Node) else value for value, _ in self._results]
        for check in reversed(self.program.checks):
            check(flat.pop())
        return flat

    # --- forward -------------------------------------------------------------------------------------------------

    def forward(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor | int, ...], dict[Slot, Any]]:
        """Run the forward executor; return the module's results and the values saved for backward."""
        self.hide()
        run, taken = self._forward_code()
        with disable_autocast(), without_selective_checkpoints(), self.bound.step(self._forward, taken):
            values = run(self.values.inputs(tensors))
        if self.program.offloaded:  # or the user, who may write to a shard now, would change what is still copied
            finish_copies(self.program.device)
        results: list[torch.Tensor | int] = []
        saved: dict[Slot, Any] = {}
        for value, node, slot in zip(values, self._forward.results, self._forward.outputs, strict=True):
            if slot.kind == "mutation":
                assert slot.of is not None
                self.values.read(Slot(slot.of, slot.name), tensors).copy_(value)
            elif slot.kind != "output":
                saved[slot] = value
            elif isinstance(node, Node):
                results.append(value)
        return tuple(results), saved

    def _forward_code(self) -> tuple[Boxed, str]:
        """Return forward's code, which takes prefetched gathers if they still hold; and what other ranks are told."""
        prefetch = self.accumulation.prefetch
        if prefetch is not None and prefetch is self._prefetch and current_recording() is None and prefetch.holds():
            self.accumulation.prefetch = None
            return prefetch.run, ", beginning with what was gathered ahead"
        self.accumulation.drop_prefetch()
        return self.bound.code(self._forward), ""

    def prefetch(self) -> GatherPrefetch | None:
        """Return the gathers at the head of forward, so that they can be started before; None if there are none."""
        if self.program.offloaded or any(kind == "gather" for kind, _ in self.bound.collectives.chosen):
            return None
        if self._prefetch is None:
            self._prefetch = GatherPrefetch(self.bound, self._forward, self.values)
        return self._prefetch if self._prefetch else None

    def gather(self, slots: Iterable[Slot], params: Mapping[str, nn.Parameter]) -> dict[Slot, torch.Tensor]:
        """Gather full parameters that forward left to backward, from the shards that it has read, as they are now."""
        wanted = {slot.name: slot for slot in slots}
        arriving = self._gather([(self.program.params[name], params[self.names_in_model[name]]) for name in wanted])
        return {wanted[name]: value.wait(wanted[name].index) for name, value in arriving.items()}

    def _gather(self, pairs: Sequence[tuple[ParamSpec, nn.Parameter]]) -> dict[str, Gathering]:
        return start_gathering(pairs, self.program.mesh, self.bound.groups, self.program.device) if pairs else {}

    def show(self, full: Mapping[Slot, torch.Tensor]) -> None:
        """Let modules show full parameters that forward has kept for that, until the next forward or backward."""
        shown = self.values.unsharded.shown
        for slot, ref in self._shown.items():
            shown.show(ref, landed(full[slot], ref.row, slot.index), until_next_call=True)
        if self._attributes:
            kept = {slot.name: _kept(full[slot], slot) for slot in self._kept if slot in full}
            self._show_attributes(kept, self._steps_left)
        others = [ref for ref in self._shown_too if ref.name not in self.values.unsharded.full]
        if others:
            gathered = self._gather([(self.program.params[ref.row.name], ref.param) for ref in others])
            for ref in others:
                shown.show(ref, gathered[ref.row.name].wait(), until_next_call=True)
        shown.connect()

    def _find_attributes(self) -> list[ParamRef]:
        """Return parameters that FSDP2's root keeps until backward by default, the largest ones."""
        table, outside = self.program.params, self.values.unsharded.read_outside
        found = []
        for ref in self.values.refs:
            row = table[ref.row.name]
            by_default = not (row.unit or row.reshard) and (not row.shown or ref.name in outside)
            if by_default and not (row.partly or row.ignored or row.split or row.extension):
                found.append(ref)
        found = heapq.nlargest(_MOST_ATTRIBUTES, found, key=lambda ref: math.prod(ref.row.shape))
        self._shown = {slot: ref for slot, ref in self._shown.items() if ref not in found}
        return found

    def _show_attributes(self, kept: Mapping[str, Callable[[], torch.Tensor | None]], left: Mapping[str, int]) -> None:
        """Let attributes show parameters, of which forward has kept some, without the steps `left` of their epilogues.

        What autograd keeps of them is freed with its graph.
        """
        fetch = functools.partial(self._fetch, kept, left)
        shown, table, device = self.values.unsharded.shown, self.program.params, self.program.device
        for ref in self._attributes:
            shown.show_as_attribute(ref, table[ref.row.name].compute_dtype, device, fetch)

    def _fetch(
        self, kept: Mapping[str, Callable[[], torch.Tensor | None]], left: Mapping[str, int], ref: ParamRef
    ) -> torch.Tensor:
        """Return a full parameter that something outside of forward computes with, gathered unless it is kept."""
        row, unsharded = self.program.params[ref.row.name], self.values.unsharded
        full = kept[row.name]() if row.name in kept else None
        if full is not None:
            return landed(full, row, left.get(row.name, 0))
        if ref.name in unsharded.full:
            return unsharded.read(ref.name)
        if row.num_shards > 1 and row.name in self._read - kept.keys() and self._backwards:
            unsharded.read_outside.add(ref.name)
        return self._gather([(row, ref.param)])[row.name].wait()

    def _find_shown_too(self) -> list[ParamRef]:
        """Return parameters that forward does not gather, of units that stay gathered after it.

        FSDP2 gathers a unit whole. A loss may read parameters that forward does not, such as the weight of a head.
        """
        table = self.program.params
        units = {table[name].unit for name in self._read}
        kept = (row for row in map(table.__getitem__, self.values.params) if row.unit in units and not row.reshard)
        kept = (row for row in kept if row.name not in self._read or (row.num_shards == 1 and row.shows))
        plain = (row for row in kept if not (row.partly or row.ignored or row.is_dtensor or row.extension))
        return [ref for row in plain if (ref := self.values.params[row.name]) not in self._attributes]

    def hide(self) -> None:
        """Let modules show shards again; raises UnsupportedError if a full parameter was written to."""
        self.values.unsharded.shown.hide_left(self.names_in_model.values())

    # --- backward ------------------------------------------------------------------------------------------------

    def backward(
        self,
        saved: dict[Slot, Any],
        tangents: dict[str, torch.Tensor],
        fates: Sequence[Fate] = (),
        deferred: Collection[str] | None = (),
    ) -> list[torch.Tensor | None]:
        """Run the backward executor for the given tangents; `saved` is emptied.

        The gradients of parameters that are `deferred`, by their names in the model, another call's backward returns.
        With None, all gradients are reduced and returned, whatever other microbatches have left.
        """
        variant = frozenset(tangents), None if deferred is None else self.microbatches(fates, deferred)
        strides = self._strides(tangents)
        phase = self._backwards.get((variant, strides))
        if phase is None:
            assert self.make_backward is not None
            phase = self.bound.bind_backward(self.make_backward(variant, strides))
            self._backwards[variant, strides] = phase

        def read(slot: Slot, node: Node) -> Any:
            if slot.kind == "tangent":
                tangent = tangents.pop(slot.name)
                if self.follows_strides and _layout(tangent) == _layout(fake(node)):
                    return tangent
                return restride(tangent, self._stride(node, tangent, saved))
            if slot.kind in LEFT:
                return restride(self.accumulation.take(self._left(slot), self.bound.groups), fake(node).stride())
            return self.values.buffer(slot.name)

        slots = zip(phase.inputs, phase.placeholders, strict=True)
        inputs = [read(slot, node) if (kept := saved.get(slot)) is None else kept for slot, node in slots]
        saved.clear()
        consumer = self.accumulation.consumer
        with disable_autocast(), self.bound.step(phase):
            if consumer is None or current_recording() is not None:
                values = self.bound.code(phase)(inputs)
            else:  # None for gradients that are handed over
                values = consumer.run(self.bound, phase, inputs, self.values)
        self.values.unsharded.end()
        if self.program.offloaded:
            finish_copies(self.program.device)
        if phase.module not in self._ends:
            places = {slot: place for place, slot in enumerate(phase.outputs)}
            others = [(place, slot) for slot, place in places.items() if slot.kind in LEFT or slot.of == "late"]
            self._ends[phase.module] = [places.get(slot) for slot in self.grads], others
        of_grads, others = self._ends[phase.module]
        for place, slot in others:
            if slot.kind in LEFT:
                self.accumulation.sums[self._left(slot)] = values[place]
            elif values[place] is not None:
                self.values.buffer(slot.name).copy_(values[place])
        return [
            None if place is None or values[place] is None else self.values.as_gradient(values[place], slot, ref)
            for place, slot, ref in zip(of_grads, self.grads, self.wrt)
        ]

    def with_graph(
        self,
        given: GivenValues,
        params: Mapping[str, nn.Parameter],
        tangents: Mapping[str, torch.Tensor],
        fates: Sequence[Fate],
    ) -> list[torch.Tensor | None]:
        """Compute gradients that have a graph: run the call again by eager operators, and differentiate these."""
        assert self.eager is not None
        around = next((ref.name for ref in self.values.refs if ref.row.split and ref.row.split.around), None)
        if around is not None:
            raise UnsupportedError(
                f"gradients of {self.program.model} are to have a graph (create_graph=True), and {around} was "
                "distributed over data axes, too, on which operators leave partial sums. Distribute the model on the "
                "tensor axes alone, and leave the data axes to graphshard."
            )
        pairs = zip(self.grads, self.wrt)
        wrt = [given.tensors[int(slot.name)] if ref is None else params[ref.name] for slot, ref in pairs]
        wanted = [place for place in range(len(wrt)) if not fates or fates[place] != "dropped"]
        results = self.eager.again(given, params)
        found = torch.autograd.grad(
            [results[int(name)] for name in tangents],
            [wrt[place] for place in wanted],
            list(tangents.values()),
            create_graph=True,
            allow_unused=True,
        )
        by_place = dict(zip(wanted, found))
        return [by_place.get(place) for place in range(len(wrt))]

    def gather_shards(self, shards: Mapping[str, DTensor]) -> dict[str, torch.Tensor]:
        """Gather tensors that are sharded like the parameters of these names, in the compute dtype."""
        program, params = self.program, self.program.params
        pairs = [(params[name], shard) for name, shard in shards.items() if params[name].num_shards > 1]
        gathered = start_gathering(pairs, program.mesh, self.bound.groups, program.device)
        return {
            name: gathered[name].wait() if name in gathered else shard_in(shard).to(params[name].compute_dtype)
            for name, shard in shards.items()
        }

    def reduce_left(self) -> None:
        """Reduce gradients that backwards have added up; autograd adds them to the present ones, and runs hooks."""
        sizes: dict[Slot, Any] = {Slot("size", size.name): 0 for size in self.program.sizes}  # not read
        with torch.no_grad():
            grads = self.backward(sizes, {})
        found = [(ref.param, grad) for ref, grad in zip(self.wrt, grads) if ref is not None and grad is not None]
        found = [(param, grad) for param, grad in found if param.requires_grad]
        torch.autograd.backward([param for param, _ in found], [grad for _, grad in found])

    def microbatches(self, fates: Sequence[Fate], deferred: Collection[str]) -> AccumulateGradients | None:
        """Return what is done about microbatches; nothing in a backward that asks for no parameter's gradient.

        Where gradients have a graph, `torch.autograd.grad` returns the mean over ranks, whatever others have left.
        """
        step = self.accumulation.step(self.names_in_model, deferred if self.defers else (), self.summands)
        other = {slot: fate for slot, fate in zip(self.grads, fates) if slot.of == "param" and fate != "accumulated"}
        separate = self.gathers or self.runs_eagerly or set(other.values()) == {"dropped"}
        if step is None or (separate and len(other) == len(self.trained)):
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

    def _left(self, slot: Slot) -> LeftGradient:
        name = self.names_in_model[slot.name]
        return LeftGradient(slot.kind, name, self.summands[name] if slot.kind in ("accumulated", "pending") else ())

    def _strides(self, tangents: Mapping[str, torch.Tensor]) -> Strides:
        """Return the layouts of tangents, if they tell backwards apart."""
        pairs = tangents.items() if self.follows_strides else ()
        return frozenset((name, _layout(tangent)) for name, tangent in pairs)

    def _stride(self, node: Node, tangent: torch.Tensor, known: dict[Slot, Any]) -> tuple[int, ...]:
        stride = fake(node).stride()
        if all(type(size) is int for size in stride):
            return stride
        env = {size.symbol: known[Slot("size", size.name)] for size in self.program.sizes}
        env |= sizes_in(fake(node), tangent)
        return tuple(evaluate(with_sizes(expression(size), fake(node), tangent), env) for size in stride)


def _kept(full: torch.Tensor, slot: Slot) -> Callable[[], torch.Tensor | None]:
    return (lambda: full) if slot.kind == "shown" else weakref.ref(full)


def _layout(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides, without dims of size 1, whose strides say nothing."""
    return tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride()))


class _Call(torch.autograd.Function):
    """One call of a program with gradients. The parameters are passed so that autograd sees them."""

    @staticmethod
    def forward(ctx: Any, executable: Executable, tensors: Sequence[torch.Tensor], *wrt: torch.Tensor) -> Any:
        ctx.given = None if executable.eager is None else executable.eager.given(tensors)
        results, saved = executable.forward(tensors)
        ctx.executable, ctx.ran, ctx.results = executable, -1, []
        executable.accumulation.calls.add(ctx)
        ctx.read = ReadParameters(executable.values.refs)
        ctx.set_materialize_grads(False)
        ctx.full, ctx.numbers, ctx.slots = {}, executable.values.sizes(tensors), []
        shown, kept = {}, []
        for slot, value in saved.items():
            if slot.is_full:
                ctx.full[slot] = value
            elif slot.kind == "shown":
                shown[slot] = value
            elif isinstance(value, torch.Tensor):
                ctx.slots.append(slot)
                kept.append(value)
            else:
                ctx.numbers[slot] = value
        executable.show({**ctx.full, **shown})
        ctx.save_for_backward(*kept)
        differentiable = executable.program.tangents
        named = zip(results, executable.names, strict=True)
        constant = [r for r, name in named if isinstance(r, torch.Tensor) and name not in differentiable]
        ctx.mark_non_differentiable(*constant)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        executable: Executable = ctx.executable
        tangents = {name: grad for name, grad in zip(executable.names, grads) if grad is not None}
        results = [(name, result) for name, ref in ctx.results if (result := ref()) is not None]
        hooked = [name for name, result in results if result._backward_hooks or result.retains_grad]
        check_backward(executable.program, tangents, hooked, again=executable.gathers or executable.eager is not None)
        executable.hide()
        accumulation = executable.accumulation
        fates = [] if accumulation.measured else [fate_at(node) for node, _ in ctx.next_functions]
        if torch.is_grad_enabled() and not executable.gathers:
            if ctx.given is None:
                raise RuntimeError(
                    "Trying to backward through the graph a second time. Specify retain_graph=True in the first "
                    "backward."
                )
            ctx.read.check(executable.values.refs, executable.program.model)
            return (None, None, *executable.with_graph(ctx.given, ctx.read.params, tangents, fates))
        ctx.read.check(executable.read_again, executable.program.model)
        saved = {**dict(zip(ctx.slots, ctx.saved_tensors, strict=True)), **ctx.numbers}
        ctx.full.update(executable.gather((slot for slot, value in ctx.full.items() if value is None), ctx.read.params))
        saved.update(ctx.full)
        if not keeps_graph():  # so that the executor can free them
            ctx.maybe_clear_saved_tensors()
            ctx.full.clear()
            ctx.given = None
        if torch.is_grad_enabled():
            names = tuple(tangents)
            return (None, None, *Reduction.apply(executable, saved, names, fates, *tangents.values()))
        ctx.ran = number_of_backward()
        found = executable.backward(saved, tangents, fates, accumulation.still_to_come(ctx))
        if fates and looks_for_nan():
            groups = executable.bound.groups.values()
            found = accumulate_checked(executable.wrt, found, fates, groups, executable.program.model)
        return (None, None, *found)
