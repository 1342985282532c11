"""Checks of each call of a compiled module: its parameters, submodules, modes and inputs, and the guards of programs.

Guards decide whether a program serves a call, and run the call. Dynamo's guard manager looks at the real module, the
arguments and the globals that forward reads. This file knows the differences between the traced module and the one that
is called: parameters are shards, and submodules that can be called on their own have a `forward` of graphshard's.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from graphshard.errors import InputError, MaterializationError, ParameterError, UnsupportedError
from graphshard.exported.exported_program import joint_inputs, joint_of, wrong_call
from graphshard.frontend.dynamo_patches import without_torchs_hooks
from graphshard.frontend.unit_boundaries import BOUNDARY, BoundaryModule
from graphshard.guards.unguarded_state import HOOK_MARKS, condition_of, read
from graphshard.guards.value_branches import WARNING
from graphshard.ir.param_table import places_of
from graphshard.ir.program import Program
from graphshard.ir.recompute import is_in_checkpoint
from graphshard.ir.submodule_entry_points import EntryPoint, method_of, replaced_by_entries
from graphshard.runtime.executable import Executable
from graphshard.runtime.shards import REBUILD, ParamRef, place_of
from graphshard.torch_compat.autograd_state import transform_of
from graphshard.torch_compat.dtensor import was_applied
from graphshard.torch_compat.torch_ops import memory_of, pytree
from graphshard.utils.source_lines import MISSING
from graphshard.utils.text import brief, users_class

_training: Callable[[dict[str, Any]], bool] = operator.itemgetter("training")


class ModuleTree:
    """Submodules of a module and their training modes, walked again only if the tree has changed.

    `forwards` are the instances' attributes of that name: another list if one of them was replaced.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.forwards: list[Any] = []
        self._walk()

    def changed(self) -> bool:
        """Return whether a submodule was exchanged, added or removed since the last walk."""
        # Each of these dicts belongs to a module that is still there: an exchanged one is noticed at its parent.
        return any(self._empty) or any(tuple(now.values()) != children for now, children in self._children)

    def modes(self) -> tuple[bool, ...]:
        """Return the training modes as they are now, in the order of `modules()`."""
        if self.changed():
            self._walk()
        return tuple(map(_training, self._attributes))

    def find_forwards(self) -> bool:
        """Look at forwards again, and return whether one was replaced."""
        found = [attributes.get("forward") for attributes in self._dicts]
        changed = found != self.forwards
        if changed:
            self.forwards = found
        return changed

    def _walk(self) -> None:
        modules = list(self.root.modules())
        self._dicts = [m.__dict__ for m in modules]
        self._empty = [m._modules for m in modules if not m._modules]
        self._children = [(m._modules, tuple(m._modules.values())) for m in modules if m._modules]
        self._attributes = [vars(m) if "training" in vars(m) else _ClassAttributes(m) for m in modules]


class _ClassAttributes(dict[str, Any]):
    """Attributes of a module whose class has the mode, for all its objects."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getitem__(self, name: str) -> Any:
        return getattr(self._module, name)


def check_same_modules(module: nn.Module, params: Sequence[ParamRef]) -> None:
    """Raise ParameterError if parameters, or modules that have some, are others than when the model was compiled."""
    modules = dict(module.named_modules(remove_duplicate=False))
    for ref in params:
        for name in ref.row.names:
            path = name.rpartition(".")[0]
            if path not in modules or (name == ref.row.name and modules[path] is not ref.owner):
                moved = next((other for other, now in modules.items() if now is ref.owner), None)
                what = "was exchanged for another" if path in modules else "was removed"
                where = f", and is {moved} now" if moved is not None and name == ref.row.name else ""
                raise ParameterError(
                    f"module {path}, which has the parameter {name}, {what} after graphshard.compile{where}. {REBUILD} "
                    "To give a module other values, load or copy them into it."
                )
        ref.check_tied(place_of(module, name) for name in ref.row.names[1:])
    known = {name for ref in params for name in ref.row.names}
    for name in places_of(module):
        if name not in known:
            raise ParameterError(
                f"parameter {name} was added after graphshard.compile, which would leave it out of sharding and "
                f"reduction. {REBUILD}"
            )


def check_still_trained(accumulated: Collection[str], params: Sequence[ParamRef]) -> None:
    """Raise ParameterError if a parameter was frozen whose gradients microbatches have accumulated."""
    for ref in params:
        if ref.name in accumulated and not ref.param.requires_grad:
            raise ParameterError(
                f"parameter {ref.name} was frozen between microbatches, and what they have added up of its gradient "
                "would be left out. Freeze it between steps; reset_iter_state() forgets what was added up."
            )


def check_materialized(
    module: nn.Module, params: Sequence[ParamRef], device: torch.device, storage: torch.device
) -> None:
    """Raise MaterializationError for a tensor on the meta device, or a parameter on another device than it must be."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    meta = [name for name, tensor in tensors if tensor.is_meta]
    if meta:
        listed = ", ".join(meta[:5]) + (f" and {len(meta) - 5} more" if len(meta) > 5 else "")
        raise MaterializationError(
            f"{len(meta)} parameters or buffers of {users_class(module).__name__} are on the meta device: {listed}. "
            "Allocate them with model.to_empty(device=...) and initialize or load them before the first call."
        )
    for ref in params:
        wanted = device if ref.row.ignored else storage
        if ref.param.device != wanted:
            why = "it was moved after graphshard.compile"
            if ref.row.ignored:
                why = "ignored_params are not moved"
            elif storage != device:
                why = "with offload_policy=CPUOffloadPolicy() parameters are materialized on the CPU"
            raise MaterializationError(
                f"parameter {ref.row.name} is on {ref.param.device} and must be on {wanted}: {why}. Move it there."
            )


def seen_by_python_alone(leaves: Sequence[object], *, refused: bool) -> str:
    """Return why no program can run a call: a transform of torch.func, dual numbers, or nested tensors; "" if one can.

    Raises:
        UnsupportedError: a transform is refused.
        InputError: a nested tensor is refused.
    """
    what = transform_of(leaves)
    if what and refused:
        raise UnsupportedError(
            f"a compiled model was called inside {what}, which cannot see through its programs. Call autograd "
            "(torch.autograd.grad, backward), put the transform into the model's forward, or use the model before "
            "graphshard.compile."
        )
    if what:
        return f"is called inside {what}, which cannot see through programs"
    if not any(isinstance(leaf, torch.Tensor) and leaf.is_nested for leaf in leaves):
        return ""
    if refused:
        raise InputError(
            "an input is a nested tensor, which programs do not take. Pass x.values() and x.offsets(), and call "
            "torch.nested.nested_tensor_from_jagged(values, offsets) in forward."
        )
    return "is given a nested tensor, which programs do not take"


# A parameter in a guard's source, and the attribute of it that is read.
_PARAMETER = re.compile(r"_parameters(?:'\])?\[[^\]]*\](?:\.(\w+))?")
_ROOT_HOOKS = re.compile(r"^L\['module'\]\.(__dict__\[')?_(forward|backward)_(pre_)?hooks")


class TracedGuard:
    """Dynamo's guards and bytecode of a traced program."""

    def __init__(self, program: Program, tree: ModuleTree, executable: Executable) -> None:
        trace, module = program.trace, tree.root
        self._module, self._tree, self._taken = module, tree, program.taken
        named = [(name, part) for name, part in module.named_modules() if name]
        self._names = [name for name, _ in named]
        self._attributes = [part.__dict__ for _, part in named]
        self._forwards = [_replaced(attributes) for attributes in self._attributes]
        self._find_entries()
        self._method = trace.method
        self._root = self._root_now()
        with without_torchs_hooks(), self._without_entries():
            keep = functools.partial(_is_kept, module, *_ours(module))
            self._guards, self._extra = trace.build_guards(keep, executable.program.device)
        self._branches, self._globals = trace.branches, trace.names
        self._conditions = [(text, condition_of(text, trace.names)) for text in trace.conditions]
        self._executable = executable
        self._label = users_class(module).__name__
        names = [_shorten(trace.inputs[index].source, self._label) for index in program.taken]
        self._memory = SharedMemoryCheck(executable.program, module, names)
        self.run: Callable[..., Any] = trace.replay(self._run)
        program.trace = None  # it holds the arguments of the call that was traced

    def change(self, scope: Mapping[str, Any]) -> str:
        """Return why the program does not serve a call, in words; "" if it does."""
        if self._tree.forwards is not self._found:
            now = (_replaced(attributes) for attributes in self._attributes)
            for name, was, is_now in zip(self._names, self._forwards, now):
                if was is not is_now:
                    return f"{name}.forward was replaced"
            self._find_entries()
        if self._root_now() != self._root:
            return f"{self._method} was replaced"
        with self._without_entries():
            return self._guarded_change(scope)

    def _guarded_change(self, scope: Mapping[str, Any]) -> str:
        changed = self._extra.change(scope)
        if changed:
            return _shorten(changed, self._label)
        with without_torchs_hooks():
            holds = self._guards.check(scope)
        if not holds:
            parts = self._guards.check_verbose(scope).verbose_code_parts
            return _reason(parts, self._label, {"L": scope, "G": self._globals})
        for text, holds_for in self._conditions:
            if not holds_for(scope):
                return _shorten(text, self._label)
        branches = self._branches
        if branches is None or branches.answers_for(scope, self._globals) == branches.answers:
            return ""
        sources = ", ".join(_shorten(source, self._label) for source in branches.sources)
        return f"forward decides by the values of {sources}, and otherwise in this call"

    def _root_now(self) -> Any:
        """Return the function that calls of the root run."""
        found = method_of(self._module, self._method)
        return found.__func__ if getattr(found, "__self__", None) is self._module else found

    def _find_entries(self) -> None:
        """Find the entry points in place of functions that guards look at."""
        self._found = self._tree.forwards
        self._entries = [
            (part.__dict__, name, part.__dict__[name], before)
            for part in self._module.modules()
            for name, before in replaced_by_entries(part)
            if before is not MISSING
        ]

    @contextlib.contextmanager
    def _without_entries(self) -> Iterator[None]:
        """Let modules have the functions that entry points replace, as in the trace."""
        for attributes, name, _, before in self._entries:
            attributes[name] = before
        try:
            yield
        finally:
            for attributes, name, entry, _ in self._entries:
                attributes[name] = entry

    def _run(self, *inputs: Any) -> Sequence[Any]:
        tensors = []
        for index in self._taken:
            value = inputs[index]
            value = value._local_tensor if isinstance(value, DTensor) else value
            tensors.append(value if isinstance(value, torch.Tensor) else torch.tensor(value))
        self._memory.check(tensors)
        tensors = [_resolved(tensor) for tensor in tensors]
        return pytree.tree_unflatten(self._executable(tensors), self._executable.program.out_spec)


class JointGuard:
    """Guard of the one program of a joint program's module, which was not traced: inputs are like the captured ones."""

    def __init__(self, program: Program, tree: ModuleTree, executable: Executable) -> None:
        module = tree.root
        exported = joint_of(module)
        assert exported is not None
        self._expected = joint_inputs(exported)
        self._executable = executable
        inputs = [f"input {number}" for number in range(len(self._expected))]
        self._memory = SharedMemoryCheck(executable.program, module, inputs)

    def change(self, scope: Mapping[str, Any]) -> str:
        """Return why the program does not serve a call, in words; "" if it does."""
        return wrong_call(self._expected, pytree.tree_leaves((scope["args"], scope["kwargs"])))

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call."""
        tensors = pytree.tree_leaves((args, kwargs))
        self._memory.check(tensors)
        return pytree.tree_unflatten(self._executable(tensors), self._executable.program.out_spec)


def guard_of(program: Program, tree: ModuleTree, executable: Executable) -> TracedGuard | JointGuard:
    """Bind the guards of a program to a module."""
    return (JointGuard if program.trace is None else TracedGuard)(program, tree, executable)


def _replaced(attributes: Mapping[str, Any]) -> Any:
    """Return the forward that the user has put on a module; MISSING if there is none."""
    found = attributes.get("forward", MISSING)
    return found.replaced if type(found) is EntryPoint else found


# --- Dynamo's guards ---------------------------------------------------------------------------------------------


def _ours(module: nn.Module) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return names of attributes that graphshard sets, and sources of modules that were traced in a class of ours."""
    entries = (name for part in module.modules() for name, value in vars(part).items() if type(value) is EntryPoint)
    named = [(name, part) for name, part in module.named_modules() if name]
    paths = [name for name, part in named if was_applied("checkpoint", part) and not isinstance(part, BoundaryModule)]
    sources = tuple("".join(f"._modules['{key}']" for key in path.split(".")) for path in paths)
    return frozenset({BOUNDARY, WARNING, "forward", *entries}), sources


def _is_kept(
    module: nn.Module, ours: frozenset[str], classes: tuple[str, ...], source: str, kind: str, key: Any
) -> bool:
    """Return whether a guard of the trace holds for the module that is called, too."""
    parameter = _PARAMETER.search(source)
    if parameter is not None:
        attribute, whole = parameter[1], source[: parameter.end()]
        torchs = attribute is None or attribute.startswith("_") or hasattr(DTensor, attribute)
        # A shard differs from the traced parameter, and is checked elsewhere, unless the user has set the attribute.
        if torchs or not list(read([whole], {"L": {"module": module}})):
            return kind in ("NONE_MATCH", "CONSTANT_MATCH") and "None" in source
    if kind == "DIMENSION_DYNAMIC_MARKING_GUARD":  # marks of the first call stand for all
        return False
    if "__mro__" in source and any(other in source for other in classes):
        return False
    if BOUNDARY in source or WARNING in source or key in ours:
        return False
    return not (_ROOT_HOOKS.search(source) or HOOK_MARKS.search(source))


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
    if found := re.match(r"___check_type_id\((.+), \d+\)(?:, type=<class '(?:[\w<>]+\.)*(\w+)'>)?", part):
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


class _ReadTensor(NamedTuple):
    """A tensor that a program reads: the kind and name of its slot, its name for the user, and the tensor."""

    slot: tuple[str, str]
    name: str
    tensor: torch.Tensor


class SharedMemoryCheck:
    """Check in each call that inputs and buffers that forward writes to share no memory with others.

    A program reads everything before it writes. A tensor that is given twice is one in the program, too. `names` are
    expressions that read the program's inputs.
    """

    def __init__(self, program: Program, module: nn.Module, names: Sequence[str]) -> None:
        forward = program.phases["forward"]
        self._names, self._label = names, program.model
        self._written = {(str(slot.of), slot.name) for slot in forward.outputs if slot.kind == "mutation"}
        written = [name for kind, name in self._written if kind == "buffer"]
        self._written_buffer = next(iter(written), None)
        buffers = {*written, *(slot.name for slot in forward.inputs if slot.kind == "buffer")}
        self._places = [(name, *place_of(module, name)) for name in sorted(buffers - program.constants.keys())]
        self._found: list[Any] = []
        self._buffers: dict[int, list[_ReadTensor]] = {}

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Check the inputs of a call; in a region of torch.utils.checkpoint forward may not write a buffer."""
        if not self._written:
            return
        if self._written_buffer is not None and is_in_checkpoint():
            raise UnsupportedError(
                f"{self._label} is called in a region of torch.utils.checkpoint and writes the buffer "
                f"{self._written_buffer}, which eager mode does again in backward. Take the module that writes it, "
                "such as a BatchNorm, out of the checkpoint."
            )
        found = [owner._buffers.get(key) for _, owner, key in self._places]
        if len(found) != len(self._found) or any(now is not was for now, was in zip(found, self._found)):
            self._found, self._buffers = found, {}
            for (name, *_), buffer in zip(self._places, found):
                if _has_memory(buffer):
                    one = _ReadTensor(("buffer", name), name, buffer)
                    others = self._buffers.setdefault(memory_of(buffer), [])
                    self._compare(one, others)
                    others.append(one)
        inputs = [
            _ReadTensor(("input", str(number)), self._names[number], tensor)
            for number, tensor in enumerate(tensors)
            if _has_memory(tensor)
        ]
        for one in inputs:
            if one.slot in self._written and (one.tensor.is_conj() or one.tensor.is_neg()):
                raise InputError(
                    f"{one.name} of {self._label} is a conjugate or negative view, and forward writes to it. Pass "
                    f"{one.name}.resolve_conj().resolve_neg()."
                )
            self._compare(one, self._buffers.get(memory_of(one.tensor), ()))
            if one.slot in self._written:
                self._compare(one, inputs)

    def _compare(self, one: _ReadTensor, others: Sequence[_ReadTensor]) -> None:
        begin, end = _span(one.tensor)
        for other in others:
            first, last = _span(other.tensor)
            if one.tensor is other.tensor or first >= end or begin >= last:
                continue
            for held in (one, other):
                if held.slot in self._written:
                    raise InputError(
                        f"{one.name} and {other.name} of {self._label} share memory, and forward writes to "
                        f"{held.name}: a program reads both before it writes. Pass a copy, x.clone(), or take views in "
                        "forward."
                    )


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as programs read it: not a lazy conjugate or negative, and with the same strides."""
    if not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    once = tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]
    made = torch.empty_strided(once.shape, once.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.copy_(once).expand(tensor.shape)


def _has_memory(value: object) -> TypeGuard[torch.Tensor]:
    is_dense = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return is_dense and not value.is_meta and value.numel() > 0  # type: ignore[attr-defined]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first element and of the end of the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
