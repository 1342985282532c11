"""Triton's kernels in files, started without Triton and Inductor: cubins and what launches them.

    kernel.run(x, y, 4096, stream=stream)       in the code of a region

    def launcher(in_ptr0, out_ptr0, xnumel, stream):                      Inductor's, for one configuration
        runner(-(xnumel // -1024), 1, 1, stream, in_ptr0, out_ptr0, xnumel)

Inductor compiles some kernels in several configurations and measures them at their first call; the file then keeps the
fastest, so that later launches compute the same bits. Who finds the file before measures them here, in the same way.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from graphshard.errors import ArtifactError
from graphshard.torch_compat.torch_ops import static_launcher

# Kernels are compiled for tensors that begin at multiples of this number of bytes, as torch's allocator places them.
_ALIGNMENT = 16
# Launches of a configuration that are measured together, and how often.
_LAUNCHES, _ROUNDS = 5, 3


@dataclass(frozen=True)
class KernelVariant:
    """A kernel compiled in one configuration.

    Attributes:
        launcher: Inductor's function that calls `runner` with the grid.
        types: a letter for each argument, as torch's launcher takes them.
        scratch: number of arguments that are null at the end.
        constants: what the kernel was compiled with, for people.
    """

    name: str
    launcher: str
    types: str
    scratch: int
    warps: int
    shared: int
    constants: Mapping[str, Any]
    cubin: bytes = field(repr=False)

    def launch_on(self, index: int) -> Callable[..., None]:
        """Load the kernel onto a GPU and return its launcher; raise ArtifactError if the driver refuses it."""
        function = load_cubin(self.name, self.cubin, self.shared, index)
        launch, types = static_launcher()._launch_kernel, self.types + "O" * self.scratch
        nulls = (None,) * self.scratch

        def runner(x: int, y: int, z: int, stream: int, *args: Any) -> None:
            launch(function, x, y, z, self.warps, self.shared, types, (*args, *nulls), stream)

        names: dict[str, Any] = {"runner": runner}
        exec(compile(self.launcher, f"<launcher of {self.name}>", "exec"), names)
        return names["launcher"]


@dataclass(frozen=True)
class CubinKernel:
    """A kernel in the configurations among which the fastest is to be found; `writes` are the arguments it changes."""

    variants: tuple[KernelVariant, ...]
    writes: tuple[int, ...] = ()

    def facts(self) -> dict[str, Any]:
        """Return all but the cubins, for a file."""
        rows = [{name: value for name, value in asdict(each).items() if name != "cubin"} for each in self.variants]
        return {"writes": self.writes, "variants": rows}

    @staticmethod
    def of(facts: Mapping[str, Any], cubins: Sequence[bytes]) -> CubinKernel:
        """Return the kernel of a file's facts."""
        variants = (KernelVariant(**row, cubin=cubin) for row, cubin in zip(facts["variants"], cubins, strict=True))
        return CubinKernel(tuple(variants), tuple(facts["writes"]))


class LoadedKernel:
    """A kernel on a GPU. `run` launches it on a stream; `kernel` has only the fastest variant once that is known."""

    def __init__(self, kernel: CubinKernel, index: int) -> None:
        self.kernel = kernel
        self._launches = [variant.launch_on(index) for variant in kernel.variants]
        self.run: Callable[..., None] = self._launches[0] if len(self._launches) == 1 else self._measure

    def _measure(self, *args: Any, stream: int) -> None:
        """Launch the variants on copies of what they change, and then the fastest."""
        if torch.cuda.is_current_stream_capturing():
            return self._launches[0](*args, stream=stream)
        changed = self.kernel.writes
        try:
            copies = [arg.clone() if place in changed else arg for place, arg in enumerate(args)]
        except torch.OutOfMemoryError:
            fastest = 0
        else:
            times = [min(_milliseconds(launch, copies, stream)) for launch in self._launches]
            fastest = times.index(min(times))
        self.kernel = CubinKernel((self.kernel.variants[fastest],), changed)
        self.run = self._launches[fastest]
        return self.run(*args, stream=stream)


def _milliseconds(launch: Callable[..., None], args: Sequence[Any], stream: int) -> Iterator[float]:
    launch(*args, stream=stream)
    for _ in range(_ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(_LAUNCHES):
            launch(*args, stream=stream)
        end.record()
        end.synchronize()
        yield start.elapsed_time(end)


def load_cubin(name: str, cubin: bytes, shared: int, index: int) -> Any:
    """Load a kernel onto a GPU, and return its function; raise ArtifactError if the driver refuses it."""
    with tempfile.TemporaryDirectory(prefix="graphshard-") as directory:
        path = Path(directory, f"{name}.cubin")
        path.write_bytes(cubin)
        try:
            loaded = static_launcher()._load_kernel(str(path), name, shared, index)
        except (AttributeError, RuntimeError) as error:
            raise ArtifactError(
                f"kernel {name} cannot be loaded here: {str(error).splitlines()[0]}. It takes torch built for CUDA, "
                "and a driver that knows the GPU: update the driver, or export again on this machine."
            ) from error
    # The function, its registers and spills; newer releases of torch have the module before them.
    return loaded[1] if len(loaded) > 3 else loaded[0]


def aligned(value: torch.Tensor) -> torch.Tensor:
    """Copy a tensor that does not begin where kernels need it: a piece of another one may begin anywhere."""
    if value.data_ptr() % _ALIGNMENT == 0:
        return value
    length = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride()))
    return value.as_strided((length,), (1,)).clone().as_strided(value.shape, value.stride())
