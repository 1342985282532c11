"""Run the code of regions for GPUs on the CPU, with Triton's interpreter in the place of the kernels' cubins.

`python -m tests.lower.interpreted FILE` prints, for each region of a file that was compiled without a GPU, how far its
code is from its operators. Its process must have TRITON_INTERPRET=1 before Triton is imported.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton.language as tl
from torch._decomp import decomposition_table
from torch._inductor.runtime import triton_helpers  # kernels call them
from torch.fx.node import map_aggregate
from triton.runtime.interpreter import InterpretedFunction

from graphshard.artifact.cubins import capabilities_of, read_gpu_code
from graphshard.artifact.members import read_artifact
from graphshard.codec.lowered import decode_region
from graphshard.ir.program import Region
from graphshard.lower.kernels import GpuRegion, Kernel, Launch
from graphshard.lower.operators import outputs_of

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


class LibDevice:
    """CUDA's functions that Triton has, too; the interpreter exchanges those of Triton while a kernel runs."""

    def __getattr__(self, name: str) -> Any:
        return getattr(tl.math, name)


def interpreted(kernel: Kernel) -> Launch:
    """What runs a kernel's source instead of its cubin."""
    first, _, source = kernel.source.partition("\n")
    constants, _ = json.JSONDecoder().raw_decode(first.removeprefix("# "))
    scope: dict[str, Any] = {"tl": tl, "tl_math": tl.math, "triton_helpers": triton_helpers, "libdevice": LibDevice()}
    path = Path(sys.argv[2]) / f"{kernel.name}.py"  # the interpreter reads sources from files
    path.write_text(source)
    exec(compile(source, str(path), "exec"), scope)
    function = InterpretedFunction(scope[kernel.name])
    (signature,) = re.findall(rf"def {kernel.name}\((.*?)\):", source, re.DOTALL)
    names = [name.partition(":")[0].strip() for name in signature.split(",")]

    def launch(args: list[Any], grid: list[int]) -> None:
        given = iter(args)
        values = {name: constants[name] if name in constants else next(given) for name in names}
        function[tuple(grid)](**values)

    return launch


def on_cpu(graph: torch.fx.Graph) -> torch.fx.Graph:
    """The graph with what it makes on the CPU."""
    for node in graph.nodes:
        move = lambda arg: CPU if isinstance(arg, torch.device) else arg  # noqa: E731
        node.args, node.kwargs = map_aggregate((node.args, node.kwargs), move)
    return graph


def value_of(fake: torch.Tensor) -> torch.Tensor:
    """Values for an input."""
    if fake.dtype.is_floating_point:
        made = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
        return made.copy_(torch.randn(fake.shape) * 0.5)
    made = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
    return made.copy_(torch.randint(0, 4, fake.shape))


class OnCpu(torch.fx.Interpreter):
    """Runs operators that the CPU has not by their decompositions."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return super().call_function(target, args, kwargs)
        except NotImplementedError:
            return decomposition_table[target](*args, **kwargs)


def differences(path: Path) -> dict[str, float]:
    """How far the code of each region is from its operators, relative to their largest value."""
    torch.manual_seed(0)
    artifact = read_artifact(path)
    found = {}
    for key, row in artifact.facts["regions"].items():
        if row["code"] != "gpu":
            continue
        code = read_gpu_code(artifact.archive, key, capabilities_of(artifact.facts)[0], CUDA)
        run = GpuRegion(replace(code, graph=on_cpu(code.graph)), CPU, interpreted)
        region: Region = decode_region(key, artifact.archive.json(f"regions/{key}.json"), CUDA)
        inputs = [value_of(node.meta["val"]) for node in region.module.graph.find_nodes(op="placeholder")]
        on_cpu(region.module.graph)
        expected = OnCpu(region.module).run(*(value.clone() for value in inputs))
        for mine, theirs, fake in zip(run(inputs), expected, outputs_of(region.module), strict=True):
            assert mine.stride() == fake.stride(), (key, mine.stride(), fake.stride())
            scale = max(1.0, float(theirs.abs().max()))
            found[key] = max(found.get(key, 0.0), float((mine.float() - theirs.float()).abs().max()) / scale)
    return found


if __name__ == "__main__":
    print(json.dumps(differences(Path(sys.argv[1]))))
