"""The model's own collectives, as costs see them.

%w = reduced(%y, sum, tp)       at once, along an axis

%w = reduced_together([%y, %z], sum, tp)   several by one launch

%s = reducing(%y, sum, tp)      overlaps the compute in between
%w = settled(%s)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from torch.fx import Node

from graphshard.cost.costs import Costs
from graphshard.cost.kernels import num_bytes
from graphshard.cost.scalars import Scalar, maximum
from graphshard.ir.mesh import Axis
from graphshard.ir.operators import BEGINS, COPIES, EXCHANGED, JOINED, REDUCED, SCATTERED, SETTLED, TOGETHER

ModelKind = Literal["reduced", "joined", "scattered", "exchanged"]
MODEL_KINDS: tuple[ModelKind, ...] = get_args(ModelKind)

# The kind of each for `Costs.collective`.
_KINDS: dict[object, tuple[ModelKind, str]] = {
    REDUCED: ("reduced", "all_reduce"),
    JOINED: ("joined", "gather"),
    SCATTERED: ("scattered", "reduce"),
    EXCHANGED: ("exchanged", "all_to_all"),
}
# The operator that runs at once by the one that starts it, or carries several tensors.
_AT_ONCE: dict[object, object] = {other: at_once for others in (BEGINS, TOGETHER) for at_once, other in others.items()}


@dataclass(frozen=True)
class ModelCollective:
    """A collective of the model.

    Attributes:
        kind: the operator.
        costs_as: the kind for `Costs.collective`.
        num_bytes: of the full tensors; of an all-to-all the larger of what this rank sends and receives.
        axis: its name.
        num_tensors: of the launch.
        at_once: compute waits until it has ended; otherwise until it is settled.
    """

    kind: ModelKind
    costs_as: str
    num_bytes: Scalar
    axis: str
    num_tensors: int = 1
    at_once: bool = True

    @property
    def name(self) -> str:
        """Return a name for reports, such as "reduced over tp"."""
        return f"{self.kind} over {self.axis}"

    def seconds(self, costs: Costs, axis: Axis) -> Scalar:
        """Return its cost."""
        return costs.collective(self.costs_as, self.num_bytes, self.num_tensors, axis)


def model_collective(node: Node, size_of: Callable[[Node], Scalar] = num_bytes) -> ModelCollective | None:
    """Return the collective of a node; None if it is not a collective of the model.

    Args:
        size_of: bytes of a value.
    """
    target: object = _AT_ONCE.get(node.target, node.target)
    if target not in _KINDS:
        return None
    kind, costs_as = _KINDS[target]
    values = node.args[0] if node.target in TOGETHER.values() else [node.all_input_nodes[0]]
    assert isinstance(values, (list, tuple))
    given, made = sum(size_of(value) for value in values if isinstance(value, Node)), size_of(node)
    size = made if kind == "joined" else given
    if kind == "exchanged" and given != made:
        size = maximum(given, made)
    at_once = node.target not in BEGINS.values()
    return ModelCollective(kind, costs_as, size, str(node.args[-1]), len(values), at_once)


def computing(nodes: Iterable[Node]) -> list[Node]:
    """Return the operators that compute, without collectives of the model and copies from or to the host."""
    apart = {SETTLED, *COPIES}
    return [node for node in nodes if node.target not in apart and model_collective(node) is None]
