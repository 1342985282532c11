"""Torch internals that more than one module needs, in one place to adapt when torch moves them.

What tracing needs is in `tracing_internals.py`, sizes that depend on values are in `unbacked_internals.py`, meshes and
DTensors in `distributed_internals.py`, and what stands in for a GPU is in `driver_internals.py`. Who else may import
torch internals is a lint rule, and in CONTRIBUTING.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import linecache
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import sympy
import torch
from torch import nn
from torch._dynamo.source import ConstantSource
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor.runtime.cache_dir_utils import cache_dir as inductor_cache
from torch._logging import getArtifactLogger, trace_structured
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.fx import Graph, GraphModule, graph_module
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
)
from torch.fx.graph import _BoxedCodeGen
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils._sympy.numbers import int_oo
from torch.utils.checkpoint import CheckpointPolicy, _CachedTorchDispatchMode, _CachingTorchDispatchMode

# Size, for estimates, of what depends on values.
_GUESS = 64

# Prints with `TORCH_LOGS=recompiles`: torch gives its handlers to loggers under "torch" only.
recompiles_log = getArtifactLogger("torch.graphshard", "recompiles")

# What becomes of a gradient.
Fate = Literal["accumulated", "returned", "dropped"]

__all__ = [
    "CheckpointPolicy",
    "FakeTensor",
    "FakeTensorMode",
    "Fate",
    "FunctionalTensor",
    "assume_total",
    "cached_casts",
    "changed_settings",
    "condition",
    "disable_autocast",
    "dispatcher_operators",
    "distinct",
    "draws_stay",
    "fake_mode_of",
    "fake_tensor",
    "fate_at",
    "forget_sources",
    "hint",
    "inductor_cache",
    "keeps_code",
    "leave_modes_on_error",
    "load_package",
    "min_cut_partition",
    "modes_of_functions",
    "new_fake_mode",
    "new_size",
    "recompiles_log",
    "replaced",
    "run_and_save_rng_state",
    "run_with_rng_state",
    "trace_structured",
    "transform_of",
    "uncompiled",
    "use_boxed_calls",
    "without_dispatch_modes",
    "without_selective_checkpoints",
]


def min_cut_partition(joint: GraphModule, num_outputs: int) -> tuple[GraphModule, GraphModule]:
    """AOTAutograd's min-cut partitioner; `num_outputs` counts the forward's outputs in the joint graph.

    Its common subexpression elimination is off: it would merge the reductions of equal gradients into one. Random
    operators that are computed again get their generator's state as a tensor, not as a generator object, which graphs
    could not be stored with.
    """
    modes = (fake_mode_of(n.meta["val"]) for n in joint.graph.nodes if isinstance(n.meta.get("val"), FakeTensor))
    with (
        config.patch(cse=False, graphsafe_rng_functionalization=False),
        tracing(TracingContext(next(modes, None))),
        draws_stay(),
    ):
        return min_cut_rematerialization_partition(joint, [], num_fwd_outputs=num_outputs)


def draws_stay() -> contextlib.AbstractContextManager[None]:
    """In the block torch keeps random operators in graphs although nobody reads what they draw, as eager mode does.

    Later ones draw what comes after in the generator.
    """
    patched: contextlib.AbstractContextManager[None] = inductor_config.patch(fallback_random=True)
    return patched


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

    Of a size that depends on values no more than its range is known: it is guessed, unless `assume_total` was called.
    """
    if not isinstance(size, torch.SymInt):
        return size
    if size.node.hint is not None:
        return int(size.node.hint)
    expr = size.node.expr
    known = size.node.shape_env.bound_sympy(expr)
    assumed = _assumed_in(size.node.shape_env)
    guess = expr.xreplace({symbol: sympy.Integer(assumed.get(symbol, _GUESS)) for symbol in expr.free_symbols})
    return int(min(max(guess, known.lower), known.upper))


def assume_total(sizes: Sequence[int | torch.SymInt], total: int) -> None:
    """For estimates: sizes that depend on values add up to a total, in equal parts; what is assumed already stays."""
    for size in sizes:
        if isinstance(size, torch.SymInt) and size.node.hint is None:
            assumed, symbols = _assumed_in(size.node.shape_env), size.node.expr.free_symbols
            for symbol in symbols - set(assumed):
                assumed[symbol] = max(round(total / len(sizes) / len(symbols)), 1)


def _assumed_in(sizes: ShapeEnv) -> dict[sympy.Symbol, int]:
    """What kernels are to be tuned for, where sizes depend on values."""
    found: dict[sympy.Symbol, int] = vars(sizes).setdefault("var_to_hint_override", {})
    return found


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


def disable_autocast() -> torch._C._DisableAutocast:
    """Run operators as they stand in the graph: autocast was captured with them."""
    return torch._C._DisableAutocast()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute another value while the block is open; an inherited one is inherited again afterwards."""
    is_own, own = name in vars(owner), vars(owner).get(name)  # which may be None
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, own)
        else:
            delattr(owner, name)


def uncompiled(root: nn.Module, graph: Graph) -> GraphModule:
    """A module of a graph whose code is only made when somebody reads or calls it."""
    return _LazyGraphModule(root, graph)


@contextlib.contextmanager
def cached_casts(cached: bool) -> Iterator[None]:
    """Within an autocast block a leaf is cast once, however often it is read, if `cached`, as in eager mode.

    AOTAutograd would cast it each time, and add the gradients of the reads in the leaf's own precision.
    """
    enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(cached)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
        torch.clear_autocast_cache()


def distinct(values: Iterable[Any], copy: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """Return values with copies of the tensors that are there a second time."""
    seen: set[int] = set()
    found = []
    for value in values:
        again = isinstance(value, torch.Tensor) and id(value) in seen
        seen.add(id(value))
        found.append(copy(value) if again else value)
    return found


@contextlib.contextmanager
def leave_modes_on_error() -> Iterator[None]:
    """Leave autocast, and transforms of torch.func, that the block has entered when an error ends it.

    A graph enters and leaves them by calls. In an autocast that is never left, plain PyTorch keeps casts of parameters
    for ever, and computes with old ones.
    """
    kinds = ("cpu", "cuda")
    casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    torch.autocast_increment_nesting()
    nesting, transforms = torch.autocast_decrement_nesting(), torch._C._functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):  # torch 2.11 asserts that something is left
            torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(transforms)
        torch.autocast_increment_nesting()
        while torch.autocast_decrement_nesting() > nesting:
            pass
        torch.clear_autocast_cache()
        for kind, (enabled, dtype) in zip(kinds, casts):
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        raise


@contextlib.contextmanager
def forget_sources() -> Iterator[None]:
    """Of graphs that torch.fx compiles in the block nothing is kept for tracebacks: it keeps their source for ever.

    What remains in use is held by its GraphModule (`code`), and executors keep their own while they live.
    """
    known = set(graph_module._loader.eval_cache)
    try:
        yield
    finally:
        for name in set(graph_module._loader.eval_cache) - known:
            graph_module._loader.eval_cache.pop(name, None)
            linecache.cache.pop(name, None)


@contextlib.contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Nobody sees the operators of the block: what counts those of a call is not to count its compilation.

    Inside a trace they run on real tensors, untraced.
    """
    with _disable_current_modes():
        yield


@contextlib.contextmanager
def without_selective_checkpoints() -> Iterator[None]:
    """Let no policy of a selective checkpoint see the operators of the block.

    The policy would keep results of single operators, though backward runs the whole program again, and torch has no
    rule there for operators with graphs.
    """
    modes = _get_current_dispatch_mode_stack()
    kept = [mode for mode in modes if not isinstance(mode, (_CachedTorchDispatchMode, _CachingTorchDispatchMode))]
    if len(kept) == len(modes):
        yield
        return
    with _disable_current_modes():
        for mode in kept:  # entering would begin their counts anew
            _push_mode(mode)
        try:
            yield
        finally:
            for _ in kept:
                _pop_mode()


def transform_of(leaves: Sequence[object]) -> str:
    """What differentiates or batches a call with these inputs besides autograd's backward; "" is nothing."""
    if torch._C._functorch.maybe_current_level() is not None:
        return "a transform of torch.func"
    if forward_ad._current_level >= 0:
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
            return "forward-mode differentiation"
    return ""


def number_of_backward() -> int:
    """Which backward pass is running; -1 outside of them."""
    return torch._C._current_graph_task_id()


def keeps_graph() -> bool:
    """Whether the backward pass that is running leaves what was saved to another one (`retain_graph=True`)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def fate_at(node: torch.autograd.graph.Node) -> Fate:
    """What the backward pass that is running does with a gradient that arrives here."""
    try:
        return "accumulated" if torch._C._will_engine_execute_node(node) else "dropped"
    except RuntimeError:  # of a leaf that it was asked for by `torch.autograd.grad`
        return "returned"


def changed_settings() -> dict[str, str]:
    """Settings of AOTAutograd and Inductor that are not as they come."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of settings that are deprecated
        for module in (config, inductor_config):
            for name, entry in module._config.items():
                value = entry.default if entry.alias is not None else getattr(module, name)
                if value is not entry.default and value != entry.default:
                    found[f"{module.__name__}.{name}"] = repr(value)
    return dict(sorted(found.items()))


def keeps_code() -> bool:
    """Whether Inductor keeps the code that it generates, and nobody wants to see how it does."""
    settings: Any = inductor_config
    return bool(settings.fx_graph_cache and not settings.force_disable_caches and not settings.trace.enabled)


def modes_of_functions() -> list[str]:
    """Classes of the modes that see every function of torch, but for the default device."""
    return [type(mode).__qualname__ for mode in _get_current_function_mode_stack() if type(mode) is not DeviceContext]


def kernels_in_python() -> str:
    """Digest of which of torch's own operators have implementations in Python: anybody may add some."""
    own = (name for name in torch.library._impls if name.startswith(("aten/", "prims/")))
    return hashlib.sha256("\n".join(sorted(own)).encode()).hexdigest()[:32]
