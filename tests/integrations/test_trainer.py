"""The Trainer of transformers trains a compiled model like FSDP2's, bit for bit, saves and resumes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import Dataset

import graphshard
from graphshard.errors import ArgumentError
from graphshard.integrations.accelerate import become_fsdp2
from graphshard.integrations.transformers import use_graphshard
from tests.distributed.twins import assert_same, local, params_of
from tests.docs.nets import Config, Transformer
from tests.integrations.hugging_face import VOCAB, launched, text
from tests.ranks import Ranks


class Rows(Dataset[dict[str, Any]]):
    def __init__(self, count: int = 32) -> None:
        self.rows = text(count)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Scored(Transformer):
    """A model with the Trainer's interface that captures quickly."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(Config(vocab=VOCAB))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": super().forward(input_ids, labels)}

    def generate(self, rows: Tensor) -> Tensor:
        return self(input_ids=rows, labels=rows)["loss"]


def trainer_of(folder: str, impl: str, model: Any = None, kind: str = "SHARDED_STATE_DICT", **changes: Any) -> Any:
    """Create a Trainer of four steps of two microbatches, with a checkpoint after the second.

    `impl` is "graphshard" or "fsdp2", which shard the model, or "" for a model that is sharded already.
    """
    from accelerate import FullyShardedDataParallelPlugin
    from transformers import Trainer, TrainingArguments

    given = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "save_steps": 2,
        "logging_steps": 1,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-2,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 0,
    }
    callbacks = changes.pop("callbacks", None)
    args = TrainingArguments(folder, **{**given, **changes})
    trainer = Trainer(model or Scored(), args, train_dataset=Rows(), eval_dataset=Rows(8), callbacks=callbacks)
    if not impl:
        return trainer
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
    if impl == "graphshard":
        return use_graphshard(trainer, plugin=plugin, backend="eager")
    become_fsdp2(trainer.accelerator, plugin)
    trainer.is_fsdp_enabled = True
    return trainer


def log_by_step(trainer: Any) -> dict[str, Any]:
    """Return losses, norms and learning rates by step."""
    return {
        f"{name} {entry['step']}": entry[name]
        for entry in trainer.state.log_history
        for name in ("loss", "grad_norm", "learning_rate")
        if name in entry
    }


def _trains(rank: int, world_size: int, folder: str) -> None:
    with launched():
        theirs = trainer_of(f"{folder}/fsdp2", "fsdp2", save_strategy="no")
        theirs.train()
        expected = {name: local(param).clone() for name, param in params_of(theirs.model).items()}
        evaluated = theirs.evaluate()  # leaves some of FSDP2's parameters gathered
    with launched():
        ours = trainer_of(f"{folder}/graphshard", "graphshard")
        ours.train()
        assert len(log_by_step(ours)) == 12
        assert_same(log_by_step(ours), log_by_step(theirs), "training")
        assert_same(params_of(ours.model), expected, "parameters")
        losses = [{"eval_loss": each["eval_loss"]} for each in (ours.evaluate(), evaluated)]
        assert_same(*losses, "evaluation")
    with launched():
        resumed = trainer_of(f"{folder}/graphshard", "graphshard")
        resumed.train(resume_from_checkpoint=f"{folder}/graphshard/checkpoint-2")
        assert_same(log_by_step(resumed), log_by_step(ours), "resumed training")
        assert_same(params_of(resumed.model), params_of(ours.model), "resumed parameters")


@pytest.mark.slow
def test_training_matches_fsdp2_and_resumes(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_trains, str(tmp_path))


def _saves(rank: int, world_size: int, folder: str) -> None:
    with launched():
        trainer = trainer_of(folder, "graphshard", kind="FULL_STATE_DICT", max_steps=2)
        trainer.train()
        trainer.save_model(f"{folder}/whole")
        trainer.accelerator.wait_for_everyone()
    whole = {name: value.full_tensor() for name, value in sorted(trainer.model.state_dict().items())}
    assert_same(dict(sorted(load_file(f"{folder}/whole/model.safetensors").items())), whole, "what was saved")
    # The Trainer prepares this method for FSDP2, which a compiled model does not need.
    assert torch.isfinite(trainer.model.generate(text(2)))


def test_a_whole_model_is_saved_and_generates(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_saves, str(tmp_path))


class Pairs(Rows):
    """Pairs of a sequence and its target."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.rows[index], "labels": self.rows[index].flip(0)}


def _predicts(rank: int, world_size: int, folder: str) -> None:
    from accelerate import FullyShardedDataParallelPlugin
    from transformers import GenerationConfig, Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config
    from transformers import T5ForConditionalGeneration as T5

    with launched():
        torch.manual_seed(0)
        sizes = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
        plain = T5(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))
        special = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
        args = Seq2SeqTrainingArguments(
            folder, per_device_train_batch_size=2, per_device_eval_batch_size=2, max_steps=2, learning_rate=0.1,
            report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no", predict_with_generate=True,
            generation_config=GenerationConfig(max_new_tokens=7, **special),
        )  # fmt: skip
        trainer = Seq2SeqTrainer(model=copy.deepcopy(plain), args=args, train_dataset=Pairs(8), eval_dataset=Pairs(8))
        use_graphshard(trainer, plugin=FullyShardedDataParallelPlugin(fsdp_version=2), backend="eager")
        trainer.train()
        captured = len(graphshard.programs(trainer.model))
        found = trainer.predict(Pairs(8)).predictions
        assert len(graphshard.programs(trainer.model)) <= captured + 1  # the program that computes the loss
        plain.load_state_dict({name: value.full_tensor() for name, value in trainer.model.state_dict().items()})
        plain.eval()
        expected = plain.generate(Pairs(8).rows, generation_config=args.generation_config)
        assert found[:, :8].tolist() == expected.tolist()  # the Trainer pads to a maximal length
        copied = copy.deepcopy(trainer.model)
        assert copied.generate.__self__ is copied


@pytest.mark.slow
def test_evaluation_generates(ranks: Ranks, tmp_path: Path) -> None:
    """With caches, without programs."""
    ranks(2).run(_predicts, str(tmp_path))


def test_rejects_objects_other_than_trainers() -> None:
    with pytest.raises(ArgumentError, match=r"trainer must be a transformers\.Trainer, got Linear\."):
        use_graphshard(torch.nn.Linear(1, 1))
