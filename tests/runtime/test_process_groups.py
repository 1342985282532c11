"""Process groups that graphshard makes ask for high priority, where their backend has priorities."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import graphshard
from graphshard.ir.mesh import only_replicating
from graphshard.runtime.process_groups import log_priorities
from graphshard.torch_compat.dtensor import HIGH_PRIORITY
from tests.helpers import Blocks
from tests.ranks import reset_distributed

# The options that each group of the stub backend was made with, in order.
Asked = list[Any]


class Options(FakeProcessGroup.Options):
    """Options of the stub backend, as NCCL's."""

    def __init__(self, *, is_high_priority_stream: bool = False) -> None:
        super().__init__()
        self.is_high_priority_stream = is_high_priority_stream


NAME = "recording"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    """Make this process one of four ranks on a stub backend that records options; the default group has none."""
    reset_distributed()
    found: Asked = []

    def create(given: Any, options: Any) -> Any:
        found.append(options)
        return FakeProcessGroup._create_internal(given.group_rank, given.group_size, FakeProcessGroup.Options())

    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
    monkeypatch.setitem(dist.Backend._plugins, NAME.upper(), dist.Backend._BackendPlugin(create, extended_api=True))
    monkeypatch.setitem(HIGH_PRIORITY, NAME, lambda: Options(is_high_priority_stream=True))
    monkeypatch.setattr("graphshard.runtime.peers.is_fake", lambda mesh: True)
    log_priorities.cache_clear()
    dist.init_process_group(NAME, store=FakeStore(), rank=0, world_size=4)
    yield found
    reset_distributed()


def test_groups_for_gathers_in_backward(asked: Asked) -> None:
    mesh = init_device_mesh("cpu", (4,))
    del asked[:]
    model = graphshard.compile(Blocks(), mesh, backend="eager", reshard_after_forward=2)
    model(torch.ones(2, 4)).backward()
    assert asked
    assert all(options.is_high_priority_stream for options in asked)


def test_other_groups(asked: Asked) -> None:
    """A sharding axis of size 1, axes as one, and FSDP2's separate group for reductions."""
    only_replicating(init_device_mesh("cpu", (4,), mesh_dim_names=("dp_replicate",)))
    assert [options.is_high_priority_stream for options in asked[1:]] == [True, True]
    del asked[:]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
    del asked[:]
    model = graphshard.compile(Blocks(), mesh, backend="eager")
    model.set_separate_reduce_scatter_group()
    assert [options.is_high_priority_stream for options in asked] == [True, True]


def test_normal_priority_is_logged_once(asked: Asked, caplog: pytest.LogCaptureFixture) -> None:
    mesh = init_device_mesh("cpu", (4,))
    caplog.set_level(logging.INFO, "graphshard")
    for _ in range(2):
        graphshard.compile(Blocks(), mesh, backend="eager")
    (line,) = (record.getMessage() for record in caplog.records if "priority" in record.getMessage())
    assert f"process groups {mesh.get_group().group_name} have no higher priority than kernels" in line
    assert "pg_options=torch.distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)" in line


def test_other_backends_have_no_priorities(fake_world: Any, caplog: pytest.LogCaptureFixture) -> None:
    fake_world(4)
    caplog.set_level(logging.INFO, "graphshard")
    graphshard.compile(Blocks(), init_device_mesh("cpu", (4,)), backend="eager")
    assert not [record for record in caplog.records if "priority" in record.getMessage()]
