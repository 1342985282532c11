"""The Trainer of transformers with graphshard in the place of FSDP2.

    trainer = use_graphshard(Trainer(model=model, args=args, train_dataset=data))
    trainer.train()

The same for its subclasses, such as those of trl. The Trainer's accelerator compiles the model when training begins.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, TypeVar

from torch.distributed.device_mesh import DeviceMesh

from graphshard.errors import ArgumentError
from graphshard.integrations import accelerate
from graphshard.module.uncompiled import uncompiled

TrainerT = TypeVar("TrainerT")


def use_graphshard(
    trainer: TrainerT, mesh: DeviceMesh | None = None, *, plugin: Any = None, **options: Any
) -> TrainerT:
    """Let a Trainer compile its model, where it would shard it with FSDP2.

    Training, evaluation, accumulation, clipping, checkpoints and resuming go the Trainer's way for FSDP2. On GPUs give
    `TrainingArguments` its settings for FSDP2, too, so that the model is not moved to the device as a whole before.

    Args:
        trainer: a `transformers.Trainer` that has not trained yet.
        mesh, plugin, options: as in `graphshard.integrations.accelerate.use_graphshard`.

    Returns:
        The same trainer.

    Raises:
        ArgumentError: it is no Trainer, was given an optimizer, or is for one process.
        UnsupportedError: as for an accelerator.
    """
    given: Any = trainer
    if not all(hasattr(trainer, name) for name in ("accelerator", "is_fsdp_enabled", "add_callback")):
        raise ArgumentError(f"trainer must be a transformers.Trainer, got {type(trainer).__name__}.")
    accelerate.use_graphshard(given.accelerator, mesh, plugin=plugin, **options)
    given.is_fsdp_enabled = True
    given.add_callback(_callback())
    return trainer


def _callback() -> Any:
    """Exchanges, when training begins, what the Trainer does to `generate` of a model of FSDP2's.

    It lets the method gather the root's parameters, and forwards gather the others. Here all are gathered at once, so
    that ranks may generate as many tokens as they like.
    """
    from transformers import TrainerCallback

    class OwnGenerate(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            model = others["model"]
            model.__dict__.pop("generate", None)
            if hasattr(model, "generate"):
                model.generate = MethodType(_generate, model)  # of a copy of the model it is the copy's

    return OwnGenerate()


def _generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    with uncompiled(model):
        return type(model).generate(model, *args, **kwargs)
