"""What ranks do together, so that an error of one is an error of all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from graphshard.ir.errors import ArgumentError, CheckpointError
from graphshard.ir.text import brief

T = TypeVar("T")


class Ranks:
    """The ranks that save or load together.

    Args:
        group: their process group; None is that of all.
        task: what they do, to begin error messages with.

    Raises:
        ArgumentError: there is no process group, or `group` is none of this rank.
    """

    def __init__(self, group: dist.ProcessGroup | None, task: str) -> None:
        if not dist.is_initialized():
            raise ArgumentError(
                f"{task}: there is no process group. Call torch.distributed.init_process_group() first."
            )
        if not (group is None or isinstance(group, dist.ProcessGroup)):
            raise ArgumentError(f"group must be a process group that this rank is in, or None, got {brief(group)}.")
        self.group, self.task = group, task
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def share(self, names: Iterable[str]) -> list[str]:
        """This rank's part of some work that is the same on all ranks."""
        return sorted(names)[self.rank :: self.size]

    def gather(self, value: T) -> list[T]:
        """Every rank's value; raise CheckpointError if a rank does not answer."""
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, self.group)
        except (RuntimeError, ValueError) as error:  # ValueError: the process group was destroyed meanwhile
            raise CheckpointError(f"{self.task}: a rank ended, or the process group did ({error})") from error
        return values

    @contextmanager
    def together(self) -> Iterator[None]:
        """At the end of the block, an exception in it on any rank is a CheckpointError on all."""
        cause: BaseException | None = None
        failed: dict[int, str] = {}
        try:
            yield
        except CheckpointException as error:  # of DCP, the same on all ranks
            cause, failed = error, {rank: _in_words(failure) for rank, (failure, _) in error.failures.items()}
        except Exception as error:
            cause, failed = error, {self.rank: _in_words(error)}
        for others in self.gather(failed):
            failed.update(others)
        reasons: dict[str, list[str]] = {}
        for rank, reason in sorted(failed.items()):
            reasons.setdefault(reason, []).append(str(rank))
        if reasons:
            listed = "; ".join(f"{reason} (rank {', '.join(ranks)})" for reason, ranks in reasons.items())
            raise CheckpointError(f"{self.task}: {listed}") from cause


def shown(path: Any) -> str:
    """An argument that should be a path, in messages."""
    return brief(Path(path) if isinstance(path, str) else path)


def _in_words(error: BaseException) -> str:
    return str(error) if isinstance(error, (CheckpointError, ArgumentError)) else f"{type(error).__name__}: {error}"
