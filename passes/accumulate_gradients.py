"""Backward for one of several microbatches: gradients are added to those of earlier ones, and reduced later or now.

    %r = reduce_scatter_tensor(%dw, avg, 2, shard)        %a: f32[8, 4] = accumulated:w
    %ds: f32[4, 4] = wait_tensor(%r)                    * %s = add(%a, %dw)
    return %ds as grad:w                                  return %s as accumulated:w

Without communication what is added up is the full gradient, in the reduce dtype. Over two mesh axes it can also be what
the reduce-scatter made, which only the all-reduce follows; that is `partial:w`. What is reduced now has first what is
there of earlier microbatches added to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from graphshard.ir.graph import aten, behind, emit, erase_dead, fake, is_backward
from graphshard.ir.mesh import Axis
from graphshard.ir.params import ParamRow
from graphshard.ir.program import Phase, Program, Slot, SlotKind
from graphshard.ir.transport import OF_A_REDUCTION, over_replicas, over_shards, reduced_over
from graphshard.passes.base import Pass
from graphshard.torch_compat.fake_tensors import fake_mode_of, new_fake_mode
from graphshard.torch_compat.operators import OpOverload, pytree

# Mark of the operators that add up what uses of a parameter pass back.
_OF_USES = "of_uses"


@dataclass(frozen=True)
class AccumulateGradients(Pass):
    """Requires: a partitioned program that reduces every gradient.
    Preserves: the sum of the gradients over all microbatches.

    Attributes:
        unsynced: parameters whose gradients are added up in full, without communication.
        unreplicated: those whose gradients are reduced over shards only.
        accumulated: those of which there are full gradients of earlier microbatches.
        partial: those of which there are gradients that were reduced over shards.
        deferred: those whose gradients are left to another call's part of the same backward.
        pending: those of which other calls have left some.
    """

    name: ClassVar[str] = "accumulate-gradients"
    unsynced: frozenset[str] = frozenset()
    unreplicated: frozenset[str] = frozenset()
    accumulated: frozenset[str] = frozenset()
    partial: frozenset[str] = frozenset()
    deferred: frozenset[str] = frozenset()
    pending: frozenset[str] = frozenset()

    def rewrite(self, program: Program) -> int:
        phase = program.phases["backward"]
        left = self.accumulated | self.partial | self.pending
        concerned = self.unsynced | self.unreplicated | self.deferred | left
        outputs, results = list(phase.outputs), phase.results
        count = 0
        for index, slot in enumerate(outputs):
            if slot.kind == "grad" and slot.of == "param" and slot.name in concerned:
                row = program.params[slot.name]
                full = full_gradient(results[index])
                wide = row.grad_dtype is None and slot.name in self.unsynced - self.accumulated
                grad = _Gradient(phase, row, reduced_over(row, program), full, program.device, wide)
                if wide:
                    grad.widen()
                if (grad.axes or (row.split and row.split.sums)) and self._apply(grad):
                    results[index], outputs[index] = grad.value, grad.slot
                    count += 1
        phase.set_results(results)
        phase.outputs = tuple(outputs)
        erase_dead(phase.module.graph)
        program.differentiated = phase.differentiated
        return count

    def _apply(self, grad: _Gradient) -> bool:
        """Compute what backward returns for a parameter; False if this microbatch has nothing to do for it."""
        name = grad.row.name
        if name in self.pending:
            grad.add("pending", grad.full_shape)
        if name in self.deferred:
            if grad.value is not None:
                grad.keep("pending")
            return grad.value is not None
        if grad.value is None and (name in self.unsynced or not {name} & (self.accumulated | self.partial)):
            return False
        if name in self.accumulated:
            grad.add("accumulated", grad.full_shape)
        if name in self.unsynced:
            grad.keep("accumulated")
            return True
        grad.reduce_over_shards()
        if name in self.partial:
            grad.add("partial", grad.row.in_memory(grad.row.padded_shape))
        if name in self.unreplicated:
            grad.keep("partial")
        else:
            grad.reduce_over_replicas()
        return True


@dataclass
class _Gradient:
    """A gradient on its way from the operator that makes it to what backward returns.

    Attributes:
        wide: what several uses of the parameter pass back is added up in the reduce dtype. FSDP2 of torch 2.15 does so
            in the first of several microbatches; in others autograd adds it up in the dtype that it has.
    """

    phase: Phase
    row: ParamRow
    axes: tuple[Axis, ...]
    value: Node | None
    device: torch.device
    wide: bool

    def __post_init__(self) -> None:
        self.slot = Slot("grad", self.row.name, "param")

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Before anything is reduced."""
        return self.row.split.summand(self.row.shape) if self.row.split else self.row.shape

    def add(self, kind: SlotKind, shape: tuple[int, ...]) -> None:
        """Add what earlier microbatches left."""
        like = self._like(shape, self.dtype_of(kind))
        earlier = self.phase.add_input(f"{kind}_{self.row.name.replace('.', '_')}", Slot(kind, self.row.name), like)
        if self.value is None:
            self.value = earlier
        elif kind == "pending" and (sums := _sums(self.value)):
            first = sums[-1].all_input_nodes[0]
            with behind(first):
                begun = emit(first.graph, aten.add.Tensor, earlier, first, like=first)
            sums[-1].update_arg(0, begun)
        else:
            self._then(aten.add.Tensor, earlier)

    def widen(self) -> None:
        """Add up in the reduce dtype what several uses of the parameter pass back."""
        if self.value is None:
            return
        for each in reversed(_sums(self.value)):
            before, passed_back = map(self._in_reduce_dtype, each.args[:2])  # type: ignore[arg-type]
            with behind(each):
                self.value = emit(each.graph, aten.add.Tensor, before, passed_back, like=each)
            self.value.meta[_OF_USES] = True
            each.replace_all_uses_with(self.value)

    def _in_reduce_dtype(self, value: Node) -> Node:
        if fake(value).dtype == self.row.reduce_dtype:
            return value
        with behind(value):
            return emit(value.graph, aten._to_copy.default, value, like=value, dtype=self.row.reduce_dtype)

    def dtype_of(self, kind: SlotKind) -> torch.dtype:
        if kind == "pending" and not self.wide:
            return self.row.grad_dtype or self.row.compute_dtype
        return self.row.reduce_dtype

    def _like(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self.value is not None:
            return torch.empty_like(fake(self.value), dtype=dtype)  # dense, where the gradient is an expanded one
        values = (node.meta["val"] for node in self.phase.placeholders)
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        with fake_mode_of(tensors[0]) if tensors else new_fake_mode():
            return torch.empty(shape, dtype=dtype, device=self.device)

    def keep(self, kind: SlotKind) -> None:
        """Return it for later microbatches."""
        assert self.value is not None
        if fake(self.value).dtype != self.dtype_of(kind):
            self._then(aten._to_copy.default, dtype=self.dtype_of(kind))
        elif self.value.op == "placeholder":  # whose memory is somebody else's
            self._then(aten.clone.default)
        self.slot = Slot(kind, self.row.name)

    def reduce_over_shards(self) -> None:
        if self.value is not None:
            self.value = over_shards(self.phase.module.graph, self.value, self.row, self.axes)

    def reduce_over_replicas(self) -> None:
        """The rest of the reduction, and the cast to the dtype of the shard."""
        assert self.value is not None
        self.value = over_replicas(self.phase.module.graph, self.value, self.row, self.axes)
        if self.row.dtype != self.row.reduce_dtype:
            self._then(aten._to_copy.default, dtype=self.row.dtype)

    def _then(self, target: OpOverload, *args: Node, **kwargs: object) -> None:
        assert self.value is not None
        with behind(self.value):
            self.value = emit(self.value.graph, target, self.value, *args, like=self.value, **kwargs)


def mark_sums(full: Node, grad: Node | None) -> None:
    """Mark in a joint graph what autograd adds up where a parameter is: what each use of it in forward passes back.

    Where several calls come before one backward, FSDP2 has all that they pass back added up one after the other.
    """
    users = (user for user in full.users if not is_backward(user))
    uses = sum(leaf is full for user in users for leaf in pytree.tree_leaves((user.args, user.kwargs)))
    grad = full_gradient(grad)
    while uses > 1 and grad is not None and grad.target is aten.add.Tensor and not grad.kwargs:
        grad.meta[_OF_USES] = True
        uses, grad = uses - 1, grad.all_input_nodes[0]


def _sums(grad: Node) -> list[Node]:
    """The marked ones, the last one first."""
    found = []
    while grad.meta.get(_OF_USES):
        found.append(grad)
        grad = grad.all_input_nodes[0]
    return found


def full_gradient(value: Node | None) -> Node | None:
    """Where the way begins that ends at a reduced gradient: the casts at its end, then the reduction itself."""
    while isinstance(value, Node) and OF_A_REDUCTION not in value.meta:
        value = value.all_input_nodes[0] if value.all_input_nodes else None
    while isinstance(value, Node) and OF_A_REDUCTION in value.meta:
        value = value.all_input_nodes[0]
    return value
