"""Records of traces: what a later launch checks instead of tracing, and what it then calls.

    codes       every code object of the user that Dynamo ran must be one that the facts hash
    facts       what each guard reads, described so that equal values of two processes have equal texts
    guards      their sources and kinds, to be built anew against the objects of the later launch
    bytecode    reads the inputs of the program, and replays side effects

A guard compares with an object of its process, often by identity. So a record has a description of each such object
(`guards/value_descriptions.py`), and the later launch compares all of them before it builds guards against its own.
What cannot be described is not recorded: the later launch traces, as the first one did.
"""

from __future__ import annotations

import base64
import builtins
import dataclasses
import functools
import marshal
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from graphshard.frontend.dynamo_capture import DynamoTrace, GraphInput, TracedFunction
from graphshard.guards.unguarded_state import GLOBAL_HOOKS, condition_of, key_of, sources_of
from graphshard.guards.value_branches import ValueBranches, eager_answers
from graphshard.guards.value_descriptions import (
    UndescribedError,
    ValueDescriber,
    differs_by_rank,
    environment_of,
    must_be_described,
    tensor_facts,
)
from graphshard.torch_compat.autograd_state import modes_of_functions, saved_tensors_hooks
from graphshard.torch_compat.dynamo import (
    GlobalStateGuard,
    GraphCaptureOutput,
    Guard,
    GuardBuilder,
    GuardsSet,
    OrderedSet,
    OutputGraphCommon,
    OutputGraphGuardsState,
    Source,
    dynamo_config,
    dynamo_sources,
    pgo,
)
from graphshard.torch_compat.inductor_settings import changed_settings
from graphshard.torch_compat.symbolic_sizes import has_unknown
from graphshard.torch_compat.torch_ops import HigherOrderOperator, OpOverload

# Guards of the process's state, which the key has, see `global_state`.
_OF_STATE = frozenset(
    {
        *("AUTOGRAD_SAVED_TENSORS_HOOKS", "DEFAULT_DEVICE", "DETERMINISTIC_ALGORITHMS", "GLOBAL_STATE", "GRAD_MODE"),
        "TORCH_FUNCTION_STATE",
    }
)
# Guards of symbols, which a trace that is recorded has not.
_OF_SIZES = ("SHAPE_ENV", "DIMENSION_DYNAMIC_MARKING_GUARD")
# Guards by equality or identity, whose values are described as a whole.
_EXACT = frozenset(
    {
        *("BOOL_MATCH", "BUILTIN_MATCH", "CLASS_MATCH", "CLOSURE_MATCH", "CONSTANT_MATCH", "EQUALS_MATCH"),
        *("FUNCTION_MATCH", "ID_MATCH", "MODULE_MATCH", "NONE_MATCH"),
    }
)
# Guards of the type, and of one fact.
_FACTS: dict[str, Callable[[Any, Any], Any]] = {
    "DICT_CONTAINS": lambda value, key: key in value,
    "DICT_NOT_CONTAINS": lambda value, key: key in value,
    "DUPLICATE_INPUT": lambda value, _: "",
    "EMPTY_NN_MODULE_HOOKS_DICT": lambda value, _: len(value),
    "HASATTR": hasattr,
    "NOT_PRESENT_IN_GENERIC_DICT": lambda value, key: key in getattr(value, "__dict__", {}),
    "SEQUENCE_LENGTH": lambda value, _: len(value),
    "TYPE_MATCH": lambda value, _: "",
}
# Higher-order operators whose bodies Dynamo has traced, too.
_TRACED_BODIES = frozenset({"autograd_function_apply", "tag_activation_checkpoint"})
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, type)
_OF_LIBRARY = ("torch", "_operator", "math", "builtins", "graphshard")
_ANSWER = re.compile("begin_answers|sub_next_answer")
_SIZE = re.compile(r"\.size\(\)\[\d+\]$")
_CHECKPOINT_POLICY = "_checkpoint_context_fn"


def global_state() -> list[str]:
    """Return the state that guards compare and that a trace depends on; it belongs in the key of a record."""
    guard: Any = GlobalStateGuard()
    return [guard.__getstate__(), str(_is_clear()), str(changed_settings((dynamo_config,)))]


def _is_clear() -> bool:
    """Return whether no hooks or modes of the process see what a trace does."""
    return saved_tensors_hooks() is None and not modes_of_functions() and not any(GLOBAL_HOOKS)


def record_of(trace: DynamoTrace, traced: TracedFunction) -> dict[str, Any]:
    """Return a trace whose guards were built as plain data; raise UndescribedError for what cannot be recorded.

    `traced` has seen the sizes of inputs.
    """
    output = trace.captured.graph_capture_output
    graph = output.output_graph
    _check_trace(trace, graph)
    table = _SourceTable()
    kept = [each for each in graph.guards if each.create_fn_name() not in _OF_SIZES]
    guards = [[table.add(guard.originating_source), *_kind(guard, table)] for guard in kept]
    compared = {
        source: {name: [*map(_size, values)] for name, values in known.items()}
        for source, known in graph.input_source_to_sizes_strides.items()
    }
    of_sizes = [each for each in graph.guards if each.create_fn_name() == "SHAPE_ENV"]
    record = {
        "sources": table.sources,
        "guards": guards,
        "sizes": [[table.add(source), known] for source, known in compared.items()],
        "dims": {str(source.name): known for source, known in compared.items() if None in known["size"]},
        "conditions": [text for each in of_sizes for text in each.code_list or ()],
        "branches": trace.branches and trace.branches.encode(),
        "ordered": [table.add(source) for source in sorted(graph.guard_on_key_order, key=lambda each: str(each.name))],
        "globals": _globals(trace),
        "imports": dict(output.import_sources),
        "builtins": graph.name_of_builtins_dict_key_in_fglobals,
        "backend": trace.captured.backend_input.backend_id,
        "bytecode": _encode_code(output.bytecode),
        "inputs": [each.source for each in trace.inputs],
        "method": trace.method,
        "seen": [[asdict(code), _seen(state)] for code, state in traced.seen.items()],
        "reads environment": any("environ" in str(guard.name) or "getenv" in str(guard.name) for guard in kept),
        "named": sorted({each for code in output.traced_code for each in code.co_consts if type(each) is str}),
    }
    describer = ValueDescriber()
    values = {"L": graph.local_scope, "G": output.f_globals}
    record["facts"] = _facts(record, kept, values, describer)
    if otherwise := _unmet(record, values):
        raise UndescribedError(f"the guard {otherwise} cannot be tested")
    if describer.constant:
        raise UndescribedError(f"Dynamo takes the result of {min(describer.constant)} for a constant")
    for code in set(output.traced_code):
        if must_be_described(code) and code not in describer.codes:
            raise UndescribedError(f"{code.co_qualname} of {code.co_filename} was traced, and no guard reads it")
    return record


def _check_trace(trace: DynamoTrace, graph: Any) -> None:
    """Raise UndescribedError for a trace that depends on more than its guards say."""
    state = (graph.torch_function_mode_stack, graph.functorch_layers, graph.aotautograd_guards, graph.current_device)
    for wrong, why in (
        (trace.prints or trace.growing, "it prints, or lists grow"),
        (trace.captured.backend_input is None, "it computes nothing"),
        (trace.captured.graph_capture_output.closure, "it has a closure"),
        (any(state) or graph.dual_level >= 0 or not _is_clear(), "a mode or a hook of all modules was active"),
        (any(map(_is_number, trace.inputs)), "an input is a number"),
        (trace.sizes is not None and has_unknown(trace.sizes), "a size depends on values"),
    ):
        if wrong:
            raise UndescribedError(why)
    for module in trace.graph.modules():
        if isinstance(module, GraphModule):
            if module.meta.get(_CHECKPOINT_POLICY) is not None:
                raise UndescribedError("a policy chooses what is saved")
            for node in module.graph.nodes:
                if node.op == "call_function":
                    _check_target(node.target)
                elif node.op == "call_module":
                    raise UndescribedError(f"it calls the module {node.target}")


def _is_number(given: GraphInput) -> bool:
    """Return whether a graph input is a number that is not the size of a tensor."""
    return not isinstance(given.value, torch.Tensor) and not _SIZE.search(given.source)


def _size(value: Any) -> int | None:
    """Return a size that a guard compares; None for a dynamic one."""
    found: int | None = value.node.maybe_as_int() if isinstance(value, torch.SymInt) else value
    return found


def _unmet(record: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """Return the first condition on sizes that does not hold; "" if all do."""
    return next((text for text in record["conditions"] if not condition_of(text, values["G"])(values["L"])), "")


def _check_target(target: Any) -> None:
    """Raise UndescribedError for a function that may run code that was not traced."""
    if isinstance(target, HigherOrderOperator):
        known = target.name() in _TRACED_BODIES
    elif isinstance(target, OpOverload):
        known = target.namespace in ("aten", "prims")
    else:
        package = str(getattr(target, "__module__", None) or "torch").partition(".")[0]
        is_local = "<locals>" in getattr(target, "__qualname__", "")  # one that calls an opaque function
        known = isinstance(target, _FUNCTIONS) and package in _OF_LIBRARY and not is_local
    if not known:
        raise UndescribedError(f"it calls {getattr(target, '__name__', target)}")


# --- facts -------------------------------------------------------------------------------------------------------


def _facts(
    record: Mapping[str, Any], guards: Iterable[Any], values: dict[str, Any], describer: ValueDescriber
) -> list[Any]:
    """Return what the guards read, with the source of each."""
    first: dict[int, int] = {}
    kept: list[Any] = []  # sources make dicts, whose ids would be used again
    found: list[Any] = [["torch.Tensor", describer.cls(torch.Tensor)]]
    if record["reads environment"]:
        found.append(["os.environ", environment_of(os.environ, set(record["named"]))])
    for place, guard in enumerate(guards):
        kind, key, sources = guard.create_fn_name(), key_of(guard), sources_of(guard)
        if kind in _OF_STATE:
            continue
        if kind == "HASATTR" and key is None:  # before torch 2.13 the source is the attribute
            attribute = guard.originating_source
            while not hasattr(attribute, "member"):
                attribute = attribute.base
            key, sources = attribute.member, [str(attribute.base.name)]
        for source in sources:
            try:
                value = eval(source, {**values})
            except Exception as error:
                raise UndescribedError(f"{source} cannot be read: {error!r}") from None
            kept.append(value)
            if differs_by_rank(value):
                raise UndescribedError(f"{source} may answer otherwise on another rank")
            same = first.setdefault(id(value), place) if isinstance(value, (torch.Tensor, nn.Module, dict, list)) else 0
            try:
                if kind == "TENSOR_MATCH":
                    fact = tensor_facts(value, record["dims"].get(source, {}))
                else:
                    fact = _fact(kind, key, value, describer)
            except Exception as error:  # a fact of another type than the value now
                raise UndescribedError(f"{source}: {error}") from None
            found.append([source, kind, describer.type_of(value), same, fact])
    return _as_json(found)


def _fact(kind: str, key: Any, value: Any, describer: ValueDescriber) -> Any:
    if kind in _EXACT:
        return describer.exact(value)
    if kind == "DICT_KEYS_MATCH":
        return [*map(describer.exact, value)]
    if kind in _FACTS:
        return _FACTS[kind](value, key)
    raise UndescribedError(f"a guard {kind} is not known")


def _as_json(value: Any) -> Any:
    return [*map(_as_json, value)] if isinstance(value, (list, tuple)) else value


def _globals(trace: DynamoTrace) -> dict[str, str]:
    """Return the modules that the bytecode and guards know by names that Dynamo made up."""
    output, found = trace.captured.graph_capture_output, {}
    known = {*TracedFunction.NAMES, *output.import_sources, output.output_graph.name_of_builtins_dict_key_in_fglobals}
    for name, value in output.f_globals.items():
        if name in known or name == trace.captured.backend_input.backend_id:
            continue
        if isinstance(value, bool) and _ANSWER.match(name):  # branches have the answers
            continue
        if not isinstance(value, types.ModuleType):
            raise UndescribedError(f"the trace has the global {name}")
        found[name] = value.__name__
    return found


# --- restoring ---------------------------------------------------------------------------------------------------


def restore(
    record: Mapping[str, Any], traced: TracedFunction, forward: Callable[..., Any], scope: dict[str, Any]
) -> DynamoTrace | str:
    """Return a trace with the guards and bytecode of a record; or what differs from the launch that recorded it."""
    function = traced.function(forward, scope["module"], None)  # type: ignore[arg-type]
    names = function.__globals__
    for name, module in (record["imports"] | record["globals"]).items():
        if module not in sys.modules:
            return f"{module} was not imported"
        names[name] = sys.modules[module]
    names[record["builtins"]] = builtins.__dict__
    sources = _read_sources(record["sources"])
    guards = [_read_guard(sources, *each) for each in record["guards"]]
    values = {"L": scope, "G": names}
    with eager_answers():  # it substitutes functions of transformers, once
        pass
    try:
        facts = _facts(record, guards, values, ValueDescriber())
    except UndescribedError as error:
        return str(error)
    if facts != record["facts"]:
        pairs = zip([*record["facts"], ["the end"]], [*facts, ["the end"]])
        was, now = next(pair for pair in pairs if pair[0] != pair[1])
        return f"{now[0]} was {was[1:]} and is {now[1:]}"
    if otherwise := _unmet(record, values):
        return f"{otherwise} does not hold"
    branches = record["branches"] and ValueBranches.decode(record["branches"])
    if branches and branches.answers_for(scope, names) != branches.answers:
        return f"forward decides by the values of {', '.join(branches.sources)}, and otherwise"
    state = OutputGraphGuardsState(
        local_scope=scope,
        global_scope=names,
        torch_function_mode_stack=[],
        guard_on_key_order={sources[each] for each in record["ordered"]},
        input_source_to_sizes_strides={sources[each]: dict(found) for each, found in record["sizes"]},  # type: ignore[misc]
        dual_level=-1,
        functorch_layers=[],
        current_device=None,
        global_state_guard=GlobalStateGuard(),
        _guards=GuardsSet(OrderedSet(guards)),
        _aotautograd_guards=[],
        skip_guards_check=True,
        name_of_builtins_dict_key_in_fglobals=record["builtins"],
    )
    empty: dict[str, Any] = {field.name: None for field in dataclasses.fields(GraphCaptureOutput)}
    known = {
        "output_graph": OutputGraphCommon(state, record["imports"]),
        "import_sources": record["imports"],
        "traced_code": [],
        "bytecode": _decode_code(*record["bytecode"]),
        "closure": (),
        "f_globals": names,
    }
    captured = SimpleNamespace(
        graph_capture_output=GraphCaptureOutput(**(empty | known)),
        backend_input=SimpleNamespace(backend_id=record["backend"]),
    )
    for code, seen in record["seen"]:
        known_sizes = traced.seen[pgo.CodeId(**code)].automatic_dynamic
        for name, entry in seen.items():
            known_sizes.setdefault(name, pgo.FrameStateSizeEntry(*map(_read_sizes, entry)))
    inputs = tuple(GraphInput(source, None, None) for source in record["inputs"])
    graph = GraphModule(nn.Module(), torch.fx.Graph())
    conditions = tuple(record["conditions"])
    facts_of_call = {"method": record["method"], "branches": branches, "conditions": conditions}
    return DynamoTrace(graph, inputs, None, captured, function.__code__, **facts_of_call)


def _seen(state: Any) -> dict[str, list[Any]]:
    """Return the numbers and sizes that one code has seen, so that another one becomes a symbol."""
    return {
        name: [_sizes(value) for value in (entry.scalar, entry.size, entry.stride)]
        for name, entry in state.automatic_dynamic.items()
    }


def _sizes(value: Any) -> Any:
    if isinstance(value, tuple):
        return [*map(_sizes, value)]
    if value is pgo.auto_unset:
        return None
    if value is pgo.auto_dynamic:
        return {}
    return {"infer": value.dim} if isinstance(value, pgo.InferStride) else _plain(value)


def _read_sizes(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_read_sizes, value))
    if isinstance(value, dict):
        return pgo.InferStride(value["infer"]) if value else pgo.auto_dynamic
    return pgo.auto_unset if value is None else value


# --- guards and sources as data ----------------------------------------------------------------------------------


class _SourceTable:
    """Sources as data, each after the sources that it is made of."""

    def __init__(self) -> None:
        self.sources: list[Any] = []
        self._places: dict[Source, int] = {}

    def add(self, source: Source) -> int:
        """Return the place of a source."""
        if source not in self._places:
            named = [field for field in dataclasses.fields(source) if field.init]
            values = {field.name: self.value(getattr(source, field.name)) for field in named}
            self.sources.append([type(source).__name__, values])
            self._places[source] = len(self.sources) - 1
        return self._places[source]

    def value(self, value: Any) -> Any:
        return {"source": self.add(value)} if isinstance(value, Source) else _plain(value)


def _plain(value: Any) -> Any:
    if type(value) in (bool, int, float, str, type(None)):
        return value
    if type(value) is bytes:
        return {"bytes": value.hex()}
    raise UndescribedError(f"a guard's source has a {type(value).__qualname__}")


def _kind(guard: Any, table: _SourceTable) -> list[Any]:
    create = guard.create_fn
    if not isinstance(create, functools.partial):
        return [guard.create_fn_name(), {}]
    if create.args:
        raise UndescribedError(f"a guard {guard.create_fn_name()} has further arguments")
    kind, given = guard.create_fn_name(), dict(create.keywords)
    if kind == "TENSOR_MATCH":
        given.pop("value", None)  # it is read again
    return [kind, {name: table.value(value) for name, value in given.items()}]


def _encode_code(code: types.CodeType) -> list[Any]:
    """Return code as text, and the devices and dtypes among its constants by their places."""
    of_torch = {i: str(each) for i, each in enumerate(code.co_consts) if isinstance(each, (torch.device, torch.dtype))}
    plain = code.replace(co_consts=tuple(None if i in of_torch else each for i, each in enumerate(code.co_consts)))
    return [base64.b64encode(marshal.dumps(plain)).decode(), list(map(list, of_torch.items()))]


def _decode_code(text: str, of_torch: list[tuple[int, str]]) -> types.CodeType:
    code: types.CodeType = marshal.loads(base64.b64decode(text))
    constants = list(code.co_consts)
    for index, name in of_torch:
        prefix, _, dtype = name.partition(".")
        constants[index] = getattr(torch, dtype) if prefix == "torch" else torch.device(name)
    return code.replace(co_consts=tuple(constants))


def _read_sources(data: list[Any]) -> list[Source]:
    found: list[Source] = []
    for name, values in data:
        kind = getattr(dynamo_sources, name)
        assert issubclass(kind, Source)
        found.append(kind(**{key: _read_value(found, value) for key, value in values.items()}))
    return found


def _read_value(sources: list[Source], value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return sources[value["source"]] if "source" in value else bytes.fromhex(value["bytes"])


def _read_guard(sources: list[Source], source: int, kind: str, given: dict[str, Any]) -> Any:
    create = getattr(GuardBuilder, kind)
    if given:
        create = functools.partial(create, **{name: _read_value(sources, value) for name, value in given.items()})
    return Guard(sources[source], create)
