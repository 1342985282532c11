"""Parameter table: one spec for each distinct parameter, which everything after capture reads.

Frozen, tied and uneven parameters are specs with other values, not special cases in passes. The arithmetic of shards is
only here.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import math
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from graphshard.errors import ArgumentError
from graphshard.ir._rank_order_sum import sum_dtype
from graphshard.ir.mesh import AxisPlacement, DTensorLayout, Mesh, PendingReduction
from graphshard.ir.plan import CollectiveKind
from graphshard.ir.subclasses import Extension
from graphshard.ir.units import Precision, keeps_wider_gradients, reduced_in, unit_of, units_within
from graphshard.utils.text import brief

# Settings of a parameter that users change between calls: see `ParamSpec.settings`.
Settings = tuple[bool, bool, float | None, bool, bool]

# Attribute with the name of a full parameter that a shard has replaced.
REPLACED = "_graphshard_replaced"
# Attribute of a DTensor whose plain piece forward finds: the tensor axes over which its gradients are summed.
SUMMED_OVER = "_graphshard_summed_over"


@dataclass(frozen=True)
class ParamSpec:
    """Spec of one distinct parameter. Sizes are in elements; `shape` is the shape that data ranks shard.

    Attributes:
        names: all names in registration order; tied weights have several.
        shape: global shape; for a parameter split over a tensor axis, the shape of one rank's piece.
        dtype: dtype of the stored shard, as the optimizer sees it.
        compute_dtype: dtype in which it is gathered and used.
        reduce_dtype: dtype in which its gradient is reduced.
        trainable: it receives a gradient.
        num_shards: number of shards; 1 for a parameter that is not sharded, such as a scalar.
        unit: name of its unit; "" is the root.
        reshard: resharded after forward and gathered again in backward.
        shown: kept for modules to show, even if backward does not read it: see `shows`.
        dim: the dim that it is sharded along.
        order: dims from outermost to innermost in memory; () if contiguous.
        ignored: neither sharded, nor moved, nor reduced.
        divide_factor: divisor of its gradient; None is the number of ranks.
        force_sum: the collective sums and a division follows, even if the collective could average.
        held: the user gathered it, so the program has it as an input.
        extension: tensors that it gathers instead of its shard (FSDP2's protocol); `compute_dtype` is then the dtype
            of the result.
        split: distribution over the mesh's tensor axes; None for a plain tensor.
        expert: it is on the experts' mesh.
        exchanged: its gradient is reduced by exchange, and summed in `sum_dtype` in the order of ranks.
        partly: its unit has parameters outside of the module that is called.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    trainable: bool
    num_shards: int
    unit: str
    reshard: bool
    dim: int = 0
    order: tuple[int, ...] = ()
    ignored: bool = False
    divide_factor: float | None = None
    force_sum: bool = False
    held: bool = False
    extension: Extension | None = None
    split: DTensorLayout | None = None
    partly: bool = False
    expert: bool = False
    shown: bool = False
    exchanged: bool = False

    @property
    def sum_dtype(self) -> torch.dtype:
        """Dtype of its reduced gradient, before a cast to the stored dtype."""
        return sum_dtype(self.reduce_dtype) if self.exchanged else self.reduce_dtype

    @property
    def has_plain_rows(self) -> bool:
        """Whether its shards are rows, and it is a plain tensor that is contiguous and gathered."""
        plain = self.extension is None and self.split is None and not self.order and not self.ignored
        return plain and self.num_shards > 1 and self.dim == 0 and len(self.shape) > 1

    def has_even_pieces(self, mesh: Mesh) -> bool:
        """Return whether all ranks of the tensor axes have pieces of the same size."""
        return self.split is None or self.split.is_even({axis.name: axis.size for axis in mesh.every_axis})

    def on(self, mesh: Mesh) -> Mesh:
        """Return the mesh that the parameter is on: the program's mesh, or its experts' mesh."""
        return mesh.experts if self.expert and mesh.experts is not None else mesh

    def as_now(self, param: nn.Parameter, policy: MixedPrecisionPolicy) -> ParamSpec:
        """Return the spec for the parameter's current dtype and requires_grad."""
        cast = param.is_floating_point() and not self.ignored
        compute_dtype = (policy.param_dtype if cast else None) or param.dtype
        return dataclasses.replace(
            self,
            dtype=param.dtype,
            compute_dtype=compute_dtype,
            reduce_dtype=reduced_in(policy, param.dtype, compute_dtype) if cast else compute_dtype,
            trainable=param.requires_grad,
        )

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """Dtype in which autograd accumulates its gradients, as torch's `Tensor.grad_dtype`; None accepts any.

        None follows FSDP2 of torch 2.15, if gradients are reduced in a wider dtype. If only a part of the unit is
        called, FSDP2 does not prepare that backward, so each gradient is cast before it is added.
        """
        if not keeps_wider_gradients(self.compute_dtype, self.reduce_dtype):
            return self.compute_dtype
        return self.reduce_dtype if self.partly else None

    @property
    def shows(self) -> bool:
        """Whether modules show it unsharded between forward and backward; not if that is a DTensor."""
        return self.shown and not self.is_dtensor

    @property
    def is_dtensor(self) -> bool:
        """Whether forward finds it as a DTensor."""
        return self.split is not None and not self.split.local

    @property
    def settings(self) -> Settings:
        """Settings that users change between calls: resharding, divisor, sum instead of mean, gathered by the user."""
        return self.reshard, self.shown, self.divide_factor, self.force_sum, self.held

    @property
    def name(self) -> str:
        return self.names[0]

    @cached_property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter over all ranks, as the user sees it."""
        return self.split.shape if self.split else self.shape

    @property
    def shard_len(self) -> int:
        """Length of each padded shard along `dim`: ceil(size / shards), the chunk size of torch.chunk."""
        return self.local_range(0)[1]

    @cached_property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of the padded shard that every rank passes to the graph."""
        return self._with_len(self.shard_len) if self.num_shards > 1 else self.shape

    @cached_property
    def padded_stride(self) -> tuple[int, ...]:
        """Strides of the padded shard."""
        return self.stride_of(self.padded_shape)

    @property
    def memory_dim(self) -> int:
        """Position of `dim` in memory order; at 0, padding follows the shard."""
        return self.order.index(self.dim) if self.order else self.dim

    @property
    def inverse_order(self) -> tuple[int, ...]:
        """The inverse permutation of `order`."""
        return inverse_of(self.order)

    def in_memory(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return a shape of the parameter or its shard with dims in memory order."""
        return tuple(shape[d] for d in self.order) if self.order else tuple(shape)

    def stride_of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the strides of the parameter or a shard: dense, in the parameter's memory order."""
        sizes = self.in_memory(shape)
        numels = list(itertools.accumulate(reversed(sizes[1:]), operator.mul, initial=1))[::-1][: len(sizes)]
        return tuple(numels[place] for place in self.inverse_order) if self.order else tuple(numels)

    def sent_dtype(self, kind: CollectiveKind) -> torch.dtype:
        """Return the dtype in which the parameter is gathered, or its gradient reduced."""
        if kind != "gather":
            return self.reduce_dtype
        return self.extension.dtype if self.extension else self.compute_dtype

    def shard_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a padded shard in a dtype."""
        return math.prod(self.padded_shape) * dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        """Bytes of the padded shard that a rank stores."""
        return self.extension.stored_bytes if self.extension else self.shard_bytes(self.dtype)

    def piece_bytes(self, kind: CollectiveKind) -> int:
        """Return the bytes of one rank's piece in a collective."""
        if kind == "gather" and self.extension:
            return self.extension.num_bytes
        return self.shard_bytes(self.sent_dtype(kind))

    def sent_bytes(self, kind: CollectiveKind) -> int:
        """Return the bytes of a collective's large tensor: all padded shards, or one for an all-reduce."""
        return (1 if kind == "all_reduce" else self.num_shards) * self.piece_bytes(kind)

    @property
    def is_even(self) -> bool:
        return self.num_shards == 1 or self.shard_len * self.num_shards == self.shape[self.dim]

    def local_range(self, rank: int) -> tuple[int, int]:
        """Return start and length of a rank's shard along `dim`; trailing ranks may have length 0."""
        if self.num_shards == 1:
            return 0, self.shape[self.dim] if self.shape else 1
        return chunk_range(self.shape[self.dim], self.num_shards, rank)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's shard without padding."""
        return self._with_len(self.local_range(rank)[1]) if self.num_shards > 1 else self.shape

    def piece(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a view of a rank's shard of a full tensor."""
        return full.narrow(self.dim, *self.local_range(rank)) if self.num_shards > 1 else full

    def without_padding(self, shard: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a view of a padded shard without the padding."""
        return shard.narrow(self.dim, 0, self.local_range(rank)[1]) if self.num_shards > 1 else shard

    def _with_len(self, length: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])


def even_pieces(mesh: Mesh, params: Iterable[ParamSpec]) -> bool:
    """Whether all ranks on the axes along which the model communicates have pieces of the same sizes."""
    return all(row.has_even_pieces(mesh) for row in params)


@dataclass(frozen=True)
class ParamTable:
    """Specs of all distinct parameters of a module, in registration order."""

    rows: tuple[ParamSpec, ...]

    def __iter__(self) -> Iterator[ParamSpec]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def _by_name(self) -> dict[str, ParamSpec]:
        return {name: row for row in self.rows for name in row.names}

    def __getitem__(self, name: str) -> ParamSpec:
        """Return the spec of a parameter by any of its names."""
        return self._by_name[name]

    def of_units(self, patterns: Sequence[str] | None) -> set[str]:
        """Return the names of the parameters in units that match patterns ("" is the root); None matches all.

        Raises:
            ArgumentError: a pattern matches no unit.
        """
        units = list(dict.fromkeys(["", *(row.unit for row in self)]))
        chosen: set[str] = set()
        for pattern in ("*",) if patterns is None else patterns:
            found = fnmatch.filter(units, pattern)
            if not found:
                known = ", ".join(map(repr, units))
                raise ArgumentError(f"units: {brief(pattern)} names no unit; there are {known}.")
            chosen.update(found)
        return {row.name for row in self if row.unit in chosen}

    def within(self, module: str) -> ParamTable:
        """Return the specs of a submodule's parameters, by their names there."""
        prefix = f"{module}."
        rows = []
        beyond = {row.unit for row in self if not any(name.startswith(prefix) for name in row.names)}
        for row in self:
            names = tuple(name.removeprefix(prefix) for name in row.names if name.startswith(prefix))
            (unit,) = units_within(module, [row.unit]) or ("",)
            if names:
                rows.append(dataclasses.replace(row, names=names, unit=unit, partly=row.unit in beyond))
        return ParamTable(tuple(rows))

    @cached_property
    def in_packing_order(self) -> tuple[ParamSpec, ...]:
        """The specs in the order of FSDP2's flat buffer: a module's parameters follow its submodules' parameters.

        The position in a buffer may decide the order in which an element is summed over ranks.
        """
        places: dict[str, int] = {}

        def path(row: ParamSpec) -> tuple[float, ...]:
            *modules, _ = row.name.split(".")
            prefixes = itertools.accumulate(modules, "{}.{}".format)
            return (*(places.setdefault(prefix, len(places)) for prefix in prefixes), math.inf)

        paths = {row.name: path(row) for row in self.rows}
        return tuple(sorted(self.rows, key=lambda row: paths[row.name]))

    @property
    def trained_bytes(self) -> int:
        """Bytes of the stored shards of trainable parameters."""
        return sum(row.shard_bytes(row.dtype) for row in self if row.trainable)

    @property
    def units(self) -> tuple[str, ...]:
        """Units with parameters, in registration order."""
        return tuple(dict.fromkeys(row.unit for row in self.rows))


def chunk_range(size: int, chunks: int, index: int) -> tuple[int, int]:
    """Return start and length of a chunk, as torch.chunk has them; chunks past the end have length 0."""
    length = -(-size // chunks)
    start = min(index * length, size)
    return start, min(length, size - start)


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dims of a dense tensor from outermost to innermost in memory; () if contiguous.

    Also () for a tensor with gaps or overlaps, whose shards are made contiguous.
    """
    if tensor.is_contiguous():
        return ()
    sizes, strides = tuple(tensor.shape), tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], -sizes[d]))
    return tuple(order) if tensor.permute(order).is_contiguous() else ()


def inverse_of(order: Sequence[int]) -> tuple[int, ...]:
    """Return the inverse of a permutation."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def named_parameters(module: nn.Module) -> dict[tuple[str, ...], nn.Parameter]:
    """Return the distinct parameters in registration order, each with all its names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in places_of(module).items():
        names.setdefault(param, []).append(name)
    return {tuple(n): p for p, n in names.items()}


def places_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by every name that `get_parameter` accepts.

    An overridden `named_parameters` may give other names: torch's `checkpoint_wrapper` leaves its own name out.
    """
    return dict(nn.Module.named_parameters(module, remove_duplicate=False))


def build_table(
    module: nn.Module,
    *,
    mesh: Mesh,
    units: Sequence[str],
    precision: Precision,
    reshard_after_forward: bool | None,
    exchanged: bool = False,
    dims: Mapping[str, int] = MappingProxyType({}),
    ignored: Collection[nn.Parameter] = (),
    known: Mapping[nn.Parameter, ParamSpec] = MappingProxyType({}),
    experts: Collection[str] = (),
    params: Mapping[tuple[str, ...], nn.Parameter] | None = None,
) -> ParamTable:
    """Build the table of a module whose parameters are plain tensors, or DTensors on the mesh's tensor axes.

    Precision follows FSDP2: only floating-point parameters are cast; see `reduced_in` for `reduce_dtype=None`.

    Args:
        reshard_after_forward: None keeps the root unit's parameters that backward reads and reshards all others. False
            keeps all, and modules show them.
        exchanged: gradients are reduced by exchange.
        dims: the dim to shard along, where it is not 0, by the parameter's first name.
        known: specs of parameters that were sharded before, as parts of the module; they keep their options.
        experts: first names of the parameters on the experts' mesh.
        params: `named_parameters(module)`, if known.
    """
    rows = []
    leave = set(ignored)
    for names, param in (named_parameters(module) if params is None else params).items():
        unit = unit_of(names[0], units)
        if param in known:
            rows.append(dataclasses.replace(known[param], names=names, unit=unit, exchanged=exchanged))
            continue
        on = mesh.experts if mesh.experts is not None and names[0] in experts else mesh
        piece, split = _on_tensor_axis(param, on)
        row = ParamSpec(
            names=names,
            shape=tuple(piece.shape),
            dtype=param.dtype,
            compute_dtype=param.dtype,
            reduce_dtype=param.dtype,
            trainable=param.requires_grad,
            num_shards=1 if param in leave or param.dim() == 0 else on.shard.size,
            unit=unit,
            reshard=unit != "" if reshard_after_forward is None else reshard_after_forward,
            shown=reshard_after_forward is False,
            dim=dims.get(names[0], 0),
            order=memory_order(piece),
            ignored=param in leave,
            split=split,
            expert=on is not mesh,
            exchanged=exchanged,
        )
        rows.append(row.as_now(param, precision.of(unit)))
    return ParamTable(tuple(rows))


def _on_tensor_axis(param: nn.Parameter, mesh: Mesh) -> tuple[torch.Tensor, DTensorLayout | None]:
    """Return a tensor rank's piece of a parameter, and its layout over the tensor axes."""
    if not isinstance(param, DTensor):
        return param, None
    tensors = [axis.name for axis in mesh.tensors]
    names = param.device_mesh.mesh_dim_names or tensors
    dims = (placement.dim if isinstance(placement, Shard) else None for placement in param.placements)
    cuts = tuple(AxisPlacement(name, dim) for name, dim in zip(names, dims) if name in tensors)
    around = tuple(name for name in names if name not in tensors)
    summed = vars(param).get(SUMMED_OVER)
    sums = tuple(PendingReduction(axis, "sum") for axis in summed or ())
    return param._local_tensor, DTensorLayout(tuple(param.shape), cuts, sums, around, local=summed is not None)
