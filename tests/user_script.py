"""A user's script, for type checkers: they know the result of `compile` with FSDP2's methods.

mypy --strict --follow-imports=silent tests/user_script.py && pyright tests/user_script.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import graphshard


class Model(nn.Module):
    """A list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def encode(self, x: Tensor) -> Tensor:
        """Return what the layers make of x."""
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        """Return a loss."""
        return self.encode(x).square().mean()


def train(model: graphshard.CompiledModule, batches: list[Tensor]) -> float:
    """Train with one optimizer step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for index, batch in enumerate(batches):
        model.set_requires_gradient_sync(index == len(batches) - 1)
        model(batch).backward()
    with model.no_sync():
        model(batches[0]).backward()
    model.unshard()
    model.reshard()
    optimizer.step()
    return float(model.layers[0].weight.full_tensor().sum()) + float(model.encode(batches[0]).sum())


def main() -> None:
    """Compile, train, load, and shard unit by unit."""
    mesh = init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = graphshard.compile(Model(), mesh, mp_policy=policy, units=["layers.*"], memory_limit=10**9)
    as_fsdp: FSDPModule = model
    as_module: nn.Module = model
    print(train(model, [torch.ones(2, 8)]), as_fsdp, as_module, graphshard.programs(model)[0].plan)
    inner = Model()
    graphshard.fully_shard([inner.layers[0], inner.layers[1]], mesh=mesh)
    outer = graphshard.fully_shard(inner, mesh=mesh, backend="eager")
    outer.set_reshard_after_forward(False, recurse=False)
    loaded = graphshard.load("model.gshard", Model(), mesh)
    loaded.set_requires_all_reduce(False)
    graphshard.checkpoint.save_checkpoint("run/step-1", loaded, extra={"step": 1})
    profile = graphshard.profiling.profile_step(loaded, (torch.ones(2, 8),))
    profile.save_report("step.html")


if __name__ == "__main__":
    main()
