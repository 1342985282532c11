"""All GPUs of a machine, at least four: FSDP2's bits on one axis and on 2 x n / 2, checkpoints. On a CPU four ranks.

`tests/gpu/run.sh` runs them as its parts "bits" and "checkpoints".
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu import test_two_ranks as two_ranks
from tests.ranks import Ranks

NUMBER = max(torch.cuda.device_count(), 4)
ENOUGH = pytest.mark.skipif(torch.cuda.device_count() < NUMBER, reason="needs four GPUs")
DEVICES = pytest.mark.parametrize(
    ("device", "backend"),
    [
        pytest.param("cpu", "gloo", id="on_cpu", marks=pytest.mark.slow),
        pytest.param("cuda", "nccl", id="nccl", marks=[pytest.mark.gpu, ENOUGH]),
    ],
)


@DEVICES
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_bits_on_one_axis(ranks: Ranks, device: str, backend: str, policy: str) -> None:
    ranks(NUMBER, backend).run(two_ranks._train, device, policy, ())


@DEVICES
def test_bits_on_two_axes(ranks: Ranks, device: str, backend: str) -> None:
    ranks(NUMBER, backend).run(two_ranks._train, device, "bf16", (2, NUMBER // 2))


@DEVICES
def test_checkpoint(ranks: Ranks, device: str, backend: str, tmp_path: Path) -> None:
    ranks(NUMBER, backend).run(two_ranks._checkpoint, device, str(tmp_path / "checkpoint"))
