"""Checkpoints that are whole, or refused: torch.distributed.checkpoint (DCP) and a manifest.

step-100/           made as .step-100.partial, renamed when everything is in it
    .metadata       DCP's index; __0_0.distcp, __1_0.distcp, ... hold the shards
    extra.pt        plain data, the same for all ranks; rank-0.pt, rank-1.pt, ...: each rank's own
    manifest.json   what else there is, written last

An error on one rank is a CheckpointError on all, as every step ends with an exchange of errors. Nothing is unpickled
before it was compared with the manifest, nor freely (`state/unpickling.py`), so a forged checkpoint runs no
code either.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from graphshard.ir.errors import ArgumentError, CheckpointError
from graphshard.ir.given import answer_of, check_count, path_of
from graphshard.ir.text import brief
from graphshard.state.manifest import check_contents, measure, read_manifest, rotate, sync, write_manifest
from graphshard.state.together import Ranks, shown
from graphshard.state.unpickling import SafePlanner, SafeReader, load_plain, serialize_plain

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
            removed when this one is complete, and not before. None keeps all. What is damaged is not counted, and not
            removed.

    Raises:
        CheckpointError: on all ranks; there is nothing at `path` then, and nothing was removed.
        ArgumentError: there is no process group, or `group` is none of this rank.
    """
    ranks = Ranks(group, f"cannot save {shown(path)}")
    write(begin(ranks, path, model, optimizers, extra, per_rank, keep), ranks)


@dataclass(frozen=True)
class Save:
    """A checkpoint that is being saved.

    Attributes:
        path: where it will be.
        partial: where it is until everything is in it.
        state: what DCP saves.
        plain: contents of the other files of this rank, by name.
        keep: as in `save_checkpoint`.
    """

    path: Path
    partial: Path
    state: dict[str, Any]
    plain: Mapping[str, bytes]
    keep: int | None


def begin(
    ranks: Ranks, path: Any, model: nn.Module, optimizers: Any, extra: Any, per_rank: Any, keep: int | None
) -> Save:
    """Check the arguments of `save_checkpoint`, and make the directory for what is not whole yet."""
    with ranks.together():
        path = path_of("path", path, "a directory to make")
        if keep is not None:
            check_count("keep", keep)
        optimizers = _checked(model, optimizers)
        partial = path.with_name(f".{path.name}.partial") if path.name else path
        state = _state(model, optimizers)
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
    """Write a checkpoint; it is there, and on the disk, when this returns."""
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
        ArgumentError: there is no process group, or `group` is none of this rank.
    """
    ranks = Ranks(group, f"cannot load {shown(path)}")
    with ranks.together():
        path = path_of("path", path, "a directory that graphshard.save_checkpoint made")
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


def _checked(model: Any, optimizers: Any) -> tuple[Optimizer, ...]:
    """The optimizers, read once; raise ArgumentError if they or the model are none."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model must be an nn.Module, got {brief(model)}")
    given = (optimizers,) if isinstance(optimizers, Optimizer) else optimizers
    several = isinstance(given, Iterable) and not isinstance(given, torch.Tensor)
    found = tuple(answer_of("optimizers", list, given)) if several else (given,)
    if not all(isinstance(optimizer, Optimizer) for optimizer in found):
        raise ArgumentError(f"optimizers must be a torch.optim.Optimizer or several, got {brief(optimizers)}")
    return found


def _state(model: nn.Module, optimizers: Optimizer | Iterable[Optimizer]) -> dict[str, Any]:
    """What DCP saves, or loads into: shards that share memory with the parameters, under the original names."""
    model_state, optim_state = get_state_dict(model, optimizers)
    return {"model": model_state, "optim": optim_state}
