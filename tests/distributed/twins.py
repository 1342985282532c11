"""A model compiled by graphshard and a twin sharded by the real FSDP2, with helpers that compare them bit for bit."""

from __future__ import annotations

import copy
import functools
import importlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

import graphshard
from graphshard.ir.units import find_units
from graphshard.torch_compat.torch_ops import TorchDispatchMode, pytree

VOCAB = 101  # not a multiple of any world size here, so shards are uneven
FP32 = MixedPrecisionPolicy()
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
POLICIES = {"fp32": FP32, "bf16": BF16}

Batch: TypeAlias = Callable[[], dict[str, Any]]


def fsdp2(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    units: Sequence[str] | None = None,
    mp_policy: MixedPrecisionPolicy | dict[str, MixedPrecisionPolicy] = FP32,
    **options: Any,
) -> nn.Module:
    """Shard with FSDP2 by graphshard's units of one module each; `mp_policy` may be a dict by unit name."""
    for unit in (*find_units(model, units), ""):
        policy = mp_policy.get(unit, FP32) if isinstance(mp_policy, dict) else mp_policy
        fully_shard(model.get_submodule(unit), mesh=mesh, mp_policy=policy, **options)
    return model


def twins(model: nn.Module, mesh: DeviceMesh, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Compile the model with graphshard and the eager backend, and shard a copy with FSDP2."""
    twin = fsdp2(copy.deepcopy(model), mesh, **options)
    return graphshard.compile(model, mesh, backend="eager", **options), twin


OURS = functools.partial(graphshard.fully_shard, backend="eager")


def sharded_alike(
    parallelize: Callable[[Callable[..., Any], Any], object], model: nn.Module
) -> tuple[nn.Module, nn.Module]:
    """Parallelize the model and a copy by one function, with graphshard's `fully_shard` and with FSDP2's."""
    theirs = copy.deepcopy(model)
    parallelize(OURS, model)
    parallelize(fully_shard, theirs)
    return model, theirs


def world_mesh() -> DeviceMesh:
    """Build a mesh of all ranks on one axis."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def local(tensor: Tensor | None) -> Tensor | None:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def groups_of(unit: Any) -> list[Any]:
    """Return FSDP2's parameter groups of a unit or of its state; before torch 2.12 there is at most one."""
    state = unit._get_fsdp_state() if isinstance(unit, nn.Module) else unit
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def assert_same(ours: dict[str, Any], theirs: dict[str, Any], when: str) -> None:
    """Check that both have the same names with bitwise equal values."""
    assert list(ours) == list(theirs), f"{when}: {list(ours)} != {list(theirs)}"
    differing = []
    for name, a in ours.items():
        a, b = local(a), local(theirs[name])
        equal = torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, Tensor) and b is not None else a == b
        if not equal:
            differing.append(name)
    assert not differing, f"{when}: {differing} differ"


def params_of(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: param.grad for name, param in model.named_parameters()}


def example_llama(layers: int = 2) -> tuple[nn.Module, Batch]:
    """Build the model of examples/, with grouped-query attention, and a function that returns its batches."""
    llama = load_example("llama")
    config = llama.LlamaConfig(layers=layers, dim=16, heads=4, kv_heads=2, hidden=24, seq=8, vocab=VOCAB)
    return llama.Llama(config), lambda: {"tokens": tokens(), "targets": tokens()}


def load_example(name: str) -> Any:
    """Import a module of examples/."""
    folder = str(Path(__file__).parents[2] / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def tokens(length: int = 8) -> Tensor:
    """Return a batch of the example's inputs or targets."""
    return torch.randint(0, VOCAB, (2, length))


class AliveBytes(TorchDispatchMode):
    """Measures the peak of bytes of tensors alive at once, except tensors that existed before.

    If more than expected is alive, it waits briefly for gloo's threads.
    """

    def __init__(self, before: list[Tensor], expected: float) -> None:
        super().__init__()
        self.before = {tensor.untyped_storage()._cdata for tensor in before}
        self.expected = expected
        self.found: dict[int, StorageWeakRef] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves((args, result)):
            if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor):  # its shard is counted separately
                continue
            if tensor.untyped_storage()._cdata not in self.before:
                self.found[tensor.untyped_storage()._cdata] = StorageWeakRef(tensor.untyped_storage())
        patience = time.monotonic() + 0.5
        while (alive := self._alive()) > self.expected and time.monotonic() < patience:
            time.sleep(0.001)
        self.most = max(self.most, alive)
        return result

    def _alive(self) -> int:
        storages = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self.found.values()]
        return sum(storage.nbytes() for storage in storages if storage is not None)


# Operators of all-gathers on gloo: on two ranks an all-to-all that sends nothing to the rank itself.
GATHERS = ("_allgather_base_", "alltoall_base_")


def filled(args: Any) -> Tensor:
    """Return the full tensor that an all-gather with these arguments fills, in one dimension."""
    return args[0].new_empty(0).set_(args[0].untyped_storage())  # type: ignore[no-any-return]


class CountLaunches(TorchDispatchMode):
    """Counts launches, functional (graphshard's) or not (FSDP2's); a coalesced one is one launch.

    All-reduces of integers are "flags": which parameters that stay gathered were written to on any rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and func._opname != "wait_tensor":
            # Operators of a reduce-scatter and an all-gather on two gloo ranks.
            name = func._opname.replace("all_to_all", "reduce_scatter_by_all_to_all")
            sent = pytree.tree_leaves(args)[0]
            flags = "allreduce" in name and isinstance(sent, Tensor) and not sent.is_floating_point()
            self.launches["flags" if flags else name.replace("alltoall_base_", "all_gather_by_alltoall")] += 1
        return func(*args, **(kwargs or {}))

    def of(self, kind: str) -> int:
        """Count the launches that contain this in their name: "gather", "scatter", "all_reduce"."""
        return sum(n for name, n in self.launches.items() if kind in name.replace("allreduce", "all_reduce"))


def train_side_by_side(pair: tuple[nn.Module, nn.Module], batch: Batch, steps: int = 20) -> None:
    """Train with AdamW and clipped gradients, bitwise equal; every step has a gradient and changes the model."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optims = [torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True) for model in pair]
    for step in range(steps):
        before = {name: local(param).detach().clone() for name, param in params_of(pair[0]).items()}
        seen = []
        for model, optim in zip(pair, optims):
            torch.manual_seed(step * world_size + rank)  # for the batch and dropout
            output = model(**batch())
            loss = output if isinstance(output, Tensor) else output.loss
            loss.backward()
            grads = {name: grad.to_local().clone() for name, grad in grads_of(model).items() if grad is not None}
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optim.step()
            optim.zero_grad()
            seen.append((loss.detach(), grads, norm.full_tensor()))
        (loss, grads, norm), (their_loss, their_grads, their_norm) = seen
        assert_same({"loss": loss}, {"loss": their_loss}, f"step {step}")
        assert_same(grads, their_grads, f"gradients of step {step}")
        assert_same({"norm": norm}, {"norm": their_norm}, f"step {step}")
        assert_same(params_of(pair[0]), params_of(pair[1]), f"parameters after step {step}")
        assert_same(*(dict(model.named_buffers()) for model in pair), f"buffers after step {step}")
        assert norm > 0, f"the model has no gradient in step {step}"
        changed = [name for name, param in params_of(pair[0]).items() if not torch.equal(local(param), before[name])]
        assert changed, f"step {step} changes no parameter"
