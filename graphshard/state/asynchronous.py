"""Checkpoints that are written while training goes on.

training    | step 7 | copy | step 8 | step 9 | step 10 | copy | ...
thread                      | write step-7 ...| rename         | write step-10 ...

The state is copied to the host, so that the next step may change it. A thread then writes the copy as `save_checkpoint`
would; its exchanges with the other ranks run on a process group of their own, beside training's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.optim import Optimizer

from graphshard.state.checkpoint import begin, write
from graphshard.state.together import Ranks, shown

log = logging.getLogger(__name__)


def async_save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer] = (),
    *,
    extra: Any = None,
    per_rank: Any = None,
    group: dist.ProcessGroup | None = None,
    keep: int | None = None,
) -> Future[None]:
    """As `save_checkpoint`, but return when the state was copied to the host; a thread writes the copy.

    Until all of it is on the disk there is no checkpoint at `path`, whatever happens. One is written at a time: a
    call waits for the one before. The copy takes as many bytes of the host's memory as this rank's part of the
    checkpoint, until it is written.

    Returns:
        `result()` waits until the checkpoint is complete, and raises CheckpointError if it could not be written; an
        error is logged in any case. Wait for the last one before the process group is destroyed.

    Raises:
        CheckpointError: on all ranks, as in `save_checkpoint`, for what is found before the state is copied.
        ArgumentError: there is no process group, or `group` is none of this rank.
    """
    task = f"cannot save {shown(path)}"
    ranks = Ranks(group, task)
    background = _background(group)
    wait(background.unfinished)
    save = begin(ranks, path, model, optimizers, extra, per_rank, keep)
    with ranks.together():
        copied = replace(save, state=BlockingAsyncStager().stage(save.state))
    future = background.thread.submit(write, copied, Ranks(background.group, task))
    future.add_done_callback(_log_error)
    background.unfinished = [future]
    return future


@dataclass
class _Background:
    """What writes checkpoints of some ranks.

    Attributes:
        group: of the same ranks, for what they exchange while they write.
        unfinished: what is, or was last, written.
    """

    group: dist.ProcessGroup
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "graphshard-checkpoint"))
    unfinished: list[Future[None]] = field(default_factory=list)


_BACKGROUNDS: WeakKeyDictionary[dist.ProcessGroup, _Background] = WeakKeyDictionary()


def _background(group: dist.ProcessGroup | None) -> _Background:
    """Of a process group; all its ranks ask for the first time together."""
    group = dist.group.WORLD if group is None else group
    assert group is not None
    if group not in _BACKGROUNDS:
        ranks = dist.get_process_group_ranks(group)
        own = dist.new_group(ranks, backend="gloo", use_local_synchronization=True, group_desc="graphshard checkpoints")
        _BACKGROUNDS[group] = _Background(own)
    return _BACKGROUNDS[group]


def _log_error(future: Future[None]) -> None:
    if (error := future.exception()) is not None:
        log.error("%s", error)
