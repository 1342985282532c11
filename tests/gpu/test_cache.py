"""A second launch on a GPU finds what the first one has kept. Run with `pytest -m gpu`; skipped without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.cache.launches import Launches
from tests.gpu.test_cuda import nccl  # noqa: F401

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_the_second_launch_captures_nothing(nccl: DeviceMesh, tmp_path: Path, backend: str) -> None:  # noqa: F811
    (tmp_path / "source").mkdir()
    launches = Launches(tmp_path / "source", tmp_path / "cache", nccl)
    x = torch.linspace(-1, 1, 8, device="cuda").view(2, 4)
    first = launches.run(lambda _, model: model.cuda(), x=x, backend=backend)
    assert launches.captured
    second = launches.run(lambda _, model: model.cuda(), x=x, backend=backend)
    assert not launches.captured
    for one, other in zip((first[0], *first[1]), (second[0], *second[1]), strict=True):
        assert torch.equal(one, other)
