"""What compute, collectives and copies cost on a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from graphshard.program import Axis


@dataclass(frozen=True)
class Profile:
    """Which machine: its name, and the hash of all its numbers."""

    name: str
    hash: str


@dataclass(frozen=True)
class Costs:
    """What the simulator and the planner ask; all results in seconds."""

    profile: Profile

    def compute(self, nodes: Sequence[Node]) -> float:
        """These compute nodes, run as one fused region."""
        raise NotImplementedError

    def collective(self, kind: str, num_bytes: int, num_tensors: int, axis: Axis) -> float:
        """`kind` is gather, reduce, all_reduce or all_to_all; `num_bytes` is that of the full tensors."""
        raise NotImplementedError

    def copy(self, num_bytes: int) -> float:
        """A copy within device memory, as packed buckets need."""
        raise NotImplementedError

    def host_copy(self, num_bytes: int) -> float:
        """A copy between host and device."""
        raise NotImplementedError
