"""Meshes, DTensors, process groups and composable functions."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as _symmetric_memory
from torch import nn
from torch._C._distributed_c10d import _register_work
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor, _random
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

from graphshard.torch_compat.torch_ops import replaced

try:
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
except ImportError:  # torch 2.11 has none
    ShardPlacementResult = None  # type: ignore[assignment, misc]

# The mesh that a mesh is a part of.
root_of = DeviceMesh._get_root_mesh
# By backend, the options of a group whose collectives run on streams of high priority.
HIGH_PRIORITY: dict[str, Callable[[], Any]] = {
    "nccl": lambda: dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
}
# The store that the default process group was made with.
rendezvous_store = dist.distributed_c10d._get_default_store
_CHECKPOINT = "torch.distributed._composable.checkpoint_activation"


def sharded_like(local: torch.Tensor, param: DTensor) -> DTensor:
    """Return a gradient's shard as a DTensor placed like the parameter.

    `from_local` takes five times as long, and torch's wrapper of `DTensor.__init__` twice.
    """
    return DTensor.__new__(DTensor, local, param._spec, requires_grad=False)


def dtensor_of(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """Return a DTensor with a local tensor as it is, which `DTensor.from_local` moves to the mesh's kind of device."""
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)


def cut_of_pieces(dim: int, num_pieces: int) -> Placement:
    """Return the placement of pieces along a dim, each cut along it again, on the mesh axis that they are cut over."""
    return _StridedShard(dim, split_factor=num_pieces) if num_pieces > 1 else Shard(dim)


def cuts_of(placements: Sequence[Placement]) -> list[tuple[int, int]]:
    """Return the mesh axes along which a tensor is cut, and its dims, in the order of the cuts.

    Axes go from the outside in; but a strided placement cuts pieces that others have made.
    """
    cuts = [(place, p.dim) for place, p in enumerate(placements) if isinstance(p, (Shard, _StridedShard))]
    return sorted(cuts, key=lambda cut: isinstance(placements[cut[0]], _StridedShard))


def joined_mesh(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh:
    """Return the mesh of all axes of two parts of one mesh; raise RuntimeError if they are not, or share an axis."""
    return DeviceMesh._concatenate([first, second])


def mesh_of_both(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh:
    """Return the mesh of the axes of two parts of one mesh, each once, in its order.

    Raises:
        RuntimeError, KeyError: there is none.
    """
    if is_part(second, first):
        return first
    root = first._get_root_mesh()
    wanted = (*(first.mesh_dim_names or ()), *(second.mesh_dim_names or ()))
    names = tuple(name for name in root.mesh_dim_names or () if name in wanted)
    both = root if len(names) == root.ndim else root[names]
    if not all(is_part(mesh, both) for mesh in (first, second)):
        raise RuntimeError(f"they are no parts of {root}")
    return both


def is_part(mesh: DeviceMesh, whole: DeviceMesh) -> bool:
    """Return whether a mesh has some of the axes of another, or all, with the same ranks."""
    names = mesh.mesh_dim_names
    if mesh == whole or names is None:
        return mesh == whole
    return set(names) < set(whole.mesh_dim_names or ()) and bool(whole[names] == mesh)


def split_mesh(mesh: DeviceMesh, names: tuple[str, str], inner: int) -> DeviceMesh:
    """Return a mesh of one axis as one of two, the second of size `inner`; all ranks must call this together.

    It is kept with the mesh that all axes are of, as torch keeps flattened ones: process groups are made once.
    """
    kept: dict[tuple[str, str], DeviceMesh] = vars(mesh._get_root_mesh()).setdefault("_graphshard_split", {})
    if names not in kept:
        options = high_priority(mesh.get_group(), mesh.device_type)
        override = dict.fromkeys(names, options) if options is not None else None
        kept[names] = mesh._unflatten(0, (mesh.size() // inner, inner), names, override)
    return kept[names]


def flattened_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the axes of a mesh as one; torch keeps it with the mesh, as code for FSDP2 makes it."""
    return mesh._flatten(backend_override=high_priority(mesh.get_group(0), mesh.device_type))


def backend_of(group: dist.ProcessGroup, device_type: str) -> str:
    """Return the name of the backend that sends a group's tensors on such devices; "" if none does."""
    entries = (entry.partition(":") for entry in dist.get_backend_config(group).split(","))
    return next((backend for kind, _, backend in entries if kind == device_type), "")


def high_priority(group: dist.ProcessGroup, device_type: str) -> Any:
    """Return options of a new group by a group's backend, with high priority; None where that has no priorities."""
    make = HIGH_PRIORITY.get(backend_of(group, device_type))
    return None if make is None else make()


def has_high_priority(group: dist.ProcessGroup, device_type: str) -> bool:
    """Return whether a group's collectives have high priority, or its backend has no priorities."""
    if backend_of(group, device_type) not in HIGH_PRIORITY:
        return True
    options = getattr(group._get_backend(torch.device(device_type)), "options", None)
    return bool(getattr(options, "is_high_priority_stream", False))


def rank_in_group(group: str) -> int:
    """Return this rank's place in a process group that is known by name."""
    return int(process_group(group).rank())


def process_group(name: str) -> dist.ProcessGroup:
    """Return the process group of a name."""
    return _resolve_process_group(dist.distributed_c10d.GroupName(name))


def group_of(ranks: Sequence[int]) -> str | None:
    """Return the name of the first process group here that has these ranks in this order; None if there is none.

    All of its ranks find the same one, as they make groups in the same order.
    """
    groups = dist.distributed_c10d._world.pg_map
    return next((str(g.group_name) for g in groups if dist.get_process_group_ranks(g) == list(ranks)), None)


def all_gather_into(full: torch.Tensor, shard: torch.Tensor, group: Any) -> Any:
    """Launch an all-gather over a named group; return its work.

    On CPUs gloo gathers into a separate buffer, as large as the result, and copies it. Two ranks send each other
    their shards right into the result instead, as an all-to-all in which nothing is for oneself.
    """
    among = _resolve_process_group(group)
    if shard.device.type == "cpu" and among.size() == 2 and shard.numel() and shard.is_contiguous():
        mine, halves, sizes = among.rank(), full.chunk(2), [0, 0]
        with torch.no_grad():
            halves[mine].copy_(shard)
        sizes[1 - mine] = len(shard)
        return among.alltoall_base(halves[1 - mine], shard, sizes, sizes, dist.AllToAllOptions())
    return among._allgather_base(full, shard)


def started(result: torch.Tensor, work: dist.Work | None) -> torch.Tensor:
    """Return the result of a collective that is under way, to be waited for like a functional collective."""
    if work is not None:
        _register_work(result, work)
    return result


def group_allocator(group: dist.ProcessGroup, device: torch.device) -> Callable[..., torch.Tensor] | None:
    """Return what allocates elements in the pool of a group's backend; None if it has none for the device."""
    backend = group._get_backend(device)
    if not backend.supports_tensor_alloc(device):
        return None
    return lambda size, dtype, _: backend.allocate_tensor(size, dtype=dtype, device=device)


def symmetric_allocator(group: dist.ProcessGroup, device: torch.device) -> Callable[..., torch.Tensor] | None:
    """Return what allocates elements in symmetric memory of NCCL; None for devices and backends without.

    The ranks of a group call it together: they tell each other where the memory is.
    """
    if device.type != "cuda" or backend_of(group, device.type) != "nccl":
        return None
    _symmetric_memory.set_backend("NCCL")

    def allocate(size: int, dtype: torch.dtype, among: dist.ProcessGroup) -> torch.Tensor:
        with torch.cuda.use_mem_pool(_symmetric_memory.get_mem_pool(device)):
            made = torch.empty(size, dtype=dtype, device=device)
        _symmetric_memory.rendezvous(made, group=among.group_name)
        return made

    return allocate


@contextlib.contextmanager
def fake_world(num_ranks: int, rank: int = 0) -> Iterator[None]:
    """Let this process be one rank of `num_ranks` whose collectives send nothing; no other groups may exist."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    tracker = _random._rng_tracker
    try:
        yield
    finally:
        dist.destroy_process_group()
        _random._rng_tracker = tracker  # one that the block has made draws on its meshes' devices
        # DTensor keeps plans by mesh, and an equal mesh of later has other groups.
        _clear_sharding_prop_cache()


def track_draws(mesh: DeviceMesh) -> None:
    """Let DTensors on a mesh of GPUs draw random numbers, without asking a GPU for its state: none need be here."""
    tracker = _random.OffsetBasedRNGTracker
    if mesh.device_type != "cpu":
        with replaced(tracker, "_get_device_state", lambda self: None):  # torch 2.11 asks for it, to no purpose
            _random._rng_tracker = tracker(mesh, run_state_sync=False)


def checkpoint_classes() -> tuple[type, Any]:
    """Return classes in the metadata of torch.distributed.checkpoint (DCP), which takes long to import."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    return _StorageInfo, _MEM_FORMAT_ENCODING


def was_applied(name: str, module: nn.Module) -> bool:
    """Return whether torch's composable `replicate` or `checkpoint` was applied to the module itself."""
    return name in module.__dict__.get(REGISTRY_KEY, {})


def take_checkpoint_hooks(module: nn.Module) -> tuple[tuple[str, Any], ...] | None:
    """Remove the hooks of the composable `checkpoint`; return its settings, None if it was not applied."""
    if not was_applied("checkpoint", module):
        return None
    settings: dict[str, Any] = {}
    for attribute in ("_forward_pre_hooks", "_forward_hooks"):
        hooks = module.__dict__[attribute]
        ours = [key for key, hook in hooks.items() if getattr(hook, "__module__", "") == _CHECKPOINT]
        for key in ours:
            settings |= inspect.getclosurevars(hooks[key]).nonlocals
        module.__dict__[attribute] = type(hooks)((key, hook) for key, hook in hooks.items() if key not in ours)
    names = ("preserve_rng_state", "determinism_check", "debug", "early_stop")
    known = [(name, settings[name]) for name in names if name in settings]
    contexts = settings.get("user_context_fns")
    return tuple([*known, ("context_fn", contexts)] if contexts is not None else known)


def register_as(module: nn.Module, function: Any, state: Any, registry: type[dict[str, Any]]) -> None:
    """Tell torch's composable functions, such as `replicate`, that one was applied; set `function.state(module)`."""
    applied = module.__dict__.get(REGISTRY_KEY, {})
    module.__dict__[REGISTRY_KEY] = registry(applied | {function.__name__: RegistryItem()})
    module.__dict__.setdefault(STATE_KEY, {})[function.__wrapped__] = state
