"""Graphs captured and partitioned by AutoParallel, before and after `schedule_graph`; needs AutoParallel's source.

    git clone https://github.com/meta-pytorch/autoparallel && pip install pulp
    export PYTHONPATH=$PWD:autoparallel
    python benchmarks/autoparallel_graphs.py --mesh 64 --mesh 8 8 [--dim 4096] [--tokens 8192]
    torchrun --nproc-per-node 4 benchmarks/autoparallel_graphs.py --mesh 2 2 --dim 64 --tokens 64

AutoParallel places each value of forward and backward on the mesh and inserts the resulting collectives. The first
command predicts a step of one rank, for ranks that need not exist, with the original graph and with the result of
`schedule_graph`. The second also runs both graphs on that number of gloo ranks, and compares every output bit for bit.
"""

from __future__ import annotations

import argparse
import math
import os
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.fx import GraphModule
from torch.testing._internal.distributed.fake_pg import FakeStore

import graphshard
from graphshard.ir.program import Phase
from graphshard.runtime.collective_launches import gather_into_buffers
from graphshard.schedule.schedule_graph import ScheduledGraph

AXES = ("dp", "tp", "cp")
SEQUENCE = 256


class Block(nn.Module):
    """Attention and two layers. The attention is written out: AutoParallel has no rule for the CPU's operator."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[batch, sequence, dim]` to the same shape."""
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = torch.softmax(q @ k.transpose(-1, -2) * (x.shape[-1] // self.heads) ** -0.5, -1)
        x = x + self.o((weights @ v).transpose(1, 2).flatten(-2))
        return x + self.down(torch.relu(self.up(x)))


def capture(mesh: DeviceMesh, dim: int, layers: int, tokens: int) -> GraphModule:
    """Return forward and backward of one rank, with the placements that AutoParallel chooses.

    Args:
        tokens: of one rank of the first axis.
    """
    from autoparallel.api import AutoParallel

    batch = max(tokens // SEQUENCE, 1) * mesh.size(0)
    with torch.device("meta"):
        model = nn.Sequential(*(Block(dim, max(dim // 128, 4)) for _ in range(layers)))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    placed = (Shard(0), *[Replicate()] * (mesh.ndim - 1))
    # AutoParallel uses the costs of a GPU that it queries by name.
    name = mock.patch.object(torch.cpu, "get_device_name", create=True, return_value="NVIDIA H100")
    with name, AutoParallel(model, lambda: torch.rand(batch, min(tokens, SEQUENCE), dim), mesh, policy) as auto:
        auto.add_parameter_memory_constraint(low=None, high=None)
        auto.add_input_constraints([placed])
        auto.add_output_constraints([placed])
        auto.apply_placement(auto.optimize_placement())
        return auto.parallel_gm


def outputs(module: GraphModule) -> list[torch.Tensor]:
    """Run the graph on values that depend only on the rank, and return its outputs."""
    torch.manual_seed(dist.get_rank())
    values = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    inputs = [torch.randn(value.shape, dtype=value.dtype) if torch.is_tensor(value) else value for value in values]
    gather_into_buffers(Phase(module, (), ()))  # functional gathers corrupt the heap on gloo
    module.recompile()
    return [leaf for leaf in torch.utils._pytree.tree_leaves(module(*inputs)) if torch.is_tensor(leaf)]


def agree(gm: GraphModule, found: ScheduledGraph) -> None:
    """Raise RuntimeError if ranks would wait for each other: AutoParallel's solver may choose differently on each."""
    for name, module in (("AutoParallel", gm), ("schedule_graph", found.module)):
        launches = [
            (str(n.target), str(n.args[1:-1])) for n in module.graph.nodes if "_c10d_functional" in str(n.target)
        ]
        theirs: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(theirs, launches)
        if any(other != launches for other in theirs):
            raise RuntimeError(f"the collectives of {name}'s graph differ between ranks")


def line(name: str, gm: GraphModule, found: ScheduledGraph) -> str:
    """Return a row of the table."""
    sent = sum(len(bucket.members) for bucket in found.buckets)
    seconds = found.seconds_before, found.seconds_after, found.lower_bound
    numbers = " | ".join(f"{1e3 * value:.2f}" for value in seconds)
    ratio = found.seconds_after / found.lower_bound
    return f"| {name} | {len(gm.graph.nodes)} | {sent} | {len(found.buckets)} | {numbers} | {ratio:.4f} |"


def main() -> None:
    """Print one row for each mesh."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", type=int, nargs="+", action="append", required=True, help="sizes of the mesh's axes")
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per rank of the first axis")
    parser.add_argument("--hardware", default="h100")
    args = parser.parse_args()
    real = "TORCHELASTIC_RUN_ID" in os.environ
    if real:
        dist.init_process_group("gloo")
    rows = []
    for shape in args.mesh:
        if not real:
            if dist.is_initialized():
                dist.destroy_process_group()
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(shape))
        mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=AXES[: len(shape)])
        gm = capture(mesh, args.dim, args.layers, args.tokens)
        found = graphshard.schedule_graph(gm, mesh, hardware=args.hardware, memory_limit=math.inf)
        name = " x ".join(str(size) for size in shape)
        rows.append(line(name, gm, found))
        if real:
            agree(gm, found)
            before, after = outputs(gm), outputs(found.module)
            for one, other in zip(before, after, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
            rows.append(f"{name}: rank {dist.get_rank()}: {len(before)} outputs are equal, bit for bit")
    if not real or dist.get_rank() == 0:
        print("| mesh | nodes | collectives | launches | ms before | ms after | bound | after / bound |")
        print("|---|---|---|---|---|---|---|---|")
    print("\n".join(rows if not real or dist.get_rank() == 0 else rows[1::2]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
