"""AOTAutograd: joint graphs with descriptors, the min-cut partitioner, decompositions and recomputed randomness."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._decomp import decompositions as torch_decompositions
from torch._decomp import get_decompositions
from torch._decomp.decompositions import one_layer_lstm
from torch._functorch import config
from torch._functorch._aot_autograd.descriptors import (
    AOTInput,
    AOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils.checkpoint import CheckpointPolicy, _CachedTorchDispatchMode, _CachingTorchDispatchMode

from graphshard.torch_compat.fake_tensors import FakeTensor, fake_mode_of
from graphshard.torch_compat.torch_ops import replaced


def min_cut_partition(joint: GraphModule, num_outputs: int) -> tuple[GraphModule, GraphModule]:
    """Partition a joint graph with AOTAutograd's min-cut; `num_outputs` counts the outputs of forward.

    Common subexpression elimination is off: it would merge the reductions of equal gradients. Recomputed random
    operators get their generator's state as a tensor, because graphs with generator objects cannot be stored.
    """
    modes = (fake_mode_of(n.meta["val"]) for n in joint.graph.nodes if isinstance(n.meta.get("val"), FakeTensor))
    with (
        config.patch(cse=False, graphsafe_rng_functionalization=False),
        tracing(TracingContext(next(modes, None))),
        draws_stay(),
    ):
        return min_cut_rematerialization_partition(joint, [], num_fwd_outputs=num_outputs)


def draws_stay() -> contextlib.AbstractContextManager[None]:
    """Keep random operators whose result is unused: as in eager mode they advance the generator."""
    return inductor_config.patch(fallback_random=True)


@contextlib.contextmanager
def cached_casts(cached: bool) -> Iterator[None]:
    """Cast a leaf once per autocast block if `cached`, as eager mode does.

    AOTAutograd casts it at each read, and so adds the gradients of the reads in the leaf's precision.
    """
    enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(cached)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
        torch.clear_autocast_cache()


@contextlib.contextmanager
def leaves_stay_leaves() -> Iterator[None]:
    """Trace a leaf as a leaf, as autocast caches casts of leaves only; AOTAutograd makes it a result of an operator."""
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
def without_selective_checkpoints() -> Iterator[None]:
    """Hide the operators of the block from policies of selective checkpoints.

    A policy would save results of single operators although backward recomputes the whole program, and torch has no
    rule there for operators with graphs.
    """
    modes = _get_current_dispatch_mode_stack()
    kept = [mode for mode in modes if not isinstance(mode, (_CachedTorchDispatchMode, _CachingTorchDispatchMode))]
    if len(kept) == len(modes):
        yield
        return
    with _disable_current_modes():
        for mode in kept:  # entering a mode would restart its counts
            _push_mode(mode)
        try:
            yield
        finally:
            for _ in kept:
                _pop_mode()
