"""Python code of an exported graph, one function per call of a module.

A program of `torch.export` is one flat list of operators. `nn_module_stack` says in which calls of modules each ran.
FSDP2 acts where a call of a unit starts and ends (casts, one node of autograd), so the calls are restored:

    embedding   emb                    def call_0(self, x0):                       # of the root
    linear      layers.0, layers.0.up      embedding_0 = self.emb(x0)
    tanh        layers.0                   layers_0 = getattr(self.layers, "0")(embedding_0)
    mul                                    mul_0 = torch.ops.aten.mul.Tensor(layers_0, ...)

Equal calls have equal code: values are numbered within a call, and parameters are read from `self`.
"""

from __future__ import annotations

import functools
import itertools
import keyword
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Graph, Node

from graphshard.errors import UnsupportedError
from graphshard.ir.graph import place_of
from graphshard.torch_compat.torch_ops import HigherOrderOperator, OpOverload, pytree
from graphshard.utils.text import brief

STATE = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
# Asserts what the dtype was at export; with a mixed-precision policy it is another one.
_DROPPED = "aten._assert_tensor_metadata.default"
_GRAD, _AUTOCAST = "wrap_with_set_grad_enabled", "wrap_with_autocast"

# Modules of functions that are arithmetic of sizes.
ARITHMETIC = (operator, math)


@dataclass(frozen=True)
class Scope:
    """A call of a module of a class, or a region under a context manager such as `torch.no_grad()`, as code."""

    key: str
    path: str
    kind: str = ""
    context: str = ""


class _Item(NamedTuple):
    node: Node
    scopes: tuple[Scope, ...]


@dataclass
class ProgramCode:
    """Code of a program.

    Attributes:
        calls: of each module that is called, its calls in order.
        kinds: qualified names of the classes of these modules; "" is the root.
        casts: places where the graph names a floating-point dtype.
    """

    program: ExportedProgram
    names: Mapping[str, Sequence[str]]
    calls: dict[str, list[CallCode]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    casts: list[tuple[torch.dtype, str]] = field(default_factory=list)
    _items: list[_Item] = field(default_factory=list)
    _same_as: dict[Node, Any] = field(default_factory=dict)
    _last_use: dict[Node, int] = field(default_factory=dict)

    @classmethod
    def of(cls, program: ExportedProgram, names: Mapping[str, Sequence[str]]) -> ProgramCode:
        """Write the code of a program; `names` are all names of each tensor that it holds, by each of them."""
        code, graph = cls(program, names), program.graph
        code._flatten(graph, (), program.graph_module)
        end = len(code._items)
        results = list(map(code._resolved, graph.output_node().args[0]))
        uses = [(place, used) for place, item in enumerate(code._items) for used in item.node.all_input_nodes]
        for place, used in [*uses, *((end, result) for result in results)]:
            if isinstance(found := code._resolved(used), Node):
                code._last_use[found] = place
        writer = CallWriter("", names, code._resolved)
        specs = zip(graph.find_nodes(op="placeholder"), program.graph_signature.input_specs, strict=True)
        writer.inputs = [node for node, spec in specs if spec.kind not in STATE]
        code._write(writer, 0, end, 0)
        code.calls[""] = [writer.finish(results)]
        return code

    def _flatten(self, graph: Graph, outer: tuple[Scope, ...], owner: Any) -> None:
        """List the operators of a graph and of its regions, with the calls that they are in."""
        for node in graph.nodes:
            if node.op != "call_function" or str(node.target) == _DROPPED:
                continue
            if isinstance(node.target, HigherOrderOperator):
                self._enter_region(node, outer, owner)
            elif node.target is not operator.getitem or node not in self._same_as:  # a result of a region
                self._check(node)
                if _returns_first(node.target):
                    self._same_as[node] = node.args[0]
                self._items.append(_Item(node, (*outer, *self._scopes(node)[_depth(outer) :])))

    def _enter_region(self, node: Node, outer: tuple[Scope, ...], owner: Any) -> None:
        name = str(node.target)
        if name == _GRAD:
            enabled, body, *args = node.args
            context = f"torch.set_grad_enabled({bool(enabled)})"
        elif name == _AUTOCAST:
            device, dtype, enabled, cached, body, *args = node.args
            context = f"torch.autocast({', '.join(map(literal, (device, dtype, enabled, cached)))})"
        else:
            raise UnsupportedError(
                f"model: the program has the operator {name}{place_of(node)}, which graphshard cannot take from a "
                "program. Compile the module that was exported instead."
            )
        assert isinstance(body, Node)
        region = getattr(owner, str(body.target))
        self._same_as |= zip(region.graph.find_nodes(op="placeholder"), args, strict=True)
        depth = _depth(outer)
        common = self._scopes(node)[depth:]
        for inner in region.graph.nodes:
            if inner.op == "call_function" and (scopes := self._scopes(inner)):
                common = tuple(a for a, b in zip(common, scopes[depth:]) if a == b)
        path = common[-1].path if common else outer[-1].path if outer else ""
        self._flatten(region.graph, (*outer, *common, Scope(node.name, path, context=context)), region)
        results = region.graph.output_node().args[0]
        self._same_as |= {user: results[user.args[1]] for user in node.users if user.target is operator.getitem}

    def _scopes(self, node: Node) -> tuple[Scope, ...]:
        """Return the calls that an operator ran in, from the outside in, while each is in the one before."""
        found: list[Scope] = []
        for key, (path, kind) in (node.meta.get("nn_module_stack") or {}).items():
            path = path.partition("@")[0]
            if path == "":
                self.kinds.setdefault("", qualified_name(kind))
                continue
            if path not in self._modules or (found and not path.startswith(f"{found[-1].path}.")):
                break
            found.append(Scope(key, path, qualified_name(kind)))
        return tuple(found)

    @functools.cached_property
    def _modules(self) -> frozenset[str]:
        return module_names(self.program)

    def _check(self, node: Node) -> None:
        """Raise UnsupportedError for a function that is neither an operator nor arithmetic of sizes."""
        target = node.target
        is_sym = getattr(torch, getattr(target, "__name__", ""), None) is target
        if not (isinstance(target, OpOverload) or is_sym or any(target in vars(m).values() for m in ARITHMETIC)):
            raise UnsupportedError(
                f"model: the program calls {brief(target)}{place_of(node)}, which is not an operator. Export the "
                "module again with torch.export.export."
            )
        if not all(map(is_name, node.kwargs)):
            raise UnsupportedError(f"model: {target} in the program has the argument {brief(list(node.kwargs))}.")
        for value in pytree.tree_leaves((node.args, node.kwargs)):
            if isinstance(value, torch.dtype) and value.is_floating_point:
                self.casts.append((value, f"{target}{place_of(node)}"))

    def _resolved(self, value: Any) -> Any:
        while isinstance(value, Node) and value in self._same_as:
            value = self._same_as[value]
        return value

    def _write(self, writer: CallWriter, first: int, end: int, depth: int) -> None:
        """Write operators of one call, or region, and calls within it."""
        for scope, begin, last in self._within(first, end, depth):
            for item in self._items[first:begin]:
                writer.write(item.node)
            if scope.context:
                writer.enter(scope.context)
                self._write(writer, begin, last + 1, depth + 1)
                writer.leave()
            else:
                inner = CallWriter(scope.path, self.names, self._resolved)
                self._write(inner, begin, last + 1, depth + 1)
                made = [item.node for item in self._items[begin : last + 1]]
                calls = self.calls.setdefault(scope.path, [])
                calls.append(inner.finish([node for node in made if self._last_use.get(node, -1) > last]))
                self.kinds.setdefault(scope.path, scope.kind)
                writer.call(scope.path, len(calls) - 1, calls[-1])
            first = last + 1
        for item in self._items[first:end]:
            writer.write(item.node)

    def _within(self, first: int, end: int, depth: int) -> list[tuple[Scope, int, int]]:
        """Return calls within a call, with the places of their first and last operators."""
        spans: dict[Scope, list[int]] = {}
        for place in range(first, end):
            scopes = self._items[place].scopes
            if len(scopes) > depth:
                spans.setdefault(scopes[depth], [place, place])[1] = place
        found = [(scope, begin, last) for scope, (begin, last) in spans.items()]
        for (one, _, last), (other, begin, _) in itertools.pairwise(found):
            if begin <= last:
                raise UnsupportedError(
                    f"model: the operators of {one.path} and {other.path} are interleaved in the program, and calls of "
                    "modules cannot be told apart. Export the module again, without passes that reorder the graph."
                )
        return found


def module_names(program: ExportedProgram) -> frozenset[str]:
    """Return the names of the modules of a program, but for the root."""
    names = [entry.fqn.partition("@")[0] for entry in program.module_call_graph]
    names += [name.rpartition(".")[0] for name in (*program.state_dict, *program.constants)]
    parts = [name.split(".") for name in names if name]
    return frozenset(".".join(name[:end]) for name in parts for end in range(1, len(name) + 1))


def _depth(scopes: Sequence[Scope]) -> int:
    """Count calls of modules."""
    return sum(not scope.context for scope in scopes)


def qualified_name(kind: Any) -> str:
    """Return the name of a class, which a program of a file holds as text."""
    return kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"


def _returns_first(target: Any) -> bool:
    """Return whether an operator writes its first argument and returns it: in Python both are one object."""
    schema = getattr(target, "_schema", None)
    if schema is None or len(schema.returns) != 1 or not schema.arguments:
        return False
    writes = schema.returns[0].alias_info, schema.arguments[0].alias_info
    return all(alias is not None and alias.is_write for alias in writes)


# --- code of one call ---------------------------------------------------------------------------------------------


@dataclass
class CallCode:
    """Code of one call: a function of its inputs, and where in the user's code each line of its body comes from."""

    inputs: list[Node]
    outputs: list[Any]
    lines: list[tuple[str, str]]

    def text(self, *, commented: bool) -> str:
        """Return the function, with the places of the model's code as comments or without."""
        names = "".join(f", x{i}" for i in range(len(self.inputs)))
        lines = [f"    {line}{f'  # {place}' if place and commented else ''}" for line, place in self.lines]
        return "\n".join([f"def call(self{names}):", *(lines or ["    pass"]), ""])


class CallWriter:
    """Writes the code of one call of the module of a path; `names` are all names of each input of the graph."""

    def __init__(self, path: str, names: Mapping[str, Sequence[str]], resolved: Callable[[Any], Any]) -> None:
        self._prefix, self._names, self._resolved = f"{path}." if path else "", names, resolved
        self.inputs: list[Node] = []
        self.lines: list[tuple[str, str]] = []
        self._named: dict[Node, str] = {}
        self._counts: Counter[str] = Counter()
        self._indent = 0

    def write(self, node: Node) -> None:
        args = [self.text(value) for value in node.args]
        args += [f"{name}={self.text(value)}" for name, value in node.kwargs.items()]
        target: Any = node.target
        if isinstance(target, OpOverload):
            name, function = target._schema.name.rpartition("::")[2], f"torch.ops.{target}"
        else:
            home = next((module.__name__ for module in ARITHMETIC if target in vars(module).values()), "torch")
            name, function = target.__name__, f"{home}.{target.__name__}"
        self._line(f"{self._new(node, name.strip('_') or 'value')} = {function}({', '.join(args)})", node)

    def call(self, path: str, number: int, code: CallCode) -> None:
        """Write the call of a submodule."""
        args = [self.text(value) for value in code.inputs] + ([f"call={number}"] if number else [])
        name = re.sub(r"\W", "_", path.removeprefix(self._prefix))
        results = ", ".join(self._new(node, f"of_{name}") for node in code.outputs)
        called = f"{self._attribute(path)}({', '.join(args)})"
        self._line(f"{results} = {called}" if results else called)

    def enter(self, context: str) -> None:
        self._line(f"with {context}:")
        self._indent += 1
        self._line("pass")

    def leave(self) -> None:
        self._indent -= 1

    def finish(self, results: list[Any]) -> CallCode:
        """Write what the call returns, one value, or several as a tuple, and return its code."""
        texts = list(map(self.text, results))
        if not self._prefix or len(texts) > 1:
            self._line(f"return ({''.join(f'{text}, ' for text in texts)})")
        elif texts:
            self._line(f"return {texts[0]}")
        return CallCode(self.inputs, results, self.lines)

    def text(self, value: Any) -> str:
        """Return an argument as code."""
        value = self._resolved(value)
        if isinstance(value, Node):
            # A parameter has a name within this module; other values of other calls are passed in.
            state = self._names.get(value.name, ()) if value.op == "placeholder" else ()
            path = next((name for name in state if name.startswith(self._prefix)), None)
            if value in self._named or path is not None:
                return self._named[value] if value in self._named else self._attribute(path or "")
            if value not in self.inputs:
                self.inputs.append(value)
            return f"x{self.inputs.index(value)}"
        if isinstance(value, (list, tuple)):
            inside = ", ".join(map(self.text, value))
            return f"[{inside}]" if isinstance(value, list) else f"({inside},)" if inside else "()"
        if isinstance(value, slice):
            return f"slice({self.text(value.start)}, {self.text(value.stop)}, {self.text(value.step)})"
        return literal(value)

    def _attribute(self, path: str) -> str:
        text = "self"
        for part in path.removeprefix(self._prefix).split("."):
            text = f"{text}.{part}" if is_name(part) else f"getattr({text}, {part!r})"
        return text

    def _new(self, node: Node, base: str) -> str:
        name = self._named[node] = f"{base}_{self._counts[base]}"
        self._counts[base] += 1
        return name

    def _line(self, text: str, node: Node | None = None) -> None:
        place = "" if node is None else place_of(node).removeprefix(" at ")
        self.lines.append(("    " * self._indent + text, place))


def literal(value: Any) -> str:
    """Return a constant as code."""
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if value is None or type(value) in (bool, int, float, complex, str):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    raise UnsupportedError(
        f"model: the program has the constant {brief(value)}, which cannot be written as code. Compile the module that "
        "was exported instead."
    )


def is_name(text: str) -> bool:
    """Return whether a text can be a name in Python code."""
    return text.isidentifier() and not keyword.iskeyword(text)
