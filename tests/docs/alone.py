"""Helpers for code blocks that need no process group: leave the page's groups, and create new ones afterwards."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from tests.ranks import reset_distributed

_STORE = Path("come_back.store")


def leave() -> tuple[int, int]:
    """Leave all process groups; return the rank and the number of ranks."""
    place = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    reset_distributed()
    return place


def come_back(rank: int, world_size: int) -> None:
    """Create the group of all ranks again, with a file in the page's directory."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(_STORE.resolve()), world_size), rank=rank, world_size=world_size
    )
    dist.barrier()
