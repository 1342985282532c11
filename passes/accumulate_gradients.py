"""Make the backward of one of several microbatches: add up gradients, and reduce them later or now.

    %r = reduce_scatter_tensor(%dw, avg, 2, shard)        %a: f32[8, 4] = accumulated:w
    %ds: f32[4, 4] = wait_tensor(%r)                    * %s = add(%a, %dw)
    return %ds as grad:w                                  return %s as accumulated:w

Without communication the sum is of full gradients, in the reduce dtype. Over two mesh axes it can also be of
reduce-scattered gradients, which only the all-reduce follows; that is `partial:w`. A gradient that is reduced now first
has the sum of earlier microbatches added to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from graphshard.ir.graph import WAIT, aten, behind, emit, erase_dead, fake, is_backward, trace
from graphshard.ir.mesh import Axis
from graphshard.ir.operators import REDUCE_SCATTER
from graphshard.ir.param_table import ParamSpec
from graphshard.ir.program import Phase, Program, Slot, SlotKind
from graphshard.ir.transport import OF_A_REDUCTION, over_replicas, over_shards, reduced_over
from graphshard.passes.base import Pass
from graphshard.torch_compat.fake_tensors import fake_mode_of, new_fake_mode
from graphshard.torch_compat.torch_ops import OpOverload, pytree

# Mark of the operators that add up the gradients of several uses of a parameter.
_OF_USES = "of_uses"
# The operators between a full gradient and its reduction that change numbers; the others arrange rows for ranks.
ARITHMETIC = frozenset({aten._to_copy.default, aten.mul.Tensor, aten.div.Tensor})
_MOVES = frozenset({aten.constant_pad_nd.default, aten.clone.default})


@dataclass(frozen=True)
class AccumulateGradients(Pass):
    """Requires: a partitioned program that reduces every gradient.
    Preserves: the sum of the gradients over all microbatches.

    Attributes:
        unsynced: parameters whose full gradients are added up without communication.
        unreplicated: parameters whose gradients are reduced over shards only.
        accumulated: parameters with full gradients of earlier microbatches.
        partial: parameters with reduce-scattered gradients of earlier microbatches.
        deferred: parameters whose gradients are left to another call's part of the same backward.
        pending: parameters of which other calls have left gradients.
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
                spec = program.params[slot.name]
                wide = spec.grad_dtype is None and slot.name in self.unsynced - self.accumulated
                axes = reduced_over(spec, program)
                grad = _Gradient(phase, spec, axes, full_gradient(results[index]), slot, program.device, wide)
                if wide:
                    grad.widen()
                if (grad.axes or (spec.split and spec.split.sums)) and self._apply(grad):
                    results[index], outputs[index] = grad.value, grad.slot
                    count += 1
        phase.set_results(results)
        phase.outputs = tuple(outputs)
        erase_dead(phase.module.graph)
        program.differentiated = phase.differentiated
        return count

    def _apply(self, grad: _Gradient) -> bool:
        """Compute what backward returns for a parameter; False if this microbatch leaves it as it is."""
        spec, name, graph = grad.spec, grad.spec.name, grad.phase.module.graph
        full_shape = spec.split.summand(spec.shape) if spec.split else spec.shape
        if name in self.pending:
            grad.add("pending", full_shape)
        if name in self.deferred:
            if grad.value is not None:
                grad.keep("pending")
            return grad.value is not None
        if grad.value is None and (name in self.unsynced or not {name} & (self.accumulated | self.partial)):
            return False
        if name in self.accumulated:
            grad.add("accumulated", full_shape)
        if name in self.unsynced:
            grad.keep("accumulated")
            return True
        if grad.value is not None:
            grad.value = over_shards(graph, grad.value, spec, grad.axes)
        if name in self.partial:
            grad.add("partial", spec.in_memory(spec.padded_shape))
        if name in self.unreplicated:
            grad.keep("partial")
            return True
        assert grad.value is not None
        grad.value = over_replicas(graph, grad.value, spec, grad.axes)
        if spec.dtype != fake(grad.value).dtype:
            grad.then(aten._to_copy.default, dtype=spec.dtype)
        return True


@dataclass
class _Gradient:
    """A gradient on its way from the operator that makes it to the output of backward.

    Attributes:
        wide: add up the gradients of several uses of the parameter in the reduce dtype. FSDP2 of torch 2.15 does so in
            the first of several microbatches; in others autograd adds them up in their own dtype.
    """

    phase: Phase
    spec: ParamSpec
    axes: tuple[Axis, ...]
    value: Node | None
    slot: Slot
    device: torch.device
    wide: bool

    def add(self, kind: SlotKind, shape: tuple[int, ...]) -> None:
        """Add the sum that earlier microbatches left."""
        like = self._like(shape, self._dtype_of(kind))
        earlier = self.phase.add_input(f"{kind}_{self.spec.name.replace('.', '_')}", Slot(kind, self.spec.name), like)
        if self.value is None:
            self.value = earlier
        elif kind == "pending" and (sums := _sums_of_uses(self.value)):
            first = sums[-1].all_input_nodes[0]
            with behind(first):
                begun = emit(first.graph, aten.add.Tensor, earlier, first, like=first)
            sums[-1].update_arg(0, begun)
        else:
            self.then(aten.add.Tensor, earlier)

    def widen(self) -> None:
        """Add up the gradients of several uses of the parameter in the reduce dtype."""
        if self.value is None:
            return
        dtype = self.spec.reduce_dtype
        for each in reversed(_sums_of_uses(self.value)):
            wide = trace(each, lambda before, passed_back: before.to(dtype) + passed_back.to(dtype), *each.args[:2])
            wide.meta[_OF_USES] = True
            each.replace_all_uses_with(wide)
            self.value = wide

    def _dtype_of(self, kind: SlotKind) -> torch.dtype:
        if kind == "pending" and not self.wide:
            return self.spec.grad_dtype or self.spec.compute_dtype
        return self.spec.sum_dtype if kind == "partial" else self.spec.reduce_dtype

    def _like(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self.value is not None:
            return torch.empty_like(fake(self.value), dtype=dtype)  # dense, even if the gradient is expanded
        values = (node.meta["val"] for node in self.phase.placeholders)
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        with fake_mode_of(tensors[0]) if tensors else new_fake_mode():
            return torch.empty(shape, dtype=dtype, device=self.device)

    def keep(self, kind: SlotKind) -> None:
        """Return the gradient for later microbatches."""
        assert self.value is not None
        if fake(self.value).dtype != self._dtype_of(kind):
            self.then(aten._to_copy.default, dtype=self._dtype_of(kind))
        elif self.value.op == "placeholder":  # the caller owns its memory
            self.then(aten.clone.default)
        self.slot = Slot(kind, self.spec.name)

    def then(self, target: OpOverload, *args: Node, **kwargs: object) -> None:
        """Insert an operator on the gradient."""
        assert self.value is not None
        with behind(self.value):
            self.value = emit(self.value.graph, target, self.value, *args, like=self.value, **kwargs)


def mark_sums(full: Node, grad: Node | None) -> None:
    """Mark, in a joint graph, the sums in which autograd adds up the gradients of a parameter's uses in forward.

    If several calls precede one backward, FSDP2 adds up the gradients of all their uses one after the other.
    """
    users = (user for user in full.users if not is_backward(user))
    uses = sum(leaf is full for user in users for leaf in pytree.tree_leaves((user.args, user.kwargs)))
    grad = full_gradient(grad)
    while uses > 1 and grad is not None and grad.target is aten.add.Tensor and not grad.kwargs:
        grad.meta[_OF_USES] = True
        uses, grad = uses - 1, grad.all_input_nodes[0]


def _sums_of_uses(grad: Node) -> list[Node]:
    """Return the marked sums, the last one first."""
    found = []
    while grad.meta.get(_OF_USES):
        found.append(grad)
        grad = grad.all_input_nodes[0]
    return found


def full_gradient(value: Node | None) -> Node | None:
    """Return the full gradient that a reduced one is made of: skip the casts at the end, then the reduction."""
    while isinstance(value, Node) and OF_A_REDUCTION not in value.meta:
        value = value.all_input_nodes[0] if value.all_input_nodes else None
    while isinstance(value, Node) and OF_A_REDUCTION in value.meta:
        value = value.all_input_nodes[0]
    return value


def apply(steps: Iterable[Node], value: Tensor, targets: frozenset[OpOverload] = ARITHMETIC) -> Tensor:
    """Apply the operators of a chain that are among `targets` to a traced value."""
    for step in steps:
        if step.target in targets:
            assert callable(step.target)
            value = step.target(value, *step.args[1:], **step.kwargs)
    return value


def until_reduced(full: Node) -> list[Node]:
    """Return the nodes from a gradient to its sum over ranks, launch and wait the last; empty if there are other users.

    Launch and wait are the same node if `chunked-reduce-scatter` reduces the gradient separately.
    """
    chain = [full]
    while chain[-1].target not in (WAIT, REDUCE_SCATTER):
        if len(chain[-1].users) != 1:
            return []
        chain += chain[-1].users
        if OF_A_REDUCTION not in chain[-1].meta:
            return []
    if chain[-1].target is REDUCE_SCATTER:
        chain.append(chain[-1])
    return chain[1:] if all(node.target in ARITHMETIC | _MOVES for node in chain[1:-2]) else []
