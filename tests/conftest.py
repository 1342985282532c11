"""Fixtures for all tests: worlds of real ranks, fake worlds, and skipped GPU and slow tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.ranks import FakeWorld, RankPool, Ranks, reset_distributed

# Programs are verified before the first pass and after the last, here and in the processes that tests start. Verifying
# after every pass takes a third of a test's time; the fixture `rules_after_every_pass` does it.
os.environ.setdefault("GRAPHSHARD_VERIFY", "ends")
# Tests compile without the cache; tests of the cache set a directory. With a directory set here, a second run of all
# tests is a second launch of each model.
os.environ["GRAPHSHARD_CACHE"] = os.environ.get("GRAPHSHARD_TEST_CACHE", "off")


SLOW_CASES = frozenset(
    line for line in Path(__file__).with_name("slow_cases.txt").read_text().splitlines() if not line.startswith("#")
)


@pytest.hookimpl(tryfirst=True)  # before pytest deselects tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    found = {item.nodeid for item in items}
    tests = {nodeid.partition("[")[0] for nodeid in found}
    asked = {argument.partition("::")[0] for argument in config.args if "::" in argument}
    for case in SLOW_CASES - found:
        test = case.partition("[")[0]
        if test in tests and test.partition("::")[0] not in asked:
            raise pytest.UsageError(f"tests/slow_cases.txt: {case} is no case of its test")
    for item in items:
        if item.nodeid in SLOW_CASES:
            item.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.manual_seed(0)  # the same random numbers whatever ran before
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture
def rules_after_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify programs after every pass, here and on the first rank."""
    monkeypatch.setenv("GRAPHSHARD_VERIFY", "each")


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
