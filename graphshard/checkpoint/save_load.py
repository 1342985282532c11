"""Checkpoints that are complete, or refused: torch.distributed.checkpoint (DCP) and a manifest.

    step-100/           written as .step-100.partial, renamed when everything is in it
        .metadata       DCP's index; __0_0.distcp, __1_0.distcp, ... hold the shards
        extra.pt        plain data, the same for all ranks; rank-0.pt, rank-1.pt, ...: each rank's own
        manifest.json   sizes and checksums of the other files, written last

An error on one rank is a CheckpointError on all, as every step ends with an exchange of errors. Nothing is unpickled
before it was compared with the manifest, nor freely (`_safe_unpickler.py`), so a forged checkpoint runs no code either.

    training    | step 7 | copy | step 8 | step 9 | step 10 | copy | ...
    thread                      | write step-7 ...| rename         | write step-10 ...

An asynchronous save copies the state to the host, so that the next step may change it. A thread then writes the copy;
its exchanges with the other ranks run on a separate process group.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from graphshard.checkpoint._manifest import check_contents, measure, read_manifest, rotate, sync, write_manifest
from graphshard.checkpoint._safe_unpickler import SafePlanner, SafeReader, load_plain, serialize_plain
from graphshard.errors import ArgumentError, CheckpointError
from graphshard.ir.param_table import chunk_range
from graphshard.torch_compat.dtensor import cuts_of, dtensor_of
from graphshard.torch_compat.torch_ops import OpOverload, TorchDispatchMode, pytree
from graphshard.utils.argument_validation import answer_of, check_count, path_of
from graphshard.utils.text import brief

log = logging.getLogger(__name__)
T = TypeVar("T")

_EXTRA, _PER_RANK = "extra.pt", "rank-{}.pt"


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer] = (),
    *,
    extra: Any = None,
    per_rank: Any = None,
    group: dist.ProcessGroup | None = None,
    keep: int | None = None,
) -> None:
    """Save a model and its optimizers as a new directory; every rank calls it. It is on the disk when this returns.

    Args:
        path: the directory, on a file system that all ranks share.
        model: compiled by graphshard, or sharded by FSDP2: a checkpoint of one loads into the other.
        optimizers: one or several.
        extra: step, scheduler's state, ...: tensors, numbers, strings, and lists, tuples and dicts of them. Rank
            0's is saved.
        per_rank: the same for what differs between ranks: random state, position in the data, ...
        group: the ranks that call; None is all.
        keep: how many complete checkpoints stay in the directory that `path` is in, this one included; older ones are
            removed when this one is complete, and not before. None keeps all. Damaged ones are not counted, and not
            removed.

    Raises:
        CheckpointError: on all ranks; there is nothing at `path` then, and nothing was removed.
        ArgumentError: there is no process group, or this rank is not in `group`.
    """
    ranks = Ranks(group, f"cannot save {shown(path)}")
    write(_begin(ranks, path, model, optimizers, extra, per_rank, keep), ranks)


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
    """Save as `save_checkpoint`, but return when the state was copied to the host; a thread writes the copy.

    Until all of it is on the disk there is no checkpoint at `path`, whatever happens. One is written at a time: a
    call waits for the one before. The copy takes host memory of the size of this rank's part of the checkpoint until
    it is written.

    Returns:
        `result()` waits until the checkpoint is complete, and raises CheckpointError if it could not be written; an
        error is logged in any case. Wait for the last one before the process group is destroyed.

    Raises:
        CheckpointError: on all ranks, as in `save_checkpoint`, for what is found before the state is copied.
        ArgumentError: there is no process group, or this rank is not in `group`.
    """
    task = f"cannot save {shown(path)}"
    ranks = Ranks(group, task)
    writer = _writer(group)
    wait(writer.unfinished)
    save = _begin(ranks, path, model, optimizers, extra, per_rank, keep)
    with ranks.together():
        copied = replace(save, state=BlockingAsyncStager().stage(save.state))
    future = writer.thread.submit(write, copied, Ranks(writer.group, task))
    future.add_done_callback(_log_error)
    writer.unfinished = [future]
    return future


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer] = (),
    *,
    group: dist.ProcessGroup | None = None,
) -> tuple[Any, Any]:
    """Load what `save_checkpoint` saved, on any number of ranks; every rank calls it.

    Returns:
        What was saved as `extra`, and what this rank saved as `per_rank`: None if there were fewer ranks then.

    Raises:
        CheckpointError: on all ranks; the message names the file that is missing, truncated or damaged, or the
            parameter that does not fit. Nothing was loaded then (unless manifest and contents were forged).
        ArgumentError: there is no process group, or this rank is not in `group`.
    """
    ranks = Ranks(group, f"cannot load {shown(path)}")
    with ranks.together():
        path = path_of("path", path, "a directory that graphshard.checkpoint.save_checkpoint made")
        optimizers = _checked(model, optimizers)
        time, files = read_manifest(path)
        check_contents(path, {name: files[name] for name in ranks.share(files)})
    if len(set(ranks.gather(time))) > 1:
        raise CheckpointError(f"cannot load {path}: ranks see different checkpoints there. Use a shared file system")
    with ranks.together():
        state, reader = _state(model, optimizers), SafeReader(path)
        if foreign := reader.files - set(files):
            raise CheckpointError(f"{', '.join(foreign)} is not in the manifest")
        unknown = reader.names("model") - set(state["model"])
        if state["optim"]:
            unknown |= {f"state of {n}" for n in reader.names("optim", "state") - set(state["optim"]["state"])}
        if unknown:
            raise CheckpointError(f"it holds {', '.join(sorted(unknown)[:5])}, which model or optimizers have not")
        extra, per_rank = (
            load_plain((path / name).read_bytes()) if name in files else None
            for name in (_EXTRA, _PER_RANK.format(ranks.rank))
        )
    with ranks.together():
        dcp.load(state, storage_reader=reader, planner=SafePlanner(), process_group=group)
        set_state_dict(model, optimizers, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return extra, per_rank


# --- saving ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Save:
    """A checkpoint that is being saved.

    Attributes:
        path, partial: the directory when it is complete, and until then.
        state: for DCP.
        plain: contents of the other files of this rank, by name.
    """

    path: Path
    partial: Path
    state: dict[str, Any]
    plain: Mapping[str, bytes]
    keep: int | None


def _begin(
    ranks: Ranks, path: Any, model: nn.Module, optimizers: Any, extra: Any, per_rank: Any, keep: int | None
) -> Save:
    """Check the arguments of `save_checkpoint`, and make the partial directory."""
    with ranks.together():
        path = path_of("path", path, "a directory to make")
        if keep is not None:
            check_count("keep", keep)
        partial = path.with_name(f".{path.name}.partial") if path.name else path
        state = _state(model, _checked(model, optimizers))
        serialize_plain(pytree.tree_map_only(torch.Tensor, lambda _: None, state), "state")  # or it would not load
        plain = {_PER_RANK.format(ranks.rank): serialize_plain(per_rank, "per_rank")}
        if ranks.rank == 0:
            plain[_EXTRA] = serialize_plain(extra, "extra")
            if path.exists():
                raise CheckpointError("it exists already. Remove it, or choose another name")
            shutil.rmtree(partial, ignore_errors=True)  # of a save that was interrupted
            partial.mkdir(parents=True)
    return Save(path, partial, state, plain, keep)


def write(save: Save, ranks: Ranks) -> None:
    """Write a checkpoint; it is complete, and on the disk, when this returns."""
    path, partial = save.path, save.partial
    with ranks.together():
        for name, content in save.plain.items():
            (partial / name).write_bytes(content)
            sync(partial / name)
    with ranks.together():
        dcp.save(save.state, checkpoint_id=partial, process_group=ranks.group)
        names = SafeReader(partial).files | {_EXTRA, *(_PER_RANK.format(rank) for rank in range(ranks.size))}
        share = measure(partial, ranks.share(names))
    files = {name: measured for part in ranks.gather(share) for name, measured in part.items()}
    with ranks.together():
        if ranks.rank == 0:
            write_manifest(partial, files)
            sync(partial)
            partial.rename(path)
            sync(path.parent)
            if save.keep is not None:
                rotate(path.parent, save.keep)


def _checked(model: Any, optimizers: Any) -> tuple[Optimizer, ...]:
    """Return the optimizers, read once; raise ArgumentError if they or the model are of another type."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model must be an nn.Module, got {brief(model)}")
    given = (optimizers,) if isinstance(optimizers, Optimizer) else optimizers
    several = isinstance(given, Iterable) and not isinstance(given, torch.Tensor)
    found = tuple(answer_of("optimizers", list, given)) if several else (given,)
    if not all(isinstance(optimizer, Optimizer) for optimizer in found):
        raise ArgumentError(f"optimizers must be a torch.optim.Optimizer or several, got {brief(optimizers)}")
    return found


def _state(model: nn.Module, optimizers: Optimizer | Iterable[Optimizer]) -> dict[str, Any]:
    """Return the state for DCP: shards that share memory with the parameters, under the original names."""
    model_state, optim_state = get_state_dict(model, optimizers)
    return {"model": model_state, "optim": optim_state}


@dataclass
class _Writer:
    """Thread that writes checkpoints of some ranks.

    Attributes:
        group: of the same ranks, for their exchanges while they write.
        unfinished: the checkpoint that is, or was last, written.
    """

    group: dist.ProcessGroup
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "graphshard-checkpoint"))
    unfinished: list[Future[None]] = field(default_factory=list)


_WRITERS: WeakKeyDictionary[dist.ProcessGroup, _Writer] = WeakKeyDictionary()


def _writer(group: dist.ProcessGroup | None) -> _Writer:
    """Return the writer of a process group; all its ranks ask for the first time together."""
    group = dist.group.WORLD if group is None else group
    assert group is not None
    if group not in _WRITERS:
        ranks = dist.get_process_group_ranks(group)
        own = dist.new_group(ranks, backend="gloo", use_local_synchronization=True, group_desc="graphshard checkpoints")
        _WRITERS[group] = _Writer(own)
    return _WRITERS[group]


def _log_error(future: Future[None]) -> None:
    if (error := future.exception()) is not None:
        log.error("%s", error)


# --- ranks -------------------------------------------------------------------------------------------------------


class Ranks:
    """The ranks that save or load together, so that an error of one is an error of all.

    Args:
        group: their process group; None is all ranks. ArgumentError if there is none, or this rank is not in it.
        task: starts error messages, such as "cannot save step-100".
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
        """Return this rank's part of names that are the same on all ranks."""
        return sorted(names)[self.rank :: self.size]

    def gather(self, value: T) -> list[T]:
        """Return every rank's value; raise CheckpointError if a rank does not answer."""
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, self.group)
        except (RuntimeError, ValueError) as error:  # ValueError: the process group was destroyed meanwhile
            raise CheckpointError(f"{self.task}: a rank ended, or the process group did ({error})") from error
        return values

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Make an exception in the block on any rank a CheckpointError on all, at its end."""
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
    """Return an argument that should be a path, for messages."""
    return brief(Path(path) if isinstance(path, str) else path)


def _in_words(error: BaseException) -> str:
    return str(error) if isinstance(error, (CheckpointError, ArgumentError)) else f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def unsharded_init() -> Iterator[None]:
    """Let random operators on sharded parameters draw what they would draw on the full ones.

        model.to_empty(device=device)
        torch.manual_seed(0)  # the same on all ranks
        with graphshard.checkpoint.unsharded_init():
            model.init_weights()

    An operator such as `normal_` then draws the whole parameter on every rank, keeps this rank's piece and frees the
    rest: the values equal the unsharded model's, bit for bit, and memory holds one full parameter next to the
    shards. Other operators run on the shards as usual.
    """
    with _DrawUnsharded():
        yield


class _DrawUnsharded(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Fill a full tensor, and keep this rank's piece of it: in place, or as a new tensor."""
        fills = torch.Tag.nondeterministic_seeded in func.tags and func._schema.name.endswith(("_", "_like"))
        like = args[0] if fills else None
        if not isinstance(like, DTensor) or not cuts_of(like.placements):
            return func(*args, **(kwargs or {}))
        local, mesh = like.to_local(), like.device_mesh
        full = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=local.device)
        piece = drawn = func(full, *args[1:], **(kwargs or {}))
        for place, dim in cuts_of(like.placements):
            piece = piece.narrow(dim, *chunk_range(piece.shape[dim], mesh.size(place), mesh.get_local_rank(place)))
        if func._schema.name.endswith("_"):
            local.copy_(piece)
            return like
        return dtensor_of(piece.clone(), mesh, like.placements, drawn.shape, drawn.stride())
