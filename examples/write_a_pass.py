"""Write a pass, insert it into the pipeline, and see the results of verification and bisection.

    torchrun --standalone --nproc-per-node 2 examples/write_a_pass.py
    torchrun --standalone --nproc-per-node 2 examples/write_a_pass.py --fault

The pass clips every gradient elementwise before the optimizer sees it, in the compiled backward: on each rank's shard,
after the reduction. It declares that it changes numerics. With `--fault`, a pass with a mistake is inserted as well,
and `graphshard.bisect` names it.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.ir.graph import aten, calls_of, replace_after
from graphshard.ir.program import Program


@dataclass(frozen=True)
class ClipGradients(graphshard.Pass):
    """Clamp every element of a parameter's gradient to [-limit, limit]."""

    name: ClassVar[str] = "clip-gradients"
    exact: ClassVar[bool] = False  # it may change numerics
    limit: float = 0.01

    def rewrite(self, program: Program) -> int:
        backward = program.phases["backward"]
        grads = [value for value, slot in zip(backward.results, backward.outputs) if slot.of == "param"]
        for grad in grads:
            replace_after(grad, aten.clamp.default, -self.limit, self.limit)
        return len(grads)


@dataclass(frozen=True)
class ScaleByMistake(graphshard.Pass):
    """Faulty pass that claims to be exact but doubles one activation's gradient."""

    name: ClassVar[str] = "scale-by-mistake"

    def rewrite(self, program: Program) -> int:
        relu = calls_of(program.phases["backward"], aten.threshold_backward.default)[0]
        replace_after(relu, aten.mul.Tensor, 2.0)
        return 1


def main() -> None:
    """Train a small model with the pass, or find the faulty one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fault", action="store_true", help="insert a faulty pass and bisect")
    fault = parser.parse_args().fault
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    inputs, targets = torch.randn(32, 16), torch.randn(32, 1)

    pipeline = graphshard.Pipeline().insert(ClipGradients(limit=0.01), after="reorder")
    if fault:
        pipeline = pipeline.insert(ScaleByMistake(), after="partition")
    graphshard.compile(model, mesh, backend="eager", passes=pipeline, verify="each")
    if fault:
        found = graphshard.bisect(model, (inputs,))
        if dist.get_rank() == 0:
            print(found)
    else:
        if dist.get_rank() == 0:
            print(pipeline)
        optim = torch.optim.SGD(model.parameters(), lr=1.0)
        for step in range(20):
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            largest = max(float(p.grad.full_tensor().abs().max()) for p in model.parameters())
            optim.step()
            optim.zero_grad()
            if dist.get_rank() == 0 and step % 5 == 0:
                print(f"step {step}: loss {loss:.4f}, largest gradient {largest:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # A gloo thread frees the tensors of the last collective and needs Python for it; if Python is shutting down by
    # then, the process aborts. So exit without shutting Python down.
    os._exit(0)
