"""Python overhead of region calls in a step: microseconds of CPU time, compared with the called code.

    python -m benchmarks.region_calls [--calls 2000] [--rounds 7]

A GPU waits for the host if it finishes before the next kernels are launched, so the overhead between kernels counts.
Here regions compute on a CPU with tensors of a few elements, so that mostly the calls remain:

* a line of the executor, with a region that returns its arguments;
* a region of one operator, which runs directly, and the operator alone;
* a region that Inductor compiled, and its generated code alone: the difference is torch's wrapper;
* a gather, its start and its wait, in torch's fake process group, which sends nothing.

Numbers are from the best round, because the machine may be shared. Kernels and launchers of Triton are not included.
"""

from __future__ import annotations

import argparse
import operator
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import Graph

import graphshard
from graphshard.ir.graph import c10d
from graphshard.lower._batch_compile import Batch
from graphshard.lower.eager import compile_operators
from graphshard.lower.inductor import generate
from graphshard.lower.regions import RegionCall, executor
from graphshard.torch_compat.dtensor import fake_world
from tests.helpers import Blocks

WIDTH = 16


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with fake_world(8):
        for title, seconds in measured(args.calls, args.rounds):
            print(f"{title:45}{seconds * 1e6:8.2f} us")


def measured(calls: int, rounds: int) -> list[tuple[str, float]]:
    """Return the seconds of each kind of call, by its title."""
    x, small = torch.ones(4, WIDTH), torch.ones(WIDTH)

    def seconds(call: Callable[[], Any], times: int = 1) -> float:
        call()
        return min(_round(call, max(calls // times, 1)) for _ in range(rounds)) / times

    lines, graph = 100, _lines(100)
    one, several = _regions()
    alone = compile_operators(one)
    with Batch(1) as batch:
        finish = generate(several, "region", batch)
        batch.submit()
        compiled: Any = finish()
    inputs = [torch.empty_strided(fake.shape, fake.stride()).fill_(1.0) for fake in _inputs(several)]
    return [
        ("line of the executor", seconds(lambda: graph.forward([x]), lines)),
        ("region of one operator", seconds(lambda: alone([small, small]))),
        ("  its operator alone, without the views", seconds(lambda: torch.cat([small, small]))),
        ("region of Inductor's", seconds(lambda: compiled(list(inputs)))),
        ("  the generated code alone", seconds(lambda: compiled.current_callable(list(inputs)))),
        ("gather, start and wait", seconds(lambda: _gather(small))),
    ]


def _round(call: Callable[[], Any], times: int) -> float:
    began = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - began) / times


def _lines(number: int) -> Any:
    """Return an executor that calls one region this number of times in sequence."""
    graph = Graph()
    value = graph.placeholder("x")
    for _ in range(number):
        call = graph.call_module("region", ([value],))
        call.meta["val"] = (None,)
        value = graph.call_function(operator.getitem, (call, 0))
    graph.output((value,))
    return executor(graph, {"region": RegionCall(tuple)})


def _regions() -> tuple[Any, Any]:
    """Return a region that packs two shards, and one with something to fuse, of a model on eight ranks."""
    mesh = init_device_mesh("cpu", (8,))
    inputs = (torch.ones(4, WIDTH),)
    model = graphshard.compile(Blocks(3, WIDTH, bias=True), mesh, backend="eager", example_inputs=inputs)
    (program,) = graphshard.programs(model)
    regions = sorted(program.regions.values(), key=lambda region: len(region.module.graph.nodes))
    one = next(region for region in regions if "cat" in region.text and len(_inputs(region)) == 2)
    several = next(region for region in regions if "relu" in region.text and len(_inputs(region)) == 3)
    return one, several


def _inputs(region: Any) -> list[torch.Tensor]:
    return [node.meta["val"] for node in region.module.graph.find_nodes(op="placeholder")]


def _gather(shard: torch.Tensor) -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(shard, 8, "0"))


if __name__ == "__main__":
    main()
