"""Would it pay if one rank of a machine captured for the others? CPU seconds of what they would do.

    python -m benchmarks.shared_capture [--layers 4 32] [--repeats 3]

Today each rank captures and runs the passes, but for the plan, which the first one makes and the others wait for.
If the others took its program, all that its capture has read would have to be on them as it is there. So its capture
would be watched, and they would compare, as for `graphshard/cache`, and read the program from JSON.

"saved" is what each of the others does today and would not do. "compare" and "read" are what it would do instead.
"watching" and "write" come on top of what the first does, and the others wait for them. Each number is the least of
the repeats, which take turns in one process. Nothing is lowered.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

import graphshard
from examples.llama import Llama, LlamaConfig
from graphshard.cache.codes import codes_that_ran, names_in
from graphshard.cache.kept import ProgramCache
from graphshard.codec.stage import program_from_json, program_to_json
from graphshard.ir.program import Program
from graphshard.ir.torch_internals import forget_sources
from graphshard.module.sharded_module import compiled_module
from graphshard.passes import MakePlan
from graphshard.pipeline.observe import Observer

COLUMNS = ("saved", "compare", "read", "watching", "write")


def main() -> None:
    """Print one line for each depth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    print(f"layers{''.join(f'{column:>10}' for column in COLUMNS)}   CPU seconds")
    for layers in args.layers:
        taken: dict[str, float] = {}
        for repeat in range(args.repeats + 1):
            found: dict[str, float] = {}
            measure(layers, found)
            if repeat:  # the first one imports
                taken = {name: min(seconds, taken.get(name, seconds)) for name, seconds in found.items()}
        taken["watching"] = taken["watched"] - taken["trace"]
        taken["saved"] = taken["trace"] - taken["plan"]
        print(f"{layers:6}{''.join(f'{taken[column]:10.2f}' for column in COLUMNS)}", flush=True)


def measure(layers: int, found: dict[str, float]) -> None:
    """Capture the example's model as it is done today, and watched."""
    tokens = torch.randint(256, (4, 128))
    args = (tokens, tokens)
    leaves, structure = pytree.tree_flatten((args, {}))

    def rewrite(step: MakePlan, program: Program) -> int:
        with timed(found, "plan"):
            return planned(step, program)

    planned = MakePlan.rewrite
    for what in ("trace", "watched"):
        model = Llama(LlamaConfig(layers=layers, dim=256, seq=128))
        graphshard.compile(model, init_device_mesh("cpu", (2,)), backend="eager", cache=False)
        runner = compiled_module(model)._graphshard
        signature = runner.tracer.signature(model, leaves, structure)
        with timed(found, "compare"):  # and once more below
            search = ProgramCache(Path("nowhere"), 1).search(runner, model, signature)
        assert search is not None
        watching = search.watching if what == "watched" else contextlib.nullcontext
        observer = Observer("ends", None, runner.passes.passes, lambda _: None)
        with mock.patch.object(MakePlan, "rewrite", rewrite), timed(found, what), forget_sources():
            program, _ = runner.tracer.trace(
                model, args, {}, observer, "", grad=True, passes=runner.passes, watching=watching, few=True
            )
    assert search._ran is not None
    codes = [list(code) for code in codes_that_ran(search._ran)]
    before = found["compare"]
    with timed(found, "compare"):
        search._walk(codes, names_in(search._ran), sorted(search._ran.files))
    found["compare"] += before
    with timed(found, "write"):
        text = program_to_json(program)
    with timed(found, "read"):
        program_from_json(text)


@contextlib.contextmanager
def timed(found: dict[str, float], name: str) -> Iterator[None]:
    """CPU seconds of the block."""
    start = time.process_time()
    yield
    found[name] = time.process_time() - start


if __name__ == "__main__":
    main()
