"""Strict trace of one call by TorchDynamo: the torch-level graph, its guards, and the bytecode around it.

    module(*args, **kwargs)   ->   graph inputs -> GraphModule -> graph outputs     what passes and Inductor compile
                                   guards                                           which later calls it serves
                                   bytecode                                         reads inputs, replays side effects

This is the tracer of `torch.export.export(strict=True)` and `torch.compile(fullgraph=True)`. Parameters are graph
inputs, because Dynamo inlines modules; the caller knows inputs by the identity of the objects that the module held.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import logging
import random
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.torch_version import TorchVersion

from graphshard.errors import GraphBreak
from graphshard.frontend._opaque_functions import OpaqueFunctions
from graphshard.frontend.dynamo_patches import finite_numbers, with_inputs_apart
from graphshard.frontend.inputs import without_values
from graphshard.frontend.unit_boundaries import BOUNDARY, UnitBoundary
from graphshard.guards.append_only_lists import lists_among, trace_lists, without_length
from graphshard.guards.changing_numbers import numbers_change, with_symbols
from graphshard.guards.unguarded_state import ExtraGuards, key_of, reject_unguarded, sources_of, with_grad_fns
from graphshard.guards.value_branches import ValueBranches, begin_answers, branches_of, eager_answers
from graphshard.ir.custom_functions import separate_results
from graphshard.ir.repeats import Repeats
from graphshard.repeats.repeated_blocks import guards_of_blocks
from graphshard.torch_compat.dynamo import (
    AttributeMutationExisting,
    DebuggingVariable,
    FloatTensorSource,
    GuardsSet,
    OrderedSet,
    SideEffects,
    SubgraphTracer,
    ValueMutationExisting,
    compile_lock,
    dynamo_config,
    dynamo_timed,
    fullgraph_capture,
    get_metrics_context,
    pgo,
)
from graphshard.torch_compat.fake_tensors import FakeTensor
from graphshard.torch_compat.symbolic_sizes import hint
from graphshard.torch_compat.torch_ops import pytree, replaced
from graphshard.utils.progress import check_cancelled
from graphshard.utils.text import users_class

log = logging.getLogger(__name__)

# Names of the arguments of the traced function, which begin the sources of guards: L['module'], L['args'][0].
_SCOPE = ("module", "args", "kwargs")
# Dynamo and AOTAutograd keep what they are doing in variables of the process: threads trace one after the other. So do
# threads that torch.compile serves, by the same lock, and do not see what is changed meanwhile.
TRACING = compile_lock

# Globals of each `TracedFunction`. Guards read them, so closures and defaults of forward are looked at in each call.
_graphshard_boundary = cast(UnitBoundary, None)
_graphshard_forward = cast("Callable[..., Any]", None)
_graphshard_begin = begin_answers


def _call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _graphshard_begin()
    args, kwargs = _graphshard_boundary.enter(args, kwargs)
    return _graphshard_boundary.leave(_graphshard_forward(module, *args, **kwargs))


def _call_replaced(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _graphshard_begin()
    args, kwargs = _graphshard_boundary.enter(args, kwargs)
    return _graphshard_boundary.leave(_graphshard_forward(*args, **kwargs))


@dataclass
class TracedFunction:
    """The function that Dynamo traces for one module or entry, and the changing numbers and sizes that it has seen.

    Automatic dynamic shapes remember these by code object, and models must not share them.
    """

    NAMES: ClassVar = ("__name__", "__builtins__", BOUNDARY, "_graphshard_begin", "_graphshard_forward")

    name: str
    seen: Any = field(default_factory=lambda: defaultdict(pgo.CodeState))
    opaque: OpaqueFunctions = field(default_factory=OpaqueFunctions)

    def function(self, forward: Callable[..., Any], module: nn.Module, boundary: UnitBoundary) -> types.FunctionType:
        """Return the function (module, args, kwargs) that calls a forward, perhaps not a method of it."""
        is_method = getattr(forward, "__self__", None) is module
        names = {
            "__name__": __name__,
            "__builtins__": __builtins__,
            BOUNDARY: boundary,
            "_graphshard_begin": begin_answers,
            "_graphshard_forward": cast(types.MethodType, forward).__func__ if is_method else forward,
        }
        code = (_call if is_method else _call_replaced).__code__.replace(co_name=self.name)
        return types.FunctionType(code, names, self.name)


@dataclass(frozen=True)
class GraphInput:
    """One input of the traced graph: the expression that reads it, the object that was read, its fake or symbol."""

    source: str
    value: Any
    fake: Any


@dataclass
class DynamoTrace:
    """What Dynamo makes of one call.

    Attributes:
        graph: torch-level graph; its placeholders are `inputs` in order, its results a tuple.
        sizes: where symbolic sizes and their guards live; None if the graph is empty.
        repeats: equal blocks of which a few were traced; guards are of all.
        branches, conditions: on values of inputs, or None; on sizes, of a trace from a file, whose `sizes` are None.
        changed: what forward changes of the objects that were there before: modules, or the names of other objects.
        prints: the call prints, or warns.
        growing: sources of lists that forward only appends to, whatever their length.
    """

    graph: GraphModule
    inputs: tuple[GraphInput, ...]
    sizes: ShapeEnv | None
    captured: Any
    code: types.CodeType
    repeats: Repeats | None = None
    method: str = "forward"
    branches: ValueBranches | None = None
    changed: tuple[nn.Module | str, ...] = ()
    prints: bool = False
    growing: frozenset[str] = frozenset()
    conditions: tuple[str, ...] = ()

    def structure(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> pytree.TreeSpec | None:
        """Return the structure of what the call returns, whose leaves are the graph's results in order.

        It is found by a run of the bytecode with other tensors for results; None if that would change objects, or if a
        leaf is something else.
        """
        if self.changed or self.prints or not len(self.graph.graph.nodes):
            return None
        outputs: Any = self.graph.graph.output_node().args[0]
        values = [node.meta["example_value"] for node in outputs]
        if not all(isinstance(value, torch.Tensor) for value in values):
            return None
        results = [torch.empty(list(map(hint, value.shape)), dtype=value.dtype, device="meta") for value in values]
        try:
            leaves, structure = pytree.tree_flatten(self.replay(lambda *_: results)(module, args, kwargs))
        except Exception:
            log.debug("the bytecode of a trace does not run with tensors on the meta device", exc_info=True)
            return None
        is_same = len(leaves) == len(results) and all(leaf is result for leaf, result in zip(leaves, results))
        return structure if is_same else None

    @property
    def names(self) -> dict[str, Any]:
        """Globals that sources read."""
        return self.captured.graph_capture_output.f_globals

    def replay(self, run: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
        """Return the function (module, args, kwargs) -> result that calls `run` with the graph's inputs.

        It replays the side effects of forward, too: on attributes, lists, dicts, globals.
        """
        output = self.captured.graph_capture_output
        if self.captured.backend_input is None:
            return types.FunctionType(output.bytecode, output.f_globals, closure=output.closure)
        names = {**output.f_globals, self.captured.backend_input.backend_id: run}
        aliases = output.import_sources
        names |= {alias: importlib.import_module(module) for alias, module in aliases.items() if alias not in names}
        return types.FunctionType(output.bytecode, names, closure=output.closure)

    def check_constraints(self) -> None:
        """Raise ConstraintViolationError if forward takes a dynamic size for a number, or for a smaller range."""
        self._guard_manager()

    def build_guards(self, keep: Callable[[str, str, Any], bool], device: torch.device) -> tuple[Any, ExtraGuards]:
        """Build the guard manager against the module as it is now.

        It has `check(scope)` and `check_verbose(scope)`; the second result checks the rest.

        Args:
            keep: whether to keep a guard, given its source, its kind and, for a key of a dict, the key.
        """
        output = self.captured.graph_capture_output
        graph = output.output_graph
        kept = [
            without_length(guard, self.growing)
            for guard in graph.guards
            if all(keep(source, guard.create_fn_name(), key_of(guard)) for source in sources_of(guard))
        ]
        if self.repeats is not None:
            kept += guards_of_blocks(kept, self.repeats, graph.input_source_to_sizes_strides)
        graph._guards = GuardsSet(OrderedSet(kept))
        _relax(graph)
        with TRACING, dynamo_config.patch(_known(_GUARD_SETTINGS)):
            made = self._guard_manager()
        module = graph.local_scope["module"]
        with _materialized(module, device):
            if not made.check(graph.local_scope):
                parts = made.check_verbose(graph.local_scope).verbose_code_parts
                raise AssertionError(f"a guard fails for the call that was traced: {parts}")
        values = {"L": graph.local_scope, "G": graph.global_scope}
        sources = [(source, guard.create_fn_name()) for guard in graph.guards for source in sources_of(guard)]
        # Only guards are made of these. A view among them keeps its base where the garbage collector does not look.
        if graph.shape_env is not None:
            graph.shape_env.tracked_fakes = None
        return made, ExtraGuards(module, sources, values)

    def _guard_manager(self) -> Any:
        """Return what checks the guards of the trace, without having checked or measured them."""
        output = self.captured.graph_capture_output
        output.output_graph.skip_guards_check = True  # to measure them, Dynamo flushes the caches: 0.1 s
        for guard in output.output_graph.guards:
            guard.guarded_class_weakref = None  # it had another class when constraints were checked
        with _metrics():
            manager = output.build_guards(self.code)
        made = manager.guard_manager
        # Functions and classes that forward reads keep the manager as long as they live, to tell it of their end; with
        # it they would keep the trace, and the process groups of its tensors.
        del manager.guard_manager
        return made


@contextlib.contextmanager
def _materialized(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Give a module on the meta device the buffers that guards expect, which it has when it is called."""
    materialize = functools.cache(functools.partial(without_values, device=device))
    buffers = [(owner._buffers, *each) for owner in module.modules() for each in owner._buffers.items()]
    meta = [(held, name, buffer) for held, name, buffer in buffers if buffer is not None and buffer.is_meta]
    for held, name, buffer in meta:
        held[name] = materialize(buffer)
    try:
        yield
    finally:
        for held, name, buffer in meta:
            held[name] = buffer


def _relax(graph: Any) -> None:
    """Let sizes be in a smaller range than was declared: compiled code may have one. Other sizes are traced again."""
    graph.export_constraints = []
    for each in graph.shape_env.tracked_fakes or [] if graph.shape_env is not None else []:
        context = each.symbolic_context
        if getattr(context, "constraint_sizes", None):
            free = {"constraint_sizes": [None] * len(context.constraint_sizes)}
            if getattr(context, "constraint_strides", None):
                free["constraint_strides"] = [None] * len(context.constraint_strides)
            each.symbolic_context = dataclasses.replace(context, **free)


@contextlib.contextmanager
def _metrics() -> Iterator[None]:
    with get_metrics_context(), dynamo_timed("graphshard.frontend"):
        yield


_LEVELS = {"debug", "info", "warning", "warn", "error", "exception", "critical", "fatal", "log"}
# Traces of one call, each with the answers to questions about values that the one before has found.
_MOST_TRACES = 6
# Hooks are looked at, and a module whose dicts have not changed since the last call is not walked again.
_GUARD_SETTINGS: dict[str, Any] = {
    "skip_nnmodule_hook_guards": False,
    "use_recursive_dict_tags_for_guards": True,
    # Torch 2.11 does not see that a tensor that is skipped is an input, too.
    "skip_tensor_guards_with_matching_dict_tags": TorchVersion(torch.__version__) >= "2.13",
    "max_saved_pointers_for_recursive_dict_tags_check": 1 << 16,
    "assume_dunder_attributes_remain_unchanged": False,  # contents of closures change
}
# Numbers that change become symbols, and values that decide nothing are not asked for. Graph breaks are errors.
_SETTINGS: dict[str, Any] = {
    "allow_unspec_int_on_nn_module": True,
    "specialize_float": False,
    "capture_scalar_outputs": True,
    "capture_dynamic_output_shape_ops": True,
    "automatic_dynamic_shapes": True,
    "assume_static_by_default": True,
    "trace_autograd_ops": True,
    "error_on_nested_fx_trace": True,
    "use_numpy_random_stream": True,  # torch's draws are others
    "skip_guards_on_constant_func_defaults": False,  # closures of the same code have other defaults
    "suppress_errors": False,
}


def _known(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that this release of torch has."""
    return {name: value for name, value in settings.items() if hasattr(dynamo_config, name)}


_call_debugging, _make_proxy = DebuggingVariable.call_function, SubgraphTracer.create_proxy


def _create_proxy(self: SubgraphTracer, kind: str, target: Any, args: Any, *others: Any, **kwargs: Any) -> Any:
    """Ask at each node whether another rank has failed, because a trace may take minutes; keep symbols in indices."""
    check_cancelled()
    return _make_proxy(self, kind, with_symbols(target, args), args, *others, **kwargs)


def trace_call(
    traced: TracedFunction,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    forward: Callable[..., Any],
    boundary: UnitBoundary,
    constraints: Any = None,
) -> DynamoTrace:
    """Trace a call of a module whose parameters are full.

    Args:
        forward: what the call runs, a method of the module or a function that replaces one.
        constraints: on sizes, as torch.export makes them of dynamic shapes.
    """
    scope = dict(zip(_SCOPE, (module, args, dict(kwargs))))
    make = functools.partial(traced.function, forward, module, boundary)
    retrace = functools.partial(_trace_with_answers, make, scope, traced, constraints)
    trace = retrace()
    growing = lists_among(trace.changed, {"L": scope, "G": trace.names, **trace.names})
    other = trace_lists(growing, retrace)
    return trace if other is None else dataclasses.replace(other, growing=growing)


def _trace_with_answers(make: Callable[..., Any], scope: Any, traced: TracedFunction, constraints: Any) -> DynamoTrace:
    """Trace a call until the answers to its questions about values are known."""
    answers: list[bool] | None = []
    for left in reversed(range(_MOST_TRACES)):
        trace, given = traced.opaque.retrace(functools.partial(_trace, make(), scope, traced, constraints, answers))
        sources, values = [each.source for each in trace.inputs], [each.value for each in trace.inputs]
        branches = branches_of(trace.graph, sources, values, given)
        # With `explain`, inputs that are not parameters are fake, and have no values.
        if branches is None or any(isinstance(x, FakeTensor) and not isinstance(x, nn.Parameter) for x in values):
            return trace
        if branches is not False:
            found = branches.answers_for(scope, trace.names)
            if found == branches.answers:
                return dataclasses.replace(trace, branches=branches)
            answers = list(found)
        if branches is False or left == 1:
            answers = None  # Dynamo breaks at the first branch
    raise AssertionError("a trace without answers has branches on values")


def _trace(
    function: types.FunctionType,
    scope: dict[str, Any],
    traced: TracedFunction,
    constraints: Any,
    answers: list[bool] | None,
) -> tuple[DynamoTrace, list[bool]]:
    """Trace a call with answers to questions about values; return the answers that it was given, too."""
    known = _known(_SETTINGS)
    name = f"{users_class(scope['module']).__name__}.{function.__name__}"
    if any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves((scope["args"], scope["kwargs"]))):
        known["automatic_dynamic_shapes"] = False  # of layouts that are known
    printed: list[bool] = []

    def print_later(self: DebuggingVariable, tx: Any, args: Any, kwargs: Any) -> Any:
        """Let the frame that is traced print, or warn, after the graph: Dynamo forgets what the frames inside it do."""
        printed.append(True)
        if kwargs.keys() - {"stacklevel", "category"}:  # where a warning comes from is lost
            raise GraphBreak("forward", f"{self.value.__name__} has keyword arguments.", "Leave them out.")
        root = tx.output.root_tx
        if self.value is not warnings.warn:
            return _call_debugging(self, root, args, {})
        nothing = _call_debugging(self, root, args[:1], {})  # Dynamo refuses the class of the warning
        root.debug_locals[-1] = self, [*args[:2], *filter(None, [kwargs.get("category")])]
        return nothing

    # Libraries add methods that write to loggers, such as `warning_once`.
    loggers = {getattr(logging.Logger, name) for name in dir(logging.Logger) if name.removesuffix("_once") in _LEVELS}
    known |= {"ignore_logging_functions": loggers, "reorderable_logging_functions": {print, warnings.warn}}
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(pgo, "_CODE_STATE", traced.seen))
        stack.enter_context(_metrics())  # around the settings: torch 2.11 cannot log a set of functions
        stack.enter_context(dynamo_config.patch(known))
        stack.enter_context(replaced(DebuggingVariable, "call_function", print_later))
        changed = stack.enter_context(_changes())
        given = stack.enter_context(eager_answers(answers))
        stack.enter_context(numbers_change())
        stack.enter_context(finite_numbers(name))
        stack.enter_context(with_inputs_apart())
        stack.enter_context(with_grad_fns())
        stack.enter_context(traced.opaque.called())
        stack.enter_context(replaced(SubgraphTracer, "create_proxy", _create_proxy))
        stack.callback(random.setstate, random.getstate())  # a trace draws, too
        captured = fullgraph_capture(function, tuple(scope.values()), constraints=constraints)
    code, output, backend = function.__code__, captured.graph_capture_output, captured.backend_input
    facts: dict[str, Any] = {"changed": tuple(changed), "prints": bool(printed)}
    if backend is None:
        return DynamoTrace(GraphModule(nn.Module(), torch.fx.Graph()), (), None, captured, code, **facts), given
    graph, found = backend.graph_module, output.output_graph.export_metadata.graph_input_idx_to_local_source
    separate_results(graph)
    sources: dict[int, Any] = {i: s.base if isinstance(s, FloatTensorSource) else s for i, s in found.items()}
    values = {"L": scope, "G": output.f_globals, "___from_numpy": torch.as_tensor}
    reject_unguarded(output.output_graph.guards, output.traced_code, graph.graph, sources.values(), values, name)
    inputs = tuple(
        GraphInput(sources[index].name, eval(sources[index].name, values), node.meta["example_value"])
        for index, node in enumerate(graph.graph.find_nodes(op="placeholder"))
    )
    return DynamoTrace(graph, inputs, backend.fake_mode.shape_env, captured, code, **facts), given


@contextlib.contextmanager
def _changes() -> Iterator[list[nn.Module | str]]:
    """Yield what forward changes while it is traced, of the objects that were there before."""
    changed: list[nn.Module | str] = []

    def watched(change: Callable[..., Any]) -> Callable[..., Any]:
        def changes(effects: SideEffects, variable: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(variable.mutation_type, (AttributeMutationExisting, ValueMutationExisting)):
                value = vars(variable).get("value")
                with contextlib.suppress(NotImplementedError):  # of the stack of modes, which has no name
                    changed.append(value if isinstance(value, nn.Module) else getattr(variable.source, "name", ""))
            return change(effects, variable, *args, **kwargs)

        return changes

    with contextlib.ExitStack() as stack:
        for name in ("mutation", "store_attr"):
            stack.enter_context(replaced(SideEffects, name, watched(getattr(SideEffects, name))))
        yield changed
