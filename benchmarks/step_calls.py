"""Python overhead around the programs of a step: microseconds of CPU time of one thread per parameter.

    python -m benchmarks.step_calls [--layers 8] [--steps 200]

A step reads parameters, evaluates guards, runs autograd and makes gradients DTensors. Programs run once and then return
the same results again, so that only the rest of a step remains. The example's model is one of two ranks in torch's fake
process group. Numbers are from the best step, because the machine may be shared. They include zeroing gradients, and
exclude the optimizer and `compile_step`'s parameter updates.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.lower.executor import Boxed
from graphshard.runtime import step_overlap
from graphshard.runtime.bound_program import BoundProgram
from graphshard.torch_compat.dtensor import fake_world

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import llama


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with fake_world(2):
        measure(args.layers, args.steps)


def measure(layers: int, number_of_steps: int) -> None:
    """Print a line for each kind of step."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    plain = llama.Llama(llama.LlamaConfig(layers=layers, dim=16, seq=4))
    model = graphshard.compile(plain, mesh, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters())
    number = len(list(model.parameters()))
    tokens = torch.zeros(1, 4, dtype=torch.long)
    whole = graphshard.compile_step(model, optimizer)

    def separate() -> None:
        model(tokens, tokens).backward()
        optimizer.zero_grad()

    steps = {"forward, backward, zero_grad": separate, "compile_step": lambda: whole(tokens, tokens)}
    print(f"{number} parameters, us for each")
    with _returning_again():
        for title, step in steps.items():
            print(f"{title:45}{_seconds(step, number_of_steps) / number * 1e6:8.2f}")


def _seconds(step: Callable[[], Any], steps: int) -> float:
    step()
    return min(_once(step) for _ in range(steps))


def _once(step: Callable[[], Any]) -> float:
    began = time.thread_time()
    step()
    return time.thread_time() - began


@contextlib.contextmanager
def _returning_again() -> Iterator[None]:
    """Run programs once, and return the same results afterwards, within the block."""
    returned: dict[Any, list[Any]] = {}

    def once(key: Any, run: Boxed) -> Boxed:
        def call(inputs: list[Any]) -> Any:
            if key not in returned:
                returned[key] = list(run(inputs))
            inputs.clear()
            return list(returned[key])

        return call

    code, code_of_arrivals = BoundProgram.code, step_overlap._Code

    def of_arrivals(*args: Any) -> Any:
        made = code_of_arrivals(*args)
        made.run = once(made, made.run)
        return made

    with (
        mock.patch.object(BoundProgram, "code", lambda self, phase: once(phase.module, code(self, phase))),
        mock.patch.object(step_overlap, "_Code", of_arrivals),
    ):
        yield


if __name__ == "__main__":
    main()
