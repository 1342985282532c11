"""The Trainer of transformers with graphshard instead of FSDP2.

    trainer = use_graphshard(Trainer(model=model, args=args, train_dataset=data))
    trainer.train()

It takes subclasses of the Trainer, too, such as trl's. Its accelerator compiles the model when training starts.
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
    """Let a Trainer compile its model instead of sharding it with FSDP2.

    Training, evaluation, accumulation, clipping, checkpoints and resuming work as with FSDP2. On GPUs give
    `TrainingArguments` its settings for FSDP2, too, so that the full model is not moved to the device before.

    Args:
        trainer: a `transformers.Trainer` that has not trained yet.
        mesh, plugin, options: as in `graphshard.integrations.accelerate.use_graphshard`.

    Returns:
        The same trainer.

    Raises:
        ArgumentError: it is not a Trainer, was given an optimizer, or is for one process.
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
    """Return a callback that replaces the Trainer's `generate` for FSDP2 when training starts.

    The Trainer's gathers the root's parameters at once, and the others in each forward. This one gathers all at once,
    so that ranks may generate different numbers of tokens.
    """
    from transformers import TrainerCallback

    class OwnGenerate(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            model = others["model"]
            model.__dict__.pop("generate", None)
            if hasattr(model, "generate"):
                model.generate = MethodType(_generate, model)  # a copy of the model has its own

    return OwnGenerate()


def _generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    with uncompiled(model):
        return type(model).generate(model, *args, **kwargs)
