"""Ask gloo if a rank has closed its connections, and close all of this rank's own.

Gloo has no call for either, but receiving does both: gloo refuses to receive from a rank that has hung up, and when a
receive takes longer than it may, gloo closes all connections of the group. Whoever waits for a collective on them, here
or on another rank, gets an error at once, and so does the destructor of the group, which waits for what is under way.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta

import torch
import torch.distributed as dist

# Nothing is ever sent under this tag.
_TAG = 0x6753
_AT_ONCE = timedelta(milliseconds=1)


def has_hung_up(rank: int) -> bool:
    """Whether a rank of the default group has closed its connection to this one, as a process that ends does."""
    group = dist.group.WORLD
    assert group is not None
    try:
        group.recv([torch.zeros(1)], rank, _TAG)
    except RuntimeError as error:
        return any(word in str(error) for word in ("onnection closed", "onnection reset", "roken pipe"))
    return False


def hang_up(group: dist.ProcessGroup) -> None:
    """End what is under way in a group of gloo's; it cannot be used any more."""
    if "gloo" not in str(dist.get_backend(group)):
        return
    for rank in range(group.size()):
        if rank != group.rank():
            try:
                work = group.recv([torch.zeros(1)], rank, _TAG)
            except RuntimeError:  # it has hung up, and the others may not have: gloo asks only this one
                continue
            with contextlib.suppress(RuntimeError):
                work.wait(_AT_ONCE)
            return
