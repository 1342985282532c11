"""What a machine can do, as far as a rough estimate needs it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Hardware:
    """Rates of one accelerator and of the link between them.

    Attributes:
        name: as it is shown.
        flops: dense matrix multiplication by dtype, FLOP/s; other dtypes run at that of float32.
        achievable: fraction of `flops` that large multiplications in training reach.
        memory_bandwidth: bytes/s.
        link_bandwidth: bytes/s of a collective, counted on the full (gathered) tensor.
        link_latency: seconds from the start of a collective to its end, without the bytes.
        kernel_seconds: floor of one kernel.
    """

    name: str
    flops: dict[torch.dtype, float]
    achievable: float
    memory_bandwidth: float
    link_bandwidth: float
    link_latency: float
    kernel_seconds: float

    def matmul_seconds(self, flop: float, dtype: torch.dtype) -> float:
        """Time of a large matrix multiplication, convolution or attention."""
        return flop / (self.achievable * self.flops.get(dtype, self.flops[torch.float32]))

    def collective_seconds(self, num_bytes: float) -> float:
        """Time of an all-gather or reduce-scatter of `num_bytes` in full."""
        return self.link_latency + num_bytes / self.link_bandwidth


# Peaks: NVIDIA's H100 SXM data sheet, dense. Achievable fraction: commonly reached in training, not measured here.
# Link: NCCL inside an 8-GPU NVLink node fits 30 us + S / 394 GB/s. Kernel floor: a launch, about 3 us.
H100 = Hardware(
    name="H100 SXM, 8 in an NVLink node",
    flops={torch.float32: 67e12, torch.bfloat16: 989e12, torch.float16: 989e12},
    achievable=0.65,
    memory_bandwidth=3.35e12,
    link_bandwidth=394e9,
    link_latency=30e-6,
    kernel_seconds=3e-6,
)
