"""The module made of an exported program: its parameters under their names, and calls of its submodules as at export.

Containers come back as such, so that repeated blocks are found: a module whose children are numbered and that was not
called itself is an `nn.ModuleList`, and one that was an `nn.Sequential` is one. Submodules whose calls are equal share
a class, which is how capture knows equal blocks. Parameters, buffers and constants are tied as they were, and checked
against the graph.

`torch.export` fixes what is not declared dynamic: the structure of inputs, values, sizes. A call that differs is an
InputError: it would compute another thing.
"""

from __future__ import annotations

import linecache
import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.fx import GraphModule, Node

from graphshard.errors import ArgumentError, InputError, UnsupportedError
from graphshard.exported.program_code import ProgramCode, is_name, module_names
from graphshard.torch_compat.fake_tensors import FakeTensor
from graphshard.torch_compat.torch_ops import OpOverload, pytree
from graphshard.utils.text import brief, users_class

# Guards of torch.export that sizes say already: two sizes are equal, or a size is a number.
_OF_SIZES = re.compile(r"L(\[[^\]]*\])+\.size\(\)\[\d+\] == (L(\[[^\]]*\])+\.size\(\)\[\d+\]|\d+)")


@dataclass(frozen=True)
class ProgramInputs:
    """What a program takes and returns.

    Attributes:
        names: of the arguments that were given by position at export, and `keywords` of the others.
        leaves: paths of the leaves of the inputs, and each one's fake tensor, size as a symbol, or constant.
        ranges: smallest and largest value of each dynamic size; None is no limit.
        guards: further conditions on the inputs, as torch.export checks them; None if there are none.
    """

    names: tuple[str, ...]
    keywords: tuple[str, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    leaves: tuple[tuple[str, Any], ...]
    ranges: Mapping[Any, tuple[int, int | None]]
    guards: nn.Module | None

    @classmethod
    def of(cls, program: ExportedProgram) -> ProgramInputs:
        """Read the signature of a program."""
        call = program.module_call_graph[0].signature
        in_spec, out_spec = program.call_spec.in_spec, program.call_spec.out_spec
        positional, named = in_spec.children()
        keywords = tuple(map(str, named.context))
        names = tuple((call.forward_arg_names if call is not None else None) or ())
        given = names[: positional.num_children]
        if len(given) != positional.num_children or not all(map(is_name, (*given, *keywords))):
            given = tuple(f"arg_{i}" for i in range(positional.num_children))
        if not all(map(is_name, keywords)):
            raise UnsupportedError(f"model: the program takes {brief(keywords)}, which are no names of arguments.")
        specs = zip(program.graph.find_nodes(op="placeholder"), program.graph_signature.input_specs, strict=True)
        values = [
            spec.arg.value if isinstance(spec.arg, ConstantArgument) else node.meta.get("val")
            for node, spec in specs
            if spec.kind is InputKind.USER_INPUT
        ]
        tree = pytree.tree_unflatten(list(range(len(values))), in_spec)
        paths = [
            "".join([name, *map(str, path)])
            for name, part in zip((*given, *keywords), (*tree[0], *tree[1].values()))
            for path, _ in pytree.tree_flatten_with_path(part)[0]
        ]
        ranges = {symbol: _range(found) for symbol, found in program.range_constraints.items()}
        leaves = tuple(zip(paths, values, strict=True))
        return cls(given, keywords, in_spec, out_spec, leaves, ranges, _guards_of(program))

    def error(self, model: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> InputError | None:
        """Return what is wrong with the inputs of a call; None if the program is for such inputs."""
        given, spec = pytree.tree_flatten((args, kwargs))
        if spec != self.in_spec:
            return InputError(
                f"{model}: the inputs have another structure than those that the program was exported for. Given was "
                f"{brief(str(spec))}, expected is {brief(str(self.in_spec))}."
            )
        sizes: dict[Any, Any] = {}
        for (path, expected), value in zip(self.leaves, given, strict=True):
            wrong = self._wrong(f"input {path}", expected, value, sizes)
            if wrong:
                return InputError(f"{model}: {wrong}")
        try:
            self.check_conditions(given)
        except AssertionError as error:
            return InputError(
                f"{model}: the inputs break a condition that the program was exported under: {error}. Export the "
                "module for such inputs."
            )
        return None

    def check_conditions(self, leaves: Sequence[Any]) -> None:
        """Raise AssertionError if the leaves of inputs break a condition that the program was exported under."""
        if self.guards is not None:
            self.guards(*leaves)

    def _wrong(self, input_: str, expected: Any, value: Any, sizes: dict[Any, Any]) -> str:
        """Say what is wrong with a leaf; "" if nothing is."""
        if isinstance(expected, torch.SymInt):
            return self._wrong_size(f"{input_} is {_shown(value)}", value, expected, sizes)
        if not isinstance(expected, torch.Tensor):
            if type(value) is type(expected) and value == expected:
                return ""
            return (
                f"{input_} must be {brief(expected)}, which was fixed at export, got {brief(value)}. Export the module "
                "with this value."
            )
        if not isinstance(value, torch.Tensor) or value.dim() != expected.dim():
            shown = f"a tensor of {value.dim()} dims" if isinstance(value, torch.Tensor) else brief(value)
            return f"{input_} must be a tensor of {expected.dim()} dims, as at export, got {shown}."
        if value.dtype != expected.dtype and not (value.is_floating_point() and expected.is_floating_point()):
            return f"{input_} must be of {expected.dtype}, as at export, got {value.dtype}."
        found = (
            self._wrong_size(f"{input_} has size {_shown(size)} in dim {dim}", size, wanted, sizes)
            for dim, (size, wanted) in enumerate(zip(value.shape, expected.shape))
        )
        return next(filter(None, found), "")

    def _wrong_size(self, what: str, size: Any, wanted: Any, sizes: dict[Any, Any]) -> str:
        """Say what is wrong with a size; the first size that is a symbol by itself decides what the symbol is."""
        expression = wanted.node.expr if isinstance(wanted, torch.SymInt) else wanted
        limit = ""
        if isinstance(expression, int) or expression.is_number:
            limit = "" if size == int(expression) else f"and was exported for {expression}"
        elif expression in sizes:
            limit = "" if size == sizes[expression] else "and a dim that had the same size at export has another one"
        elif expression.is_symbol:
            sizes[expression] = size
            low, high = self.ranges.get(expression, (0, None))
            if size < low or (high is not None and size > high):
                limit = f"and was exported for {low} to {'any' if high is None else high}"
        elif isinstance(size, int) and expression.free_symbols <= sizes.keys():
            known = {symbol: sizes[symbol] for symbol in expression.free_symbols}
            if all(isinstance(value, int) for value in known.values()) and size != int(expression.subs(known)):
                limit = f"and was exported for {expression}, which is {expression.subs(known)}"
        return f"{what} {limit}. Export the module with dynamic_shapes that allow this size." if limit else ""

    def dynamic_shapes(self) -> dict[str, Any] | None:
        """Return the sizes that may vary, in torch.export's format; None if there are none."""
        dims: dict[Any, Any] = {}
        entries: list[dict[int, Any]] = []
        for _, value in self.leaves:
            entries.append({})
            for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                if not isinstance(size, torch.SymInt) or size.node.expr.is_number:
                    continue
                expr = size.node.expr
                if expr.is_symbol and expr not in dims:
                    low, high = self.ranges.get(expr, (0, None))
                    dims[expr] = Dim(str(size) if is_name(str(size)) else f"size{len(dims)}", min=low, max=high)
                # A size that derives from another is found out while the program is captured.
                entries[-1][dim] = dims.get(expr, Dim.AUTO)
        if not dims:
            return None
        args, kwargs = pytree.tree_unflatten([entry or None for entry in entries], self.in_spec)
        return {**dict(zip(self.names, args)), **kwargs}


def _shown(size: Any) -> str:
    """Return a size for a message; while a program is captured it may be a symbol that the user does not know."""
    return str(size) if isinstance(size, int) else "n"


def _range(found: Any) -> tuple[int, int | None]:
    low, high = (int(end) if getattr(end, "is_Integer", False) else None for end in (found.lower, found.upper))
    return max(low or 0, 0), high if high is not None and high < 1 << 62 else None


def _guards_of(program: ExportedProgram) -> nn.Module | None:
    """Return the module that checks what sizes do not say, such as that one is larger than another."""
    code = getattr(program, "_guards_code", None) or []
    if all(_OF_SIZES.fullmatch(line) for line in code):
        return None
    guards = getattr(program.module(), "_guards_fn", None)
    if guards is None:
        raise UnsupportedError(
            f"model: the program was exported under the condition {brief(code[0])}, which cannot be checked, as the "
            "program has no example inputs. Export the module again, and keep them."
        )
    return guards


def forward_function(inputs: ProgramInputs) -> str:
    """Return the code of a forward with the names of the arguments that the exported module had.

    Dynamo traces the conditions alone, and guards on sizes and dtypes. The rest is checked before a trace.
    """
    args = "".join(f"{name}, " for name in inputs.names)
    kwargs = ", ".join(f"{name!r}: {name}" for name in inputs.keywords)
    given = f"({args}), {{{kwargs}}}"
    return f"""def forward({", ".join(["self", *inputs.names, *inputs.keywords])}):
    if torch.compiler.is_dynamo_compiling():
        self.check_conditions({given})
    else:
        wrong = self.wrong_inputs({given})
        if wrong is not None:
            raise wrong
    return self.run_program({given})
"""


_SEQUENTIAL = "torch.nn.modules.container.Sequential"
# Module of the classes that are made.
HOME = "exported_program"
# Arguments of operators that differ between train() and eval().
_MODE_FLAGS = ("train", "training", "use_input_stats", "is_training")


class ProgramPart(nn.Module):
    """A submodule of an exported program; functions of its class are its calls in their order."""

    # The mode that the program was exported in, if it depends on it. True is train().
    _program_mode: ClassVar[bool | None] = None

    def forward(self, *inputs: Any, call: int = 0) -> Any:
        return getattr(type(self), f"_program_call_{call}")(self, *inputs)

    def train(self, mode: bool = True) -> ProgramPart:
        """Set the mode; raise UnsupportedError if a program with dropout or the like was exported in the other."""
        exported = type(self)._program_mode
        if exported is not None and mode != exported:
            name = {True: "train()", False: "eval()"}
            raise UnsupportedError(
                f"{users_class(self).__name__} was exported in {name[exported]} mode, which is fixed in the program. "
                f"Export the module in {name[mode]} mode as another program, and load the state_dict of this one."
            )
        super().train(mode)
        return self


class ProgramModule(ProgramPart):
    """The root module of an exported program."""

    # What it takes, args and kwargs of an example, and the floating-point dtypes that it names, with places.
    program_inputs: ClassVar[ProgramInputs]
    program_examples: ClassVar[tuple[Any, Any] | None] = None
    program_casts: ClassVar[Sequence[tuple[torch.dtype, str]]] = ()

    def wrong_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> InputError | None:
        """Return what is wrong with the inputs of a call; None if the program is for such inputs."""
        return self.program_inputs.error(users_class(self).__name__, args, kwargs)

    def check_conditions(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise AssertionError if inputs break a condition that the program was exported under."""
        self.program_inputs.check_conditions(pytree.tree_leaves((args, kwargs)))

    def run_program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the results of a call whose inputs were checked."""
        results = type(self)._program_call_0(self, *pytree.tree_leaves((args, kwargs)))  # type: ignore[attr-defined]
        return pytree.tree_unflatten(list(results), self.program_inputs.out_spec)


def module_from(program: ExportedProgram) -> ProgramModule:
    """Make the module of a program that was exported for training; its errors are those of `module_of`."""
    state = state_of(program)
    code, mode, names = ProgramCode.of(program, state.names), _mode_of(program), module_names(program)
    classes: dict[Any, type[ProgramPart]] = {}  # equal code is one class
    children: dict[str, set[str]] = {}
    for name in names:
        owner, _, last = name.rpartition(".")
        children.setdefault(owner, set()).add(last)
    with_tensors = {name.rpartition(".")[0] for name in (*program.state_dict, *program.constants)}

    def part(path: str) -> nn.Module:
        """Make a submodule, without its parameters and submodules."""
        calls, kind = code.calls.get(path, []), code.kinds.get(path, "")
        if path in children and not calls and path not in with_tensors and all(map(str.isdecimal, children[path])):
            return nn.ModuleList()
        key = (kind, *(call.text(commented=False) for call in calls))
        if key not in classes:
            name, bases = _class_name(kind, "Module"), (ProgramPart,)
            functions = {
                f"_program_call_{i}": _function(
                    call.text(commented=True), f"{name} {path}{f' (call {i})' if i else ''}"
                )
                for i, call in enumerate(calls)
            }
            own = {**functions, "__module__": HOME, "_program_mode": mode}
            classes[key] = type(name, (*bases, nn.Sequential) if kind == _SEQUENTIAL else bases, own)
        return classes[key]()

    (call,) = code.calls[""]
    name, inputs = _class_name(code.kinds.get("", ""), "ExportedProgram"), ProgramInputs.of(program)
    own = {
        "_program_call_0": _function(call.text(commented=True), name),
        "forward": _function(forward_function(inputs), f"{name}.forward"),
        "program_inputs": inputs,
        "program_examples": program.example_inputs or None,
        "program_casts": tuple(code.casts),
        "__module__": HOME,
        "_program_mode": mode,
    }
    root: ProgramModule = type(name, (ProgramModule,), own)()
    modules: dict[str, nn.Module] = {"": root}
    paths = [entry.fqn.partition("@")[0] for entry in program.module_call_graph if entry.fqn]
    for path in dict.fromkeys((*paths, *sorted(names))):
        owner, _, name = path.rpartition(".")
        modules[path] = part(path)
        modules[owner].register_module(name, modules[path])
    for path, tensor in state.tensors.items():
        owner, _, attribute = path.rpartition(".")
        if isinstance(tensor, nn.Parameter):
            modules[owner].register_parameter(attribute, tensor)
        elif path in state.constants:
            setattr(modules[owner], attribute, tensor)
        else:
            modules[owner].register_buffer(attribute, tensor, persistent=path not in state.transient)
    for module in modules.values():
        module.training = mode is not False
    return root


def _class_name(kind: str, otherwise: str) -> str:
    return re.sub(r"\W", "_", kind.rpartition(".")[2]) or otherwise


def _function(text: str, title: str) -> Any:
    """Compile a function; messages about it show its lines."""
    file = f"exported program: {title}"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    # Without a name: Dynamo would import the module that owns the globals.
    found: dict[str, Any] = {"torch": torch, "math": math, "operator": operator}
    exec(compile(text, file, "exec"), found)
    return found["forward" if text.startswith("def forward(") else "call"]


def _mode_of(program: ExportedProgram) -> bool | None:
    """Return whether a program was exported in train() mode; None if it is the same in both."""
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, GraphModule)]
    nodes = (node for graph in graphs for node in graph.nodes if isinstance(node.target, OpOverload))
    found = {flag for node in nodes for flag in _flags(node)}
    return (True in found) if found else None


def _flags(node: Node) -> Iterator[bool]:
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    given = {**{a.name: value for a, value in zip(arguments, node.args)}, **node.kwargs}
    if given.get("dropout_p", 0.0) != 0.0:
        yield True
    if given.get("p", 1.0) == 0.0 or given.get("dropout", 1.0) == 0.0:
        return
    yield from (given[name] for name in _MODE_FLAGS if isinstance(given.get(name), bool))  # type: ignore[misc]


# --- parameters, buffers and constants ----------------------------------------------------------------------------


@dataclass
class ProgramState:
    """Tensors of a program by their names, in the order of the state dict; tied ones are one object.

    Attributes:
        names: all names of the tensor of an input of the graph, by the name of the input.
        constants, transient: names of tensors that are no parameters nor buffers, and of buffers not in the state dict.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)
    transient: set[str] = field(default_factory=set)


def state_of(program: ExportedProgram) -> ProgramState:
    """Return the tensors of a program, checked against its graph. Buffers are copied, as training writes them."""
    _check(program)
    state = ProgramState()
    known: dict[Any, torch.Tensor] = {}
    names: dict[int, list[str]] = {}
    buffers = {s.target: s.persistent for s in program.graph_signature.input_specs if s.kind is InputKind.BUFFER}
    for name, tensor in (*program.state_dict.items(), *program.constants.items()):
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedError(
                f"model: the program holds {name}, a {type(tensor).__name__}, and graphshard takes tensors only. "
                "Compile the module that was exported instead."
            )
        tensor = _without_fakes(tensor)
        key = _place(tensor)
        if key not in known:
            known[key] = tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone()
        state.tensors[name] = known[key]
        names.setdefault(id(known[key]), []).append(name)
        if name in program.constants:
            (state.transient if name in buffers else state.constants).add(name)
    for spec in program.graph_signature.input_specs:
        if spec.target is not None and spec.target in state.tensors:
            state.names[spec.arg.name] = tuple(names[id(state.tensors[spec.target])])
    return state


def _without_fakes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the meta device, if it is one that holds no values."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(meta, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what is equal for tensors that are one: a file has a tensor for each name of a tied parameter."""
    if tensor.is_meta or type(tensor) not in (torch.Tensor, nn.Parameter):  # all on meta have one address in a file
        return (id(tensor),)
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), isinstance(tensor, nn.Parameter)


def _check(program: ExportedProgram) -> None:
    """Raise ArgumentError unless the state dict fits the graph."""
    held: Mapping[str, Any] = {**program.constants, **program.state_dict}
    placeholders = program.graph.find_nodes(op="placeholder")
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.kind in (InputKind.CUSTOM_OBJ, InputKind.TOKEN):
            raise UnsupportedError(
                f"model: the program takes {spec.target or spec.arg.name}, which is not a tensor. Compile the "
                "module that was exported instead."
            )
        if spec.kind is InputKind.USER_INPUT:
            continue
        name, expected = spec.target, node.meta["val"]
        found = held.get(name) if name is not None else None
        kind = spec.kind.name.lower().replace("_", " ")
        if found is None:
            raise ArgumentError(
                f"model: {kind} {name} is not in the program's state_dict. It has {brief(list(program.state_dict))}. "
                "Put it back, or export the module again."
            )
        if isinstance(found, torch.Tensor) and (found.shape, found.dtype) != (expected.shape, expected.dtype):
            raise ArgumentError(
                f"model: {kind} {name} has shape {list(found.shape)} and dtype {found.dtype} in the program's "
                f"state_dict, and {list(expected.shape)} and {expected.dtype} in its graph. Put back what was there, "
                "or export the module again."
            )
