"""What the model itself communicates, as costs ask of it.

%w = reduced(%y, sum, tp)       at once, along an axis

%w = reduced_together([%y, %z], sum, tp)   several by one launch

%s = reducing(%y, sum, tp)      beside the compute that lies between
%w = settled(%s)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from torch.fx import Node

from graphshard.cost.costs import Costs, maximum
from graphshard.cost.kernels import num_bytes
from graphshard.cost.multiplications import Scalar
from graphshard.ir.mesh import Axis
from graphshard.ir.operators import BEGINS, COPIES, EXCHANGED, JOINED, REDUCED, SCATTERED, SETTLED, TOGETHER

ModelKind = Literal["reduced", "joined", "scattered", "exchanged"]
MODEL_KINDS: tuple[ModelKind, ...] = get_args(ModelKind)

# What each is to `Costs.collective`.
_KINDS: dict[object, tuple[ModelKind, str]] = {
    REDUCED: ("reduced", "all_reduce"),
    JOINED: ("joined", "gather"),
    SCATTERED: ("scattered", "reduce"),
    EXCHANGED: ("exchanged", "all_to_all"),
}
# Of what starts one, and of what carries several, the operator that runs at once.
_DONE: dict[object, object] = {begun: done for begun_by in (BEGINS, TOGETHER) for done, begun in begun_by.items()}


@dataclass(frozen=True)
class ModelCollective:
    """A collective of the model.

    Attributes:
        kind: the operator.
        costs_as: the kind that `Costs.collective` is asked for.
        num_bytes: of the full tensors; of an exchange what this rank sends or receives, whichever is more.
        axis: its name.
        num_tensors: that it carries.
        at_once: compute waits until it has ended; otherwise where it is settled.
    """

    kind: ModelKind
    costs_as: str
    num_bytes: Scalar
    axis: str
    num_tensors: int = 1
    at_once: bool = True

    @property
    def name(self) -> str:
        """ "reduced over tp"."""
        return f"{self.kind} over {self.axis}"

    def seconds(self, costs: Costs, axis: Axis) -> Scalar:
        """That it takes."""
        return costs.collective(self.costs_as, self.num_bytes, self.num_tensors, axis)


def model_collective(node: Node, size_of: Callable[[Node], Scalar] = num_bytes) -> ModelCollective | None:
    """What a node sends; None for one that is no collective of the model.

    Args:
        size_of: bytes of a value.
    """
    target: object = _DONE.get(node.target, node.target)
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
    """The operators that compute, without what the model communicates, or is copied to or from the host."""
    apart = {SETTLED, *COPIES}
    return [node for node in nodes if node.target not in apart and model_collective(node) is None]
