"""Regions compiled to kernels of a GPU, which need not be here: their form in files, and their calls.

    %buf2 = aten.empty_strided([4096, 4096], [4096, 1], dtype=bfloat16, device=cuda)
    %kernel_0 = kernel_0([%x_1, %w_1, %buf2, 4096, 4096], [4096, 1, 1])        a Triton kernel and its grid
    %mm_out = aten.mm.out(%buf2, %u_1, out=%buf3)                                ATen's operator for CUDA

The code of a region is a graph of ATen's operators and launches. It is data, not Python: nothing is executed to read
it, and the operators are looked up as in any program. A kernel is a cubin, which the CUDA driver loads; torch's
own launcher (`torch._C._StaticCudaLauncher`, in builds for CUDA) starts it. Neither a compiler nor Triton takes part.

A cubin is an ELF file of 64 bits, little-endian, for the machine 190 (EM_CUDA). Each kernel has a section
`.text.NAME`; `.nv.info` has a kernel's registers and the bytes of a thread's local memory, where registers are spilled
to.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from graphshard.errors import ArtifactError
from graphshard.ir.gpus import Capability, dotted
from graphshard.lower.cubin_kernels import aligned, load_cubin
from graphshard.lower.inductor_cache import ELF_HEADER, elf_sections
from graphshard.torch_compat.torch_ops import current_raw_stream, static_launcher, use_boxed_calls

_MACHINE = 190
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMBOLS = 2
# Format of attributes of .nv.info whose value is a symbol and a number.
_SIZED = 4
_FRAME_SIZE, _REGISTERS = 0x11, 0x2F


class Resources(NamedTuple):
    """Registers of a thread, and bytes of its local memory, to which registers are spilled."""

    registers: int
    spills: int


class Cubin(NamedTuple):
    """Compute capability and kernels, by name, of a cubin."""

    capability: tuple[int, int]
    kernels: dict[str, Resources]


def read_cubin(name: str, content: bytes) -> Cubin:
    """Read a cubin's headers; raise ArtifactError with `name` if it is not complete."""
    try:
        return _read(content)
    except (struct.error, IndexError, ValueError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{name} is no cubin: {error}. It is not loaded.") from None


def _read(content: bytes) -> Cubin:
    ident, _, machine, _, _, _, _, flags, *_, names = ELF_HEADER.unpack_from(content)
    if machine != _MACHINE:
        raise ValueError("it has not the header of an ELF file for CUDA")
    sections = elf_sections(content)

    def text(table: int, offset: int) -> str:
        start = sections[table][4] + offset
        return content[start : content.index(b"\0", start)].decode()

    parts = [(text(names, row[0]), row) for row in sections]
    kernels = [name.removeprefix(".text.") for name, _ in parts if name.startswith(".text.")]
    if not kernels:
        raise ValueError("it has no kernel")
    named: list[str] = []
    for row in [row for row in sections if row[1] == _SYMBOLS][:1]:
        places = range(row[4], row[4] + row[5] - _SYMBOL.size + 1, _SYMBOL.size)
        named = [text(row[6], _SYMBOL.unpack_from(content, place)[0]) for place in places]
    found: dict[tuple[int, str], int] = {}
    for name, row in parts:
        if name == ".nv.info":
            for attribute, symbol, value in _attributes(content[row[4] : row[4] + row[5]]):
                found[attribute, named[symbol]] = value
    taken = {name: Resources(found.get((_REGISTERS, name), 0), found.get((_FRAME_SIZE, name), 0)) for name in kernels}
    # The flags have 10 times the major number plus the minor one, in another byte since CUDA 13.
    return Cubin(divmod((flags >> 8 if ident[8] >= 8 else flags) & 0xFF, 10), taken)


def _attributes(info: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield attributes of kernels: which, the kernel's symbol, and the value."""
    offset = 0
    while offset + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, offset)
        offset += 4
        if form == _SIZED:
            if attribute in (_FRAME_SIZE, _REGISTERS):
                symbol, value = struct.unpack_from("<II", info, offset)
                yield attribute, symbol, value
            offset += size


@dataclass(frozen=True)
class KernelFacts:
    """A Triton kernel by its name: a block's warps and bytes of shared memory, a thread's registers and spills."""

    name: str
    warps: int
    shared: int
    registers: int
    spills: int

    @property
    def taken(self) -> str:
        """Resources, for people."""
        spilled = f"{self.spills} bytes spilled" if self.spills else "no spills"
        return f"{self.registers} registers, {spilled}, {self.shared} bytes of shared memory, {self.warps} warps"

    def __str__(self) -> str:
        return f"{self.name}: {self.taken}"


@dataclass(frozen=True)
class Kernel(KernelFacts):
    """A compiled kernel: its cubin, and its source for people.

    `types` has a letter for each argument, as torch's launcher takes them: "O" for a tensor or None, "i" for an int32.
    """

    types: str
    cubin: bytes = field(repr=False)
    source: str = field(default="", repr=False)


@dataclass(frozen=True)
class GpuCode:
    """A region compiled for one compute capability: a graph that calls the kernels by their names."""

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
    """A region's code on a device; its kernels are loaded at the first call, and started by what `launches` makes."""

    def __init__(self, code: GpuCode, device: torch.device, launches: Callable[[Kernel], Launch] | None = None) -> None:
        self.source_code, self.codes = code.text, (code,)
        self._index = device.index or 0
        root = nn.Module()
        for name, kernel in code.kernels.items():
            setattr(root, name, launches(kernel) if launches is not None else OnGpu(kernel, self._index))
        use_boxed_calls(code.graph)
        self._run: Callable[[list[Any]], Any] = GraphModule(root, code.graph).forward
        self._switches = launches is None

    def __call__(self, inputs: list[Any]) -> Any:
        inputs[:] = [aligned(value) if isinstance(value, torch.Tensor) else value for value in inputs]
        if not self._switches or torch.cuda.current_device() == self._index:
            return self._run(inputs)
        with torch.cuda.device(self._index):
            return self._run(inputs)


class OnGpu:
    """A kernel on a GPU, started on the current stream."""

    def __init__(self, kernel: Kernel, index: int) -> None:
        self._kernel, self._index = kernel, index
        self._function: Any = None

    def __call__(self, args: list[Any], grid: list[int]) -> None:
        kernel = self._kernel
        if self._function is None:
            self._function = load_cubin(kernel.name, kernel.cubin, kernel.shared, self._index)
        launch, stream = static_launcher()._launch_kernel, current_raw_stream(self._index)
        launch(self._function, *grid, kernel.warps, kernel.shared, kernel.types, tuple(args), stream)


def check_code(name: str, code: GpuCode, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Raise ArtifactError if a region's code contradicts its cubins, or does not fit its inputs and outputs."""
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
