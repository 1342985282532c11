"""Kernels and bytes of models' regions: by the fusion rules, and by Inductor's scheduler for an H100.

    python -m benchmarks.fusion [--models llama-8b gpt2] [--regions]

"rules" is what `explain` uses without `device="cuda"`. Bytes are read and written in a step, counted for each call of a
region. They cover generated kernels only, because matrix products and attention are the same. Seconds are CPU time of
the scheduler for all distinct regions.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from graphshard.cost.costs import Costs
from graphshard.cost.kernels import Work, work_of
from graphshard.cost.profile import load_profile
from graphshard.ir.program import Program
from graphshard.options.options import Options
from graphshard.predict.study import Study

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import llama

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# Model and arguments of a call.
Given = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def _llama(seq: int, **sizes: int) -> Given:
    with torch.device("meta"):
        model = llama.Llama(llama.LlamaConfig(seq=seq, **sizes))
    tokens = torch.zeros(1, seq, dtype=torch.long)
    return model, (tokens, tokens), {}


def _gpt2() -> Given:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=6, use_cache=False))
    tokens = torch.zeros(8, 1024, dtype=torch.long)
    return model, (), {"input_ids": tokens, "labels": tokens}


MODELS: dict[str, Callable[[], Given]] = {
    "example": lambda: _llama(128, layers=6),
    "llama-8b": lambda: _llama(8192, layers=6, dim=4096, heads=32, kv_heads=8, hidden=14336, vocab=128256),
    "gpt2": _gpt2,
}


@dataclass(frozen=True)
class Compared:
    """Region predicted both ways, and the number of its calls."""

    name: str
    calls: int
    rules: Sequence[Work]
    scheduled: Sequence[Work]


def compared(program: Program, costs: Costs) -> Iterator[Compared]:
    """Yield the regions for which the scheduler has kernels."""
    calls = Counter(program.region_calls)
    for name, key in program.region_names.items():
        if key in costs.scheduled:
            nodes = list(program.regions[key].module.graph.nodes)
            yield Compared(name, calls[key], work_of(nodes), costs.scheduled[key])


def generated(works: Sequence[Work]) -> tuple[int, int]:
    """Return the number of generated kernels of a region, and their bytes."""
    own = [work for work in works if work.kind == "pointwise"]
    return len(own), sum(int(work.num_bytes) for work in own)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--regions", action="store_true", help="also print a line for each region")
    args = parser.parse_args()
    heading = f"{'':12}{'regions':>8}{'kernels':>18}{'MB':>22}{'compute, ms':>20}{'CPU s':>8}"
    print(f"{heading}\n{'':20}{'rules scheduler':>18}{'rules scheduler':>22}{'rules scheduler':>20}", flush=True)
    for name in args.models:
        _report(name, with_regions=args.regions)


class Watch:
    """Progress listener that measures CPU seconds while kernels are scheduled."""

    def __init__(self) -> None:
        self.spent, self._began, self._doing = 0.0, 0.0, ""

    def __call__(self, doing: str) -> None:
        now = time.process_time()
        if "schedule kernels" in self._doing:
            self.spent += now - self._began
        self._began, self._doing = now, doing


def _report(name: str, *, with_regions: bool) -> None:
    model, given, named = MODELS[name]()
    watch = Watch()
    study = Study(model, given, named, Options(mp_policy=BF16), device="cuda", show=watch)
    found = study.explain((64,), load_profile("h100"), "isolated")
    assert found._program is not None
    assert found._costs is not None
    rows = list(compared(found._program, found._costs))
    if with_regions:
        for row in rows:
            _line(f"  {row.name}", 1, [row], found._costs)
    _line(name, len(rows), rows, found._costs, watch.spent)


def _line(name: str, regions: int, rows: Sequence[Compared], costs: Costs, seconds: float | None = None) -> None:
    cells = []
    for works_of in (lambda row: row.rules, lambda row: row.scheduled):
        counts = [(row.calls, *generated(works_of(row))) for row in rows]
        cells.append(
            (
                sum(calls * kernels for calls, kernels, _ in counts),
                sum(calls * moved for calls, _, moved in counts) / 1e6,
                1e3 * sum(row.calls * float(costs.kernels(works_of(row))) for row in rows),
            )
        )
    rules, scheduled = cells
    spent = "" if seconds is None else f"{seconds:8.1f}"
    print(
        f"{name:12}{regions:8}{rules[0]:8}{scheduled[0]:10}{rules[1]:12.1f}{scheduled[1]:10.1f}"
        f"{rules[2]:10.2f}{scheduled[2]:10.2f}{spent}",
        flush=True,
    )


if __name__ == "__main__":
    main()
