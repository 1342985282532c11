"""Debugging aids on a full disk warn once and stop, and training continues."""

from __future__ import annotations

import contextlib
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch._logging._internal as trace_log
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard import Pass, Pipeline, Program
from graphshard.errors import ArgumentError, PassError
from graphshard.ir.program import Stage
from graphshard.pipeline import instrumentation
from graphshard.utils.files import BestEffort
from tests.helpers import Blocks, captured
from tests.ranks import FakeWorld

BATCH = (torch.ones(3, 4),)


def trained(dump: Path, **options: object) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    model = graphshard.compile(Blocks(2), mesh, backend="eager", dump=dump, **options)
    model(*BATCH).sum().backward()
    model.eval()
    model(*BATCH)  # a second program
    return model


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Limit files to 1,000 bytes; the error differs from a full disk's only in its number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "graphshard.utils.files"]


def test_full(fake_world: FakeWorld, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The remaining files of the dump are complete."""
    fake_world(2)
    with full_disk():
        model = trained(tmp_path)
    assert len(graphshard.programs(model)) == 2
    (said,) = warnings_of(caplog)
    assert said.startswith(
        f"the dump to {tmp_path}/rank0 stops, and training goes on: OSError: [Errno 27] File too large"
    )
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in left] == ["summary.json"], "no half a file, and no temporary one"
    assert left[0].read_text().endswith("}\n")


def test_a_directory_that_cannot_be_created(fake_world: FakeWorld, caplog: pytest.LogCaptureFixture) -> None:
    fake_world(2)
    model = trained(Path("/proc/dump"))
    assert len(graphshard.programs(model)) == 2
    (said,) = warnings_of(caplog)
    assert said.startswith("the dump to /proc/dump/rank0 stops, and training goes on: ")


def test_rejects_an_impossible_directory(fake_world: FakeWorld) -> None:
    """A wrong argument is reported before anything changes."""
    fake_world(2)
    with pytest.raises(ArgumentError, match="dump must be a directory, got '/dev/full/dump', but /dev/full"):
        trained(Path("/dev/full/dump"))


@dataclass(frozen=True)
class _Vanish(Pass):
    """Requires: nothing. Ensures: the directory is a file. Preserves: everything."""

    name: ClassVar[str] = "vanish"
    directory: str = ""

    def rewrite(self, program: Program) -> int:
        if Path(self.directory).is_dir():
            shutil.rmtree(self.directory)
            Path(self.directory).write_text("")
        return 0


def test_the_directory_vanishes(fake_world: FakeWorld, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the middle of a dump."""
    fake_world(2)
    trained(tmp_path / "dump", passes=Pipeline().insert(_Vanish(str(tmp_path / "dump")), after="partition"))
    (said,) = warnings_of(caplog)
    assert "stops, and training goes on: " in said
    assert (tmp_path / "dump").read_text() == ""


def test_an_error_in_a_pass_is_not_hidden(fake_world: FakeWorld, tmp_path: Path) -> None:
    """If the disk is full while an error is dumped, the user gets that error."""

    @dataclass(frozen=True)
    class Broken(Pass):
        name: ClassVar[str] = "broken"

        def rewrite(self, program: Program) -> int:
            raise KeyError("no such thing")

    fake_world(2)
    with full_disk(), pytest.raises(PassError, match="no such thing"):
        trained(tmp_path, passes=Pipeline().insert(Broken(), after="partition"))


def test_trace(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """TORCH_TRACE names a directory that cannot be created."""
    program = captured(Blocks(1), BATCH)
    stage = Stage("capture", 0, 0.0, "", 1)
    monkeypatch.setattr(instrumentation, "_aid", BestEffort("TORCH_TRACE"))
    handler = trace_log.LazyTraceHandler("/dev/full/trace")
    trace_log.trace_log.addHandler(handler)
    try:
        instrumentation.trace_stage(program, stage)
        instrumentation.trace_stage(program, stage)
    finally:
        trace_log.trace_log.removeHandler(handler)
    (said,) = warnings_of(caplog)
    assert said.startswith("TORCH_TRACE stops, and training goes on: ")
