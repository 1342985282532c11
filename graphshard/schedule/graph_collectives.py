"""Collectives of an external graph by kind and group, the ranks they run over, and what cannot be scheduled.

    %g = all_gather_into_tensor(%s, 4, "2")          a message of the group "2" with one wait
    %w = wait_tensor(%g)

All errors are found here, before anything is changed.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph, Node

from graphshard.cost.costs import Costs
from graphshard.cost.profile import Profile
from graphshard.errors import ArgumentError, UnsupportedError
from graphshard.ir.graph import ALL_REDUCES, GATHERS, REDUCES, WAIT, c10d
from graphshard.ir.mesh import MOST_RANKS, Axis, Mesh
from graphshard.torch_compat.dtensor import process_group
from graphshard.torch_compat.symbolic_sizes import hint
from graphshard.torch_compat.torch_ops import OpOverload, OpOverloadPacket
from graphshard.utils.argument_validation import check_count, is_int
from graphshard.utils.text import brief

_EXAMPLE = "{'group name': 8}, {'group name': graphshard.Group(8, apart=2)} or a DeviceMesh"


@dataclass(frozen=True)
class Group:
    """A process group, as costs see it.

    Attributes:
        size: number of ranks.
        apart: what neighbours' global ranks differ by: 1 for ranks 0, 1, 2, and 8 for ranks 0, 8, 16. It tells how many
            ranks of the group share a node.
        link: name of what carries its collectives; groups of the same name queue for it. "" is "node" for a group
            within one node, else "network".

    Raises:
        ArgumentError: a number is not positive, or the link is no text.
    """

    size: int
    apart: int = 1
    link: str = ""

    def __post_init__(self) -> None:
        check_count("size", self.size, most=MOST_RANKS, what="number of ranks")
        check_count("apart", self.apart, most=MOST_RANKS, what="number of ranks")
        if not isinstance(self.link, str):
            raise ArgumentError(
                f"link must be a name such as 'network', or '' for the machine's, got {brief(self.link)}."
            )


# Groups by the names that a graph has for them; None is the groups of this process.
GroupsLike = Mapping[str, int | Group] | DeviceMesh | None


@dataclass(frozen=True)
class GroupCosts:
    """Costs of one group's collectives."""

    group: Group  # the group
    profile: Profile  # of the machine
    network: str

    @cached_property
    def _on(self) -> tuple[Costs, Axis]:
        axis = Axis("group", self.group.size, "replicate")
        # Ranks that lie between neighbors of the group are inside of the axis.
        mesh = Mesh((axis, Axis("inside", self.group.apart, "shard")))
        return Costs(self.profile, self.network, mesh), axis

    @cached_property
    def link(self) -> str:
        """Name of its link."""
        costs, axis = self._on
        return self.group.link or costs.link(axis)

    def seconds(self, kind: str, num_bytes: int, num_tensors: int) -> float:
        """Return the seconds of one launch, as `Costs.collective` says."""
        costs, axis = self._on
        return float(costs.collective(kind, num_bytes, num_tensors, axis))


def check_groups(groups: GroupsLike) -> dict[str, Group]:
    """Return the groups that an argument names; raise ArgumentError for other values."""
    if groups is None:
        return {}
    if isinstance(groups, DeviceMesh):
        return {groups.get_group(dim).group_name: _existing(groups.get_group(dim)) for dim in range(groups.ndim)}
    if not isinstance(groups, Mapping):
        raise ArgumentError(f"groups must be {_EXAMPLE}, got {brief(groups)}.")
    found = {}
    for name, group in groups.items():
        if not isinstance(name, str):
            raise ArgumentError(f"groups must have names of process groups for keys, got {brief(name)}.")
        if is_int(group):
            check_count(f"groups[{brief(name)}]", group, most=MOST_RANKS, what="number of ranks")
            group = Group(group)
        if not isinstance(group, Group):
            raise ArgumentError(f"groups must be {_EXAMPLE}, got {brief(group)} for {brief(name)}.")
        found[name] = group
    return found


def group_named(name: str, node: str, given: Mapping[str, Group]) -> Group:
    """Return a group that a node names: as it was given, or the one that exists.

    Raises:
        ArgumentError: there is none.
    """
    if name in given:
        return given[name]
    try:
        return _existing(process_group(name))
    except (RuntimeError, ValueError, KeyError):
        known = f" The groups given are {', '.join(map(repr, given))}." if given else ""
        raise ArgumentError(
            f"groups: %{node} communicates over the group {name!r}, which does not exist in this process.{known} Name "
            f"it, as in groups={{{name!r}: 8}}, with its number of ranks."
        ) from None


def _existing(group: dist.ProcessGroup) -> Group:
    ranks = sorted(dist.get_process_group_ranks(group))
    return Group(len(ranks), max(1, (ranks[-1] - ranks[0]) // max(1, len(ranks) - 1)))


_EXCHANGE = c10d.all_to_all_single.default
_KINDS: dict[Any, str] = {
    **dict.fromkeys(GATHERS, "gather"),
    **dict.fromkeys(REDUCES, "reduce"),
    **dict.fromkeys(ALL_REDUCES, "all_reduce"),
    _EXCHANGE: "all_to_all",
}
_PACKETS = {"gather": c10d.all_gather_into_tensor, "reduce": c10d.reduce_scatter_tensor, "all_reduce": c10d.all_reduce}
# Namespaces of operators that communicate; operators that are not in `_KINDS` are refused.
_COMMUNICATING = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d")


@dataclass(frozen=True, eq=False)
class Message:
    """One collective of a graph, single or coalesced."""

    index: int  # its place in the graph
    kind: str  # gather, reduce (reduce-scatter), all_reduce or all_to_all
    node: Node  # the launch
    tensors: tuple[Node, ...]  # its inputs
    arrivals: tuple[tuple[Node, ...], ...]  # by tensor, the nodes of its result: the launch itself, or `getitem`s of it
    waits: tuple[Node, ...]  # all of them; there may be several for a tensor, and none for one that is not read
    group: str  # name of the process group
    key: tuple[Any, ...] | None  # messages with equal keys may travel together; None travels alone
    num_bytes: int  # of the full tensors on each rank, as `Costs.collective` counts them

    @property
    def packet(self) -> OpOverloadPacket:
        """The operator without its overload, of which there is a coalesced form."""
        return _PACKETS[self.kind]


def is_launch(node: Node) -> bool:
    """Return whether a node is a functional collective that can be scheduled."""
    return node.op == "call_function" and node.target in _KINDS


def bytes_of(val: Any) -> int:
    """Return the bytes of a value, of all tensors if there are several; at their hints where sizes are dynamic."""
    if isinstance(val, torch.Tensor):
        count = 1
        for size in val.shape:
            count *= hint(size)
        return count * val.dtype.itemsize
    return sum(map(bytes_of, val)) if isinstance(val, (tuple, list)) else 0


def messages(graph: Graph, given: Mapping[str, Group]) -> tuple[list[Message], dict[str, Group]]:
    """Return the collectives of a graph in their order, and the groups that they run over.

    Raises:
        ArgumentError: values are not known, a group is not, or a result is used without a wait.
        UnsupportedError: an operator communicates in a way that is not known, or a size has no hint.
    """
    found: list[Message] = []
    groups: dict[str, Group] = {}
    for node in graph.nodes:
        _check_values(node)
        if not is_launch(node):
            _check_operator(node)
            continue
        name = _group_name(node)
        if name not in groups:
            groups[name] = group_named(name, node.name, given)
        size = groups[name].size
        if _KINDS[node.target] in ("gather", "reduce") and node.args[-2] != size:
            raise ArgumentError(
                f"groups: {name!r} has {size} ranks, but %{node.name} communicates with {node.args[-2]}. "
                "Correct the size."
            )
        found.append(_message(len(found), node, name, size))
    return found, groups


def _message(index: int, node: Node, group: str, num_ranks: int) -> Message:
    kind = _KINDS[node.target]
    given: Any = node.args[0]
    coalesced = isinstance(given, (list, tuple))
    tensors = tuple(given) if coalesced else (given,)
    arrivals: list[list[Node]] = [[] for _ in tensors] if coalesced else [[node]]
    waits: list[Node] = []
    for user in node.users:
        if coalesced and user.target is operator.getitem and isinstance(user.args[1], int):
            arrivals[user.args[1]].append(user)
            waits += [_wait(wait, user) for wait in user.users]
        else:
            waits.append(_wait(user, node))
    if not waits:
        raise ArgumentError(
            f"gm: nothing waits for the collective %{node.name} ({node.target}). Call wait_tensor on what it returns, "
            "or remove it with gm.graph.eliminate_dead_code()."
        )
    full = node.meta["val"] if kind == "gather" else [tensor.meta["val"] for tensor in tensors]
    dtypes = {tensor.meta["val"].dtype for tensor in tensors}
    key = None
    if kind in _PACKETS and len(dtypes) == 1 and not any(dtype.is_complex for dtype in dtypes):
        # The other arguments are the reduction, the number of ranks and the group.
        key = (kind, *node.args[1:], str(*dtypes), str(tensors[0].meta["val"].device))
    # Gloo makes one buffer of coalesced all-reduces, and adds up in an order that depends on the place in it.
    if kind == "all_reduce" and num_ranks > 2 and tensors[0].meta["val"].device.type == "cpu":
        exact = node.args[1] in ("min", "max") or not any(dtype.is_floating_point for dtype in dtypes)
        key = key if exact else None
    arrived = tuple(map(tuple, arrivals))
    return Message(index, kind, node, tensors, arrived, tuple(waits), group, key, bytes_of(full))


def _wait(user: Node, value: Node) -> Node:
    if user.target is not WAIT:
        what = "the graph returns it" if user.op == "output" else f"%{user.name} reads it"
        raise ArgumentError(
            f"gm: the collective %{value.name} is used without a wait: {what}. Call wait_tensor on it first."
        )
    return user


def _check_values(node: Node) -> None:
    if node.op == "output":
        return
    if "val" not in node.meta and node.users and not (node.op == "get_attr" and not any(map(is_launch, node.users))):
        raise ArgumentError(
            f"gm: %{node.name} has no meta['val'], so that its size is not known. Trace the graph with make_fx, or run "
            "torch.fx.passes.fake_tensor_prop.FakeTensorProp over it."
        )
    val = node.meta.get("val")
    for value in val if isinstance(val, (tuple, list)) else (val,):
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            if isinstance(size, torch.SymInt) and size.node.hint is None:
                raise UnsupportedError(
                    f"%{node.name} has the size {size}, which depends on values and has no hint. Give it one, as with "
                    "torch.fx.experimental.symbolic_shapes' ShapeEnv, or trace with sizes that are known."
                )


def _check_operator(node: Node) -> None:
    target = node.target
    if not isinstance(target, OpOverload) or target is WAIT:
        return
    space, _, name = target._schema.name.partition("::")
    if space not in _COMMUNICATING:
        return
    if space == "_c10d_functional":
        why, remedy = "which is not scheduled", "Functionalize the graph, and leave broadcasts and sends out of it."
    elif space == "_c10d_functional_autograd":
        why, remedy = "which autograd differentiates", "Trace the joint graph, in which autograd has run."
    else:
        why = "a legacy collective"
        remedy = "Use torch.distributed._functional_collectives, whose operators are torch.ops._c10d_functional."
    raise UnsupportedError(f"%{node.name} calls {space}.{name}, {why}. {remedy}")


def _group_name(node: Node) -> str:
    group: Any = node.args[-1] if not node.kwargs else node.kwargs.get("group_name", node.args[-1])
    name = group if isinstance(group, str) else getattr(group, "group_name", None)
    if not isinstance(name, str) or isinstance(group, Node) or node.kwargs:
        raise UnsupportedError(
            f"%{node.name} does not name its group by a text in its arguments. Trace it with positional arguments, as "
            "torch.distributed._functional_collectives calls it."
        )
    return name
