"""Store parameters and gradients in the parameters' dtype; compute and communicate in the policy's.

    %s: bf16[4, 4] = param:w                 %s: f32[4, 4] = param:w
                                             %c: bf16[4, 4] = _to_copy(%s, dtype=bf16)
  * %g = all_gather_into_tensor(%s)        * %g = all_gather_into_tensor(%c)
    ...                                      ...
    return %ds as grad:w                     %d: f32[4, 4] = _to_copy(%ds, dtype=f32)
                                             return %d as grad:w

The program was captured with parameters in the compute dtype, so casts appear only at its edges. The cast precedes the
gather, where it halves the bytes that travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from graphshard.ir.graph import aten, emit, fake, rewrite_gradients
from graphshard.ir.param_table import ParamSpec
from graphshard.ir.program import Program
from graphshard.passes.base import Pass


@dataclass(frozen=True)
class MixedPrecision(Pass):
    """Preserves: every node but the casts at the edges, and the dtype in which it computes."""

    name: ClassVar[str] = "mixed-precision"
    establishes: ClassVar[frozenset[str]] = frozenset({"stored_dtypes"})

    def rewrite(self, program: Program) -> int:
        def cast_gradient(grad: Node, name: str) -> Node:
            dtype = program.params[name].dtype
            if fake(grad).dtype == dtype:
                return grad
            return emit(grad.graph, aten._to_copy.default, grad, dtype=dtype, like=grad)

        count = 0
        for phase in program.phases.values():
            for node, slot in phase.slot_of().items():
                if slot.kind == "param":
                    count += _cast_shard(node, program.params[slot.name])
            count += rewrite_gradients(phase, cast_gradient)
        return count


def _cast_shard(shard: Node, spec: ParamSpec) -> int:
    if fake(shard).dtype == spec.dtype:
        return 0
    shard.meta["val"] = fake(shard).to(spec.dtype)
    if users := list(shard.users):
        with shard.graph.inserting_before(min(users)):
            cast = emit(shard.graph, aten._to_copy.default, shard, dtype=spec.compute_dtype, like=min(users))
        for user in users:
            user.replace_input_with(shard, cast)
    return 1
