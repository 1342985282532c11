"""Work that overlaps with a step: gradients are handed over in backward, and gathers of the next forward are started.

Where shards are offloaded, the updates run on the host in a thread, while backward computes on the device:

    this thread      kernels ... | arrived(0) | kernels ...        | arrived(1) | kernels ... | finish
    update thread                  waits for copies, updates 0 ...   waits for copies, updates 1 ...

The thread waits until a gradient's copy is there, and copies to the device that started before have read the shard.

Updates run an optimizer of torch.optim for some parameters at a time: its `step` runs on a stand-in for the optimizer
whose groups have the local tensors of DTensors, with the gradients that have arrived, and the current hyperparameters.
State is read from the optimizer and new state is put there, as the DTensors that it would have made itself, so that
state dicts and checkpoints do not change. Only for optimizers that compute each element of a parameter by itself
(`ELEMENTWISE`), and have a step on DTensors to be equal to. Others that are known need whole matrices or DTensors, but
only after backward (`is_whole`).

Gathers at the head of the program (`line_rewrites.take_out_gathers`) are started while other parameters are updated:
when the last of their own has been updated, and the backward has started its last reduction. The next forward takes
them if it is a call of the same program and the parameters were not written to; otherwise they are dropped.

Torch counts writes to tensors, but not through `.data`, `_foreach` functions or other memory of the same numbers. So
what was sent is kept, a shard of the parameters, and compared with what would be sent now.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, Muon, NAdam, Optimizer, RAdam, RMSprop

from graphshard.cost.costs import Costs, joined_updates
from graphshard.cost.kernels import num_bytes
from graphshard.errors import ParameterError
from graphshard.ir.graph import c10d
from graphshard.ir.operators import copies_so_far
from graphshard.ir.program import Phase, Slot
from graphshard.ir.subclasses import shard_in
from graphshard.lower.executor import Arrive, Boxed, Executor, Start
from graphshard.lower.line_rewrites import Groups, Taken, hand_over_gradients, take_out_gathers
from graphshard.optim.master_weights import Master, MasterWeights
from graphshard.runtime.bound_program import BoundProgram, SlotValues
from graphshard.runtime.parameter_writes import Version, version_of
from graphshard.runtime.shards import ParamRef
from graphshard.torch_compat.autograd_state import disable_autocast
from graphshard.torch_compat.dtensor import sharded_like
from graphshard.torch_compat.torch_ops import assert_async


class Arrival(NamedTuple):
    """The reduced gradient of a parameter: this rank's shard of it, without padding."""

    param: nn.Parameter
    grad: torch.Tensor


class UpdateThread:
    """One thread, which runs functions in order when copies have completed."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._begun: list[Future[None]] = []

    def run(self, work: Callable[[], None], device: torch.device) -> None:
        """Run a function when the copies to and from a device that have been started are there; returns at once."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "graphshard-updates")
        self._begun.append(self._pool.submit(_run_after, copies_so_far(device), work, self._begun[-1:]))

    def finish(self) -> None:
        """Wait for all functions; raise the first exception, after which none was run."""
        begun, self._begun = self._begun, []
        wait(begun)
        for done in begun:
            done.result()


def _run_after(ready: Callable[[], None], work: Callable[[], None], before: list[Future[None]]) -> None:
    for done in before:
        done.result()  # raises the exception of the work before
    ready()
    with torch.no_grad():  # a setting of threads
        work()


@dataclass
class GradientConsumer:
    """Consumer of the gradients of a model's parameters, while a backward runs that is to hand them over.

    Attributes:
        take: is called with gradients that have arrived together.
        costs: say which buckets' gradients wait for others; None hands each bucket's over at once.
        params: names in the model of the parameters whose gradients are taken.
        ran: a backward has run that handed them over.
        at_the_end: that backward has started its last collective.
        thread: takes gradients that are on their way to the host; finish it after the backward.
    """

    take: Callable[[list[Arrival]], None]
    costs: Costs | None = None
    params: Collection[str] = ()
    ran: bool = False
    at_the_end: bool = False
    thread: UpdateThread = field(default_factory=UpdateThread)

    def run(self, program: BoundProgram, phase: Phase, inputs: list[Any], values: SlotValues) -> Any:
        """Run a backward; its results are None for the gradients that are handed over. `inputs` is emptied."""
        self.ran = True
        refs: dict[int, ParamRef] = {}  # by the place of the gradient
        for place, slot in enumerate(phase.outputs):
            if slot.kind == "grad" and slot.of == "param" and values.params[slot.name].name in self.params:
                refs[place] = values.params[slot.name]
        key = phase.module, frozenset(refs)
        code = program.cached(key, lambda: _Code(program, phase, _taken(phase, inputs, refs), self.costs))
        to_host = program.program.device if program.program.offloaded else None

        def arrived(number: int, grads: list[torch.Tensor]) -> None:
            found = [(grads.pop(0), phase.outputs[place], refs[place].param) for place in code.groups[number]]
            self.at_the_end = number >= code.at_the_end

            def take() -> None:
                self.take([Arrival(param, values.local_gradient(grad, slot, param)) for grad, slot, param in found])

            if to_host is None:
                take()
            else:
                self.thread.run(take, to_host)

        code.hand_to = arrived
        try:
            return code.run(inputs)
        finally:
            code.hand_to = None


class _Code:
    """Code that hands gradients over to `hand_to`.

    Attributes:
        groups: places of the gradients that are handed over together.
        at_the_end: number of groups before the last collective is started.
    """

    def __init__(self, program: BoundProgram, phase: Phase, taken: Sequence[Taken], costs: Costs | None = None) -> None:
        assert isinstance(phase.module, Executor)

        def join(groups: Groups) -> list[int]:
            sizes = [[phase.results[place] for place in group] for group in groups]
            pairs = [(len(nodes), sum(map(num_bytes, nodes))) for nodes in sizes]
            return [1] * len(groups) if costs is None or program.program.offloaded else joined_updates(costs, pairs)

        lines, groups = hand_over_gradients(phase.module.lines, taken, join)
        last = max((index for index, line in enumerate(lines) if isinstance(line, Start)), default=0)
        self.at_the_end = sum(isinstance(line, Arrive) for line in lines[:last])
        self.groups: Groups = groups
        self.hand_to: Callable[[int, list[torch.Tensor]], None] | None = None

        def arrived(number: int, grads: list[torch.Tensor]) -> None:
            assert self.hand_to is not None
            self.hand_to(number, grads)

        self.run: Boxed = program.function(phase, lines, arrived=arrived)


def _taken(phase: Phase, inputs: Sequence[Any], refs: Mapping[int, ParamRef]) -> list[Taken]:
    memory = [_address(value) if isinstance(value, torch.Tensor) else 0 for value in inputs]
    taken = []
    for place, ref in refs.items():
        own, name = _address(shard_in(ref.param)), ref.row.name
        sources = tuple(
            index
            for index, slot in enumerate(phase.inputs)
            if (slot.is_of_shard and slot.name == name) or (own and memory[index] == own)
        )
        taken.append(Taken(place, sources, gathered=ref.row.num_shards > 1))
    return taken


def _address(tensor: torch.Tensor) -> int:
    """Return where a tensor's memory begins; 0 if it has none."""
    return tensor.untyped_storage().data_ptr()


_NOT_RECORDED = (
    "gather_ahead: of {} something was written to after a step in a way that torch does not record (.data, _foreach "
    "functions, other memory of the same numbers), and was gathered before that. Call model.reshard() after writing, "
    "or make the step with compile_step(gather_ahead=False)."
)


class _UnderWay(NamedTuple):
    """A gather that was started: its results, what was sent, and the parameters' versions then."""

    results: tuple[Any, ...]
    sent: tuple[torch.Tensor, ...]
    written: tuple[Version, ...]


@dataclass(eq=False)
class _Gather:
    """A gather at the head of a forward.

    Attributes:
        start: returns `num_results` values that are on their way, and then what is sent.
        sent: returns what is sent.
        own: parameters that updates may change.
        left: those of them that are not updated yet.
    """

    values: SlotValues
    slots: tuple[Slot, ...]
    refs: tuple[ParamRef, ...]
    start: Boxed
    sent: Boxed
    num_results: int
    own: set[nn.Parameter] = field(default_factory=set)
    left: set[nn.Parameter] = field(default_factory=set)
    under_way: _UnderWay | None = None

    def read(self) -> list[Any]:
        return [self.values.read(slot, ()) for slot in self.slots]

    def written(self) -> tuple[Version, ...]:
        return tuple(version_of(ref.param) for ref in self.refs)

    @torch.no_grad()
    def begin(self) -> None:
        """Start it before the forward, unless it was started."""
        if self.under_way is None:
            shards = self.read()
            memory = {shard.untyped_storage().data_ptr() for shard in shards}
            with disable_autocast():
                started = self.start(shards)
            results, sent = started[: self.num_results], started[self.num_results :]
            kept = tuple(one.clone() if one.untyped_storage().data_ptr() in memory else one for one in sent)
            self.under_way = _UnderWay(results, kept, self.written())

    def take(self, inputs: list[Any]) -> Sequence[Any]:
        """Return its results in the forward, which starts it if it was not started before."""
        one, self.under_way = self.under_way, None
        if one is not None:
            inputs.clear()
            return one.results
        started: Sequence[Any] = self.start(inputs)
        return started[: self.num_results]

    def forget(self) -> None:
        """Drop its results, when they have arrived."""
        one, self.under_way = self.under_way, None
        for result in one.results if one is not None else ():
            c10d.wait_tensor(result)


class GatherPrefetch:
    """The gathers at the head of the forward of a program, whose phase `phase` is."""

    def __init__(self, program: BoundProgram, phase: Phase, values: SlotValues) -> None:
        executor = phase.module
        assert isinstance(executor, Executor)
        shards = [place for place, slot in enumerate(phase.inputs) if slot.is_of_shard]
        self._program, self._phase = program, phase
        self._lines, found = take_out_gathers(executor.lines, shards)
        self._gathers: list[_Gather] = []
        for gather in found:
            slots = tuple(phase.inputs[place] for place in gather.sources)
            refs = tuple(values.params[name] for name in dict.fromkeys(slot.name for slot in slots))
            start, sent = executor.function(gather.start), executor.function(gather.sent)
            self._gathers.append(_Gather(values, slots, refs, start, sent, gather.num_results))
        weakref.finalize(self, _end, self._gathers)

    def __bool__(self) -> bool:
        """Return whether there is anything to start."""
        return bool(self._gathers)

    def begin(self) -> None:
        """Begin a backward that is followed by updates, before which nothing is gathered."""
        self.forget()
        for gather in self._gathers:
            gather.own = {ref.param for ref in gather.refs if ref.param.requires_grad}
            gather.left = set(gather.own)

    def first(self, params: Collection[nn.Parameter]) -> bool:
        """Return whether some parameters are among the first gathers."""
        return any(not gather.own.isdisjoint(params) for gather in self._gathers)

    def updated(self, params: Collection[torch.Tensor], *, start: bool) -> None:
        """Note that parameters have their values for the next forward; start gathers that wait for no other."""
        for gather in self._gathers:
            gather.left.difference_update(params)
            if start and not gather.left:
                gather.begin()

    def finish(self) -> None:
        """Start the other gathers: all parameters have their values."""
        for gather in self._gathers:
            gather.begin()

    def holds(self) -> bool:
        """Return whether this forward would gather what is under way; raise ParameterError if torch missed a write."""
        under_way = [(gather, gather.under_way) for gather in self._gathers if gather.under_way is not None]
        if any(one.written != gather.written() for gather, one in under_way):
            return False
        for gather, one in under_way:
            for then, now in zip(one.sent, gather.sent(gather.read()), strict=True):
                text = _NOT_RECORDED.format(", ".join(ref.row.name for ref in gather.refs))
                bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (then, now)]
                if now.is_cuda:  # the device checks, and fails with the text
                    assert_async((bits[0] == bits[1]).all(), text)
                elif not torch.equal(*bits):
                    self.forget()
                    raise ParameterError(text)
        return bool(under_way)

    def run(self, inputs: list[Any]) -> Any:
        """Run the forward with what is under way; it starts the other gathers itself."""

        def make() -> Boxed:
            return self._program.function(self._phase, self._lines, begun=[gather.take for gather in self._gathers])

        try:
            return self._program.cached((self._phase.module, "prefetch"), make)(inputs)
        finally:
            self.forget()

    def forget(self) -> None:
        """Drop what is under way, when it has arrived."""
        for gather in self._gathers:
            gather.forget()


def _end(gathers: Sequence[_Gather]) -> None:
    """Wait, at the end of the process, for what the last step has started: else torch warns of each collective.

    While there are process groups the other ranks may not have started theirs.
    """
    if dist.is_initialized():
        return
    for result in (result for gather in gathers if gather.under_way for result in gather.under_way.results):
        with contextlib.suppress(RuntimeError):  # the group was torn down by an error
            c10d.wait_tensor(result)


# --- optimizers -----------------------------------------------------------------------------------------------------

ELEMENTWISE = (SGD, Adam, AdamW, Adagrad, Adadelta, Adamax, ASGD, NAdam, RAdam, RMSprop)
# Where torchao has the step of its optimizers with states of eight and four bits, and in float8.
_TORCHAO = "torchao.optim.adam"
# State that is one number for a parameter, and no DTensor.
_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step is an unchanged one of torch that computes element by element."""
    if isinstance(optimizer, MasterWeights):
        return is_elementwise(optimizer.wrapped)
    return any(
        isinstance(optimizer, known)
        and all(_plain(type(optimizer), name) is _plain(known, name) for name in ("step", "_init_group"))
        for known in ELEMENTWISE
    )


def is_whole(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step is known to run on DTensors after a backward."""
    step = _plain(type(optimizer), "step")
    return step is _plain(Muon, "step") or getattr(step, "__module__", "") == _TORCHAO


def _plain(cls: type, name: str) -> Callable[..., Any]:
    """Return a method without torch's wrappers: hooks, ranges, no_grad."""
    found: Callable[..., Any] = inspect.unwrap(getattr(cls, name))
    return found


class Updates:
    """The steps of an elementwise optimizer, group by group and shard by shard.

    With `fuses` torch's fused kernel is taken where the optimizer leaves that to torch.
    """

    def __init__(self, optimizer: Optimizer, *, fuses: bool = False) -> None:
        self._optimizer, self._step = optimizer, _plain(type(optimizer), "step")
        self._fuses = fuses and self._step is _plain(Adam, "step")
        self._group_of: dict[int, int] = {}  # by the parameter's id: tensors are hashed in Python

    def begin(self) -> None:
        """Look at which groups there are now."""
        groups = enumerate(self._optimizer.param_groups)
        self._group_of = {id(param): number for number, group in groups for param in group["params"]}

    def __contains__(self, param: nn.Parameter) -> bool:
        """Return whether the optimizer has a parameter."""
        return id(param) in self._group_of

    @torch.no_grad()
    def take(self, arrivals: Sequence[Arrival]) -> list[torch.Tensor]:
        """Update parameters of the optimizer by their gradients; return which have their values now: all."""
        groups: dict[int, list[Arrival]] = {}
        for arrival in arrivals:
            groups.setdefault(self._group_of[id(arrival.param)], []).append(arrival)
        for number, members in groups.items():
            self._update(self._optimizer.param_groups[number], members)
        return [param for param, _ in arrivals]

    def finish(self) -> None:
        """Do nothing: all updates have run."""

    def _update(self, group: Mapping[str, Any], members: list[Arrival]) -> None:
        shards, state = [], defaultdict[torch.Tensor, dict[str, Any]](dict)
        before: list[dict[str, Any]] = []
        for param, grad in members:
            shard = shard_in(param).detach()
            shard.grad = grad
            shards.append(shard)
            known = self._optimizer.state.get(param) or {}
            before.append({name: shard_in(v) if isinstance(v, torch.Tensor) else v for name, v in known.items()})
            if known:
                state[shard] = dict(before[-1])
        group = {**group, "params": shards}
        if self._fuses and _can_fuse(group, before):
            group["fused"] = True
        stand_in = object.__new__(type(self._optimizer))
        stand_in.__dict__.update(self._optimizer.__dict__, param_groups=[group], state=state)
        self._step(stand_in)
        for shard, known, (param, _) in zip(shards, before, members):
            for name, value in state.get(shard, {}).items():
                if name in known and known[name] is value:
                    continue  # changed in place
                if isinstance(value, torch.Tensor) and isinstance(param, DTensor) and name not in _NUMBERS:
                    value = sharded_like(value, param)
                self._optimizer.state[param][name] = value


class MasterUpdates:
    """Updates of master weights, those on the host in a thread."""

    def __init__(self, optimizer: MasterWeights, thread: UpdateThread, *, fuses: bool = False) -> None:
        self._optimizer, self._thread = optimizer, thread
        self._copies = Updates(optimizer.wrapped, fuses=fuses)

    def begin(self) -> None:
        """Look at which groups there are now, and their settings."""
        self._optimizer.begin()
        self._copies.begin()

    def __contains__(self, param: nn.Parameter) -> bool:
        """Return whether the optimizer has a parameter."""
        return param in self._optimizer

    def take(self, arrivals: Sequence[Arrival]) -> list[torch.Tensor]:
        """Update parameters by their gradients; return which have their values now."""
        return self._optimizer.take(arrivals, self._update, self._thread.run)

    def finish(self) -> None:
        """Wait for updates on the host."""
        self._thread.finish()
        self._optimizer.finish()

    def _update(self, members: Sequence[tuple[Master, torch.Tensor]]) -> None:
        self._copies.take([Arrival(cast(nn.Parameter, master.tensor), grad) for master, grad in members])


def _can_fuse(group: Mapping[str, Any], state: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether torch's fused kernel computes the same as its operators, for Adam and AdamW on a CPU.

    It reads and writes a third of what torch's operators do one after the other, and rounds differently, as Inductor
    does. On other devices it needs the number of the step there, which would change checkpoints.

    It goes through memory from end to end, so all tensors of a parameter must have the same layout, and it reads the
    number of a step as float32. `group` is the stand-in's, and `state` of each of its shards.
    """
    if any(group[name] is not None for name in ("fused", "foreach")) or group["capturable"] or group["differentiable"]:
        return False
    if torch.get_default_dtype() is not torch.float32:
        return False  # steps that begin now are counted in that
    for shard, known in zip(group["params"], state):
        dtype = shard.dtype
        if not (dtype.is_floating_point and shard.is_cpu and shard.is_contiguous() and shard.grad.is_contiguous()):
            return False
        for name, value in known.items():
            if name in _NUMBERS:
                if value.dtype is not torch.float32:
                    return False
            elif value.dtype is not dtype or not value.is_contiguous():
                return False
    return True
