"""GPU kernels of models, forward and backward, and their resources; needs no GPU.

    python -m benchmarks.kernels                      all models, bf16 and fp32, or the ones missing in the results
    python -m benchmarks.kernels llama gpt2 --dtype bf16      these, again
    python -m benchmarks.kernels --show                       the table of the results, and why regions have no kernels

Models have random weights and small sizes (`tiny_models.py`), except one block of the example at the width of Llama 3
8B. Parameters are float32, as FSDP2 requires; bf16 is a `MixedPrecisionPolicy`. Kernels are compiled as in `export`,
with Inductor and Triton, and read from the file: registers of a thread, bytes spilled per thread, bytes of shared
memory of a block, each the maximum over all kernels. Seconds are CPU time of Inductor, Triton and ptxas with empty
caches.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import os
import resource
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from benchmarks.tiny_models import batch_of, tiny_model
from examples.llama import Llama, LlamaConfig
from graphshard.cross import compile_for_gpus
from graphshard.cross.compile_for_gpus import compile_for
from graphshard.cross.gpu_kernels import GpuCode
from graphshard.ir.gpus import CAPABILITIES, Capability, dotted
from graphshard.ir.program import Region
from graphshard.store.artifact_file import read_artifact

# Model and arguments of a call.
Given = tuple[nn.Module, dict[str, Any]]

POLICIES: dict[str, MixedPrecisionPolicy | None] = {
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "fp32": None,
}


def main() -> None:
    args = _parse_args()
    logging.getLogger("graphshard").setLevel(logging.ERROR)  # the table shows regions without kernels
    path = Path(args.results)
    results: dict[str, list[dict[str, Any]]] = json.loads(path.read_text()) if path.exists() else {}
    for name, dtype in itertools.product(args.names or MODELS, args.dtype):
        key = f"{name} {dtype}"
        if not args.show and (args.names or key not in results):
            print(key, flush=True)
            results[key] = measured(name, dtype)
            path.write_text(json.dumps(results, indent=1))
    found = [row for key in map(" ".join, itertools.product(MODELS, POLICIES)) for row in results.get(key, [])]
    _print(found)
    for row in found:
        for why, count in row["why"].items():
            print(f"{row['model']} {row['dtype']} {row['capability']}: {count} regions run as operators: {why}")


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *MODELS], help="models (default: all)")
    parser.add_argument("--dtype", nargs="*", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--results", default="kernels.json", help="result file, read and written")
    parser.add_argument("--show", action="store_true", help="print the result file without measuring")
    return parser.parse_args()


def measured(name: str, dtype: str) -> list[dict[str, Any]]:
    """Return a model's regions and kernels, for each kind of GPU."""
    model, kwargs = MODELS[name]()
    seconds: Counter[Capability] = Counter()

    def timed(region: Region, capability: Capability) -> GpuCode:
        start = _cpu_seconds()
        try:
            return compile_for(region, capability)
        finally:
            seconds[capability] += _cpu_seconds() - start

    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")  # of models
        for cache in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
            stack.enter_context(mock.patch.dict(os.environ, {cache: f"{directory}/{cache}"}))
        stack.enter_context(mock.patch.object(compile_for_gpus, "compile_for", timed))
        path = graphshard.export(
            model,
            (2,),
            Path(directory) / "model.gshard",
            example_kwargs=kwargs,
            device="cuda",
            capability=CAPABILITIES,
            mp_policy=POLICIES[dtype],
        )
        regions = read_artifact(path).manifest.regions
    given = {"model": name, "dtype": dtype}
    return [
        {**given, "capability": dotted(each), "seconds": round(seconds[each], 1), **taken(regions, each)}
        for each in CAPABILITIES
    ]


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and its children."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def taken(regions: Mapping[str, Any], capability: Capability) -> dict[str, Any]:
    """Summarize the regions of a file on one kind of GPU, from its manifest."""
    kernels = [kernel for row in regions.values() for kernel in row.gpus.get(dotted(capability), [])]
    why = Counter(row.why for row in regions.values() if row.code != "gpu")
    return {
        "regions": len(regions),
        "compiled": sum(row.code == "gpu" for row in regions.values()),
        "kernels": len(kernels),
        "registers": max((kernel.registers for kernel in kernels), default=0),
        "spills": max((kernel.spills for kernel in kernels), default=0),
        "spilling": sum(kernel.spills > 0 for kernel in kernels),
        "shared": max((kernel.shared for kernel in kernels), default=0),
        "why": dict(why),
    }


def _of_transformers(name: str, **changes: Any) -> Callable[[], Given]:
    def make() -> Given:
        model, task = tiny_model(name, **changes)
        return model, batch_of(model, task)

    return make


def _example(config: LlamaConfig) -> Callable[[], Given]:
    def make() -> Given:
        with torch.device("meta"):
            tokens = torch.zeros(1, config.seq, dtype=torch.int64)
            return Llama(config), {"tokens": tokens, "targets": tokens}

    return make


MODELS: dict[str, Callable[[], Given]] = {
    "example": _example(LlamaConfig(layers=2, dim=64, heads=4, kv_heads=2, seq=64)),
    "example, 8B wide": _example(
        LlamaConfig(layers=1, dim=4096, heads=32, kv_heads=8, hidden=14336, seq=4096, vocab=128256)
    ),
    "llama": _of_transformers("llama", use_cache=False),
    "gpt2": _of_transformers("gpt2", use_cache=False),
    "vit": _of_transformers("vit"),
    "mixtral": _of_transformers("mixtral", use_cache=False),
    "resnet": _of_transformers("resnet"),
}


def _print(found: list[dict[str, Any]]) -> None:
    table = Table(box=None)
    columns = ("model", "dtype", "capability", "regions", "compiled", "kernels", "registers", "spills", "shared")
    for heading in (*columns, "seconds"):
        table.add_column(heading, justify="left" if heading in ("model", "dtype") else "right")
    for row in found:
        table.add_row(*(str(row[column]) for column in (*columns, "seconds")))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
