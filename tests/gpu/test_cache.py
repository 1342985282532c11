"""A second launch on a GPU uses the cache of the first. Run with `pytest -m gpu`; skipped without a GPU."""

from __future__ import annotations

import pkgutil
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard.lower import inductor
from tests.gpu.test_cuda import nccl  # noqa: F401
from tests.store.launches import Launches

pytestmark = pytest.mark.gpu

async_compile = pkgutil.resolve_name("torch._inductor.async_compile")
codecache = pkgutil.resolve_name("torch._inductor.codecache")


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_the_second_launch_captures_nothing(nccl: DeviceMesh, tmp_path: Path, backend: str) -> None:  # noqa: F811
    (tmp_path / "source").mkdir()
    launches = Launches(tmp_path / "source", tmp_path / "cache", nccl)
    x = torch.linspace(-1, 1, 8, device="cuda").view(2, 4)

    def moved(module: Any, model: Any) -> None:
        model.cuda().table = model.table.cuda()

    first = launches.run(moved, x=x, backend=backend)
    assert launches.captured
    second = launches.run(moved, x=x, backend=backend)
    assert not launches.captured
    for one, other in zip((first[0], *first[1]), (second[0], *second[1]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("by_text", [True, False], ids=["by text", "Inductor's cache"])
def test_kernels_are_kept_with_their_code(
    nccl: DeviceMesh,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    by_text: bool,
) -> None:
    """The next process waits for no Inductor process: here they never become ready. Kept code does not ask Inductor."""

    def losses() -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16)).cuda()
        graphshard.compile(model, nccl, backend="inductor", cache=False)
        found = []
        for _ in range(2):
            loss = model(torch.ones(4, 16, device="cuda")).square().sum()
            loss.backward()
            found.append(loss.item())
        return found

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    first = losses()
    assert list((tmp_path / "graphshard-regions").glob("*-cuda-*"))
    if not by_text:
        shutil.rmtree(tmp_path / "graphshard-regions")
    # State that a new process would not have.
    codecache.PyCodeCache.cache_clear()
    async_compile.CompiledTritonKernels.cache_clear()
    asked, waited = [], []
    inductors = async_compile.AsyncCompile
    triton = inductors.triton

    def counted(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        asked.append(name)
        return triton(self, name, *args, **kwargs)

    monkeypatch.setattr(inductors, "triton", counted)
    monkeypatch.setattr(inductors, "use_process_pool", classmethod(lambda cls: False))
    monkeypatch.setattr(inductors, "wait_pool_ready", classmethod(lambda cls: waited.append(True)))
    with mock.patch.object(inductor, "generate", side_effect=inductor.generate) as generated:
        assert losses() == first
    assert bool(asked) == bool(generated.call_count) == (not by_text)
    assert not waited
