"""Branches on values of inputs: one program per path, without a graph break."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import graphshard
from benchmarks.tiny_models import batch_of, loss_of, tiny_model
from graphshard.errors import CaptureError
from graphshard.guards.value_branches import decide
from graphshard.ir.units import find_units

# T5 copies its configuration in forward; it is split before.
copies = pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo of torch 2.11 does not trace copy.deepcopy")


def _compiled(model: nn.Module, mesh: DeviceMesh) -> Any:
    return graphshard.compile(model, mesh, backend="eager", fullgraph=True)


def _with_fsdp2(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    twin = copy.deepcopy(model)
    for unit in find_units(twin):
        fully_shard(twin.get_submodule(unit), mesh=mesh)
    return fully_shard(twin, mesh=mesh)


def _step(model: nn.Module, *args: Any, **kwargs: Any) -> list[Tensor]:
    """Return loss and gradients; random numbers are equal at each call."""
    model.zero_grad()
    torch.manual_seed(0)
    found = model(*args, **kwargs)
    found = found if isinstance(found, Tensor) else loss_of(found)
    found.backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    return [found.detach(), *(grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads)]


class Branches(nn.Module):
    """Branches twice; the second condition depends on the first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.linear(x)
        if decide(mask.all(), False, "mask."):
            x = x * 2
        elif decide(mask.sum() > 2, True, "mask."):
            x = x.sin()
        return x.square().sum() if decide(~mask[0], False, "mask.") else x.sum()


class OnWeights(Branches):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.linear(x).sum() if decide((self.linear.weight < 9).all(), True, "weights.") else x.sum()


def test_one_program_per_path(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Branches()
    plain, x = copy.deepcopy(model), torch.randn(3, 4)
    compiled = _compiled(model, mesh)
    masks = ([1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0])
    counts = []
    with caplog.at_level("INFO", "graphshard"):
        for mask in [torch.tensor(each).bool() for each in (*masks, *masks)]:
            assert all(map(torch.equal, _step(compiled, x, mask), _step(plain, x, mask)))
            counts.append(len(graphshard.programs(compiled)))
    assert counts == [1, 2, 3, 4, 5, 5, 5, 5, 5, 5]
    assert "forward decides by the values of args[1], and otherwise in this call" in caplog.text


def test_sizes_stay_dynamic(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = Branches()
    plain = copy.deepcopy(model)
    compiled = _compiled(model, mesh)
    for length in (4, 5, 6, 7):
        x, mask = torch.randn(length, 4), torch.ones(length).bool()
        assert all(map(torch.equal, _step(compiled, x, mask), _step(plain, x, mask)))
    assert len(graphshard.programs(compiled)) == 2


def test_values_of_parameters_are_a_graph_break(mesh: DeviceMesh) -> None:
    with pytest.raises(CaptureError, match=r"values of tensors|[Dd]ata-dependent"):
        _compiled(OnWeights(), mesh)(torch.randn(3, 4), torch.ones(4).bool())


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module.*returned a view")
@pytest.mark.parametrize("name", ["llama", "bert", "gpt2", pytest.param("t5", marks=copies)])
@pytest.mark.slow
def test_padding_of_transformers(mesh: DeviceMesh, name: str) -> None:
    """No mask, a mask with padding, one without: each has FSDP2's bits and a program, because kernels differ."""
    model, task = tiny_model(name)
    plain = _with_fsdp2(model, mesh)
    compiled = _compiled(model, mesh)
    torch.manual_seed(0)
    batch = batch_of(model, task, padding=True)
    padded = batch.pop("attention_mask")
    other = torch.ones_like(padded)
    other[1, -2:] = 0
    counts = []
    for mask in ({}, {"attention_mask": padded}, {"attention_mask": padded | 1}, {"attention_mask": other}):
        found = _step(compiled, **batch, **mask)
        assert all(map(torch.equal, found, _step(plain, **batch, **mask)))
        counts.append(len(graphshard.programs(compiled)))
    assert counts == [1, 2, 3, 3]


@pytest.mark.slow
def test_packed_sequences(mesh: DeviceMesh) -> None:
    """Positions that restart make transformers separate the sequences of a row."""
    model, task = tiny_model("llama")
    plain = _with_fsdp2(model, mesh)
    compiled = _compiled(model, mesh)
    torch.manual_seed(0)
    batch = {**batch_of(model, task), "use_cache": False}
    for positions in (torch.arange(12), torch.arange(12) % 6, torch.arange(12) % 4):
        batch["position_ids"] = positions.repeat(2, 1)
        assert all(map(torch.equal, _step(compiled, **batch), _step(plain, **batch)))
    assert len(graphshard.programs(compiled)) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module.*returned a view")
@copies
def test_masks_of_encoder_and_decoder(mesh: DeviceMesh) -> None:
    model, task = tiny_model("t5")
    plain = _with_fsdp2(model, mesh)
    compiled = _compiled(model, mesh)
    torch.manual_seed(0)
    batch = batch_of(model, task, padding=True)
    full = torch.ones_like(batch["attention_mask"])
    for masks in ((batch["attention_mask"], full), (full, batch["attention_mask"])):
        batch["attention_mask"], batch["decoder_attention_mask"] = masks
        found = _step(compiled, **batch)
        assert all(map(torch.equal, found, _step(plain, **batch)))
    assert len(graphshard.programs(compiled)) == 2


@pytest.mark.slow
def test_a_warning_about_padding_is_not_a_branch(mesh: DeviceMesh) -> None:
    """transformers searches for padding tokens in eager mode, only to warn: this is not a graph break."""
    model, task = tiny_model("deberta")
    plain = copy.deepcopy(model)
    compiled = _compiled(model, mesh)
    torch.manual_seed(0)
    for _ in range(2):
        batch = batch_of(model, task)
        assert all(map(torch.equal, _step(compiled, **batch), _step(plain, **batch)))
    assert len(graphshard.programs(compiled)) == 1
    assert not any("warn_if_padding_and_no_attention_mask" in vars(each) for each in compiled.modules())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module.*returned a view")
def test_a_model_that_installs_hooks_in_its_first_call(mesh: DeviceMesh) -> None:
    """Hidden states of a vision tower: one call before compile, as the message says, avoids the split."""
    model, task = tiny_model("llama")
    model.config.output_hidden_states = True
    torch.manual_seed(0)
    batch = batch_of(model, task)
    with pytest.raises(CaptureError, match=r"Call the model once before graphshard\.compile"):
        _compiled(copy.deepcopy(model), mesh)(**batch)
    model(**batch)
    plain = _with_fsdp2(model, mesh)
    compiled = _compiled(model, mesh)
    assert all(map(torch.equal, _step(compiled, **batch), _step(plain, **batch)))
    assert len(compiled(**batch).hidden_states) == 3
