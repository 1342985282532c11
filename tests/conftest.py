"""Fixtures for all tests: worlds of real ranks, fake worlds, and skipped GPU and slow tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.ranks import FakeWorld, RankPool, Ranks, reset_distributed

# Programs are verified before the first pass and after the last, here and in the processes that tests start. Verifying
# after every pass takes a third of a test's time: CI does it in one step, with GRAPHSHARD_VERIFY=each.
os.environ.setdefault("GRAPHSHARD_VERIFY", "ends")
# Tests compile without the cache; tests of the cache set a directory. With a directory set here, a second run of all
# tests is a second launch of each model.
os.environ["GRAPHSHARD_CACHE"] = os.environ.get("GRAPHSHARD_TEST_CACHE", "off")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects slow tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases slow that `quick_cases` does not list; reject an id in it of no case, or of a slow one."""
    unknown: dict[str, set[str]] = {}
    for item in items:
        marker = item.get_closest_marker("quick_cases")
        if marker is not None and isinstance(item, pytest.Function):
            test, case = item.nodeid.partition("[")[0], item.callspec.id
            unknown.setdefault(test, set(marker.args)).discard(case)
            if case not in marker.args:
                item.add_marker(pytest.mark.slow)
            elif item.get_closest_marker("slow") is not None:
                raise pytest.UsageError(f"quick_cases of {test} lists {case!r}, which has a slow mark")
    files_of_single_cases = {argument.partition("::")[0] for argument in config.args if "::" in argument}
    for test, cases in unknown.items():
        if cases and test.partition("::")[0] not in files_of_single_cases:
            raise pytest.UsageError(f"quick_cases of {test} names {sorted(cases)}, which are not cases of it")


def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.manual_seed(0)  # the same random numbers whatever ran before
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Yield `ranks(n)`, which returns n gloo ranks of the session's pool; see tests/ranks.py."""
    with RankPool() as pool:
        yield pool.world


@pytest.fixture
def fake_world() -> Iterator[FakeWorld]:
    """Yield `fake_world(n)`, which makes this process a rank of n. Collectives return at once, with made-up values.

    A second call in the same test replaces the world.
    """

    def start(world_size: int, rank: int = 0) -> None:
        reset_distributed()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    yield start
    reset_distributed()


@pytest.fixture
def mesh(fake_world: FakeWorld) -> DeviceMesh:
    """Return a mesh of this process alone; a module that needs another overrides this fixture."""
    fake_world(1)
    return init_device_mesh("cpu", (1,))
