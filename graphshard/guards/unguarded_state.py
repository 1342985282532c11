"""State that a trace depends on and that Dynamo's guards leave out: guards of our own, or else an error.

Block.forward = other, nn.Linear.forward = other     guard: functions of classes of what is read
os.environ["SCALE"]                                  guard: environment variables, if forward reads one
self.rates.move_to_end("a")                          guard: order of an OrderedDict
register_module_forward_hook(...)                    guard: hooks of all modules
register_forward_hook(..., always_call=True)         guard: which hooks of a module, not their handles' numbers
x.grad, x.is_leaf                                    error: a program has no such thing
torch.set_default_dtype(...)                         error: the trace would set it, and no call
id(x), random.randint(0, 9), vars(m)                 graph break: Python answers in each call
mask.any().item() is True                            graph break: Dynamo says no
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import linecache
import os
import re
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.nn.modules import module as torch_module
from torch.torch_version import TorchVersion

from graphshard.errors import CaptureError, GraphBreak
from graphshard.torch_compat.dynamo import (
    ConstantVariable,
    Guard,
    RandomValueSource,
    Source,
    TensorVariable,
    VariableTracker,
    dict_version,
    numpy_method_wrapper,
    numpy_operator_wrapper,
    numpy_to_tensor_wrapper,
)
from graphshard.torch_compat.symbolic_sizes import NAMES_OF_SIZE_GUARDS
from graphshard.torch_compat.torch_ops import replaced, set_grad_enabled
from graphshard.utils.source_lines import is_users, source_line

# Flags of classes whose attributes may be set.
_IS_HEAP_TYPE, _IS_IMMUTABLE = 1 << 9, 1 << 8
_ENVIRON = re.compile(r"\b(environ|getenv)\b")
_FRAME = re.compile(r'^ *File "([^"]*)", line (\d+)', re.MULTILINE)
# What modules hold themselves; their classes are known without.
_OF_MODULES = re.compile(r"_parameters|_buffers|_hooks|_modules(?:'\])?(?:\['[^']+'\])?$")
# Dicts of a module's hooks, and of hooks that get keyword arguments or are always called, by numbers of handles.
_HOOKS = re.compile(r"(?:\.|\.__dict__\[')(_forward_pre_hooks|_forward_hooks)(?:'\])?$")
HOOK_MARKS = re.compile(r"\b_forward(_pre)?_hooks(_with_kwargs|_always_called)\b")
# What `register_module_forward_hook` and its like fill.
GLOBAL_HOOKS: tuple[dict[int, Any], ...] = tuple(
    value for name, value in vars(torch_module).items() if name.startswith("_global_") and isinstance(value, dict)
)
# Guards by ==, which -0.0 passes for 0.0.
_EQUAL = ("CONSTANT_MATCH", "EQUALS_MATCH")
_FUNCTIONS = (types.FunctionType, staticmethod, classmethod, property)

# Builtins with another answer in each call.
_BUILTINS = {
    "id": "id() of an object is another one in each call.",
    "vars": "vars() is a dict of all attributes, which no guard compares.",
}
# Attributes of tensors that a program does not have, or has otherwise.
_HISTORY = frozenset({"grad", "is_leaf", "output_nr", "_base", "retains_grad"})
# Before the name of an attribute: it is not one of a tensor.
_NO_TENSORS = frozenset({"self", "autograd", "func"})
# Calls of numpy in graphs of Dynamo.
_NUMPY = (numpy_to_tensor_wrapper, numpy_method_wrapper, numpy_operator_wrapper)
# Functions that change what holds after the call, too.
_SETTERS = frozenset(
    {
        *("set_autocast_cache_enabled", "set_autocast_dtype", "set_autocast_enabled", "set_default_device"),
        *("set_default_dtype", "_set_default_dtype"),
        *("_set_deterministic_algorithms", "use_deterministic_algorithms"),
    }
)
_ANY_REMEDY = "Ask outside of forward, and pass the answer into it."


class ExtraGuards:
    """Checks of one program, made when it is installed.

    `guards` are expressions that guards read, with the kinds of the guards; `values` are of the names in these.
    """

    def __init__(self, module: nn.Module, guards: Sequence[tuple[str, str]], values: Mapping[str, Any]) -> None:
        sources = {source for source, _ in guards}
        found = dict(read({each for each in sources if not _OF_MODULES.search(each)}, values))
        objects = [*module.modules(), *found.values(), torch.empty(0)]
        classes = dict.fromkeys(cls for each in objects for cls in type(each).__mro__)
        changeable = [cls for cls in classes if cls.__flags__ & _IS_HEAP_TYPE and not cls.__flags__ & _IS_IMMUTABLE]
        self._classes = [(cls, _attributes_of(cls)) for cls in changeable]
        self._functions = [_functions_of(attributes) for _, attributes in self._classes]
        self._versions = self._versions_now()
        self._hooks = _hooks_now()
        self._environment = dict(os.environ) if any(map(_ENVIRON.search, sources)) else None
        equal = {source for source, kind in guards if kind in _EQUAL}
        names = {name: value for name, value in values.items() if name != "L"}
        # Expressions, with what they read, what is compared of that, and what it was.
        self._compared: list[tuple[str, Callable[..., Any], Callable[[Any], Any], Any]] = []
        for source in sources:
            kind, owner = _kind_of_hooks(source)
            for _, part in read([owner], values) if kind else ():
                if getattr(part, kind):
                    marked = functools.partial(_marked_hooks, kind)
                    self._compared.append((owner, eval(f"lambda L: {owner}", {**names}), marked, marked(part)))
        for source, value in found.items():
            # Zeros are equal whatever their signs.
            parts = (value.real, value.imag) if isinstance(value, complex) else (value,)
            is_zero = isinstance(value, (float, complex)) and 0 in parts
            compared = list if isinstance(value, OrderedDict) else repr if source in equal and is_zero else None
            if compared is not None:
                self._compared.append((source, eval(f"lambda L: {source}", {**names}), compared, compared(value)))

    def change(self, scope: Mapping[str, Any]) -> str:
        """Describe what has changed since the program was traced, for a call (module, args, kwargs); "" if nothing."""
        versions = self._versions_now()
        if versions != self._versions:
            for (cls, attributes), was in zip(self._classes, self._functions):
                now = _functions_of(attributes)
                changed = next((key for key in {**was, **now} if now.get(key) is not was.get(key)), None)
                if changed is not None:
                    return f"{cls.__qualname__}.{changed} was replaced"
            self._versions = versions
        if _hooks_now() != self._hooks:
            return "hooks of all modules were changed"
        if self._environment is not None and self._environment != os.environ:
            names = sorted({*self._environment, *os.environ})
            name = next(name for name in names if self._environment.get(name) != os.environ.get(name))
            return f"the environment variable {name} was changed"
        for source, value_in, compared, before in self._compared:
            if compared(value_in(scope)) != before:
                what = "marked hooks of " if isinstance(compared, functools.partial) else ""
                return f"{what}{source} was {before} and is {compared(value_in(scope))}"
        return ""

    def _versions_now(self) -> list[int]:
        return [dict_version(attributes) for _, attributes in self._classes]


def read(sources: Iterable[str], values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of sources that can be read."""
    for source in sources:
        if source:
            try:
                yield source, eval(source, {**values})
            except Exception:
                continue


def condition_of(text: str, names: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], bool]:
    """Return the function that tests a guard on sizes for a call (module, args, kwargs), given globals."""
    test = eval(f"lambda L: {text}", {**NAMES_OF_SIZE_GUARDS, "G": names})

    def holds_for(scope: Mapping[str, Any]) -> bool:
        try:
            return bool(test(scope))
        except Exception:  # another input is no view, and has no base
            return False

    return holds_for


def _attributes_of(cls: type) -> dict[str, Any]:
    """Return the dict of a class, whose version changes when an attribute is set."""
    (found,) = [each for each in gc.get_referents(cls.__dict__) if type(each) is dict]
    return found


def _functions_of(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if isinstance(value, _FUNCTIONS) or callable(value)}


def _kind_of_hooks(source: str) -> tuple[str, str]:
    """Return the attribute and the module's source if a source is one of a module's hooks; else empty texts."""
    found = _HOOKS.search(source)
    return (found[1], source[: found.start()]) if found is not None else ("", "")


def _marked_hooks(kind: str, module: nn.Module) -> list[tuple[int, str]]:
    """Return which hooks of a module have which marks, in their order: registered anew, a hook has another number."""
    marks = [mark for mark in (f"{kind}_with_kwargs", f"{kind}_always_called") if hasattr(module, mark)]
    hooks = enumerate(getattr(module, kind))
    return [(place, mark) for place, number in hooks for mark in marks if number in getattr(module, mark)]


def _hooks_now() -> list[list[Any]]:
    return [list(hooks.values()) for hooks in GLOBAL_HOOKS]


def sources_of(guard: Guard) -> list[str]:
    """Return what a guard is about; a guard that two things are one is about both."""
    create = guard.create_fn
    others = (*create.args, *create.keywords.values()) if isinstance(create, functools.partial) else ()
    return [str(guard.name), *(str(other.name) for other in others if isinstance(other, Source))]


def key_of(guard: Guard) -> Any:
    """Return the key of a guard that a dict has, or lacks, a key; None for another guard."""
    create = guard.create_fn
    named = create.keywords if isinstance(create, functools.partial) else {}
    return named.get("key", named.get("attr"))


# --- state that no guard can compare ------------------------------------------------------------------------------


def reject_unguarded(
    guards: Iterable[Any],
    codes: Sequence[types.CodeType],
    graph: Graph,
    sources: Iterable[Any],
    values: Mapping[str, Any],
    function: str,
) -> None:
    """Raise an error where no guard can say whether a trace serves the next call.

    It is a GraphBreak where Python does it right, and a CaptureError otherwise: modules hold shards.

    Args:
        sources: of the graph's inputs.
        values: of the names in sources.
    """
    sources = list(sources)
    codes = [code for code in dict.fromkeys(codes) if is_users(code.co_filename)]
    names = {str(guard.name) for guard in guards}
    found = dict(read((name for name in names if name), values))
    _reject_builtins(guards, function)
    _reject_attributes(codes, names | {str(source.name) for source in sources}, function)
    _reject_classes(codes, found, function)
    _reject_graph(graph, found, function)
    _reject_identity(codes, graph, function)
    if TorchVersion(torch.__version__) < "2.13":  # wrong gradients, or hooks in no order
        for code, line in _lines_with(codes, "register_hook"):
            raise _break_at(code, line, function, f"Torch {torch.__version__} traces hooks of tensors wrongly.")
    if any(isinstance(source, RandomValueSource) for source in sources):
        reason, remedy = "Python draws a random number.", "Draw with torch (torch.rand)."
        for code, line in _lines_with(codes, "random"):
            raise _break_at(code, line, function, reason, remedy)
        raise GraphBreak(function, reason, remedy)
    for name, value in found.items():
        if isinstance(value, deque) and value.maxlen is not None:
            reason = f"{name} is a deque with a maxlen, which Dynamo ignores."
            raise GraphBreak(function, reason, "Keep the last values in a list.")


class _GradFn(VariableTracker):
    """The `grad_fn` of a tensor that has one: not None. What it is remains a graph break."""

    def python_type(self) -> type:
        return torch.autograd.graph.Node


def with_grad_fns() -> contextlib.AbstractContextManager[None]:
    """Let Dynamo answer `x.grad_fn is None` in the block, except of inputs: no guard compares their history."""

    def grad_fn(self: TensorVariable, tx: Any) -> VariableTracker:
        is_param = self.source is not None and issubclass(self.class_type, nn.Parameter)
        if self.requires_grad and not is_param and (self.source is not None or not self.has_grad_fn):
            reason = "It asks for grad_fn of an input, which is another one in each call."
            raise GraphBreak("forward", reason, _ANY_REMEDY)
        return _GradFn() if self.has_grad_fn else ConstantVariable.create(None)

    return replaced(TensorVariable, "method_attr_grad_fn", grad_fn)


def _reject_builtins(guards: Iterable[Any], function: str) -> None:
    for guard in guards:
        name, frames = str(guard.name), list(guard.user_stack or ())
        reason = next((why for builtin, why in _BUILTINS.items() if name.endswith(f"['{builtin}']")), None)
        if reason and guard.create_fn_name() == "BUILTIN_MATCH" and frames and is_users(frames[-1].filename):
            where, source = source_line(frames)
            raise GraphBreak(function, reason, _ANY_REMEDY, where=where, source=source)


def _reject_attributes(codes: Iterable[types.CodeType], names: Iterable[str], function: str) -> None:
    for code in codes:
        if _HISTORY.isdisjoint(code.co_names):  # to read instructions takes long
            continue
        for name, before, line in _attributes(code, "LOAD_ATTR"):
            if name in _HISTORY and before not in _NO_TENSORS:
                raise CaptureError(
                    f"graphshard cannot capture {function} at {code.co_filename}:{line}\n"
                    f"    {linecache.getline(code.co_filename, line).strip()}\n"
                    f"It asks for {name}, which does not belong to the value of a tensor, and is otherwise in a "
                    f"program. {_ANY_REMEDY}"
                )
    for name in names:
        if name.endswith(".grad") and not name.startswith("G["):
            raise CaptureError(
                f"graphshard cannot capture {function}: it asks for {name}, which is accumulated after the call. Take "
                "gradients with torch.autograd.grad in forward, or pass them as arguments."
            )


def _reject_classes(codes: Iterable[types.CodeType], found: Mapping[str, Any], function: str) -> None:
    """Reject attributes of classes that are set by the class's name, and all attributes of a module at once."""
    classes = {value.__name__ for value in found.values() if isinstance(value, type)}
    methods = {getattr(each, "__code__", None) for cls in _classes_of(found) for each in vars(cls).values()}
    for code in codes:
        named = (*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars)
        if classes.isdisjoint(named) and "__dict__" not in named:
            continue
        stored = list(_attributes(code, "STORE_ATTR"))
        changed = {name for name, *_ in stored}
        added_to = [each for each in _attributes(code, "LOAD_ATTR") if each[0] in changed]  # Block.calls += 1
        for name, before, line in (*stored, *added_to):
            if before in classes:
                raise _break_at(code, line, function, f"It sets {before}.{name}, which Dynamo reads as it was.")
        if code in methods:
            for name, before, line in _attributes(code, "LOAD_ATTR"):
                if name == "__dict__" and before == "self":
                    raise _break_at(code, line, function, "It reads all attributes, which no guard compares.")


def _classes_of(found: Mapping[str, Any]) -> set[type]:
    """Return the classes of modules that were read."""
    return {cls for value in found.values() if isinstance(value, nn.Module) for cls in type(value).__mro__}


def _break_at(code: types.CodeType, line: int, function: str, reason: str, remedy: str = _ANY_REMEDY) -> GraphBreak:
    source = linecache.getline(code.co_filename, line).strip()
    return GraphBreak(function, reason, remedy, where=f"{code.co_filename}:{line}", source=source)


def _reject_graph(graph: Graph, found: Mapping[str, Any], function: str) -> None:
    methods = (each for cls in _classes_of(found) for each in vars(cls).values())
    functions = [each for each in (*found.values(), *methods) if isinstance(each, functools._lru_cache_wrapper)]
    wrapped = [each.__wrapped__ for each in functions]
    cached = {each.__code__ for each in wrapped if isinstance(each, types.FunctionType)}
    places = [(code.co_filename, {line for *_, line in code.co_lines()}) for code in cached]
    for node in graph.nodes:
        if getattr(node.target, "__name__", "") in _SETTERS:
            reason = f"It calls {node.target.__name__}, and a program does not change settings of torch."
            remedy = "Set it before the call, or use a context such as torch.autocast in forward."
            raise GraphBreak(function, reason, remedy, where=_line_of(node))
        if type(node.target) in _NUMPY and node.all_input_nodes:
            reason = "numpy computes with values of tensors, and torch rounds otherwise."
            raise GraphBreak(function, reason, "Use the functions of torch.", where=_line_of(node))
        if places and any(file == known and line in lines for file, line in _stack_of(node) for known, lines in places):
            reason = "A function under functools.lru_cache makes a tensor, which eager mode makes once."
            raise GraphBreak(function, reason, "Make the tensor in __init__, as a buffer.", where=_line_of(node))
    modes = [node.args[0] for node in graph.nodes if node.target is set_grad_enabled]
    if modes and modes[-1] != torch.is_grad_enabled():
        reason = f"It leaves gradients {'on' if modes[-1] else 'off'}, and they were not before."
        raise GraphBreak(function, reason, "Use `with torch.set_grad_enabled(...)`.")


def _reject_identity(codes: Iterable[types.CodeType], graph: Graph, function: str) -> None:
    """Reject `x.any().item() is True`, which Dynamo says is False: a symbol is no Python bool."""
    are_read = any(isinstance(node.meta.get("example_value"), torch.SymBool) for node in graph.nodes)
    for code in codes:
        if not are_read and "item" not in code.co_names:  # torch 2.11 drops what only `is` asks for
            continue
        before = None
        for each, line in _instructions(code):
            if each.opname == "IS_OP" and isinstance(before, bool):
                raise _break_at(code, line, function, "It asks `is` of a bool that may be read from a tensor.")
            before = each.argval


def _lines_with(codes: Iterable[types.CodeType], name: str) -> Iterator[tuple[types.CodeType, int]]:
    """Yield code that reads a global or an attribute of this name, and the line."""
    for code in codes:
        yield from ((code, line) for each, line in _instructions(code) if each.argval == name)


def _instructions(code: types.CodeType) -> Iterator[tuple[dis.Instruction, int]]:
    """Yield instructions with their lines."""
    line = code.co_firstlineno
    for each in dis.get_instructions(code):
        starts: Any = getattr(each, "line_number", None) or each.starts_line
        line = starts if type(starts) is int else line
        yield each, line


def _attributes(code: types.CodeType, opname: str) -> Iterator[tuple[str, Any, int]]:
    """Yield names of attributes that code reads or sets, with the name before and the line."""
    before = None
    for each, line in _instructions(code):
        is_method = sys.version_info >= (3, 12) and opname == "LOAD_ATTR" and bool((each.arg or 0) & 1)
        if each.opname == opname and not is_method:
            yield each.argval, before, line
        before = before if each.opname in ("COPY", "DUP_TOP", "SWAP") else each.argval


def _stack_of(node: Node) -> list[tuple[str, int]]:
    """Return file and line of each frame that made a node."""
    frames = _FRAME.findall(str(node.meta.get("stack_trace") or ""))
    return [(file, int(line)) for file, line in frames]


def _line_of(node: Node) -> str:
    """Return where a node was made, as "file:line"."""
    frames = [frame for frame in _stack_of(node) if is_users(frame[0])]
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""
