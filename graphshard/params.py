"""The parameter table: one row per distinct parameter, read by everything that follows.

Frozen, tied and uneven parameters are rows with other values, not special cases in passes. A row knows the
arithmetic of its shards; nothing else in graphshard does it again.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from graphshard.units import unit_of


@dataclass(frozen=True)
class ParamRow:
    """One distinct parameter. Sizes are in elements; `shape` is the global (unsharded) shape.

    Attributes:
        names: every name of the parameter in registration order; tied weights have several.
        shape: global shape.
        dtype: dtype of the stored shard, which the optimizer sees.
        compute_dtype: dtype the parameter is gathered and used in.
        reduce_dtype: dtype its gradient is reduced in.
        trainable: whether it receives a gradient.
        num_shards: number of shards along dim 0.
        unit: the module whose parameters are gathered together; "" is the root.
        reshard: gathered again in backward instead of kept.
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

    def as_now(
        self, param: nn.Parameter, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
    ) -> ParamRow:
        """The row of the parameter as it is now: it may have been frozen or converted since."""
        compute_dtype = param_dtype if param.is_floating_point() and param_dtype is not None else param.dtype
        return dataclasses.replace(
            self,
            dtype=param.dtype,
            compute_dtype=compute_dtype,
            reduce_dtype=reduce_dtype or compute_dtype,
            trainable=param.requires_grad,
        )

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def shard_len(self) -> int:
        """Rows in each padded shard: ceil(rows / shards), the chunk size of torch.chunk."""
        return -(-self.shape[0] // self.num_shards)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of the shard that every rank passes to the graph."""
        return (self.shard_len, *self.shape[1:])

    @property
    def stride(self) -> tuple[int, ...]:
        """Strides of the contiguous parameter, and of each of its shards."""
        numels = itertools.accumulate(reversed(self.shape[1:]), operator.mul, initial=1)
        return tuple(numels)[::-1]

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the parameter when it is gathered, padding included."""
        return self.num_shards * math.prod(self.padded_shape) * self.compute_dtype.itemsize

    @property
    def is_even(self) -> bool:
        return self.shard_len * self.num_shards == self.shape[0]

    def local_rows(self, rank: int) -> tuple[int, int]:
        """First row and number of rows that belong to `rank`; trailing ranks may have none."""
        start = min(rank * self.shard_len, self.shape[0])
        return start, min(self.shard_len, self.shape[0] - start)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the shard that `rank` stores, without padding."""
        return (self.local_rows(rank)[1], *self.shape[1:])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON and for hashing."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {k: str(v) if isinstance(v, torch.dtype) else v for k, v in values.items()}


@dataclass(frozen=True)
class ParamTable:
    """All distinct parameters of a module in registration order."""

    rows: tuple[ParamRow, ...]

    def __iter__(self) -> Iterator[ParamRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def _by_name(self) -> dict[str, ParamRow]:
        return {name: row for row in self.rows for name in row.names}

    def __getitem__(self, name: str) -> ParamRow:
        """The row of a parameter, by any of its names."""
        return self._by_name[name]

    @property
    def units(self) -> tuple[str, ...]:
        """Units that own parameters, in registration order."""
        return tuple(dict.fromkeys(row.unit for row in self.rows))


def named_parameters(module: nn.Module) -> dict[tuple[str, ...], nn.Parameter]:
    """Distinct parameters in registration order, each with all its names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    return {tuple(n): p for p, n in names.items()}


def build_table(
    module: nn.Module,
    *,
    num_shards: int,
    units: Sequence[str],
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    reshard_after_forward: bool | None,
) -> ParamTable:
    """Make the table of a module whose parameters have global shapes (plain tensors or DTensors).

    Precision follows FSDP2: only floating parameters are cast, and a `reduce_dtype` of None reduces in the
    dtype of the gradient, which is the compute dtype. `reshard_after_forward=None` keeps the root unit's
    parameters between forward and backward and gathers all others again.
    """
    rows = []
    for names, param in named_parameters(module).items():
        unit = unit_of(names[0], units)
        row = ParamRow(
            names=names,
            shape=tuple(param.shape),
            dtype=param.dtype,
            compute_dtype=param.dtype,
            reduce_dtype=param.dtype,
            trainable=param.requires_grad,
            num_shards=num_shards,
            unit=unit,
            reshard=unit != "" if reshard_after_forward is None else reshard_after_forward,
        )
        rows.append(row.as_now(param, param_dtype, reduce_dtype))
    return ParamTable(tuple(rows))
