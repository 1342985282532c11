"""TRL's trainers on two ranks, with graphshard and with Accelerate's FSDP2: the same bits.

Sequences have other lengths in each batch, and other ones on each rank, as text has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import graphshard
from graphshard.integrations.accelerate import become_fsdp2
from graphshard.integrations.transformers import use_graphshard
from tests.distributed.twins import assert_same, local, params_of
from tests.integrations.hugging_face import VOCAB, launched, llama
from tests.ranks import Ranks

trl = pytest.importorskip("trl", reason="pip install trl")
pytestmark = pytest.mark.slow


def _tokenizer() -> Any:
    """Return a tokenizer of as many words as the model has tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    words = [*special.values(), *(f"w{number}" for number in range(VOCAB - len(special)))]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def _texts(column: str) -> Any:
    from datasets import Dataset

    draws = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 10, (16,), generator=draws).tolist()
    words = [torch.randint(VOCAB - 3, (length,), generator=draws).tolist() for length in lengths]
    return Dataset.from_dict({column: [" ".join(f"w{number}" for number in text) for text in words]})


def _number_of_words(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def _trainer(kind: str, folder: str) -> Any:
    settings = {
        "per_device_train_batch_size": 2,
        "max_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "bf16": False,
        "activation_checkpointing": False,
    }
    model = llama(num_hidden_layers=2, pad_token_id=0, eos_token_id=1)
    if kind == "SFT":
        args = trl.SFTConfig(folder, **settings)
        return trl.SFTTrainer(model, args, train_dataset=_texts("text"), processing_class=_tokenizer())
    args = trl.GRPOConfig(folder, num_generations=2, max_completion_length=5, **settings)
    data = {"train_dataset": _texts("prompt"), "processing_class": _tokenizer()}
    return trl.GRPOTrainer(model, reward_funcs=_number_of_words, args=args, **data)


def _found(trainer: Any) -> dict[str, Any]:
    """Train; return the numbers that the trainer logs, and the parameters."""
    torch.manual_seed(dist.get_rank())
    trainer.train()
    logged: dict[str, Any] = {
        f"{name} {at}": entry[name]
        for at, entry in enumerate(trainer.state.log_history)
        for name in ("loss", "grad_norm", "entropy", "reward", "completions/mean_length")
        if name in entry
    }
    trained: dict[str, Tensor] = {name: local(param).clone() for name, param in params_of(trainer.model).items()}
    return logged | trained


def _trains(rank: int, world_size: int, kind: str, folder: str) -> None:
    from accelerate import FullyShardedDataParallelPlugin

    with launched():
        theirs = _trainer(kind, folder)
        become_fsdp2(theirs.accelerator, FullyShardedDataParallelPlugin(fsdp_version=2))
        theirs.is_fsdp_enabled = True
        expected = _found(theirs)
    with launched():
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        ours = use_graphshard(_trainer(kind, folder), plugin=plugin, backend="eager")
        assert_same(_found(ours), expected, kind)
        assert len(graphshard.programs(ours.model)) < 10  # not one for each length


@pytest.mark.parametrize("kind", ["SFT", "GRPO"])
def test_trains_with_fsdp2s_numbers(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    ranks(2).run(_trains, kind, str(tmp_path))
