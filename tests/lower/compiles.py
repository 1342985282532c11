"""Compile a small model with Inductor and train a step in a separate process: `python -m tests.lower.compiles`."""

from __future__ import annotations

import logging
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from tests.helpers import Blocks


def main() -> None:
    """Print "compiling" before the first region compiles, and finally "equal" if the results equal plain torch's."""
    logging.basicConfig(level=logging.INFO)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model, plain = Blocks(3, bias=True), Blocks(3, bias=True)
    plain.load_state_dict(model.state_dict())
    compiled = graphshard.compile(model, init_device_mesh("cpu", (1,)))
    print("compiling", flush=True)
    losses = [_step(each) for each in (compiled, plain)]
    torch.testing.assert_close(*losses)
    print("equal", flush=True)


def _step(model: nn.Module) -> torch.Tensor:
    loss = model(torch.ones(3, 4)).square().sum()
    loss.backward()
    return loss.detach()


if __name__ == "__main__":
    main()
