"""Tell ranks that made different programs, before they wait for each other in vain.

Ranks must run the same collectives in the same order. They need no communication to agree on a plan, so this only
checks: each rank puts what its program communicates into the rendezvous store and reads the others'.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from graphshard.ir.errors import DivergenceError
from graphshard.ir.program import Program
from graphshard.ir.torch_internals import rendezvous_store
from graphshard.runtime.groups import is_fake, ranks_of


def model_tag(mesh: DeviceMesh) -> str:
    """A name for a model that is the same on all ranks: how many were compiled before on this rank and this group."""
    if _is_alone(mesh):
        return ""
    # By its ranks: a mesh of two axes has no group of all of them, and its groups have other names on other ranks.
    group = hashlib.sha256(str(ranks_of(mesh)).encode()).hexdigest()[:16]
    return f"model-{group}-{rendezvous_store().add(f'graphshard/models/{group}/{mesh.get_rank()}', 1)}"


def check_agreement(program: Program, mesh: DeviceMesh, tag: str, timeout: timedelta) -> None:
    """Compare this rank's collectives with those of the other ranks of the mesh.

    Args:
        tag: names the occasion; the same on every rank.
        timeout: how long to wait for a rank that has not come as far.

    Raises:
        DivergenceError: names the rank that differs and the first line that does, or the rank that is missing.
    """
    if _is_alone(mesh):
        return
    store = dist.PrefixStore(f"graphshard/{tag}", rendezvous_store())
    lines = program.communication
    me = dist.get_rank()
    store.set(str(me), json.dumps(lines))
    for rank in ranks_of(mesh):
        theirs = json.loads(_from_rank(rank, str(rank), store, program, timeout))
        if theirs != lines:
            raise DivergenceError(_difference(me, lines, rank, theirs))


def from_first(
    mesh: DeviceMesh, tag: str, timeout: timedelta, program: Program, make: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """What the first rank of the mesh makes (plain data), on all its ranks.

    Args:
        tag, timeout: as for `check_agreement`.
        program: what it is made for.

    Raises:
        DivergenceError: the first rank is missing.
    """
    if _is_alone(mesh):
        return make()
    store = dist.PrefixStore(f"graphshard/{tag}", rendezvous_store())
    (first, *_) = ranks_of(mesh)
    if dist.get_rank() == first:
        made = make()
        store.set("made", json.dumps(made))
        return made
    return cast("dict[str, Any]", json.loads(_from_rank(first, "made", store, program, timeout)))


def _from_rank(rank: int, key: str, store: dist.Store, program: Program, timeout: timedelta) -> bytes:
    try:
        store.wait([key], timeout)
    except (RuntimeError, ValueError) as error:
        raise DivergenceError(
            f"rank {dist.get_rank()} has a new program to run ({program.reason}), but rank {rank} has none after "
            f"{timeout.total_seconds():.0f} s. All ranks must make the same sequence of calls: look for a branch "
            f"that depends on the rank or on the data, or for an exception on rank {rank}."
        ) from error
    return store.get(key)


def _is_alone(mesh: DeviceMesh) -> bool:
    return mesh.size() == 1 or is_fake(mesh)


def _difference(me: int, mine: list[str], rank: int, theirs: list[str]) -> str:
    longest = max(len(mine), len(theirs))
    padded = [lines + ["(nothing)"] * (longest - len(lines)) for lines in (mine, theirs)]
    index, (ours, other) = next((i, pair) for i, pair in enumerate(zip(*padded)) if pair[0] != pair[1])
    return (
        f"rank {rank} made a different program than rank {me}; they first differ at collective {index}:\n"
        f"  rank {me}: {ours}\n"
        f"  rank {rank}: {other}\n"
        "Give every rank the same model, the same requires_grad flags and the same arguments of compile."
    )
