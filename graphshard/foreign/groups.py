"""The ranks that collectives of a foreign graph run over, and what carries them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from graphshard.cost.costs import Costs
from graphshard.cost.profile import Profile
from graphshard.errors import ArgumentError
from graphshard.ir.mesh import MOST_RANKS, Axis, Mesh
from graphshard.torch_compat.dtensor import process_group
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
        link: name of what carries its collectives; those of the same name queue for it. "" is "node" for a group
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


# Groups by the names that a graph has for them; None is those that exist in this process.
GroupsLike = Mapping[str, int | Group] | DeviceMesh | None


@dataclass(frozen=True)
class Wire:
    """What collectives of one group cost.

    Attributes:
        group: the group.
        profile, network: of the machine.
    """

    group: Group
    profile: Profile
    network: str

    @cached_property
    def _axis(self) -> Axis:
        return Axis("group", self.group.size, "replicate")

    @cached_property
    def _costs(self) -> Costs:
        # So many ranks apart means that as many lie inside of the axis.
        mesh = Mesh((self._axis, Axis("inside", self.group.apart, "shard")))
        return Costs(self.profile, self.network, mesh)

    @cached_property
    def link(self) -> str:
        """Name of what carries it."""
        return self.group.link or self._costs.link(self._axis)

    def seconds(self, kind: str, num_bytes: int, num_tensors: int) -> float:
        """One launch, as `Costs.collective` says."""
        return float(self._costs.collective(kind, num_bytes, num_tensors, self._axis))


def check_groups(groups: GroupsLike) -> dict[str, Group]:
    """The groups that an argument names; raise ArgumentError for what is none."""
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
    """A group that a node names: as it was given, or the one that exists.

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
