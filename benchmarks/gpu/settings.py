"""Models and sizes that parts measure, on a GPU and, at a small scale, on a CPU."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.gpu.idle import idle_world

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))
import llama  # noqa: E402

from tests.ranks import reset_distributed  # noqa: E402

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WORLDS = (1, 8, 64)
# For the artifact: a file from elsewhere must have this model and batch.
IN_A_FILE = {"layers": 2, "dim": 256, "heads": 4, "hidden": 704, "seq": 128, "vocab": 1024}
_BATCH_IN_A_FILE = 4
# From this much memory on, four blocks of the largest size fit, including the state of all waiting variants.
_LARGE_MEMORY = 100 * 2**30


@dataclass(frozen=True)
class Size:
    """Model and its batch."""

    name: str
    batch: int
    config: dict[str, int] = field(hash=False)

    def __str__(self) -> str:
        c = self.config
        return f"{self.name}: {c['layers']} x {c['dim']}/{c['hidden']}, batch {self.batch} x {c['seq']}"

    def model(self, device: str) -> nn.Module:
        """Return the model, with the same weights each time."""
        torch.manual_seed(0)
        with torch.device(device):
            return llama.Llama(llama.LlamaConfig(**self.config))

    def tokens(self, device: str, seed: int = 0) -> torch.Tensor:
        """Return inputs and targets of a step: (2, batch, seq)."""
        generator = torch.Generator().manual_seed(seed)
        shape = (2, self.batch, self.config["seq"])
        return torch.randint(self.config["vocab"], shape, generator=generator).to(device)


def size_in_a_file() -> Size:
    """Return the model of the artifact."""
    return Size("file", _BATCH_IN_A_FILE, IN_A_FILE)


@dataclass(frozen=True)
class Setup:
    """Settings of all parts.

    Attributes:
        device: "cuda" or "cpu".
        backend: graphshard's.
        compiler: the backend of `torch.compile` for the others.
        turns: of each variant, of `steps` steps.
    """

    device: str
    backend: str
    compiler: str
    turns: int
    steps: int

    @classmethod
    def of(cls, *, dry: bool) -> Setup:
        """Return the settings for a GPU, or the same at a small scale on a CPU, where nothing is compiled."""
        return cls("cpu", "eager", "aot_eager", 1, 1) if dry else cls("cuda", "inductor", "inductor", 5, 3)

    @property
    def is_dry(self) -> bool:
        return self.device == "cpu"

    def sizes(self) -> tuple[Size, ...]:
        """Return all sizes, the smallest first; the blocks of the last are as wide as in Llama 3 8B."""
        if self.is_dry:
            widths = {"tiny": 16, "small": 32, "wide": 64}
            return tuple(
                Size(n, 2, {"layers": 1, "dim": w, "heads": 2, "hidden": 2 * w, "seq": 16, "vocab": 64})
                for n, w in widths.items()
            )
        blocks = 4 if torch.cuda.get_device_properties(0).total_memory > _LARGE_MEMORY else 2
        llama3 = {"dim": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336}
        return (
            Size("1024", 8, {"layers": 8, "dim": 1024, "heads": 16, "hidden": 2816, "seq": 1024, "vocab": 8192}),
            Size("2048", 4, {"layers": 6, "dim": 2048, "heads": 16, "hidden": 7168, "seq": 2048, "vocab": 8192}),
            Size("4096", 4, {"layers": blocks, **llama3, "seq": 2048, "vocab": 8192}),
        )

    def autocast(self) -> AbstractContextManager[None]:
        """Return the autocast context for implementations without a precision policy."""
        return torch.autocast(self.device, torch.bfloat16)


@contextlib.contextmanager
def world(setup: Setup, num_ranks: int) -> Iterator[DeviceMesh]:
    """Run as the only rank, or as rank 0 of ranks that do not exist: their collectives return at once."""
    with contextlib.ExitStack() as stack:
        if num_ranks > 1:
            stack.enter_context(idle_world(num_ranks))
        else:
            backend = "nccl" if setup.device == "cuda" else "gloo"
            store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            yield init_device_mesh(setup.device, (num_ranks,))
        finally:
            reset_distributed()  # also DTensors' caches: the next mesh may equal this one


Step = Callable[[], torch.Tensor]


def stepper(model: nn.Module, tokens: torch.Tensor, around: Callable[[], AbstractContextManager[None]]) -> Step:
    """Return a function that trains one step with AdamW and returns the loss, without waiting for the device.

    Args:
        around: context for forward.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> torch.Tensor:
        with around():
            loss = model(tokens[0], tokens[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
