"""Opaque calls: functions that run as they are, of which a graph has one operator for forward and one for backward.

    y = Kernel.apply(x, w, 0.5)     %y, %inner, %state = opaque_forward("Kernel 3f0c9a2e", [%x, %w], 0)
                                    %dx, %dw = opaque_backward("Kernel 3f0c9a2e", %state, [%x, %w, %inner], [%dy], 0)

A call to ctypes, to a C++ extension or to the launcher of a kernel has no meta kernel, and a function under
`torch.compiler.disable` is not to be traced. So the function runs once with made-up numbers, outside of the trace. This
shows what it returns, which tensors autograd saves for its backward, and which gradients that returns.

* **The function's own autograd graph is kept** in `%state`, a tensor without elements. Tensors that it saves are taken
  out of it: inputs and results are passed to backward again, so a gathered parameter can be freed and gathered again,
  and others are results of the operator. So the partitioner, the planner and offloading see all memory.
* **An operator writes to none of its inputs.** Where the function does, it is given a copy, and the input's new value
  is a result. So no operator that reads the input needs to stay on one side of the call.
* **One dynamic size** is an argument of the operators. Runs at three sizes show how results depend on it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.fx import Node

from graphshard.errors import GraphBreak
from graphshard.ir.gpus import is_pretended
from graphshard.ir.tensor_memory import Affine, TensorMeta, apart, changed, copied, whole, within
from graphshard.torch_compat.autograd_state import outside_of_trace
from graphshard.torch_compat.torch_ops import TorchDispatchMode, pytree

_LIBRARY = torch.library.Library("graphshard", "FRAGMENT")
AUTOCASTS = ("cpu", "cuda")
REMEDY = (
    "Give the kernel a fake implementation: wrap it by torch.library.custom_op with register_fake, or by "
    "torch.library.triton_op."
)
# Stands for a tensor among the leaves of a call.
TENSOR = "<tensor>"


class _Source(NamedTuple):
    """Tensor of which a saved tensor is a view: the input, result or inner value of a number."""

    kind: str
    number: int


class _Place(NamedTuple):
    """Place of a saved tensor in the memory of its source, relative to where that begins."""

    source: _Source
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _OwnGraph:
    """The function's own autograd graph between forward and backward, without the tensors that it saves.

    Attributes:
        given: inputs as the function sees them; none after forward.
        saved: what was saved, in order: tensors, and their places from the end of forward on.
        read: values of the sources while backward runs.
    """

    def __init__(self) -> None:
        self.given: list[Tensor] = []
        self.saved: list[Tensor | _Place] = []
        self.results: list[GradientEdge | None] = []
        self.inputs: list[GradientEdge] = []
        self.read: dict[_Source, Tensor] = {}

    def pack(self, tensor: Tensor) -> int:
        self.saved.append(tensor.detach())
        return len(self.saved) - 1

    def unpack(self, index: int) -> Tensor:
        saved = self.saved[index]
        if isinstance(saved, Tensor):  # forward computes gradients itself
            return saved
        base = self.read[saved.source]
        return base.as_strided(saved.shape, saved.stride, base.storage_offset() + saved.offset)


class _Entry(torch.autograd.Function):
    """Makes an input of a tensor, without its autograd graph, that is no leaf; autograd keeps none of its memory."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise AssertionError("gradients are taken where they enter")


@dataclass
class _Findings:
    """What a run with made-up numbers shows of a call.

    Attributes:
        returned: leaves of what it returns, with marks for tensors, and their structure.
        results: the tensors that it returns.
        written: inputs that it writes to, by index.
        inner: tensors that only backward reads.
        sources: what each saved tensor is a view of.
        grads: gradients, one for each input; None where there is none.
        overwritten: sources that backward writes to.
        overwrites_tangents: backward writes to the gradients that it is given.
        seconds: of forward and of backward, for each byte of their inputs and results.
    """

    returned: tuple[list[Any], Any]
    results: list[TensorMeta]
    written: list[int]
    inner: list[TensorMeta]
    sources: list[_Source]
    grads: list[TensorMeta | None]
    overwritten: set[_Source] = field(repr=False)
    overwrites_tangents: bool = False
    seconds: list[float] = field(default_factory=list, compare=False, repr=False)


class NotAffineError(Exception):
    """Results do not depend on the dynamic size by `Affine`s."""


class OpaqueCall:
    """Call of a function with tensors of certain shapes, and certain other arguments.

    Args:
        leaves, structure: of the arguments, with marks for tensors.
        given: metas of the tensors, with `Affine` sizes.
        size: hint of the dynamic size; 0 if there is none.
        unchanged: is around the function while it runs with made-up numbers.

    Raises:
        GraphBreak: it cannot run as a part of a program.
        NotAffineError: it can, if the size is a number.
    """

    def __init__(
        self,
        function: Any,
        name: str,
        leaves: list[Any],
        structure: Any,
        given: Sequence[TensorMeta],
        size: int,
        unchanged: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._function, self._name, self._leaves, self._structure = function, name, leaves, structure
        self._given, self._unchanged = list(given), unchanged
        self.grad = torch.is_grad_enabled() and any(meta.requires_grad for meta in given)
        self._autocast = [(k, torch.get_autocast_dtype(k)) for k in AUTOCASTS if torch.is_autocast_enabled(k)]
        if not given:
            raise self._broken("It is given no tensor.", "Call it outside of forward.")
        self._try(size)  # it may compile kernels
        sizes = (size, 2 * size, 3 * size) if size else (0,)
        self.found = _fit({n: self._try(n) for n in sizes})
        # What the function computes is no part of a program: the cache need not know its code.
        shown = self.found, sorted(self.found.overwritten)
        facts = name, self._given, list(map(str, leaves)), str(structure), self._autocast, self.grad, shown
        digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:8]
        self.key = next(f"{name} {digest} {n}" for n in itertools.count() if f"{name} {digest} {n}" not in _CALLS)
        _CALLS[self.key] = self

    @property
    def device(self) -> torch.device:
        """Device of its first tensor."""
        return self._given[0].device

    @property
    def reads(self) -> list[_Source]:
        """Sources that backward is given."""
        return list(dict.fromkeys(self.found.sources))

    # --- made-up numbers -----------------------------------------------------------------------------------------

    def _try(self, size: int) -> _Findings:
        """Run the call with made-up numbers."""
        metas = [meta.at(size) for meta in self._given]
        devices = {meta.device for meta in metas if meta.device.type == "cuda"}
        if devices and (is_pretended() or not torch.cuda.is_available()):
            raise self._broken("It runs on a GPU that is not here, and only a run shows what it returns.")
        with (
            outside_of_trace(),
            torch.random.fork_rng(devices=devices),
            self._unchanged(),
            _WithoutCollectives(self._broken),
        ):
            before = _random_states(devices)
            try:
                found = self._try_with([meta.example() for meta in metas], metas)
                draws = before != _random_states(devices)
            except GraphBreak:
                raise
            except Exception as error:
                text = " ".join(str(error).split())[:100]
                raise self._broken(
                    f"It was run with made-up numbers to see what it returns, and raised "
                    f"{type(error).__name__}: {text}."
                ) from error
        if draws:
            raise self._broken("It draws random numbers.", "Draw before the call, and pass the numbers.")
        return found

    def _try_with(self, tensors: list[Tensor], metas: list[TensorMeta]) -> _Findings:
        before = [tensor.clone() for tensor in tensors]
        begun = _now(self.device)
        returned, state = self._run(tensors)
        seconds = _now(self.device) - begun
        leaves, structure = pytree.tree_flatten(returned)
        results = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not results:
            raise self._broken("It returns no tensor.", "Call it outside of forward.")
        entered = {edge.node for edge in state.inputs}
        if any(tensor.requires_grad and tensor.grad_fn not in entered for tensor in state.given):
            raise self._broken("It writes to an input, with gradients.", "Return the new value instead.")
        state.given.clear()
        found = _Findings(
            returned=([TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure),
            results=list(map(TensorMeta.of, results)),
            written=changed(tensors, before),
            inner=[],
            sources=[],
            grads=[],
            overwritten=set(),
        )
        self.found = found
        found.seconds.append(seconds / _num_bytes([*tensors, *results]))
        self.grad = self.grad and any(meta.requires_grad for meta in found.results)
        if not self.grad:
            return found
        values = {"input": tensors, "result": [each.detach() for each in results], "inner": list[Tensor]()}
        for saved in state.saved:
            assert isinstance(saved, Tensor)
            sources = (_Source(kind, at) for kind in values for at, base in enumerate(values[kind]))
            source = next((each for each in sources if within(saved, values[each.kind][each.number])), None)
            if source is None:
                source = _Source("inner", len(values["inner"]))
                values["inner"].append(whole(saved))
            found.sources.append(source)
        found.inner = list(map(TensorMeta.of, values["inner"]))
        self._settle(state, values)
        reads = [values[source.kind][source.number] for source in self.reads]
        tangents = [meta.example() if meta.requires_grad else None for meta in found.results]
        before = [each.clone() for each in reads]
        given = [(each, each.clone()) for each in tangents if each is not None]
        begun = _now(self.device)
        grads = self._run_backward(state, metas, reads, tangents)
        passed = (each for each in (*tangents, *grads) if each is not None)
        found.seconds.append((_now(self.device) - begun) / _num_bytes([*reads, *passed]))
        found.grads = [None if grad is None else TensorMeta.of(grad) for grad in grads]
        found.overwritten = {self.reads[index] for index in changed(reads, before)}
        found.overwrites_tangents = any(not torch.equal(now, then) for now, then in given)
        return found

    def _broken(self, reason: str, remedy: str = REMEDY) -> GraphBreak:
        return GraphBreak("forward", f"{self._name} runs as it is. {reason}", remedy)

    # --- forward and backward ------------------------------------------------------------------------------------

    def _run(self, tensors: Sequence[Tensor]) -> tuple[Any, _OwnGraph]:
        """Call the function; autograd keeps its graph in the state."""
        state = _OwnGraph()
        with contextlib.ExitStack() as stack:
            for kind, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            state.given = [tensor.detach() for tensor in tensors]
            if self.grad:
                leaf = torch.empty(0, requires_grad=True)
                for index, meta in enumerate(self._given):
                    if meta.requires_grad:
                        state.given[index] = _Entry.apply(leaf, state.given[index])
                        state.inputs.append(get_gradient_edge(state.given[index]))
                stack.enter_context(saved_tensors_hooks(state.pack, state.unpack))
            values = iter(state.given)
            leaves = [next(values) if leaf is TENSOR else leaf for leaf in self._leaves]
            args, kwargs = pytree.tree_unflatten(leaves, self._structure)
            returned = self._function(*args, **kwargs)
        results = [leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, Tensor)]
        state.results = [get_gradient_edge(each) if self.grad and each.requires_grad else None for each in results]
        return returned, state

    def _settle(self, state: _OwnGraph, values: dict[str, list[Tensor]]) -> None:
        """Replace saved tensors by their places in the sources."""
        for index, (saved, source) in enumerate(zip(state.saved, self.found.sources, strict=True)):
            base = values[source.kind][source.number]
            if not (isinstance(saved, Tensor) and within(saved, base)):
                raise self._differs("other tensors for backward", "the same as its inputs")
            offset = saved.storage_offset() - base.storage_offset()
            state.saved[index] = _Place(source, saved.shape, saved.stride(), int(offset))

    def run(self, given: Sequence[Tensor], size: int) -> list[Tensor]:
        """Run forward: return results, written inputs, inner values and the state."""
        found, metas = self.found, self._metas(size)
        tensors = [copied(each) if index in found.written else each for index, each in enumerate(given)]
        returned, state = self._run(tensors)
        state.given.clear()
        results = [leaf.detach() for leaf in pytree.tree_leaves(returned) if isinstance(leaf, Tensor)]
        if len(state.saved) != len(found.sources):
            raise self._differs(f"{len(state.saved)} tensors for backward", str(len(found.sources)))
        inner: dict[int, Tensor] = {}
        for saved, source in zip(state.saved, found.sources):
            if source.kind == "inner" and isinstance(saved, Tensor):
                inner.setdefault(source.number, whole(saved))
        self._settle(state, {"input": tensors, "result": results, "inner": list(inner.values())})
        values = [*results, *(tensors[index] for index in found.written), *inner.values()]
        for value, meta in zip(values, metas, strict=True):
            if (tuple(value.shape), value.dtype) != (meta.shape, meta.dtype):
                raise self._differs(f"{value.dtype} of {list(value.shape)}", f"{meta.dtype} of {list(meta.shape)}")
        made = list(apart(values, given, metas))
        if self.grad:
            made.append(torch.empty(0, device=given[0].device))
            made[-1]._graphshard_state = state  # type: ignore[attr-defined]
        return made

    def _run_backward(
        self, state: _OwnGraph, metas: Sequence[TensorMeta], reads: Sequence[Tensor], tangents: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Return a gradient for each input, None where there is none."""
        pairs = [(edge, grad) for edge, grad in zip(state.results, tangents) if edge is not None and grad is not None]
        state.read = dict(zip(self.reads, reads))
        try:
            outputs, grad_outputs = zip(*pairs)
            grads = torch.autograd.grad(outputs, state.inputs, grad_outputs, retain_graph=True, allow_unused=True)
        finally:
            state.read = {}
        found = iter(grads)
        return [next(found) if meta.requires_grad else None for meta in metas]

    def run_backward(
        self, handle: Tensor, reads: Sequence[Tensor], tangents: Sequence[Tensor | None], size: int
    ) -> list[Tensor]:
        """Run backward: return the gradients that there are."""
        state: _OwnGraph | None = getattr(handle, "_graphshard_state", None)
        if state is None:
            raise RuntimeError(
                f"backward of {self._name} does not find the state of its forward. saved_tensors_hooks around the "
                "model copy what a program saves: leave them out."
            )
        given = [copied(x) if source in self.found.overwritten else x for source, x in zip(self.reads, reads)]
        if self.found.overwrites_tangents:
            tangents = [None if each is None else copied(each) for each in tangents]
        grads = self._run_backward(state, self._given, given, tangents)
        pairs = [(grad, meta.at(size)) for grad, meta in zip(grads, self.found.grads) if meta is not None]
        made = [meta.empty().zero_() if grad is None else grad for grad, meta in pairs]
        others = [*reads, *(each for each in tangents if each is not None)]
        return list(apart(made, others, [meta for _, meta in pairs]))

    def _differs(self, found: str, expected: str) -> RuntimeError:
        return RuntimeError(
            f"{self._name} returns or keeps {found}; when its call was captured, with made-up numbers, {expected}. "
            f"What it returns must depend on the shapes of its inputs only. {REMEDY}"
        )

    # --- fake results --------------------------------------------------------------------------------------------

    def _metas(self, size: Any) -> list[TensorMeta]:
        found = [*self.found.results, *(self._given[index] for index in self.found.written), *self.found.inner]
        return [meta.at(size) for meta in found]

    def fake_results(self, size: Any) -> list[Tensor]:
        """Return what forward returns, without values."""
        handle = [torch.empty(0, device=self._given[0].device)] if self.grad else []
        return [*(meta.empty() for meta in self._metas(size)), *handle]

    def fake_gradients(self, size: Any) -> list[Tensor]:
        """Return what backward returns, without values."""
        return [meta.at(size).empty() for meta in self.found.grads if meta is not None]


# Calls by key.
_CALLS: dict[str, OpaqueCall] = {}


def seconds_of(node: Node) -> tuple[str, float] | None:
    """Return for which kind of device a node's call was measured, and seconds for each byte; None if it was not."""
    call = _CALLS.get(str(node.args[0])) if node.target in OPAQUE else None
    return None if call is None else (call.device.type, call.found.seconds[node.target is OPAQUE_BACKWARD])


def call_of(key: str) -> OpaqueCall:
    """Return the call that a node names.

    Raises:
        RuntimeError: it was captured in another process.
    """
    if key not in _CALLS:
        raise RuntimeError(f"a program calls {key} as it is, and was captured in another process. Capture it here.")
    return _CALLS[key]


def _define(schema: str, run: Callable[..., list[Tensor]], fake: Callable[..., list[Tensor]]) -> Any:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.needs_exact_strides, torch.Tag.cudagraph_unsafe))
    for kind in ("CPU", "CUDA"):
        _LIBRARY.impl(name, run, kind)
    torch.library.register_fake(f"graphshard::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.graphshard, name).default


OPAQUE_FORWARD = _define(
    "opaque_forward(str key, Tensor[] given, SymInt size) -> Tensor[]",
    lambda key, given, size: call_of(key).run(given, size),
    lambda key, given, size: call_of(key).fake_results(size),
)
OPAQUE_BACKWARD = _define(
    "opaque_backward(str key, Tensor state, Tensor[] reads, Tensor?[] tangents, SymInt size) -> Tensor[]",
    lambda key, state, reads, tangents, size: call_of(key).run_backward(state, reads, tangents, size),
    lambda key, state, reads, tangents, size: call_of(key).fake_gradients(size),
)
OPAQUE = frozenset({OPAQUE_FORWARD, OPAQUE_BACKWARD})


# --- one dynamic size ------------------------------------------------------------------------------------------------


def _fit(found: dict[int, _Findings]) -> _Findings:
    """Return findings with `Affine` sizes that hold for all runs, by size."""
    (first, one), *others = found.items()
    for other in (each for _, each in others):
        same = replace(other, results=one.results, inner=one.inner, grads=one.grads)
        lengths = [(len(each.results), len(each.inner), len(each.grads)) for each in (one, other)]
        if same != one or lengths[0] != lengths[1]:
            raise NotAffineError

    def affine(*values: int) -> Affine:
        slope = (values[1] - values[0]) // (others[0][0] - first) if others else 0
        size = Affine(slope, values[0] - slope * first)
        if any(size.at(n) != value for n, value in zip(found, values)):
            raise NotAffineError
        return size

    def fitted(*metas: TensorMeta | None) -> TensorMeta | None:
        known = [meta for meta in metas if meta is not None]
        if not known:
            return None
        if len(known) < len(metas) or len({(len(meta.shape), meta.dtype, meta.requires_grad) for meta in known}) > 1:
            raise NotAffineError
        shape, stride = (tuple(map(affine, *each)) for each in zip(*((meta.shape, meta.stride) for meta in known)))
        return replace(known[0], shape=shape, stride=stride)

    runs = list(found.values())
    sizes: dict[str, Any] = {
        name: [fitted(*metas) for metas in zip(*(getattr(run, name) for run in runs))]
        for name in ("results", "inner", "grads")
    }
    return replace(one, **sizes, seconds=runs[-1].seconds)


# --- a run with made-up numbers --------------------------------------------------------------------------------------


class _WithoutCollectives(TorchDispatchMode):
    """Mode in which collectives are an error: other ranks may not run them."""

    def __init__(self, error: Callable[..., GraphBreak]) -> None:
        super().__init__()
        self._error = error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional"):
            raise self._error(f"It runs {func}, a collective.", "Communicate before or after the call.")
        return func(*args, **(kwargs or {}))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return max(sum(tensor.nbytes for tensor in tensors), 1)


def _random_states(devices: set[torch.device]) -> list[bytes]:
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
    return [bytes(state.tolist()) for state in states]
