"""Let an optimizer that was made before a model was compiled update the model's shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from graphshard.ir.errors import ArgumentError


def check_optimizers(model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Raise ArgumentError if an optimizer updates something else than the model, or has state of whole parameters."""
    known = {id(param) for param in model.parameters()}
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            strange = [tuple(param.shape) for param in group["params"] if id(param) not in known]
            if strange:
                raise ArgumentError(
                    f"optimizer: group {number} of {type(optimizer).__name__} holds a tensor of shape "
                    f"{list(strange[0])} that is no parameter of {type(model).__name__}. Make the optimizer from the "
                    "parameters that the model has now."
                )
        if any(optimizer.state.values()):
            raise ArgumentError(
                f"optimizer: {type(optimizer).__name__} has state of whole parameters already. Prepare it before the "
                "first step, and load its state afterwards."
            )


def follow_parameters(optimizers: Iterable[Optimizer], moved: Mapping[Tensor, Tensor]) -> None:
    """Let optimizers update other tensors: the shards that took the place of parameters."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [moved[param] for param in group["params"]]
