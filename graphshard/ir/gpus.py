"""What is known of GPUs by their compute capability, to compile for one that is not here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

Capability = tuple[int, int]

# The GPU that `graphshard.cross.driver` answers for.
PRETENDED: ContextVar[Capability | None] = ContextVar("graphshard_pretended_gpu", default=None)


def is_pretended() -> bool:
    """Return whether the GPU is not here: tensors are fake, and where they were made does not matter."""
    return PRETENDED.get() is not None


def dotted(capability: Capability) -> str:
    """Format a compute capability: "9.0"."""
    return f"{capability[0]}.{capability[1]}"


# What Inductor asks of a GPU, of the one that each compute capability is known by.
_COMMON = {
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "shared_memory_per_block": 49152,
    "warp_size": 32,
    "is_integrated": 0,
    "gcnArchName": "",
    "uuid": "",
}
_GPUS: dict[Capability, dict[str, Any]] = {
    (8, 0): {
        "name": "NVIDIA A100-SXM4-80GB",
        "total_memory": 80 << 30,
        "multi_processor_count": 108,
        "shared_memory_per_block_optin": 166912,
        "shared_memory_per_multiprocessor": 167936,
        "L2_cache_size": 40 << 20,
        "clock_rate": 1410000,
        "memory_clock_rate": 1593000,
        "memory_bus_width": 5120,
    },
    (9, 0): {
        "name": "NVIDIA H100 80GB HBM3",
        "total_memory": 80 << 30,
        "multi_processor_count": 132,
        "shared_memory_per_block_optin": 232448,
        "shared_memory_per_multiprocessor": 233472,
        "L2_cache_size": 50 << 20,
        "clock_rate": 1980000,
        "memory_clock_rate": 2619000,
        "memory_bus_width": 5120,
    },
    (10, 0): {
        "name": "NVIDIA B200",
        "total_memory": 180 << 30,
        "multi_processor_count": 148,
        "shared_memory_per_block_optin": 232448,
        "shared_memory_per_multiprocessor": 233472,
        "L2_cache_size": 126 << 20,
        "clock_rate": 1965000,
        "memory_clock_rate": 3996000,
        "memory_bus_width": 8192,
    },
}
# Capabilities that code is compiled for where there is no GPU.
CAPABILITIES = tuple(_GPUS)
# What programs are captured for where none is given: decisions hold for any GPU from 8.0 on.
USUAL: Capability = (9, 0)


def properties_of(capability: Capability) -> dict[str, Any]:
    """What `torch.cuda.get_device_properties` says of such a GPU."""
    return {"major": capability[0], "minor": capability[1], **_COMMON, **_GPUS[capability]}


def capability_of(units: int) -> Capability | None:
    """Return the properties of the GPU with this number of multiprocessors; None if no known GPU has it."""
    return next((capability for capability, gpu in _GPUS.items() if gpu["multi_processor_count"] == units), None)


def differs(name: str) -> RuntimeError:
    """That a function of `torch.cuda` has no answer that holds for all GPUs of a file."""
    return RuntimeError(f"torch.cuda.{name} answers otherwise for each GPU of capability=; export for one alone")


class OfSeveral(tuple[int, int]):
    """The compute capability of each of several GPUs, which may be asked for what is the same of all of them."""

    _each: Sequence[Capability]

    def __new__(cls, each: Sequence[Capability]) -> OfSeveral:
        made = super().__new__(cls, each[0])
        made._each = each
        return made

    def __iter__(self) -> Iterator[int]:
        return (self[index] for index in range(2))


def _common_answer(method: str) -> Callable[..., Any]:
    """Return a method that answers if all GPUs give the same answer."""

    def ask(self: OfSeveral, *args: Any) -> Any:
        answers = {getattr(each, method)(*args) for each in self._each}
        if len(answers) > 1:
            raise differs("get_device_capability")
        return answers.pop()

    return ask


for _method in ("__getitem__", "__ge__", "__gt__", "__le__", "__lt__", "__eq__", "__ne__", "__hash__"):
    setattr(OfSeveral, _method, _common_answer(_method))
