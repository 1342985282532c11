"""Checkpoints in Hugging Face's format, read into shards and written from shards; no rank holds the full model.

    with init_empty_weights():                          # of accelerate: parameters on the meta device
        model = AutoModelForCausalLM.from_config(config)
    graphshard.compile(model, mesh)
    load_safetensors(model, folder)                     # each rank reads its rows of each file

torch.distributed.checkpoint (DCP) reads and writes. This file checks names and shapes, and knows tied names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor

from graphshard.checkpoint.save_load import Ranks, shown
from graphshard.errors import CheckpointError
from graphshard.module.compiled_module import compiled_module
from graphshard.utils.argument_validation import path_of
from graphshard.utils.text import brief, users_class


def load_safetensors(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Load the parameters and buffers of a compiled model from safetensors files; every rank calls it.

    Each rank reads its shards, in the model's dtypes. Parameters on the meta device are made on the mesh's device.

    Args:
        model: a compiled module with the names of the files; of tied names the file may have any.
        folder: written by `save_pretrained` of transformers or by `save_safetensors`, or a checkpoint of the Hub.

    Raises:
        ArgumentError: the module was not compiled.
        CheckpointError: on all ranks, if the files lack a tensor of the model, or have an unknown one or one of another
            shape. Nothing was loaded then.
    """
    runner = compiled_module(model)._graphshard
    ranks = Ranks(None, f"cannot load {shown(folder)}")
    with ranks.together():
        path = path_of("folder", folder, "a directory with safetensors files")
        if not list(path.glob("*.safetensors")):
            raise CheckpointError("there is no *.safetensors in it")
        reader = HuggingFaceStorageReader(str(path))
        entries: dict[str, Any] = reader.read_metadata().state_dict_metadata
        found = {name: entry.size for name, entry in entries.items()}
        read = _names_to_read(model, model.state_dict(), found)
        _check_buffers(model)
    with ranks.together():
        _materialize(model, runner.tracer.storage.device, runner.tracer.spec.device)
        state = model.state_dict()
        dcp.load({name: state[own] for name, own in read.items()}, storage_reader=reader)


def save_safetensors(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write a compiled model as `save_pretrained` does, from its shards; every rank calls it.

    Each rank writes its shards to `folder/sharded`; the first rank joins them, file by file, through maps of the files.
    A model of transformers gets its `config.json`, so that `from_pretrained(folder)` reads it.

    Raises:
        ArgumentError: the module was not compiled.
        CheckpointError: on all ranks, if it could not be written.
    """
    compiled_module(model)
    ranks = Ranks(None, f"cannot save {shown(folder)}")
    with ranks.together():
        path = path_of("folder", folder, "a directory to write safetensors files to")
        state = model.state_dict()
        first = {names[0]: state[names[0]] for names in _tied(model, state)}
        if ranks.rank == 0:
            path.mkdir(parents=True, exist_ok=True)
            _write_config(model, path)
    with ranks.together():
        writer = HuggingFaceStorageWriter(str(path), save_distributed=True, enable_consolidation=True)
        dcp.save(first, storage_writer=writer)


def _tied(model: nn.Module, state: Mapping[str, Any]) -> list[list[str]]:
    """Return the names in a state dict, grouped by tensor."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    groups: dict[int, list[str]] = {}
    for name, value in state.items():
        groups.setdefault(id(tensors.get(name, value)), []).append(name)
    return list(groups.values())


def _names_to_read(model: nn.Module, state: Mapping[str, Any], found: Mapping[str, torch.Size]) -> dict[str, str]:
    """Return, by each tensor's name in the files, the first of its names in the model."""
    read, known = {}, set()
    for names in _tied(model, state):
        named = next((name for name in names if name in found), None)
        if named is None:
            raise CheckpointError(
                f"it has no {names[0]}, which {users_class(model).__name__} has. If that is tied to another one, call "
                "tie_weights() of the model before graphshard.compile"
            )
        if found[named] != state[named].shape:
            raise CheckpointError(
                f"{named} has shape {list(found[named])} in it, and {list(state[named].shape)} in the model"
            )
        read[named] = names[0]
        known.update(names)
    if unknown := sorted(set(found) - known):
        raise CheckpointError(f"it holds {brief(unknown[0])}, which {users_class(model).__name__} has not")
    return read


def _check_buffers(model: nn.Module) -> None:
    """Raise CheckpointError for a non-persistent buffer on the meta device: files have no value for it."""
    saved = set(model.state_dict())
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name not in saved:
            raise CheckpointError(
                f"buffer {name} is on the meta device, and files hold persistent buffers only. Make the model under "
                "accelerate.init_empty_weights(), which leaves buffers where they are"
            )


def _materialize(model: nn.Module, shards: torch.device, others: torch.device) -> None:
    """Allocate meta tensors in place, so that ties and optimizers see the same parameters."""
    for param in model.parameters():
        if param.is_meta:
            device = shards if isinstance(param, DTensor) else others
            made = nn.Parameter(torch.empty_like(param, device=device), requires_grad=param.requires_grad)
            torch.utils.swap_tensors(param, made)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=others)


def _write_config(model: nn.Module, path: Path) -> None:
    """Write the files next to the weights that transformers reads."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config.architectures = [users_class(model).__name__]
        config.dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        config.save_pretrained(path)
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(path)
