"""A module's forward as a function of flat tensors, for AOTAutograd to call.

    flat(*parameters, *buffers, *tensors of a call, *tensors of attributes)
        -> tensors of the result, tensors that forward leaves on modules

AOTAutograd calls it twice, to learn about aliases and to trace. Each time the module is what the user wrote, holding
the tensors that are traced, and it is left exactly as it was. Because the module itself is called, autograd does what
it does in eager mode: functions with a backward of their own, hooks of tensors, gradients in forward.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.traceback import get_current_meta, preserve_node_meta
from torch.utils import _pytree as pytree

from graphshard.capture.asked import asked, no_ids
from graphshard.capture.attributes import Recorder
from graphshard.capture.batch_norm import BatchAverages
from graphshard.capture.boundaries import unit_boundaries
from graphshard.capture.checkpoints import CheckpointRegions, trace_checkpoints
from graphshard.capture.collectives import functional_collectives_only
from graphshard.capture.conditionals import Conditionals
from graphshard.capture.conversions import idle_conversions
from graphshard.capture.cuda_attention import CudaAttention
from graphshard.capture.cuda_constants import CudaConstants
from graphshard.capture.deciding import Deciding
from graphshard.capture.eager_path import EagerPath
from graphshard.capture.extensions import Extensions
from graphshard.capture.found_sizes import CheckedSizes, FoundSizes
from graphshard.capture.in_backward import InBackward
from graphshard.capture.inputs import as_given, traced_leaves
from graphshard.capture.learned import Learned
from graphshard.capture.objects import take_apart
from graphshard.capture.outside import no_outside_values
from graphshard.capture.owned import owned_tensors, place_of
from graphshard.capture.parametrizations import check_computed_once, remembered_within
from graphshard.capture.remembered import Remembered
from graphshard.capture.required import Required
from graphshard.capture.seeds import no_seeds
from graphshard.capture.substitute import Substitute
from graphshard.capture.tensor_axis import OneCast, distributed
from graphshard.capture.texts import check_texts
from graphshard.capture.torch_settings import modes_stay
from graphshard.capture.type_of import types_as_in_eager_mode
from graphshard.capture.untraceable import Located
from graphshard.capture.watch import Made, Watch, WatchHooks
from graphshard.ir.checks import Check, Condition
from graphshard.ir.classes import users_class
from graphshard.ir.driver_internals import stands_in
from graphshard.ir.params import ParamTable
from graphshard.ir.precision import Precision
from graphshard.ir.program import Slot
from graphshard.ir.state import MISSING, ModuleState, Place, Read, number_as_tensor
from graphshard.ir.torch_internals import cached_casts, replaced
from graphshard.ir.tracing_internals import (
    conditionals_are_operators,
    contents_now,
    is_reshaped,
    is_traced,
    is_written,
    memory_of,
    run_compiled_functions_eagerly,
)

# The leaves of something, and its structure.
_Flat = tuple[list[Any], pytree.TreeSpec]


class FlatForward(nn.Module):
    """A module's forward as a function of flat tensors; itself it has neither parameters nor submodules.

    Attributes:
        slots: what the tensors that it takes are; inputs are numbered as the tensors of the call.
        originals: the module's own tensors by the names of the slots.
        leaves: of the last result, and what forward left besides; None in the place of tensors.
        places: of the tensors among the leaves; those of the checks follow.
        checks: of the last call.
        made: the tensors that the last call made, while they are alive.
        state: what the last call read and left on modules.
        deciding: values of inputs and buffers that the last call, or its backward, asked for.
        in_backward: watches what runs behind a call.
        out_spec: structure of the last result.
        regions: checkpointed regions that the last call went through.
    """

    def __init__(
        self,
        module: nn.Module,
        call: tuple[Sequence[Any], pytree.TreeSpec],
        *,
        params: ParamTable,
        units: Sequence[str],
        precision: Precision,
        bare: Callable[[], contextlib.AbstractContextManager[None]],
        path: EagerPath,
        extensions: Extensions,
        meshes: Mapping[tuple[str, ...], DeviceMesh],
        learned: Learned,
        allow: Collection[str],
        remembering: Mapping[CodeType, list[Any]],
    ) -> None:
        super().__init__()
        self._remembered = functools.partial(Remembered, remembering)
        self._call, self._path, self._bare, self._learned, self._allow = call, path, bare, learned, allow
        self._boundaries = functools.partial(unit_boundaries, module, units, params, precision)
        self.__dict__["_module"] = module  # which is not a part of this one
        self._owned = owned_tensors(module, params)
        self._extensions = extensions
        self._distributed = functools.partial(distributed, params=params, meshes=meshes)
        self._data = frozenset(name for row in params if row.split is not None for name in row.split.around)
        device = next((mesh.device_type for mesh in meshes.values()), None)
        self._one_cast = functools.partial(OneCast, device=device) if device is not None else None
        count = sum(isinstance(leaf, torch.Tensor) for leaf in call[0]) + len(learned.tensors) + len(learned.numbers)
        inputs = (Slot("input", str(i)) for i in range(count))
        self.slots = [*(owned.slot for owned in self._owned), *extensions.tensors, *inputs]
        self.originals = {owned.slot.name: owned.tensor for owned in self._owned}
        self.state = ModuleState()
        self.deciding = Deciding((), learned)
        self.leaves: list[Any] = []
        self.places: list[int] = []
        self.checks: tuple[Check | Condition, ...] = ()
        self.made: list[Made] = []
        self.out_spec: pytree.TreeSpec | None = None
        self.regions = CheckpointRegions()
        self._written: tuple[bool, ...] | None = None
        self.in_backward = InBackward(module, learned)
        self._cached = torch.is_autocast_cache_enabled()

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        module: nn.Module = self.__dict__["_module"]
        self.in_backward.forward_begins()
        given = dict(zip(self.slots, tensors, strict=True))
        passed = tensors[len(self._owned) + len(self._extensions.tensors) :]
        count = sum(isinstance(leaf, torch.Tensor) for leaf in self._call[0])
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._bare())
            used = self._distributed(self._extensions.used(given))
            self._hold(used)
            constant = (owned for owned in self._owned if not owned.tensor.requires_grad)
            buffers = {id(owned.tensor): owned.slot for owned in constant if owned.slot.kind == "buffer"}
            held = {key: used[slot] for key, slot in buffers.items()}
            leaves = traced_leaves(self._call[0], passed[:count], held)
            args, kwargs = as_given(pytree.tree_unflatten(leaves, self._call[1]))
            before = pytree.tree_flatten((args, kwargs))
            stack.enter_context(self._boundaries())
            stack.enter_context(cached_casts(self._cached))
            stack.enter_context(run_compiled_functions_eagerly())
            if stands_in():
                stack.enter_context(CudaAttention())
                stack.enter_context(CudaConstants())
            stack.enter_context(preserve_node_meta())
            stack.enter_context(_module_stack(module))
            watch = Watch(given)
            stack.enter_context(watch)
            stack.enter_context(WatchHooks(watch.made))
            found_sizes = stack.enter_context(FoundSizes())
            stack.enter_context(CheckedSizes(found_sizes, watch.assume))
            stack.enter_context(self._remembered())
            stack.enter_context(BatchAverages())
            stack.enter_context(remembered_within())
            stack.enter_context(idle_conversions())
            pairs = [(new, old) for new, old in zip(leaves, self._call[0]) if isinstance(old, torch.Tensor)]
            learned = zip(passed[count:], self._learned.tensors.values())
            of_module = [(used[owned.slot], owned.tensor, place_of(owned.slot)) for owned in self._owned]
            of_module += [(new, old, places[0]) for new, (old, places) in learned]
            absent: set[Place] = set()
            stack.enter_context(asked(pairs, of_module, absent))
            stack.enter_context(no_ids(module, (new for new, _ in pairs), of_module))
            stack.enter_context(Required([new for new, _ in pairs], [used[o.slot] for o in self._owned], self._learned))
            own = {id(o.tensor): used[o.slot] for o in self._owned}
            stack.enter_context(Substitute(own))
            if self._one_cast is not None:
                stack.enter_context(self._one_cast(used))
            self.regions = stack.enter_context(trace_checkpoints(module))
            stack.enter_context(no_outside_values(module, self._allow))
            stack.enter_context(no_seeds(module))
            stack.enter_context(modes_stay(module))
            stack.enter_context(types_as_in_eager_mode(module))
            stack.enter_context(functional_collectives_only(module))
            call = {id(old): (number, new) for number, (new, old) in reversed(list(enumerate(pairs)))}
            recorder = Recorder(module, self._learned, own, call, self._allow)
            self.regions.enter_region, self.regions.buffers = recorder.enter_region, self._held_buffers
            stack.enter_context(recorder.recording(passed[count:]))
            stack.enter_context(conditionals_are_operators())
            stack.enter_context(Conditionals(watch, recorder.enter_branch))
            run = functools.partial(nn.Module.__call__, module)  # a class's own runs around the compiled forward
            self.deciding = Deciding(self._with_values(used, passed), self._learned)
            result = self._path.around(run, watch.assume, self.deciding)(*args, **kwargs)
            self.deciding.given.clear()
            found_sizes.check(watch.assume)
            leaves, self.out_spec = pytree.tree_flatten(take_apart(result, _is_computed, self._data))
            places = {number: node.place for number, node in recorder.reach.nodes.items() if node.is_module}
            self.leaves = [*leaves, *recorder.finish(leaves, passed)]
            watch.check_foreign()
            self._check_written(tuple(map(is_written, tensors)))
            check_computed_once(module, (slot for slot, tensor in given.items() if is_written(tensor)))
            self._check_given(before, pytree.tree_flatten((args, kwargs)))
            self._check_shapes(tensors)
        same = [(n, place_of(buffers[id(old)])) for n, (_, old) in enumerate(pairs) if id(old) in buffers]
        reads = [Read(place, "missing", (), MISSING) for place in sorted(absent, key=str)]
        self.state = replace(recorder.state, reads=(*recorder.state.reads, *reads), same=(*recorder.state.same, *same))
        check_texts(self.leaves, self.out_spec, self.state)
        attributes = zip((id(tensor) for tensor, _ in self._learned.tensors.values()), passed[count:])
        self.in_backward.forward_ends({**own, **dict(attributes)}, given, recorder.state.writes, places)
        self.places = [i for i, leaf in enumerate(self.leaves) if _is_computed(leaf)]
        results = _without_aliases([self.leaves[i] for i in self.places], tensors)
        self.leaves = [None if i in self.places else leaf for i, leaf in enumerate(self.leaves)]
        self.made = watch.made
        self.checks = tuple(check for check, _ in watch.checks)
        self.places += range(len(self.leaves), len(self.leaves) + len(self.checks))
        return [*results, *(status.clone() for _, status in watch.checks)]

    def _check_written(self, written: tuple[bool, ...]) -> None:
        """Raise Located if it wrote other tensors than before, as AOTAutograd keeps those that the first run wrote."""
        before, self._written = self._written, written
        for slot, first, now in zip(self.slots, before or written, written, strict=True):
            if first != now:
                label = users_class(self.__dict__["_module"]).__name__
                raise Located(
                    f"graphshard cannot capture {label}.forward, which writes {slot.kind} {slot.name} when it runs "
                    f"{'first, and not again' if first else 'again, and not at first'}. Let each call write the same "
                    "tensors, or write outside of forward."
                )

    def _check_given(self, before: _Flat, now: _Flat) -> None:
        """Raise Located if it changed what holds its inputs."""
        if before[1] != now[1] or any(then is not leaf for then, leaf in zip(before[0], now[0])):
            label = users_class(self.__dict__["_module"]).__name__
            raise Located(
                f"graphshard cannot capture {label}.forward: it changes a list or dict that it is given, which a "
                "program leaves as it was. Return what it adds, or set an attribute of a module."
            )

    def _check_shapes(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise Located if it changed what one of them looks like: a program writes values alone."""
        for slot, tensor in zip(self.slots, tensors, strict=True):
            if is_reshaped(tensor):
                label = users_class(self.__dict__["_module"]).__name__
                raise Located(
                    f"graphshard cannot capture {label}.forward: it changes the shape or strides of {slot.kind} "
                    f"{slot.name} in place. Make another tensor: unsqueeze, t, reshape without the underscore."
                )

    def _hold(self, used: dict[Slot, torch.Tensor]) -> None:
        """Put tensors in the place of the module's own."""
        for owned in self._owned:
            tensor = used[owned.slot]
            if owned.slot.kind == "param":
                tensor._is_param = True  # for isinstance(tensor, nn.Parameter)
            for attributes, name in owned.holders():
                attributes[name] = tensor

    def _with_values(
        self, used: Mapping[Slot, torch.Tensor], passed: Sequence[torch.Tensor]
    ) -> Iterator[tuple[Slot, torch.Tensor, torch.Tensor]]:
        """Inputs and buffers, as they are traced and as they are."""
        numbers = map(number_as_tensor, self._learned.numbers.values())
        held = (tensor for tensor, _ in self._learned.tensors.values())
        reals = [*(leaf for leaf in self._call[0] if isinstance(leaf, torch.Tensor)), *held, *numbers]
        for index, (traced, real) in enumerate(zip(passed, reals, strict=True)):
            yield Slot("input", str(index)), traced, real
        for owned in self._owned:
            if owned.slot.kind == "buffer":
                yield owned.slot, used[owned.slot], owned.tensor

    def _held_buffers(self) -> dict[str, Any]:
        """What each buffer holds now."""
        holders = {o.slot.name: next(o.holders()) for o in self._owned if o.slot.kind == "buffer"}
        return {name: contents_now(attributes.get(key)) for name, (attributes, key) in holders.items()}


def _is_computed(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, torch.SymInt, torch.SymFloat))


@contextlib.contextmanager
def _module_stack(module: nn.Module) -> Iterator[None]:
    """While this is open, nodes are marked with the calls of submodules that make them: "layers.0@2" is the third."""
    names = {sub: name for name, sub in module.named_modules()}
    calls: Counter[str] = Counter()
    call = nn.Module.__call__

    @functools.wraps(call)
    def within(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        name = names.get(self)
        if not name:
            return call(self, *args, **kwargs)
        meta = get_current_meta()
        outer = meta.get("nn_module_stack", {})
        meta["nn_module_stack"] = {**outer, f"{name}@{calls[name]}": (name, type(self))}
        calls[name] += 1
        try:
            return call(self, *args, **kwargs)
        finally:
            meta["nn_module_stack"] = outer

    with replaced(nn.Module, "__call__", within):
        yield


def _without_aliases(results: list[Any], given: Sequence[torch.Tensor]) -> list[Any]:
    """Copy results that share memory with an input or with another result.

    The program is a function of its inputs. FSDP2 would hand out the alias; writing to it in place is the only
    way to tell the difference.
    """
    seen = set(map(memory_of, given))
    for index, result in enumerate(results):
        if isinstance(result, torch.Tensor):
            if not is_traced(result) or memory_of(result) in seen:
                results[index] = result.clone()
            else:
                seen.add(memory_of(result))
    return results
