"""Changes to a compiled model: `rebuild` shards what is new, `unsharded` is for changes that read full parameters.

    model.head = nn.Linear(64, 10)
    graphshard.rebuild(model)

    with graphshard.unsharded(model):
        model.resize_token_embeddings(32_100)

Parameters that stay are the same objects, so optimizers keep their state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from graphshard.errors import ArgumentError, UnsupportedError
from graphshard.ir.subclasses import is_extended
from graphshard.module._fsdp_module import strip_module
from graphshard.module.compiled_module import CompiledModule, compiled_module
from graphshard.module.fully_shard import check_not_loaded, shard_again
from graphshard.torch_compat.dtensor import sharded_like
from graphshard.torch_compat.torch_ops import memory_of


def rebuild(model: nn.Module) -> None:
    """Shard what is new in a compiled model that has changed, and compile it again at its next call, in place.

    For a new head, a larger vocabulary, layers that are added or dropped, adapters such as LoRA. Parameters that are
    still there stay the same `DTensor` objects with their gradients, so optimizers keep their state; new ones become
    `DTensor`s, which optimizers must be given. Mesh, options and choices such as `set_requires_gradient_sync` stay, and
    patterns of units and policies are matched again. All ranks call it together, with equal values of new parameters.

    Args:
        model: a compiled module, or a module around one.

    Raises:
        ArgumentError: the module is not compiled, or a new part cannot be; nothing was changed.
        UnsupportedError: the model was made by `graphshard.load`; or as for `fully_shard`. Nothing was changed.
    """
    model = _compiled_in(model)
    shard_again(model, model._graphshard)


@contextlib.contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Make a compiled model a plain module with full parameters, to be changed, and rebuild it after the block.

    For functions that read full parameters in order to change the model, such as `resize_token_embeddings` of
    transformers. In the block every rank holds the whole model, in the dtypes of the shards, and may write to
    parameters, resize or replace them. Afterwards parameters of the same shape and dtype have their shards again, the
    same objects, with the values from the block; the others are new, as with `rebuild`. All ranks enter it together
    and make the same changes.

    Args:
        model: a compiled module, or a module around one.

    Raises:
        ArgumentError: the module is not compiled, or after the block a new part cannot be.
        UnsupportedError: the model was made by `graphshard.load`, or has parameters on a tensor axis or with
            `fsdp_pre_all_gather`.
    """
    model = _compiled_in(model)
    runner, spec = model._graphshard, model._graphshard.tracer.spec
    runner.reshard_all()
    refs = [ref for ref in runner.tracer.params if not ref.row.ignored]
    check_not_loaded(runner)
    for ref in refs:
        if ref.row.split is not None or is_extended(ref.checked()):
            raise UnsupportedError(
                f"unsharded: the parameter {ref.name} is on a tensor axis, or decides itself what is gathered of it "
                "(fsdp_pre_all_gather). Exchange modules outside of such a block, and call graphshard.rebuild(model)."
            )
    gathered = [(_whole(ref.param, spec.device), ref.param) for ref in refs]
    full = {id(whole): (whole, shard) for whole, shard in gathered}
    for ref, (whole, _) in zip(refs, gathered):
        ref.put(whole)
    for module in model.modules():
        strip_module(module)
    try:
        yield
    finally:
        for module in model.modules():
            for name, param in module._parameters.items():
                if param is not None and id(param) in full:
                    module._parameters[name] = _again(*full[id(param)])
        shard_again(model, runner)


def _compiled_in(model: nn.Module) -> CompiledModule:
    """Return the compiled model that a module is, or the only one in it, such as in peft's wrapper."""
    found = [each for each in model.modules() if isinstance(each, CompiledModule)] if _is_plain(model) else [model]
    if len(found) > 1:
        raise ArgumentError(f"model: {type(model).__name__} has {len(found)} compiled models in it. Pass one of these.")
    return compiled_module(found[0] if found else model)


def _is_plain(model: Any) -> bool:
    return isinstance(model, nn.Module) and not isinstance(model, CompiledModule)


@torch.no_grad()
def _whole(shard: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Gather a parameter on a device, in its dtype, and return it where its shard is kept."""
    assert isinstance(shard, DTensor)
    full = sharded_like(shard._local_tensor.to(device), shard).full_tensor().to(shard.device)
    shares = memory_of(full) == memory_of(shard._local_tensor)
    return nn.Parameter(full.clone() if shares else full, shard.requires_grad)


@torch.no_grad()
def _again(whole: nn.Parameter, shard: nn.Parameter) -> nn.Parameter:
    """Return the shard with a full parameter's values and flag; the full one if it has another shape or dtype now."""
    if whole.shape != shard.shape or whole.dtype != shard.dtype:
        return whole
    assert isinstance(shard, DTensor)
    piece = distribute_tensor(whole.detach(), shard.device_mesh, shard.placements, src_data_rank=None)
    shard._local_tensor.copy_(piece._local_tensor)
    shard.requires_grad_(whole.requires_grad)
    return shard
