"""Ray Train's `TorchTrainer` with two CPU workers on this machine: `python -m tests.integrations.ray_train FOLDER`.

Each worker trains a compiled model and FSDP2's. One worker fails once, and Ray restarts both; they resume from the
checkpoint in FOLDER, and write their losses there.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import graphshard
from tests.docs.nets import Transformer, batch

STEPS, FAILS_AT = 4, 2
# Otherwise Ray uses an external address of this machine, whatever it is configured with.
ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
OF_WORKERS = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def train(config: dict[str, Any]) -> None:
    """Run on each worker; Ray has created the process group."""
    import ray.train

    folder, fails = Path(config["folder"]), bool(config["fails"])
    model, twin = _models()
    optims = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, twin)]
    latest = graphshard.checkpoint.latest_checkpoint(folder / "compiled")
    first = 0
    if latest is not None:
        first, _ = graphshard.checkpoint.load_checkpoint(latest, model, optims[0])
        graphshard.checkpoint.load_checkpoint(folder / "fsdp2" / latest.name, twin, optims[1])
    rank = dist.get_rank()
    for step in range(first, STEPS):
        if fails and step == FAILS_AT and rank == 1 and latest is None:
            raise RuntimeError("this worker fails once")
        losses = [_step(each, optim, step) for each, optim in zip((model, twin), optims)]
        assert torch.equal(*losses), losses
        graphshard.checkpoint.save_checkpoint(
            folder / "compiled" / f"step-{step + 1}", model, optims[0], extra=step + 1, keep=1
        )
        graphshard.checkpoint.save_checkpoint(folder / "fsdp2" / f"step-{step + 1}", twin, optims[1])
        (folder / f"rank{rank}-step{step}.json").write_text(
            json.dumps({"loss": losses[0].item(), "world_size": dist.get_world_size(), "began_at": first})
        )
        ray.train.report({"loss": losses[0].item()})
    for actual, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(actual.to_local(), expected.to_local())


def _models() -> tuple[nn.Module, nn.Module]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Transformer())
    for module in (*models[1].layers, models[1]):
        fully_shard(module, mesh=mesh)
    return graphshard.compile(models[0], mesh, backend="eager"), models[1]


def _step(model: nn.Module, optim: torch.optim.Optimizer, step: int) -> Tensor:
    torch.manual_seed(10 * step + dist.get_rank())
    loss = model(*batch())
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


def main(folder: Path, *, fails: bool) -> None:
    """Start Ray on loopback, train, and stop it."""
    os.environ |= ON_LOOPBACK
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": {**OF_WORKERS, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}},
    )
    try:
        TorchTrainer(
            train,
            train_loop_config={"folder": str(folder), "fails": fails},
            scaling_config=ScalingConfig(num_workers=2),
            torch_config=TorchConfig(backend="gloo"),
            run_config=RunConfig(storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=1)),
        ).fit()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), fails="--fails" in sys.argv[2:])
