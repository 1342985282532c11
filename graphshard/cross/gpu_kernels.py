"""Regions compiled to kernels of a GPU, which need not be here: their form in files, and their calls.

    %buf2 = aten.empty_strided([4096, 4096], [4096, 1], dtype=bfloat16, device=cuda)
    %kernel_0 = kernel_0([%x_1, %w_1, %buf2, 4096, 4096], [4096, 1, 1])        a Triton kernel and its grid
    %mm_out = aten.mm.out(%buf2, %u_1, out=%buf3)                                ATen's operator for CUDA

The code of a region is a graph of ATen's operators and launches. It is data, not Python: nothing is executed to read
it, and the operators are looked up as in any program. A kernel is a cubin, which the CUDA driver loads; torch's
own launcher (`torch._C._StaticCudaLauncher`, in builds for CUDA) starts it. Neither a compiler nor Triton takes part.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from graphshard.cross.cubin import read_cubin
from graphshard.errors import ArtifactError
from graphshard.ir.gpus import Capability, dotted
from graphshard.torch_compat.cuda import current_raw_stream, static_launcher
from graphshard.torch_compat.fx_code import use_boxed_calls

# Kernels are compiled for tensors that begin at multiples of this number of bytes, as torch's allocator places them.
_ALIGNMENT = 16


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel, compiled.

    Attributes:
        name: its name in the cubin.
        types: one letter for each argument, as torch's launcher takes them: "O" for a tensor or None, "i" for an int32.
        warps: warps of a block.
        shared: bytes of shared memory of a block.
        registers: of a thread.
        spills: bytes of a thread's own memory, which registers are spilled to.
        cubin: the code.
        source: for people.
    """

    name: str
    types: str
    warps: int
    shared: int
    registers: int
    spills: int
    cubin: bytes = field(repr=False)
    source: str = field(default="", repr=False)

    def __str__(self) -> str:
        spilled = f"{self.spills} bytes spilled" if self.spills else "no spills"
        taken = f"{self.registers} registers, {spilled}, {self.shared} bytes of shared memory, {self.warps} warps"
        return f"{self.name}: {taken}"


@dataclass(frozen=True)
class GpuCode:
    """A region compiled for one compute capability.

    Attributes:
        capability: of the GPUs it runs on.
        graph: takes the region's inputs and returns its outputs; calls the kernels by name.
        kernels: by the names that the graph calls them by.
    """

    capability: Capability
    graph: Graph
    kernels: Mapping[str, Kernel]

    @property
    def text(self) -> str:
        """Code for people: the kernels, their launches, and the source of each."""
        listed = f"# compute capability {dotted(self.capability)}\n"
        listed += "".join(f"# {name} is {kernel}\n" for name, kernel in self.kernels.items())
        code = self.graph.python_code("self").src
        return "\n".join([listed, code, *(kernel.source for kernel in self.kernels.values())])

    def __str__(self) -> str:
        """Format the most that a kernel takes."""
        made = self.kernels.values()
        spilled = max((kernel.spills for kernel in made), default=0)
        return (
            f"compute capability {dotted(self.capability)}: {len(made)} kernel{'' if len(made) == 1 else 's'}, at most "
            f"{max((kernel.registers for kernel in made), default=0)} registers, "
            f"{f'{spilled} bytes spilled' if spilled else 'no spills'}, "
            f"{max((kernel.shared for kernel in made), default=0)} bytes of shared memory"
        )


# Starts a kernel; called with its arguments and its grid.
Launch = Callable[[list[Any], list[int]], None]


class GpuRegion:
    """A region's code on a device; its kernels are loaded at the first call.

    Args:
        launches: makes what starts a kernel; by default the GPU starts it.
    """

    def __init__(self, code: GpuCode, device: torch.device, launches: Callable[[Kernel], Launch] | None = None) -> None:
        self.source_code, self.codes = code.text, (code,)
        self._index = device.index or 0
        root = nn.Module()
        for name, kernel in code.kernels.items():
            setattr(root, name, launches(kernel) if launches is not None else OnGpu(kernel, self._index))
        graph = code.graph
        use_boxed_calls(graph)
        self._run: Callable[[list[Any]], Any] = GraphModule(root, graph).forward
        self._switches = launches is None

    def __call__(self, inputs: list[Any]) -> Any:
        inputs[:] = [_aligned(value) if isinstance(value, torch.Tensor) else value for value in inputs]
        if not self._switches or torch.cuda.current_device() == self._index:
            return self._run(inputs)
        with torch.cuda.device(self._index):
            return self._run(inputs)


class OnGpu:
    """A kernel on a GPU, started on the current stream."""

    def __init__(self, kernel: Kernel, index: int) -> None:
        self._kernel, self._index = kernel, index
        self._function: Any = None
        self._module: Any = None

    def __call__(self, args: list[Any], grid: list[int]) -> None:
        if self._function is None:
            self._load()
        stream = current_raw_stream(self._index)
        kernel = self._kernel
        launcher = static_launcher()
        launcher._launch_kernel(self._function, *grid, kernel.warps, kernel.shared, kernel.types, tuple(args), stream)

    def _load(self) -> None:
        kernel = self._kernel
        with tempfile.TemporaryDirectory(prefix="graphshard-") as directory:
            path = os.path.join(directory, f"{kernel.name}.cubin")
            with open(path, "wb") as file:
                file.write(kernel.cubin)
            try:
                launcher = static_launcher()
                loaded = launcher._load_kernel(path, kernel.name, kernel.shared, self._index)
            except (AttributeError, RuntimeError) as error:
                raise ArtifactError(
                    f"kernel {kernel.name} cannot be loaded here: {str(error).splitlines()[0]}. It takes torch built "
                    "for CUDA, and a driver that knows the GPU: update the driver, or export again on this machine."
                ) from error
        # The function, its registers and spills; newer releases of torch have the module before them.
        self._module, self._function = (loaded[0], loaded[1]) if len(loaded) > 3 else (None, loaded[0])


def _aligned(value: torch.Tensor) -> torch.Tensor:
    """Copy a tensor that does not begin where kernels need it: a piece of another one may begin anywhere."""
    if value.data_ptr() % _ALIGNMENT == 0:
        return value
    length = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride()))
    return value.as_strided((length,), (1,)).clone().as_strided(value.shape, value.stride())


def check_code(name: str, code: GpuCode, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Raise ArtifactError if a region's code contradicts its cubins, or does not fit the region.

    Args:
        inputs, outputs: of the region.
    """
    for key, kernel in code.kernels.items():
        cubin = read_cubin(f"{name}: kernel {kernel.name}", kernel.cubin)
        if cubin.capability != code.capability or kernel.name not in cubin.kernels:
            has = ", ".join(cubin.kernels)
            raise ArtifactError(
                f"{name}: the cubin of {key} is for compute capability {dotted(cubin.capability)} and has {has}; it "
                f"is to be for {dotted(code.capability)} and to have {kernel.name}. It is not loaded."
            )
    nodes = code.graph.find_nodes(op="placeholder")
    (output,) = code.graph.find_nodes(op="output")
    if len(nodes) != len(inputs) or len(output.args[0]) != len(outputs):
        raise ArtifactError(f"{name}: the code takes other inputs or makes other outputs than the region.")
    for node in code.graph.nodes:
        if node.op == "call_module":
            args, grid = node.args
            if len(args) != len(code.kernels[node.target].types) or len(grid) != 3:
                raise ArtifactError(f"{name}: {node.target} is called with {len(args)} arguments, and takes others.")
