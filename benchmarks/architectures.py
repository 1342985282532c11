"""Capture every architecture of transformers, and compare its training with FSDP2.

    python -m benchmarks.architectures                                    all of them
    python -m benchmarks.architectures llama clip 'qwen*'                 these
    python -m benchmarks.architectures --sample 80 --seed 1               80 that plain torch can train, in random order
    python -m benchmarks.architectures --json results.json                the ones missing in the file
    python -m benchmarks.architectures --json results.json --show         the table of the file
    python -m benchmarks.architectures --padding llama gpt2 bert t5       with padding and an `attention_mask`

Every model has random weights and small sizes (`tiny_models.py`). Plain torch trains it for two steps on one batch per
rank; a model that it cannot train is skipped, with the reason. Then graphshard (`backend="eager"`) and FSDP2 train
copies of it on two gloo ranks. Losses, gradients and parameters are compared bit by bit. FSDP2 refuses scalar
parameters, so it ignores them and their gradients are averaged separately.

Results: `equal` bits, `rounding` (a relative difference below 1e-4), `WRONG` (a larger one), `refused` (an error of
graphshard), `failed` (another error), `crashed` (a rank died, or took too long). A model with a graph break is split:
the column `split` has the reason, and the result is for the split model.

The ranks stay alive between models. A rank that dies or takes too long is restarted.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import functools
import json
import random
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.tiny_models import architectures, batch_of, loss_of, tiny_model
from tests.ranks import RankError, RankPool

WORLD = 2
STEPS = 2
MOST_PARAMETERS = 8_000_000

Batch = Callable[[], dict[str, Any]]


def main() -> None:
    args = _parse_args()
    path: Path | None = args.json
    results: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path is not None and path.exists() else {}
    with RankPool() as pool:
        for name in [] if args.show else _chosen(args, results):
            if args.sample is not None and sum(r["result"] != "skipped" for r in results.values()) >= args.sample:
                break
            print(f"{name:32}", end="", flush=True)
            results[name] = _measured(pool, name, args)
            print(_line(results[name]), flush=True)
            if path is not None:
                path.write_text(json.dumps(results, indent=1, sort_keys=True))
    _print(results)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="model types, or patterns")
    parser.add_argument("--json", type=Path, help="result file, read and written")
    parser.add_argument(
        "--sample", type=int, help="measure this number of models that are not skipped, in random order"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random order")
    parser.add_argument("--padding", action="store_true", help="pass an attention_mask with padding")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds per model")
    parser.add_argument("--without-cache", action="store_true", help="use_cache=False")
    parser.add_argument("--show", action="store_true", help="print the result file without measuring")
    return parser.parse_args()


def _chosen(args: argparse.Namespace, results: dict[str, Any]) -> list[str]:
    known = architectures()
    if args.names:
        return [name for name in known if any(fnmatch.fnmatchcase(name, pattern) for pattern in args.names)]
    if args.sample is not None:
        random.Random(args.seed).shuffle(known)
    return [name for name in known if name not in results]


def _line(result: dict[str, Any]) -> str:
    keys = ("task", "result", "difference", "capture_s", "capture_cpu_s", "why", "split")
    return " ".join(str(result[key]) for key in keys if key in result)


def _measured(pool: RankPool, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the results of the ranks, or how they ended."""
    changes = {"use_cache": False} if args.without_cache else {}
    try:
        run = functools.partial(compare, padding=args.padding)
        first, *_ = pool.run(WORLD, run, name, changes, timeout=args.timeout)
    except RankError as error:
        return {"result": "crashed", "why": str(error).splitlines()[0]}
    assert isinstance(first, dict)
    return first


def compare(
    rank: int,
    world_size: int,
    name: str,
    changes: dict[str, Any],
    *,
    padding: bool = False,
) -> dict[str, Any]:
    """Train an architecture with plain torch, FSDP2 and graphshard, on one rank of several.

    Args:
        changes: to the model's configuration.
        padding: pass an `attention_mask` in which some tokens are padding.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    try:
        model, task = tiny_model(name, **changes)
        size = sum(param.numel() for param in model.parameters())
        if size > MOST_PARAMETERS:
            raise ValueError(f"{size} parameters: benchmarks/tiny_models.py does not know how to make it small")
        make = _batches(model, task, rank, padding=padding)
        plain = copy.deepcopy(model)
        expected = _trained(plain, make, averaged=list(plain.parameters()))
    except Exception as error:
        return {"result": "skipped", "why": _reason(error)}
    found: dict[str, Any] = {"task": task, "parameters": size}
    mesh = init_device_mesh("cpu", (world_size,))
    try:
        expected = _with_fsdp2(model, mesh, make)
    except Exception as error:
        found["fsdp2"] = _reason(error)
    return found | _with_graphshard(model, mesh, make, expected)


def _batches(model: Any, task: str, rank: int, *, padding: bool) -> Callable[[int], dict[str, Any]]:
    """Return a function that makes the batch of a step, with the number of image tokens that the model expects."""

    def make(step: int, image_tokens: int) -> dict[str, Any]:
        torch.manual_seed(1000 * step + rank)
        return batch_of(model, task, image_tokens, padding=padding)

    try:
        with torch.no_grad():
            copy.deepcopy(model)(**make(0, 0))
    except ValueError as error:
        features = re.search(r"features:? (\d+)", str(error))
        if not features:
            raise
        batch = make(0, 0)
        image_tokens = int(features[1]) // len(batch["input_ids"])
        return lambda step: make(step, image_tokens)
    return lambda step: make(step, 0)


def _with_fsdp2(model: nn.Module, mesh: DeviceMesh, make: Callable[[int], dict[str, Any]]) -> dict[str, Tensor]:
    from graphshard.ir.units import find_units

    twin = copy.deepcopy(model)
    scalars = {param for param in twin.parameters() if param.dim() == 0}
    for unit in find_units(twin):
        fully_shard(twin.get_submodule(unit), mesh=mesh, ignored_params=scalars)
    fully_shard(twin, mesh=mesh, ignored_params=scalars)
    return _trained(twin, make, averaged=list(scalars))


def _with_graphshard(
    model: nn.Module,
    mesh: DeviceMesh,
    make: Callable[[int], dict[str, Any]],
    expected: dict[str, Tensor],
) -> dict[str, Any]:
    import graphshard

    def compiled(*, fullgraph: bool) -> nn.Module:
        example = make(0)
        return graphshard.compile(
            copy.deepcopy(model),
            mesh,
            backend="eager",
            example_kwargs=example,
            fullgraph=fullgraph,
        )

    split: dict[str, str] = {}
    begin, cpu = time.perf_counter(), time.process_time()
    try:
        try:
            sharded = compiled(fullgraph=True)
        except Exception as error:  # of forward, or something that the tracer treats as one
            split["split"] = _reason(error)
            sharded = compiled(fullgraph=False)
        capture_s, capture_cpu_s = round(time.perf_counter() - begin, 2), round(time.process_time() - cpu, 2)
        trained = _trained(sharded, make)
    except Exception as error:
        refused = type(error).__module__.startswith("graphshard")
        return {"result": "refused" if refused else "failed", "why": _reason(error)}
    difference, where = _difference(trained, expected)
    return {
        "result": "equal" if difference == 0 else "rounding" if difference < 1e-4 else "WRONG",
        "difference": float(f"{difference:.1e}"),
        "capture_s": capture_s,
        "capture_cpu_s": capture_cpu_s,
        **({"why": where} if where else {}),
        **split,
    }


def _trained(
    model: nn.Module, make: Callable[[int], dict[str, Any]], averaged: list[nn.Parameter] = ()
) -> dict[str, Tensor]:
    """Return losses, gradients and parameters of some steps; gradients in `averaged` are averaged over the ranks."""
    found: dict[str, Tensor] = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        batch = make(step)
        loss = loss_of(model(**batch))
        loss.backward()
        for param in averaged:
            if param.grad is not None:
                dist.all_reduce(param.grad, dist.ReduceOp.AVG)
        found[f"loss {step}"] = loss.detach().clone()
        for name, param in model.named_parameters():
            if param.grad is not None:
                found[f"gradient of {name} {step}"] = _full(param.grad)
        optimizer.step()
        optimizer.zero_grad()
    return found | {name: _full(param) for name, param in model.named_parameters()}


def _full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest difference, relative to the largest value of the tensor, and its tensor.

    Some gradients are zero up to rounding, such as the gradient of a bias before a norm. A tensor that is at most a
    thousandth of the largest gradient is compared with that.
    """
    largest, where = 0.0, ""
    least = 1e-3 * max(
        (float(t.abs().max()) for n, t in theirs.items() if n.startswith("gradient") and t.numel()), default=0
    )
    for name in ours | theirs:
        if name not in ours or name not in theirs:
            # No gradient and a gradient of zeros train alike.
            one = ours.get(name, theirs.get(name))
            assert one is not None
            difference = float("inf") if one.any() else 0.0
        elif torch.equal(ours[name].nan_to_num(7.0), theirs[name].nan_to_num(7.0)):
            difference = 0.0
        else:
            a, b = ours[name].double(), theirs[name].double()
            difference = float((a - b).abs().max() / b.abs().max().clamp(min=least))
        if not difference <= largest:
            largest, where = difference, name
    return largest, where


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {' '.join(line.strip() for line in lines[:4])}"[:600]


def _print(results: dict[str, dict[str, Any]]) -> None:
    table = Table(box=None)
    for heading in (
        "architecture",
        "task",
        "parameters",
        "result",
        "difference",
        "capture, s",
        "CPU, s",
        "why",
        "split",
    ):
        table.add_column(heading, no_wrap=True)
    for name, result in results.items():
        if result["result"] != "skipped":
            keys = ("task", "parameters", "result", "difference", "capture_s", "capture_cpu_s", "why", "split")
            table.add_row(name, *(str(result.get(key, "")) for key in keys))
    Console(width=200).print(table)
    print(", ".join(f"{count} {result}" for result, count in Counter(r["result"] for r in results.values()).items()))


if __name__ == "__main__":
    main()
