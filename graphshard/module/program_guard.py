"""Guards of a program that is bound to a module: they decide whether it serves a call, and run the call.

Dynamo's guard manager looks at the real module, the arguments and the globals that forward reads. This file knows the
differences between the traced module and the one that is called: parameters are shards, and submodules that can be
called on their own have a `forward` of graphshard's.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from graphshard.codec.joint_export import joint_inputs, wrong_call
from graphshard.errors import InputError, UnsupportedError
from graphshard.exported.exported_program import joint_of
from graphshard.frontend.dynamo_patches import without_torchs_hooks
from graphshard.frontend.unit_boundaries import BOUNDARY, BoundaryModule
from graphshard.guards.unguarded_state import read
from graphshard.guards.value_branches import WARNING
from graphshard.ir.program import Program
from graphshard.ir.recompute import is_in_checkpoint
from graphshard.ir.submodule_entry_points import EntryPoint, is_compiled
from graphshard.runtime.bound_program import memory_span
from graphshard.runtime.executable import Executable
from graphshard.torch_compat.dtensor import is_checkpointed
from graphshard.torch_compat.torch_ops import memory_of, pytree
from graphshard.utils.plain_values import MISSING
from graphshard.utils.text import brief, users_class

# A parameter in a guard's source, and the attribute of it that is read.
_PARAMETER = re.compile(r"_parameters(?:'\])?\[[^\]]*\](?:\.(\w+))?")
_ROOT_HOOKS = re.compile(r"^L\['module'\]\.(__dict__\[')?_(forward|backward)_(pre_)?hooks")


class TracedGuard:
    """Dynamo's guards and bytecode of a traced program.

    Attributes:
        moved: a forward was replaced, or put back, since the last call.
    """

    def __init__(self, program: Program, module: nn.Module, executable: Executable) -> None:
        trace = program.trace
        self.moved = True
        self._module, self._taken = module, program.taken
        named = [(name, part) for name, part in module.named_modules() if name]
        self._names = [name for name, _ in named]
        self._attributes = [part.__dict__ for _, part in named]
        self._forwards = [_replaced(attributes, "forward") for attributes in self._attributes]
        self._found = [attributes.get("forward") for attributes in self._attributes]
        self._method = trace.method
        self._root = self._root_now()
        with without_torchs_hooks():
            self._guards, self._extra = trace.build_guards(functools.partial(_is_kept, module, *_ours(module)))
        self._branches, self._globals = trace.branches, trace.names
        self._executable = executable
        self._label = users_class(module).__name__
        names = [_shorten(trace.inputs[index].source, self._label) for index in program.taken]
        self._memory = BufferMemory(executable.program, module, names)
        self.run: Callable[..., Any] = trace.replay(self._run)
        program.trace = None  # it holds the arguments of the call that was traced

    def change(self, scope: Mapping[str, Any]) -> str:
        """Return why the program does not serve a call, in words; "" if it does."""
        found = [attributes.get("forward") for attributes in self._attributes]
        self.moved = found != self._found
        if self.moved:
            now = (_replaced(attributes, "forward") for attributes in self._attributes)
            for name, was, is_now in zip(self._names, self._forwards, now):
                if was is not is_now:
                    return f"{name}.forward was replaced"
            self._found = found
        if self._root_now() is not self._root:
            return f"{self._method} was replaced"
        changed = self._extra.change(scope)
        if changed:
            return _shorten(changed, self._label)
        with without_torchs_hooks():
            holds = self._guards.check(scope)
        if not holds:
            parts = self._guards.check_verbose(scope).verbose_code_parts
            return _reason(parts, self._label, {"L": scope, "G": self._globals})
        branches = self._branches
        if branches is None or branches.answers_for(scope, self._globals) == branches.answers:
            return ""
        sources = ", ".join(_shorten(source, self._label) for source in branches.sources)
        return f"forward decides by the values of {sources}, and otherwise in this call"

    def _root_now(self) -> Any:
        """Return the function that calls of the root run; a compiled model's forward may have been wrapped."""
        found = MISSING if is_compiled(self._module) else _replaced(self._module.__dict__, self._method)
        return getattr(users_class(self._module), self._method) if found is MISSING else found

    def _run(self, *inputs: Any) -> Sequence[Any]:
        tensors = []
        for index in self._taken:
            value = inputs[index]
            value = value._local_tensor if isinstance(value, DTensor) else value
            tensors.append(value if isinstance(value, torch.Tensor) else torch.tensor(value))
        self._memory.check(tensors)
        return pytree.tree_unflatten(self._executable(tensors), self._executable.program.out_spec)


class JointGuard:
    """Guard of the one program of a joint program's module, which was not traced: inputs are like the captured ones.

    Attributes:
        moved: always false, as the module has no forward that could be replaced.
    """

    moved = False

    def __init__(self, program: Program, module: nn.Module, executable: Executable) -> None:
        exported = joint_of(module)
        assert exported is not None
        self._expected = joint_inputs(exported)
        self._executable = executable
        self._memory = BufferMemory(executable.program, module, ())

    def change(self, scope: Mapping[str, Any]) -> str:
        """Return why the program does not serve a call, in words; "" if it does."""
        return wrong_call(self._expected, pytree.tree_leaves((scope["args"], scope["kwargs"])))

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call."""
        tensors = pytree.tree_leaves((args, kwargs))
        self._memory.check(tensors)
        return pytree.tree_unflatten(self._executable(tensors), self._executable.program.out_spec)


def guard_of(program: Program, module: nn.Module, executable: Executable) -> TracedGuard | JointGuard:
    """Bind the guards of a program to a module."""
    return (JointGuard if program.trace is None else TracedGuard)(program, module, executable)


def _replaced(attributes: Mapping[str, Any], method: str) -> Any:
    """Return the method that the user has put on a module; MISSING if there is none."""
    found = attributes.get(method, MISSING)
    return found.replaced if type(found) is EntryPoint else found


# --- Dynamo's guards ---------------------------------------------------------------------------------------------


def _ours(module: nn.Module) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return names of attributes that graphshard sets, and sources of modules that were traced in a class of ours."""
    entries = (name for part in module.modules() for name, value in vars(part).items() if type(value) is EntryPoint)
    named = [(name, part) for name, part in module.named_modules() if name]
    paths = [name for name, part in named if is_checkpointed(part) and not isinstance(part, BoundaryModule)]
    sources = tuple("".join(f"._modules['{key}']" for key in path.split(".")) for path in paths)
    return frozenset({BOUNDARY, WARNING, "forward", *entries}), sources


def _is_kept(
    module: nn.Module, ours: frozenset[str], classes: tuple[str, ...], source: str, kind: str, key: Any
) -> bool:
    """Return whether a guard of the trace holds for the module that is called, too."""
    parameter = _PARAMETER.search(source)
    if parameter is not None and _is_of_tensor(parameter[1], source[: parameter.end()], module):
        # A shard differs from the traced parameter, and is checked elsewhere.
        return kind in ("NONE_MATCH", "CONSTANT_MATCH") and "None" in source
    if kind == "DIMENSION_DYNAMIC_MARKING_GUARD":  # marks of the first call stand for all
        return False
    if "__mro__" in source and any(other in source for other in classes):
        return False
    if BOUNDARY in source or WARNING in source or key in ours:
        return False
    return not _ROOT_HOOKS.search(source)


def _is_of_tensor(attribute: str | None, source: str, module: nn.Module) -> bool:
    """Return whether an attribute of a parameter is torch's or a subclass's, and not set by the user."""
    if attribute is None or attribute.startswith("_") or hasattr(DTensor, attribute):
        return True
    return not list(read([source], {"L": {"module": module}}))


def _reason(parts: Sequence[str], label: str, values: Mapping[str, Any]) -> str:
    """Return Dynamo's reason with the user's names: `args[0]`, `Net.layers.0.scale was 1.0 and is 2.0`."""
    texts = [part.split("  # ")[0].strip() for part in parts]
    failed = [text for text in texts if _fails(text, values)]  # one guard has all conditions on sizes
    return "; ".join(dict.fromkeys(_in_words(text, label, values) for text in failed or texts))


def _fails(text: str, values: Mapping[str, Any]) -> bool:
    try:
        return not eval(text, dict(values))
    except Exception:  # it has names of Dynamo's
        return False


def _in_words(part: str, label: str, values: Mapping[str, Any]) -> str:
    if found := re.match(r"___check_type_id\((.+), \d+\)(?:, type=<class '(?:\w+\.)*(\w+)'>)?", part):
        kinds = [type(now).__name__ for _, now in read([found[1]], values)]
        return f"{_shorten(found[1], label)} was a {found[2]} and is a {''.join(kinds)}"
    if found := re.fullmatch(r"(not )?___dict_contains\('(\w+)', (.+)\.__dict__\)", part):
        return f"{_shorten(f'{found[3]}.{found[2]}', label)} was {'added' if found[1] else 'removed'}"
    source, equals, before = part.partition(" == ")
    is_value = equals and not before.startswith("[") and "L[" not in before
    for name, now in read([source], values) if is_value else ():
        return f"{_shorten(name, label)} was {before} and is {brief(now)}"
    return _shorten(part, label)


def _shorten(text: str, label: str) -> str:
    """Replace Dynamo's sources by the names that the user knows."""
    text = re.sub(r"L\['(args|module|kwargs)'\]", r"\1", text)
    text = re.sub(r"kwargs\['(\w+)'\]", r"\1", text)
    text = re.sub(r"G\['__import_(\w+)'\]", lambda found: found[1].replace("_dot_", "."), text)
    text = re.sub(r"G\['(\w+)'\]", r"\1", text)
    text = re.sub(r"\.__dict__\['_modules'\]", "._modules", text)
    text = re.sub(r"\._(?:modules|buffers|parameters)\['([^']+)'\]", r".\1", text)
    return re.sub(r"(?<![\w.])module\b(?=[.\[])", label, text)


# --- shared memory -----------------------------------------------------------------------------------------------


class BufferMemory:
    """Check in each call that inputs and buffers that forward writes to share no memory with others.

    A program reads everything before it writes.

    Args:
        names: of the program's inputs, as expressions that read them.
    """

    def __init__(self, program: Program, module: nn.Module, names: Sequence[str]) -> None:
        forward = program.phases["forward"]
        self._names, self._label = names, program.model
        self._written = {(slot.of, slot.name) for slot in forward.outputs if slot.kind == "mutation"}
        written = [name for kind, name in self._written if kind == "buffer"]
        self._written_buffer = next(iter(written), None)
        buffers = {*written, *(slot.name for slot in forward.inputs if slot.kind == "buffer")}
        self._places: list[tuple[str, Mapping[str, Any], str]] = []
        for name in sorted(buffers - program.constants.keys()):
            prefix, _, attribute = name.rpartition(".")
            self._places.append((name, module.get_submodule(prefix)._buffers, attribute))
        self._found: list[Any] = []
        self._memory: dict[int, list[tuple[str, torch.Tensor]]] = {}

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Check the inputs of a call."""
        if self._written_buffer is not None and is_in_checkpoint():
            raise UnsupportedError(
                f"{self._label} is called in a region of torch.utils.checkpoint and writes the buffer "
                f"{self._written_buffer}, which eager mode does again in backward. Take the module that writes it, "
                "such as a BatchNorm, out of the checkpoint."
            )
        if not self._written or not self._places:
            return
        found = [held.get(key) for _, held, key in self._places]
        if len(found) != len(self._found) or any(now is not was for now, was in zip(found, self._found)):
            self._found, self._memory = found, {}
            for (name, *_), buffer in zip(self._places, found):
                if _is_plain(buffer):
                    for other in self._memory.setdefault(memory_of(buffer), []):
                        self._compare(("buffer", name, name, buffer), ("buffer", other[0], *other))
                    self._memory[memory_of(buffer)].append((name, buffer))
        for number, tensor in enumerate(tensors):
            if _is_plain(tensor):
                for name, buffer in self._memory.get(memory_of(tensor), ()):
                    source = self._names[number] if number < len(self._names) else str(number)
                    self._compare(("input", str(number), source, tensor), ("buffer", name, name, buffer))

    def _compare(self, one: tuple[str, str, str, torch.Tensor], other: tuple[str, str, str, torch.Tensor]) -> None:
        (begin, end), (first, last) = memory_span(one[3]), memory_span(other[3])
        if one[3] is other[3] or first >= end or begin >= last:
            return
        for kind, key, name, _ in (one, other):
            if (kind, key) in self._written:
                raise InputError(
                    f"{one[2]} and {other[2]} of {self._label} share memory, and forward writes to {name}: a program "
                    "reads both before it writes. Pass a copy, x.clone(), or take views in forward."
                )


def _is_plain(tensor: object) -> TypeGuard[torch.Tensor]:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_meta
