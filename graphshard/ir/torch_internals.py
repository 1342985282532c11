"""Torch internals that more than one module needs, in one place to adapt when torch moves them.

Besides this module only `capture/capture.py` and `lower/inductor.py` import torch internals; a lint rule says so.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import sympy
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_work
from torch._dynamo.source import ConstantSource
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._logging import trace_structured
from torch._ops import OpOverload
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.distributed.utils import _apply_to_tensors
from torch.fx import Graph, GraphModule, _symbolic_trace
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    _constrain_range_for_size,
    free_unbacked_symbols,
)
from torch.fx.graph import _BoxedCodeGen
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.numbers import int_oo
from torch.utils.checkpoint import CheckpointPolicy

try:
    from torch.distributed.fsdp._common_utils import collect_grad_tensors, replace_grad_tensors
except ImportError:
    collect_grad_tensors = None  # type: ignore[assignment]

# Size, for estimates, of what depends on values.
_GUESS = 64

__all__ = [
    "CheckpointPolicy",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "all_gather_into",
    "answer_tracing_checks",
    "cached_casts",
    "cast_tensors",
    "condition",
    "conditions_on_sizes",
    "disable_autocast",
    "dispatcher_operators",
    "dtensor_of",
    "fake_kernels",
    "fake_mode_of",
    "fake_tensor",
    "hint",
    "interceptable_reads",
    "is_traced",
    "is_unknown",
    "leaves_stay_leaves",
    "load_package",
    "makes_size",
    "memory_of",
    "min_cut_partition",
    "new_fake_mode",
    "new_size",
    "new_unknown_size",
    "quiet_tracing",
    "rendezvous_store",
    "replace_differentiable",
    "replaced",
    "run_and_save_rng_state",
    "run_compiled_functions_eagerly",
    "run_with_rng_state",
    "sharded_like",
    "trace_structured",
    "use_boxed_calls",
    "without_onednn",
    "without_tracing",
    "written_by",
]


def sharded_like(local: torch.Tensor, param: DTensor) -> DTensor:
    """A gradient's shard as a DTensor placed like the parameter; `from_local` takes five times as long."""
    return DTensor(local, param._spec, requires_grad=False)


def dtensor_of(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: torch.Size,
    stride: tuple[int, ...],
) -> DTensor:
    """A DTensor with a local tensor as it is, whatever its class."""
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)


def min_cut_partition(joint: GraphModule, num_outputs: int) -> tuple[GraphModule, GraphModule]:
    """AOTAutograd's min-cut partitioner; `num_outputs` counts the forward's outputs in the joint graph.

    Its common subexpression elimination is off: it would merge the reductions of equal gradients into one. Random
    operators that are computed again get their generator's state as a tensor, not as a generator object, which graphs
    could not be stored with.
    """
    modes = (fake_mode_of(n.meta["val"]) for n in joint.graph.nodes if isinstance(n.meta.get("val"), FakeTensor))
    with config.patch(cse=False, graphsafe_rng_functionalization=False), tracing(TracingContext(next(modes, None))):
        return min_cut_rematerialization_partition(joint, [], num_fwd_outputs=num_outputs)


def fake_mode_of(tensor: torch.Tensor) -> FakeTensorMode:
    """The mode a fake tensor belongs to."""
    assert isinstance(tensor, FakeTensor)
    return tensor.fake_mode


def new_fake_mode(sizes: ShapeEnv | None = None) -> FakeTensorMode:
    """A mode like the one that programs are captured in; `sizes` is where known dynamic sizes live."""
    return FakeTensorMode(shape_env=sizes or ShapeEnv())


def new_size(mode: FakeTensorMode, name: str, hint: int, low: int | None, high: int | None) -> torch.SymInt:
    """A dynamic size of a fake mode, with the size it has in examples and the least and largest it may have."""
    env = mode.shape_env
    assert env is not None
    source = ConstantSource(name)
    symbol = env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    env.constrain_symbol_range(symbol, low if low is not None else 2, high if high is not None else int_oo)
    size = env.create_symintnode(symbol, hint=hint, source=source)
    assert isinstance(size, torch.SymInt)
    return size


def fake_tensor(
    mode: FakeTensorMode, shape: list[int], stride: list[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A fake tensor. Making it around the mode's dispatch takes a sixth of the time."""
    return FakeTensor(mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)


def dispatcher_operators() -> frozenset[str]:
    """Operators that the dispatcher knows, as "aten::add.Tensor".

    `torch.ops` also finds TorchScript's own, some of which read and write files.
    """
    return frozenset(torch._C._dispatch_get_all_op_names())


def use_boxed_calls(graph: Graph) -> None:
    """Generate code that takes one list of inputs and clears it, so that inputs can be freed early."""
    graph.set_codegen(_BoxedCodeGen())


def hint(size: int | torch.SymInt) -> int:
    """The size itself, or the one that a dynamic size had in the example inputs.

    Of a size that depends on values no more than its range is known: it is guessed.
    """
    if not isinstance(size, torch.SymInt):
        return size
    if size.node.hint is not None:
        return int(size.node.hint)
    expr = size.node.expr
    known = size.node.shape_env.bound_sympy(expr)
    guess = expr.xreplace(dict.fromkeys(expr.free_symbols, sympy.Integer(_GUESS)))
    return int(min(max(guess, known.lower), known.upper))


def rank_in_group(group: str) -> int:
    """This rank's place in a process group that is known by name."""
    return int(dist.distributed_c10d._resolve_process_group(dist.distributed_c10d.GroupName(group)).rank())


def condition(value: torch.SymBool | bool) -> None:
    """Take a comparison of dynamic sizes for granted: it is recorded with the sizes, as capture does."""
    if not bool(value):
        raise ValueError("a condition does not hold at the sizes of the example inputs")


def load_package(path: Path, device: torch.device) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """Load the library of an AOTInductor package; what it returns empties its list of inputs.

    Unlike `torch._inductor.aoti_load_package` this imports nothing of Inductor.
    """
    index = device.index if device.index is not None else -1
    loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, index)
    run: Callable[[list[torch.Tensor]], list[torch.Tensor]] = loader.boxed_run
    return run


def rendezvous_store() -> dist.Store:
    """The store the default process group was made with."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def disable_autocast() -> torch._C._DisableAutocast:
    """Run operators as they stand in the graph: autocast was captured with them."""
    return torch._C._DisableAutocast()


def all_gather_into(full: torch.Tensor, shard: torch.Tensor, group: Any) -> None:
    """Launch an all-gather as `torch.distributed` does, to be waited for as a functional one.

    Args:
        group: name of the process group.
    """
    _register_work(full, _resolve_process_group(group)._allgather_base(full, shard))


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another value of an attribute for a while; an inherited one is inherited again afterwards."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


@contextlib.contextmanager
def answer_tracing_checks(is_told: Callable[[FrameType], bool], *, everyone: bool) -> Iterator[None]:
    """While a forward is traced, let `is_told` answer code that asks whether it is.

    Asked are `torch.compiler.is_compiling` and `is_exporting`, `torch.fx._symbolic_trace.is_fx_tracing`, and whether
    a tensor is a `torch._subclasses.FakeTensor`. Code that imported one of the functions by name reads torch's flags
    through it, which have one answer for all. `torch.jit.is_tracing` says no in any case.

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

    class Subclasses(types.ModuleType):
        FakeTensor = property(fake_tensor_class)

    with contextlib.ExitStack() as stack:
        for owner, functions, flags in (
            (torch.compiler, ("is_compiling", "is_exporting"), ("_is_compiling_flag", "_is_exporting_flag")),
            (_symbolic_trace, ("is_fx_tracing",), ("_is_fx_tracing_flag",)),
        ):
            for name, value in (*((f, ask) for f in functions), *((f, everyone) for f in flags)):
                stack.enter_context(replaced(owner, name, value))
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


def new_unknown_size(mode: FakeTensorMode, low: int | None = None, high: int | None = None) -> torch.SymInt:
    """A size that depends on values, with its least and largest."""
    assert mode.shape_env is not None
    size: torch.SymInt = mode.shape_env.create_unbacked_symint()
    _constrain_range_for_size(size, low, high)
    return size


@contextlib.contextmanager
def conditions_on_sizes(
    decide: Callable[[torch.SymBool], bool | None], check: Callable[[torch.SymBool], None]
) -> Iterator[None]:
    """Within the block, conditions on sizes that depend on values are not torch's alone.

    Args:
        decide: asked where code decides by one; None leaves it to torch.
        check: told what `torch._check` takes for granted.
    """
    ask, expect = torch.SymBool.__bool__, symbolic_shapes.expect_true

    def truth(self: torch.SymBool) -> bool:
        decided = decide(self) if free_unbacked_symbols(self) else None
        return bool(ask(self)) if decided is None else decided

    def expected(value: Any, skip: int = 0) -> bool:
        if isinstance(value, torch.SymBool) and free_unbacked_symbols(value):
            check(value)
        return bool(expect(value, skip))

    with replaced(torch.SymBool, "__bool__", truth), replaced(symbolic_shapes, "expect_true", expected):
        yield


@contextlib.contextmanager
def interceptable_reads() -> Iterator[None]:
    """Let modes see functions that read values of traced tensors, which have methods of their own for two of them."""
    with contextlib.ExitStack() as stack:
        for name in ("tolist", "__bool__"):
            stack.enter_context(replaced(FunctionalTensor, name, getattr(torch.Tensor, name)))
        yield


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tensor belongs to a function that AOTAutograd traces, perhaps within one of torch.func's."""
    return isinstance(tensor, FunctionalTensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor)


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
        for place, tensor in zip(places, replace(*(leaves[i] for i in places)) if places else ()):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, structure)
    found = collect_grad_tensors(tree)
    return replace_grad_tensors(tree, iter(replace(*found))) if found else tree


def memory_of(tensor: torch.Tensor) -> int:
    """Which memory a tensor shows; equal for views of the same, also while a forward is traced."""
    return int(tensor.untyped_storage()._cdata)


def written_by(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among an operator's arguments that it writes to."""
    given = {**dict(zip((a.name for a in func._schema.arguments), args)), **kwargs}
    writes = [given.get(a.name) for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
    return [leaf for leaf in pytree.tree_leaves(writes) if isinstance(leaf, torch.Tensor)]


def makes_size(node: torch.fx.Node) -> bool:
    """Whether an operator makes a number, or a tensor of a size, that depends on the values of a tensor."""
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    return (
        isinstance(node.target, OpOverload)
        and any(tag in node.target.tags for tag in tags)
        and any(map(is_unknown, pytree.tree_leaves(node.meta.get("val"))))
    )


def is_unknown(value: Any) -> bool:
    """Whether a value is a number, or a tensor of a size, that depends on the values of a tensor."""
    return isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)) and bool(
        free_unbacked_symbols(value)
    )


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
        else:
            mirror(source, traced)

    with replaced(torch, "_mirror_autograd_meta_to", as_it_was):
        yield


@contextlib.contextmanager
def cached_casts() -> Iterator[None]:
    """Within an autocast block a leaf is cast once, however often it is read, as in eager mode.

    AOTAutograd would cast it each time, and add the gradients of the reads in the leaf's own precision.
    """
    enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(True)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
        torch.clear_autocast_cache()


@contextlib.contextmanager
def run_compiled_functions_eagerly() -> Iterator[None]:
    """What `torch.compile` has made runs as the plain function while this is open, so that it can be traced."""
    if "torch._dynamo.eval_frame" not in sys.modules:  # then nothing was compiled
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def without_tracing() -> contextlib.AbstractContextManager[Any]:
    """Inside a trace, run operators on real tensors."""
    return _disable_current_modes()
