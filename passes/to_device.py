"""Move a captured graph to another kind of device: its values, and the device arguments of its operators.

    %0: f32[4] = input:0  (cpu)                             %0: f32[4] = input:0  (cuda)
    %1 = arange(4, device=cpu)                              %1 = arange(4, device=cuda)

This is how a machine without a GPU captures programs for GPUs: autograd of fake CUDA tensors asks for device streams.
Operators that only the CPU has cannot be moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx.node import map_aggregate

from graphshard.errors import ArtifactError
from graphshard.ir.program import Program
from graphshard.passes.base import Pass
from graphshard.torch_compat.fake_tensors import fake_mode_of, fake_tensor
from graphshard.torch_compat.torch_ops import pytree

# Parts of the names of operators that torch has for the CPU only.
_CPU_ONLY = ("_for_cpu", "mkldnn", "onednn")


@dataclass(frozen=True)
class ToDevice(Pass):
    """Requires: a captured program without operators that only the CPU has.  Preserves: everything but devices.
    Counts the device arguments.

    Attributes:
        device: kind of device, such as "cuda".
    """

    name: ClassVar[str] = "to-device"
    device: str = "cuda"

    def requires(self, program: Program) -> None:
        for phase in program.phases.values():
            for node in phase.module.graph.nodes:
                if node.op == "call_function" and any(part in str(node.target) for part in _CPU_ONLY):
                    raise ArtifactError(
                        f"{program.model} cannot be exported for {self.device} on a machine without one: it was "
                        f"captured here with {node.target}, which only the CPU has. Export it where there is such a "
                        "device, or avoid the operator (for attention: torch.nn.attention.sdpa_kernel(MATH) around "
                        "export)."
                    )

    def rewrite(self, program: Program) -> int:
        if program.device.type == self.device:
            return 0
        device = program.device = torch.device(self.device)

        def move(value: torch.Tensor) -> torch.Tensor:
            shape, stride = list(value.shape), list(value.stride())
            return fake_tensor(fake_mode_of(value), shape, stride, value.dtype, device)

        count = 0
        for phase in program.phases.values():
            for node in phase.module.graph.nodes:
                given = [arg for arg in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(arg, torch.device)]
                node.args, node.kwargs = map_aggregate(
                    (node.args, node.kwargs), lambda arg: device if isinstance(arg, torch.device) else arg
                )
                if "val" in node.meta:
                    node.meta["val"] = pytree.tree_map_only(torch.Tensor, move, node.meta["val"])
                count += len(given)  # these are visible in the program's text
        return count
