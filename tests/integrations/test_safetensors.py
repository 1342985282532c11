"""Safetensors files are read into shards and written from shards; no rank holds the whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import graphshard
from graphshard.errors import ArgumentError, CheckpointError
from graphshard.integrations.safetensors import load_safetensors, save_safetensors
from tests.distributed.twins import assert_same, local, world_mesh
from tests.helpers import resident
from tests.integrations.hugging_face import gpt2, llama, loss_of
from tests.ranks import Ranks

MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "gpt2": gpt2}
MIB = 2**20


def _both_ways(rank: int, world_size: int, name: str, folder: str) -> None:
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    given = MODELS[name]()
    expected = dict(given.state_dict())
    if rank == 0:
        given.save_pretrained(f"{folder}/theirs", max_shard_size="10KB")  # several files
    torch.distributed.barrier()
    with init_empty_weights():
        model = MODELS[name]()
    model.tie_weights()  # init_empty_weights has untied them
    graphshard.compile(model, world_mesh(), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    load_safetensors(model, f"{folder}/theirs")
    whole = {key: value.full_tensor() for key, value in model.state_dict().items()}
    assert_same(whole, expected, "what was read")
    assert {id(p) for p in model.parameters()} == {id(p) for g in optimizer.param_groups for p in g["params"]}

    rows = torch.zeros(1, 4, dtype=torch.long)
    assert_same({"loss": loss_of(model, rows)}, {"loss": loss_of(given, rows)}, "a call")
    save_safetensors(model, f"{folder}/ours")
    loaded = AutoModelForCausalLM.from_pretrained(f"{folder}/ours")
    assert type(loaded) is type(given)
    assert_same(dict(loaded.state_dict()), expected, "what was written")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_both_ways(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """Tied embeddings are in the files once, and stay tied."""
    ranks(2).run(_both_ways, name, str(tmp_path))


def _peak(rank: int, world_size: int, folder: str) -> float:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8)))
    graphshard.compile(model, world_mesh(), backend="eager")
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    before = resident("VmRSS")
    load_safetensors(model, folder)
    peak = (resident("VmHWM") - before) / MIB
    assert all(bool((local(param) == index).all()) for index, param in enumerate(model.parameters()))
    return peak


@pytest.mark.slow
def test_no_rank_holds_the_whole_model(ranks: Ranks, tmp_path: Path) -> None:
    """Two ranks read 128 MiB in files of 16: the peak is the shards plus a part of a file."""
    for index in range(8):
        save_file({f"{index}.weight": torch.full((2048, 2048), float(index))}, tmp_path / f"{index}.safetensors")
    peaks = ranks(2).run(_peak, str(tmp_path))
    assert max(peaks) <= 64 + 16


def _refused(rank: int, world_size: int, folder: str) -> None:
    def refused(message: str, make: Callable[[], nn.Module]) -> None:
        model = graphshard.compile(make(), world_mesh(), backend="eager")
        before = [local(param).clone() for param in model.parameters()]
        with pytest.raises(CheckpointError, match=message):
            load_safetensors(model, folder)
        for param, value in zip(model.parameters(), before):
            assert param.is_meta or torch.equal(local(param), value)

    def with_buffer() -> nn.Module:
        model = nn.Linear(4, 4, device="meta")
        model.register_buffer("angles", torch.empty(2, device="meta"), persistent=False)
        return model

    refused(r"there is no \*\.safetensors in it", lambda: nn.Linear(4, 4))
    torch.distributed.barrier()
    if rank == 0:
        save_file(nn.Linear(4, 4).state_dict(), f"{folder}/model.safetensors")
    torch.distributed.barrier()
    refused(r"it holds 'bias', which Linear has not", lambda: nn.Linear(4, 4, bias=False))
    refused(r"weight has shape \[4, 4\] in it, and \[4, 3\] in the model", lambda: nn.Linear(3, 4))
    refused(r"it has no 0\.weight, which Sequential has\..*tie_weights", lambda: nn.Sequential(nn.Linear(4, 4)))
    refused(r"buffer angles is on the meta device.*init_empty_weights", with_buffer)
    with pytest.raises(ArgumentError, match="is not compiled"):
        load_safetensors(nn.Linear(4, 4), folder)


def test_rejects_mismatched_files(ranks: Ranks, tmp_path: Path) -> None:
    """On all ranks, before anything is read."""
    ranks(2).run(_refused, str(tmp_path))


def _reduced_precision(rank: int, world_size: int, folder: str) -> None:
    """Values are read and written in the model's dtype."""
    if rank == 0:
        save_file({"weight": torch.full((4, 4), 1 / 3)}, f"{folder}/model.safetensors")
    torch.distributed.barrier()
    model = nn.Linear(4, 4, bias=False, device="meta", dtype=torch.bfloat16)
    graphshard.compile(model, world_mesh(), backend="eager")
    load_safetensors(model, folder)
    save_safetensors(model, f"{folder}/again")
    (file,) = Path(folder, "again").glob("*.safetensors")
    written = load_file(file)["weight"]
    assert torch.equal(written, torch.full((4, 4), 1 / 3, dtype=torch.bfloat16))


def test_keeps_the_models_dtype(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_reduced_precision, str(tmp_path))
