"""The module made of an exported program: its parameters under their names, and calls of its submodules as at export.

Containers come back as such, so that repeated blocks are found: a module whose children are numbered and that was not
called itself is an `nn.ModuleList`, and one that was an `nn.Sequential` is one. Submodules whose calls are equal share
a class, which is how capture knows equal blocks. Parameters, buffers and constants are tied as they were, and checked
against the graph.
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
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from graphshard.errors import ArgumentError, InputError, UnsupportedError
from graphshard.exported.program_code import ProgramCode, module_names
from graphshard.exported.program_inputs import ProgramInputs, forward_function
from graphshard.torch_compat.fake_tensors import FakeTensor
from graphshard.torch_compat.torch_ops import OpOverload, pytree
from graphshard.utils.text import brief, users_class

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
        """Set the mode; a program with dropout or the like keeps the one that it was exported in.

        Raises:
            UnsupportedError: the program was exported in the other mode.
        """
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

    _program_inputs: ClassVar[ProgramInputs]
    _program_examples: ClassVar[tuple[Any, Any] | None] = None
    _program_casts: ClassVar[Sequence[tuple[torch.dtype, str]]] = ()

    @classmethod
    def program_inputs(cls) -> ProgramInputs:
        """Return what the program takes."""
        return cls._program_inputs

    @classmethod
    def program_examples(cls) -> tuple[Any, Any] | None:
        """Return args and kwargs of a call, if the program holds any."""
        return cls._program_examples

    @classmethod
    def program_casts(cls) -> Sequence[tuple[torch.dtype, str]]:
        """Return the floating-point dtypes that the program names, and where."""
        return cls._program_casts

    def wrong_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> InputError | None:
        """Return what is wrong with the inputs of a call; None if the program is for such inputs."""
        return type(self)._program_inputs.error(users_class(self).__name__, args, kwargs)

    def check_conditions(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise AssertionError if inputs break a condition that the program was exported under."""
        type(self)._program_inputs.check_conditions(pytree.tree_leaves((args, kwargs)))

    def run_program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the results of a call whose inputs were checked."""
        results = type(self)._program_call_0(self, *pytree.tree_leaves((args, kwargs)))  # type: ignore[attr-defined]
        return pytree.tree_unflatten(list(results), type(self)._program_inputs.out_spec)


def module_from(program: ExportedProgram) -> ProgramModule:
    """Make the module of a program that was exported for training.

    Raises:
        ArgumentError: its state dict does not fit.
        UnsupportedError: it has operators that cannot be called from a module.
    """
    state = state_of(program)
    code = ProgramCode.of(program, state.names)
    classes = _Classes(code, _mode_of(program))
    root = classes.root(ProgramInputs.of(program), program.example_inputs or None)
    modules: dict[str, nn.Module] = {"": root}
    paths = [entry.fqn.partition("@")[0] for entry in program.module_call_graph if entry.fqn]
    for path in dict.fromkeys((*paths, *sorted(module_names(program)))):
        owner, _, name = path.rpartition(".")
        modules[path] = classes.part(path)
        modules[owner].register_module(name, modules[path])
    for name, tensor in state.tensors.items():
        owner, _, attribute = name.rpartition(".")
        if isinstance(tensor, nn.Parameter):
            modules[owner].register_parameter(attribute, tensor)
        elif name in state.constants:
            setattr(modules[owner], attribute, tensor)
        else:
            modules[owner].register_buffer(attribute, tensor, persistent=name not in state.transient)
    for module in modules.values():
        module.training = classes.mode is not False
    return root


class _Classes:
    """Makes classes of modules; equal code is one class."""

    def __init__(self, code: ProgramCode, mode: bool | None) -> None:
        self._code, self.mode = code, mode
        self._made: dict[Any, type[ProgramPart]] = {}
        names = {path.rpartition(".")[0] for path in module_names(code.program)} - {""}
        self._lists = {
            path for path in names - code.calls.keys() if all(map(str.isdecimal, _children(code.program, path)))
        }

    def root(self, inputs: ProgramInputs, examples: tuple[Any, Any] | None) -> ProgramModule:
        """Make the root module."""
        (call,) = self._code.calls[""]
        name = _class_name(self._code.kinds.get("", ""), "ExportedProgram")
        forward = forward_function(inputs)
        functions = {
            "_program_call_0": _function(call.commented, name),
            "forward": _function(forward, f"{name}.forward"),
        }
        kind = self._class(name, (ProgramModule,), functions)
        assert issubclass(kind, ProgramModule)
        kind._program_inputs, kind._program_examples = inputs, examples
        kind._program_casts = tuple(self._code.casts)
        return kind()

    def part(self, path: str) -> nn.Module:
        """Make a submodule, without its parameters and submodules."""
        if path in self._lists:
            return nn.ModuleList()
        calls = self._code.calls.get(path, ())
        kind = self._code.kinds.get(path, "")
        bases = (ProgramPart, nn.Sequential) if kind == _SEQUENTIAL else (ProgramPart,)
        key = (kind, tuple(call.text for call in calls))
        if key not in self._made:
            name = _class_name(kind, "Module")
            functions = {
                f"_program_call_{i}": _function(call.commented, f"{name} {path}{f' (call {i})' if i else ''}")
                for i, call in enumerate(calls)
            }
            self._made[key] = self._class(name, bases, functions)
        return self._made[key]()

    def _class(self, name: str, bases: tuple[type, ...], functions: dict[str, Any]) -> type[ProgramPart]:
        return type(name, bases, {**functions, "__module__": HOME, "_program_mode": self.mode})


def _children(program: ExportedProgram, path: str) -> Iterator[str]:
    for name in module_names(program):
        owner, _, last = name.rpartition(".")
        if owner == path:
            yield last
    for name in (*program.state_dict, *program.constants):
        owner, _, last = name.rpartition(".")
        if owner == path:
            yield "parameter"


def _class_name(kind: str, otherwise: str) -> str:
    return re.sub(r"\W", "_", kind.rpartition(".")[2]) or otherwise


def _function(text: str, title: str) -> Any:
    """Compile a function; messages about it show its lines."""
    file = f"exported program: {title}"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    # Without a name: Dynamo would import the module that owns the globals.
    found: dict[str, Any] = {"torch": torch, "math": math, "operator": operator}
    exec(compile(text, file, "exec"), found)
    return found["forward" if "def forward(" in text[:12] else "call"]


def _mode_of(program: ExportedProgram) -> bool | None:
    """Whether a program was exported in train() mode; None if it is the same in both."""
    found = set()
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            if isinstance(node.target, OpOverload):
                found |= set(_flags(node))
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
    """Tensors of a program by their names.

    Attributes:
        tensors: in the order of the state dict; tied ones are one object.
        names: all names of the tensor of an input of the graph, by the name of the input.
        constants: names of tensors that are neither parameters nor buffers.
        transient: names of buffers that are not in the state dict.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)
    transient: set[str] = field(default_factory=set)


def state_of(program: ExportedProgram) -> ProgramState:
    """Return the tensors of a program. Buffers and constants are copied, as training writes them.

    Raises:
        ArgumentError: one is missing, or not what the graph takes.
        UnsupportedError: the program holds objects that are not tensors.
    """
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
    """The tensor on the meta device, if it is one that holds no values."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(meta, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are one: a file has a tensor for each name of a tied parameter."""
    if tensor.is_meta or type(tensor) not in (torch.Tensor, nn.Parameter):  # all on meta have one address in a file
        return (id(tensor),)
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), isinstance(tensor, nn.Parameter)


def _check(program: ExportedProgram) -> None:
    """Raise ArgumentError unless the state dict fits the graph."""
    held: Mapping[str, Any] = {**program.constants, **program.state_dict}
    placeholders = program.graph.find_nodes(op="placeholder")
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.kind in (InputKind.USER_INPUT, InputKind.CUSTOM_OBJ, InputKind.TOKEN):
            if spec.kind is not InputKind.USER_INPUT:
                raise UnsupportedError(
                    f"model: the program takes {spec.target or spec.arg.name}, which is not a tensor. Compile the "
                    "module that was exported instead."
                )
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
