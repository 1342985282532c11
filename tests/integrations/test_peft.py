"""peft adapters match FSDP2 bit for bit, on float32 and four-bit weights, and are saved separately."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from graphshard.integrations.accelerate import become_fsdp2, use_graphshard
from tests.distributed.twins import assert_same, local, params_of
from tests.integrations.hugging_face import launched, llama, loss_of, text
from tests.ranks import Ranks


def _adapted(in_four_bits: bool) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = llama(hidden_size=64, intermediate_size=64) if in_four_bits else llama()
    if in_four_bits:
        from torchao.quantization import to_nf4

        for layer in model.model.layers:
            for linear in (layer.self_attn.q_proj, layer.mlp.up_proj):
                linear.weight = nn.Parameter(to_nf4(linear.weight.detach(), 16, 16), requires_grad=False)
    targets = ["q_proj", "up_proj"]
    return get_peft_model(
        model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    )


def _train(impl: str, in_four_bits: bool, rank: int) -> tuple[nn.Module, dict[str, Tensor]]:
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), _adapted(in_four_bits)
    use_graphshard(accelerator, backend="eager") if impl == "graphshard" else become_fsdp2(accelerator)
    adapters = [param for param in model.parameters() if param.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(adapters, lr=1e-2))
    told = {}
    for step, rows in enumerate(text(12).split(2)[rank::2]):
        loss = loss_of(model, rows)
        accelerator.backward(loss)
        told[f"norm {step}"] = accelerator.clip_grad_norm_(model.parameters(), 0.5).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        told[f"loss {step}"] = loss.detach()
    return model, told


def _parts(model: nn.Module) -> dict[str, Any]:
    """Return the plain tensors of all parameters: a four-bit weight has several."""
    from tests.distributed.extended import plain_parts

    return {
        f"{name} {key}": part for name, param in params_of(model).items() for key, part in plain_parts(param).items()
    }


def _trains(rank: int, world_size: int, in_four_bits: bool, folder: str) -> None:
    with launched():
        theirs, expected = _train("fsdp2", in_four_bits, rank)
    with launched():
        ours, told = _train("graphshard", in_four_bits, rank)
    assert_same(told, expected, "losses and norms")
    assert_same(_parts(ours), _parts(theirs), "parameters")
    begun = _parts(_adapted(in_four_bits).cpu())
    trained = {name for name, param in params_of(ours).items() if param.requires_grad}
    assert len(trained) == 4
    assert all("lora_" in name for name in trained)
    if in_four_bits:
        weight = ours.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight
        assert type(local(weight)).__name__ == "NF4Tensor"
    else:
        whole = {name: param.detach().full_tensor() for name, param in params_of(ours).items()}
        moved = {name for name, value in whole.items() if not torch.equal(value, begun[f"{name} 0"])}
        assert moved == trained
        _saves(ours, folder, rank)


def _saves(model: nn.Module, folder: str, rank: int) -> None:
    """Gather only adapters, on the first rank, and load them onto the base model."""
    from peft import PeftModel

    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    adapters = get_model_state_dict(model, options=options)
    assert bool(adapters) == (rank == 0)
    model.save_pretrained(folder, state_dict=adapters, is_main_process=rank == 0)
    torch.distributed.barrier()
    loaded = PeftModel.from_pretrained(llama(), folder)
    whole = {name: param.detach().full_tensor() for name, param in params_of(model).items()}
    assert_same({name: param.detach() for name, param in params_of(loaded).items()}, whole, "what was saved")


@pytest.mark.slow
def test_lora(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_trains, False, str(tmp_path))


@pytest.mark.slow
def test_lora_over_four_bits(ranks: Ranks, tmp_path: Path) -> None:
    """torchao's NF4 in plain linears, which is QLoRA without bitsandbytes' kernels."""
    ranks(2).run(_trains, True, str(tmp_path))
