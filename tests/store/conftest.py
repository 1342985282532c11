"""Fixtures of the cache's tests."""

import shutil
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.ranks import FakeWorld, reset_distributed
from tests.store.launches import Launches


@pytest.fixture(scope="module")  # tests of other modules may change compared state
def first_launch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a first launch of the unchanged model; return its cache."""
    folder = tmp_path_factory.mktemp("first")
    reset_distributed()
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    launches = Launches(folder, folder / "cache", init_device_mesh("cpu", (1,)))
    launches.run()
    reset_distributed()
    assert launches.compiled
    assert len(launches.files()) == 1
    return launches.cache


@pytest.fixture
def empty(tmp_path: Path, fake_world: FakeWorld) -> Launches:
    """Return launches of a small model on one rank, without a cache."""
    fake_world(1)
    folder = tmp_path / "source"
    folder.mkdir()
    return Launches(folder, tmp_path / "cache", init_device_mesh("cpu", (1,)))


@pytest.fixture
def launches(empty: Launches, first_launch: Path) -> Launches:
    """Return launches after a first one."""
    shutil.copytree(first_launch, empty.cache)
    return empty
