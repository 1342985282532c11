"""The fixtures of the cache's tests."""

import shutil
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.ranks import FakeWorld, reset_distributed
from tests.store.launches import Launches


@pytest.fixture(scope="module")  # tests of other modules may change what it is compared by
def first_launch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a first launch of the model, as it is written, has kept."""
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
    """Launches of a small model on one rank; there is no cache yet."""
    fake_world(1)
    folder = tmp_path / "source"
    folder.mkdir()
    return Launches(folder, tmp_path / "cache", init_device_mesh("cpu", (1,)))


@pytest.fixture
def launches(empty: Launches, first_launch: Path) -> Launches:
    """Launches after a first one."""
    shutil.copytree(first_launch, empty.cache)
    return empty
