"""One memory decision against every single policy, at equal memory, in the planner's prediction.

    python -m benchmarks.memory [--models 8B 1B] [--ranks 8] [--layers 4] [--tokens 2048] [--json FILE]

The example's decoder at the widths of models, captured on the meta device. For each limit, between the smallest in
which `activation="auto"` runs and the memory of everything kept and saved, every policy is planned with the same
`memory_limit`. The table has predicted milliseconds of a step, and "-" where nothing fits. The last columns are the
time of the best single policy relative to "auto", and how much longer "auto" takes than the bound of all choices.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from benchmarks.shapes import MORE, SHAPES, Shape
from graphshard.ir.plan import Prediction

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import llama

POLICIES: dict[str, dict[str, Any]] = {
    "default": {},
    "keep": {"reshard_after_forward": False},
    "again": {"reshard_after_forward": True},
    "full": {"activation": "full"},
    "full, keep": {"activation": "full", "reshard_after_forward": False},
    "0.25": {"activation": 0.25},
    "0.5": {"activation": 0.5},
    "0.75": {"activation": 0.75},
}
# Positions between the smallest limit and the limit in which everything is kept and saved.
PARTS = (0.0, 0.15, 0.4, 0.7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", default=["8B", "3.2 1B", "Qwen2.5 7B"], help="names of models, or parts of them"
    )
    parser.add_argument("--hardware", default="h100", help="name of a profile")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per rank")
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    args = parser.parse_args()
    print(f"| | GB | auto | {' | '.join(POLICIES)} | best / auto | gap | CPU s |")
    print("|--|" + "--|" * (len(POLICIES) + 5))
    rows = []
    for shape in (s for s in (*SHAPES, *MORE) if any(model in s.name for model in args.models)):
        model, batch = _model(shape, args.layers, args.tokens)

        def predict(
            limit: int | None, model: nn.Module = model, batch: Tensor = batch, **options: Any
        ) -> Prediction | graphshard.errors.InfeasibleError:
            return _predict(model, batch, args, memory_limit=limit, **options)

        refused = predict(1, activation="auto")
        most = predict(None, reshard_after_forward=False)
        assert isinstance(refused, graphshard.errors.InfeasibleError)
        assert isinstance(most, Prediction)
        for part in PARTS:
            limit = refused.smallest + int(part * (most.peak_bytes - refused.smallest))
            began = time.process_time()
            auto = predict(limit, activation="auto")
            seconds = time.process_time() - began
            assert isinstance(auto, Prediction)
            others = {name: predict(limit, **options) for name, options in POLICIES.items()}
            rows.append(_row(shape.name, limit, auto, others, seconds))
    if args.json:
        partial = args.json.with_suffix(".partial")
        partial.write_text(json.dumps(rows, indent=1))
        partial.replace(args.json)
    print(f"\nleast best / auto {min(row['ratio'] for row in rows if row['ratio']):.3f}")


def _model(shape: Shape, layers: int, tokens: int) -> tuple[nn.Module, Tensor]:
    config = llama.LlamaConfig(layers, shape.dim, shape.heads, shape.kv_heads, shape.ffn, tokens, shape.vocab)
    with torch.device("meta"):
        return llama.Llama(config), torch.zeros(1, tokens, dtype=torch.long)


def _predict(
    model: nn.Module, batch: Tensor, args: argparse.Namespace, **options: Any
) -> Prediction | graphshard.errors.InfeasibleError:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    given = {"example_inputs": (batch, batch), "hardware": args.hardware, "mp_policy": policy}
    try:
        found = graphshard.explain(model, (args.ranks,), **given, **options)
    except graphshard.errors.InfeasibleError as error:
        return error
    plan = found._program.plan
    assert plan is not None
    assert plan.prediction is not None
    return plan.prediction


def _row(
    name: str,
    limit: int,
    auto: Prediction,
    others: dict[str, Prediction | graphshard.errors.InfeasibleError],
    seconds: float,
) -> dict[str, Any]:
    """Print a row of the table."""
    steps = {key: found.step_seconds for key, found in others.items() if isinstance(found, Prediction)}
    cells = " | ".join(f"{1e3 * steps[key]:.2f}" if key in steps else "-" for key in others)
    ratio = min(steps.values()) / auto.step_seconds if steps else 0.0
    print(
        f"| {name} | {limit / 1e9:.2f} | {1e3 * auto.step_seconds:.2f} | {cells} | "
        f"{f'{ratio:.3f}' if steps else '-'} | {auto.gap:.1%} | {seconds:.0f} |",
        flush=True,
    )
    found = {"auto": auto.step_seconds, "bound": auto.lower_bound, "ratio": ratio}
    return {"model": name, "limit": limit, **found, **steps}


if __name__ == "__main__":
    main()
