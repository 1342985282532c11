"""torchft's fault tolerance on this machine: `python -m tests.integrations.torchft_train FOLDER graphshard|fsdp2`.

Two groups of two gloo ranks each. A model is sharded over the ranks of a group, and a hook averages gradients over the
active groups. With `--fails` the second group dies in its third step and restarts with the state of the first, which
has continued alone. Each rank writes its results of each step to FOLDER.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import graphshard
from tests.docs.nets import Transformer, batch

GROUPS, RANKS, STEPS = 2, 2, 7
FAILS_AT, BACK_AT = 2, 4
HEARTBEAT_MS = 15000  # timeout for a lost group: three times torchft's, for busy machines
LOST = 3  # exit status of a lost group


def shard(model: nn.Module, implementation: str) -> nn.Module:
    """Shard over the ranks of this group."""
    mesh = init_device_mesh("cpu", (RANKS,))
    if implementation == "graphshard":
        return graphshard.compile(model, mesh, backend="eager")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _until(file: Path) -> None:
    """Wait until another process has written a file."""
    deadline = time.monotonic() + 300
    while not file.exists():
        assert time.monotonic() < deadline, f"{file} is not there"
        time.sleep(0.05)


def train(folder: Path, implementation: str, group: int, *, fails: bool, again: bool) -> None:
    """Run on each rank. The manager averages over groups, counts steps and heals a returning group."""
    from torchft import Manager, Optimizer, ProcessGroupGloo

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = shard(Transformer(), implementation)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optim"])

    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optim": inner.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,  # a thread would read the state during forward, when FSDP2 is unsharded
        replica_id=f"group{group}",
        hostname="localhost",
    )
    optimizer = Optimizer(manager, inner)

    def average(gradient: Tensor) -> None:
        manager.allreduce(gradient).wait()

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(average)

    (folder / f"ready-{group}{'-again' * again}").touch()
    for other in range(GROUPS):
        _until(folder / f"ready-{other}")
    while manager.current_step() < STEPS:
        step = manager.current_step()
        if fails and group == 1 and step == FAILS_AT and not again:
            os._exit(LOST)
        if fails and group == 0 and step == BACK_AT:  # these steps take milliseconds, a new process takes seconds
            _until(folder / "ready-1-again")
        optimizer.zero_grad()  # forms a quorum and heals a group that is behind
        while fails and group == 0 and step == BACK_AT and manager.num_participants() < GROUPS:
            time.sleep(0.2)  # the returning group has not joined the quorum yet, and this one must not finish alone
            optimizer.zero_grad()
        torch.manual_seed(100 * step + 10 * group + dist.get_rank())
        loss = model(*batch())
        loss.backward()
        participants = manager.num_participants()
        optimizer.step()  # if all groups of the quorum have their gradients
        seen = {"loss": loss.item(), "groups": participants, "committed": manager.current_step() > step}
        (folder / f"{group}-{dist.get_rank()}-{step}.json").write_text(json.dumps(seen))
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    torch.save(whole, folder / f"{group}-{dist.get_rank()}.pt")
    dist.barrier()
    manager.shutdown(wait=False)
    os._exit(0)


def main(folder: Path, implementation: str, *, fails: bool) -> None:
    """Run the lighthouse and the groups, and restart a lost group."""
    from torch.distributed.elastic.utils.distributed import get_free_port
    from torchft.coordination import LighthouseServer

    folder.mkdir(parents=True, exist_ok=True)
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=60000, heartbeat_timeout_ms=HEARTBEAT_MS
    )

    def start(group: int, *flags: str) -> list[subprocess.Popen[bytes]]:
        port = get_free_port()
        common = {
            "TORCHFT_LIGHTHOUSE": lighthouse.address(),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(RANKS),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "tests.integrations.torchft_train", str(folder), implementation]
        return [
            subprocess.Popen([*command, f"--group={group}", *flags], env={**os.environ, **common, "RANK": str(rank)})
            for rank in range(RANKS)
        ]

    groups = [start(group, *(["--fails"] if fails else [])) for group in range(GROUPS)]
    try:
        while any(process.poll() is None for group in groups for process in group):
            for index, group in enumerate(groups):
                if any(process.poll() == LOST for process in group):
                    for process in group:
                        process.wait(60)
                    groups[index] = start(index, "--fails", "--again")
            time.sleep(0.2)
        codes = [process.returncode for group in groups for process in group]
        assert codes == [0] * len(codes), codes
    finally:
        for group in groups:
            for process in group:
                process.kill()
        lighthouse.shutdown()


if __name__ == "__main__":
    given = Path(sys.argv[1]).absolute(), sys.argv[2]
    number = [flag.removeprefix("--group=") for flag in sys.argv if flag.startswith("--group=")]
    if number:
        train(*given, int(number[0]), fails="--fails" in sys.argv, again="--again" in sys.argv)
    else:
        main(*given, fails="--fails" in sys.argv)
