"""Torch internals that tracing needs, in one place to adapt when torch moves them."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._export.non_strict_utils import make_fake_inputs, produce_guards_and_solve_constraints
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._prims_common import make_contiguous_strides_for
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.distributed.utils import _apply_to_tensors
from torch.fx import GraphModule, _symbolic_trace
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, get_proxy_mode
from torch.utils import _pytree as pytree

from graphshard.ir.torch_internals import replaced

try:
    from torch.distributed.fsdp._common_utils import collect_grad_tensors, replace_grad_tensors
except ImportError:
    collect_grad_tensors = None  # type: ignore[assignment]

# The modes that see an operator while a forward is traced.
TRACING_MODES = (FunctionalTensorMode, ProxyTorchDispatchMode, FakeTensorMode)

__all__ = [
    "TRACING_MODES",
    "answer_tracing_checks",
    "arguments_of",
    "cast_tensors",
    "conditionals_are_operators",
    "contents_now",
    "fake_kernels",
    "fakes_of_call",
    "interceptable_reads",
    "is_recorded",
    "is_reshaped",
    "is_traced",
    "is_written",
    "leaves_stay_leaves",
    "memory_of",
    "number_of_next_node",
    "quiet_tracing",
    "replace_differentiable",
    "run_compiled_functions_eagerly",
    "without_onednn",
    "written_by",
]


@contextlib.contextmanager
def answer_tracing_checks(is_told: Callable[[FrameType], bool], *, everyone: bool) -> Iterator[None]:
    """While a forward is traced, let `is_told` answer code that asks whether it is.

    Asked are `torch.compiler.is_compiling` and `is_exporting`, `torch.fx._symbolic_trace.is_fx_tracing`, whether a
    tensor is a `torch._subclasses.FakeTensor`, and what modules of torch ask before they take their fast paths. Code
    that imported one of the functions by name reads torch's flags through it, which have one answer for all.
    `torch.jit.is_tracing` says no in any case.

    Args:
        is_told: given the frame that asks.
        everyone: what the flags say.
    """

    def ask() -> bool:
        return is_told(sys._getframe(1))

    def fake_tensor_class(_: object) -> type:
        frame = sys._getframe(1)
        if not is_told(frame):
            return _NoTensor
        return FakeTensor if str(frame.f_globals.get("__name__", "")).startswith("torch.") else _AnyTracedTensor

    def has_torch_function(args: Iterable[Any]) -> bool:
        told = is_told(sys._getframe(1))
        return overridden(args) if told else bool(torch.overrides._get_overloaded_args(args))  # without those of modes

    overridden = torch.overrides.has_torch_function

    class Subclasses(types.ModuleType):
        FakeTensor = property(fake_tensor_class)

    with contextlib.ExitStack() as stack:
        for owner, functions, flags in (
            (torch.compiler, ("is_compiling", "is_exporting"), ("_is_compiling_flag", "_is_exporting_flag")),
            (_symbolic_trace, ("is_fx_tracing",), ("_is_fx_tracing_flag",)),
            (torch.nn.modules.activation, ("_is_make_fx_tracing",), ()),
        ):
            for name, value in (*((f, ask) for f in functions), *((f, everyone) for f in flags)):
                stack.enter_context(replaced(owner, name, value))
        stack.enter_context(replaced(torch.overrides, "has_torch_function", has_torch_function))
        # A property of its class: FakeTensor itself stays in the module, for torch's own code.
        torch._subclasses.__class__ = Subclasses
        stack.callback(setattr, torch._subclasses, "__class__", types.ModuleType)
        yield


class _NoTensor:
    """What fake tensors are no instances of."""


class _Traced(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (FakeTensor, FunctionalTensor))


class _AnyTracedTensor(metaclass=_Traced):
    """What all tensors of a trace are instances of."""


def fakes_of_call(
    mode: FakeTensorMode, module: nn.Module, args: Any, kwargs: Any, dynamic: Any
) -> tuple[Any, Any, Callable[[GraphModule], None]]:
    """Inputs of a call in another fake mode, and a check, after tracing, that their dynamic sizes stayed so.

    Args:
        args, kwargs: with fake tensors.
        dynamic: which sizes are, as `torch.export` is told; None if none are.
    """
    with tracing(TracingContext(mode)):
        made = make_fake_inputs(module, args, kwargs, dynamic)
    _, fake_args, fake_kwargs, equalities, signature, _ = made

    def check_sizes(joint: GraphModule) -> None:
        if dynamic is not None:
            produce_guards_and_solve_constraints(mode, joint, dynamic, equalities, signature)

    return fake_args, fake_kwargs, check_sizes


@contextlib.contextmanager
def quiet_tracing() -> Iterator[None]:
    """Keep what torch logs of a failure while it traces from the user, who gets an error."""
    with replaced(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Error detected in ")
        yield


@contextlib.contextmanager
def fake_kernels(kernels: Mapping[OpOverload, Callable[..., Any]]) -> Iterator[None]:
    """Within the block, operators that fake tensors have no kernel for have these; given mode, operator, arguments."""
    known = {op: op_implementations_dict[op] for op in kernels if op in op_implementations_dict}
    op_implementations_dict.update(kernels)
    try:
        yield
    finally:
        for op in kernels:
            op_implementations_dict.pop(op)
        op_implementations_dict.update(known)


@contextlib.contextmanager
def interceptable_reads(read: Callable[[Callable[..., Any], torch.Tensor], Any]) -> Iterator[None]:
    """Let `read`, given a function of torch and a traced tensor, read values, where those have methods of their own.

    Modes do not see these methods in functions that torch has written in Python, such as its losses.
    """
    with contextlib.ExitStack() as stack:
        for name in ("tolist", "__bool__"):
            function = getattr(torch.Tensor, name)
            method = functools.partialmethod(_call_second, read, function)
            stack.enter_context(replaced(FunctionalTensor, name, method))
        yield


def _call_second(tensor: torch.Tensor, read: Callable[..., Any], function: Callable[..., Any]) -> Any:
    return read(function, tensor)


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tensor belongs to a function that AOTAutograd traces, perhaps within one of torch.func's."""
    return isinstance(tensor, FunctionalTensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_recorded() -> bool:
    """Whether a graph is made of what runs, and not only looked at what it does with its inputs."""
    return get_proxy_mode() is not None


def is_written(tensor: torch.Tensor) -> bool:
    """Whether a function that AOTAutograd traces has written this input."""
    if not isinstance(tensor, FunctionalTensor):
        return False
    looks = torch._functionalize_has_data_mutation, torch._functionalize_has_metadata_mutation  # type: ignore[attr-defined]
    return any(look(tensor.elem) for look in looks)


def is_reshaped(tensor: torch.Tensor) -> bool:
    """Whether a function that AOTAutograd traces has changed the shape or strides of this input in place."""
    if not isinstance(tensor, FunctionalTensor):
        return False
    return bool(torch._functionalize_has_metadata_mutation(tensor.elem))


def contents_now(value: Any) -> Any:
    """What a traced tensor holds: another object after each write to it; of anything else, itself."""
    if not isinstance(value, FunctionalTensor):
        return value
    torch._sync(value)
    return torch._from_functional_tensor(value.elem)


def keep_strides(tensor: torch.Tensor, stride: Sequence[int]) -> None:
    """Give a traced tensor that was written to the strides it had before.

        x.relu_()        eager mode    x as it lies
                         tracing       relu(x), whose result lies as that operator's kernel likes it

    What follows computes in the order of memory, and takes that from strides of dims of size 1, too. These the kernels
    choose otherwise than tracing believes, so where they say nothing they are always given back.
    """
    sizes = tensor.shape
    if not isinstance(tensor, FunctionalTensor) or not all(type(s) is int for s in (*sizes, *tensor.stride(), *stride)):
        return
    unclear = tensor.is_contiguous() and tuple(stride) != make_contiguous_strides_for(sizes)
    if tuple(tensor.stride()) == tuple(stride) and not unclear:
        return
    aten = torch.ops.aten
    if all(now == before or size == 1 for now, before, size in zip(tensor.stride(), stride, sizes)):
        laid_out = aten.as_strided.default(tensor, sizes, stride)
    else:
        laid_out = aten.copy.default(aten.new_empty_strided.default(tensor, sizes, stride), tensor)
    torch._functionalize_replace(tensor.elem, contents_now(laid_out))
    torch._functionalize_commit_update(tensor.elem)
    torch._sync(tensor)


def cast_tensors(tree: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in containers, dataclasses among them, in another dtype: those that FSDP2 casts."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return _apply_to_tensors(cast, tree)


def replace_differentiable(tree: Any, replace: Callable[..., Sequence[torch.Tensor]]) -> Any:
    """Exchange all tensors in containers that require gradients at once: those that FSDP2 exchanges.

    Args:
        replace: from the tensors to those to put in their places; it is not called if there are none.
    """
    if collect_grad_tensors is None:  # torch before 2.13
        leaves, structure = pytree.tree_flatten(tree)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not places:
            return tree  # not a copy: what is appended to a list is seen outside
        for place, tensor in zip(places, replace(*(leaves[i] for i in places))):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, structure)
    found = collect_grad_tensors(tree)
    return replace_grad_tensors(tree, iter(replace(*found))) if found else tree


def memory_of(tensor: torch.Tensor) -> int:
    """Which memory a tensor shows; equal for views of the same, also while a forward is traced."""
    return int(tensor.untyped_storage()._cdata)


def arguments_of(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What an operator was given, or takes where it was given nothing, by the names of its arguments."""
    arguments = func._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return {**defaults, **dict(zip((argument.name for argument in arguments), args)), **kwargs}


def written_by(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among an operator's arguments that it writes to."""
    given = arguments_of(func, args, kwargs)
    writes = [given.get(a.name) for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
    return [leaf for leaf in pytree.tree_leaves(writes) if isinstance(leaf, torch.Tensor)]


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """Operators take kernels of torch's own while this is open."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


@contextlib.contextmanager
def leaves_stay_leaves() -> Iterator[None]:
    """What AOTAutograd traces for a leaf is one; it would be the result of something else.

    Autocast keeps casts of leaves only, and code may ask.
    """
    mirror = torch._mirror_autograd_meta_to  # type: ignore[attr-defined]

    def as_it_was(source: torch.Tensor, traced: torch.Tensor) -> None:
        if source.is_leaf and source.requires_grad:
            traced.requires_grad_()
            if getattr(source, "grad_dtype", source.dtype) is None:
                traced.grad_dtype = None
        else:
            mirror(source, traced)

    with replaced(torch, "_mirror_autograd_meta_to", as_it_was):
        yield


@contextlib.contextmanager
def run_compiled_functions_eagerly() -> Iterator[None]:
    """What `torch.compile` has made runs as the plain function while this is open, so that it can be traced."""
    if "torch._dynamo.eval_frame" not in sys.modules:  # then nothing was compiled
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def number_of_next_node() -> int:
    """The number that autograd gives the next node that it makes; later ones are greater."""
    return int(torch._C._autograd._get_sequence_nr())


@contextlib.contextmanager
def conditionals_are_operators() -> Iterator[None]:
    """While this is open, torch.cond calls its operator with the functions that it was given.

    Otherwise it would have Dynamo trace them: so it asks whether Dynamo does so already.
    """
    ask = torch.compiler.is_dynamo_compiling

    def asked() -> bool:
        return sys._getframe(1).f_code is torch.cond.__code__ or ask()

    with replaced(torch.compiler, "is_dynamo_compiling", asked):
        yield
