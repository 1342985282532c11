"""The cache directory: complete files or none, whatever other processes do to it."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import graphshard
from graphshard.cli.main import main
from graphshard.errors import ArgumentError, ArtifactError
from graphshard.store import cache_directory, program_cache
from graphshard.utils import archive
from graphshard.utils.archive import read_private, write_archive
from tests.ranks import FakeWorld
from tests.store.launches import Launches, messages

MEMBERS = {"a.json": b"{}", "b.so": os.urandom(1 << 20)}


def _name(number: int) -> str:
    return f"{number:032x}.gscache"


def _write_for_ever(directory: str, number: int) -> None:
    while True:
        write_archive(Path(directory) / _name(number), {"model": "m"}, MEMBERS)


def _write_many(directory: str, count: int) -> None:
    for _ in range(count):
        write_archive(Path(directory) / _name(1), {"model": "m"}, MEMBERS)
        cache_directory.shrink(Path(directory), 3 << 20)


@pytest.mark.slow
def test_two_jobs_write_one_file(tmp_path: Path) -> None:
    """A concurrent reader finds a complete file or none."""
    context = multiprocessing.get_context("fork")
    jobs = [context.Process(target=_write_many, args=(str(tmp_path), 100)) for _ in range(2)]
    for job in jobs:
        job.start()
    read = 0
    while any(job.is_alive() for job in jobs):
        try:
            found = read_private(tmp_path / _name(1))
        except FileNotFoundError:
            continue
        assert found.members == MEMBERS
        assert found.facts["model"] == "m"
        read += 1
    assert [job.exitcode for job in jobs] == [0, 0]
    assert read
    assert os.listdir(tmp_path) == [_name(1)]


def test_a_kill_in_the_middle(tmp_path: Path) -> None:
    """There is no half file under the name; leftovers of a killed process are removed later."""
    left = 0
    for number in range(20):
        job = multiprocessing.get_context("fork").Process(target=_write_for_ever, args=(str(tmp_path), number))
        job.start()
        while not any(name.startswith(".") for name in os.listdir(tmp_path)):
            time.sleep(0.0005)
        assert job.pid is not None
        os.kill(job.pid, signal.SIGKILL)
        job.join()
        found = os.listdir(tmp_path)
        for name in found:
            if name.startswith("."):
                left += 1
                os.utime(tmp_path / name, (0, 0))
            else:
                assert read_private(tmp_path / name).members == MEMBERS
        cache_directory.shrink(tmp_path, 1 << 30)
        assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert left


def test_the_oldest_unused_are_removed(tmp_path: Path) -> None:
    for number in range(5):
        write_archive(tmp_path / _name(number), {"model": "m"}, MEMBERS)
        os.utime(tmp_path / _name(number), (number, number))
    archive.touch(tmp_path / _name(0))
    (tmp_path / "notes.txt").write_text("not ours")
    assert cache_directory.shrink(tmp_path, 3 << 20, keep=tmp_path / _name(1)) == 2
    assert {*os.listdir(tmp_path)} == {_name(0), _name(1), _name(4), "notes.txt"}
    assert cache_directory.clear(tmp_path)[0] == 3
    assert os.listdir(tmp_path) == ["notes.txt"]


@pytest.mark.parametrize("at", [3, 90, -3])
def test_a_changed_byte(tmp_path: Path, at: int) -> None:
    path = tmp_path / _name(0)
    write_archive(path, {"model": "m"}, MEMBERS)
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match="not whole, or was changed"):
        read_private(path)


def test_a_directory_writable_by_others(tmp_path: Path) -> None:
    path = tmp_path / _name(0)
    write_archive(path, {"model": "m"}, MEMBERS)
    path.chmod(0o666)
    with pytest.raises(ArtifactError, match="can be written by other users"):
        read_private(path)


@pytest.mark.parametrize(
    ("given", "size"),
    [("", cache_directory.LIMIT), ("500M", 500 << 20), ("1.5 GiB", 3 << 29), ("7", 7), ("2T", 2 << 40)],
)
def test_limit(monkeypatch: pytest.MonkeyPatch, given: str, size: int) -> None:
    monkeypatch.setenv(cache_directory.LIMIT_VARIABLE, given)
    assert cache_directory.limit_of() == size


def test_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache_directory.LIMIT_VARIABLE, "much")
    with pytest.raises(ArgumentError, match="GRAPHSHARD_CACHE_LIMIT='much' is no size: give one such as 500M or 4G"):
        cache_directory.limit_of()


def test_location(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for off in ("", "off", "0", "OFF", "no"):
        monkeypatch.setenv(cache_directory.VARIABLE, off)
        assert cache_directory.directory_of() is None
        assert cache_directory.directory_of(True) == tmp_path / "graphshard"
    monkeypatch.setenv(cache_directory.VARIABLE, str(tmp_path / "here"))
    assert cache_directory.directory_of() == tmp_path / "here"
    assert cache_directory.directory_of(False) is None
    assert cache_directory.directory_of(tmp_path / "there") == tmp_path / "there"
    for on in ("on", "1"):
        monkeypatch.setenv(cache_directory.VARIABLE, on)
        assert cache_directory.directory_of() == tmp_path / "graphshard"
    monkeypatch.delenv(cache_directory.VARIABLE)
    assert cache_directory.directory_of() == tmp_path / "graphshard"


# --- with a model ------------------------------------------------------------------------------------------------


def test_a_damaged_file_is_noticed_and_written_again(launches: Launches, caplog: pytest.LogCaptureFixture) -> None:
    (name,) = launches.files()
    path = launches.cache / name
    path.write_bytes(path.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING, "graphshard.cache"):
        launches.run()
    assert launches.compiled
    assert f"{path} is not whole, or was changed" in messages(caplog)
    assert "the program is compiled again" in messages(caplog)
    launches.run()
    assert not launches.compiled


def test_forged_contents(launches: Launches, caplog: pytest.LogCaptureFixture) -> None:
    """The checksums are correct."""
    (name,) = launches.files()
    found = read_private(launches.cache / name)
    members = {**found.members, "programs/0.json": json.dumps({"nothing": 1}).encode()}
    write_archive(launches.cache / name, found.facts, members)
    with caplog.at_level(logging.WARNING, "graphshard.cache"):
        launches.run()
    assert launches.compiled
    assert messages(caplog).count("removed, and the program is compiled again") == 1


def test_another_format(launches: Launches, caplog: pytest.LogCaptureFixture) -> None:
    (name,) = launches.files()
    found = read_private(launches.cache / name)
    with mock.patch.object(archive, "FORMAT", 0):
        write_archive(launches.cache / name, found.facts, found.members)
    with caplog.at_level(logging.WARNING, "graphshard.cache"):
        launches.run()
    assert launches.compiled
    assert "has format 0, this version of graphshard reads" in messages(caplog)


def test_a_directory_that_cannot_be_written(empty: Launches, caplog: pytest.LogCaptureFixture) -> None:
    empty.cache.write_text("a file")
    with caplog.at_level(logging.WARNING, "graphshard.cache"):
        empty.run()
    assert empty.compiled
    said = messages(caplog)
    assert said.count("\n") == 0
    assert str(empty.cache) in said
    assert "GRAPHSHARD_CACHE=off" in said


@pytest.mark.parametrize("mode", [0o1777, 0o755], ids=["everybody's", "another user's"])
def test_rejects_a_directory_writable_by_others(
    launches: Launches, mode: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is read from it, and nothing in it is changed."""
    launches.cache.chmod(mode)
    if mode == 0o755:
        kept = os.stat(launches.cache)
        about = os.stat_result((*kept[:4], os.getuid() + 1, *kept[5:]))
        stat = os.stat
        monkeypatch.setattr(
            os, "stat", lambda place, **options: about if place == launches.cache else stat(place, **options)
        )
    files = launches.files()
    with caplog.at_level(logging.WARNING, "graphshard.cache"):
        launches.run()
    assert launches.compiled
    assert messages(caplog).count("is not used: other users could put code there") == 1
    assert "GRAPHSHARD_CACHE=DIRECTORY" in messages(caplog)
    assert launches.files() == files


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES], ids=errno.errorcode.get)
def test_a_read_only_directory(
    empty: Launches, first_launch: Path, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Existing programs are used; others are compiled, with one warning."""
    shutil.copytree(first_launch, empty.cache)

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(archive, "replacing", fail)
    with caplog.at_level(logging.WARNING, "graphshard.cache"):
        empty.run()
        assert not empty.compiled
        assert not messages(caplog)
        empty.run(x=torch.ones(3, 4))
    assert empty.compiled
    assert messages(caplog).count("cannot be written") == 1
    assert os.strerror(code) in messages(caplog)


def test_a_missing_home_folder(
    empty: Launches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As for service users: it cannot be created, and the step runs."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "nobody"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv(cache_directory.VARIABLE, "on")
    with caplog.at_level(logging.WARNING, "graphshard.cache"):
        empty.run(cache=None)
    assert empty.compiled
    assert messages(caplog).count("nobody/.cache/graphshard cannot be ") == 1


def test_another_rank_writes_it(empty: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not written twice at the same time."""
    asked: list[Path] = []
    monkeypatch.setattr(program_cache, "is_being_written", lambda path: asked.append(path) or len(asked) == 1)
    empty.run()
    assert empty.compiled
    assert not empty.files()
    empty.run()
    assert empty.compiled
    assert empty.files() == [asked[1].name]


def test_files_being_written(tmp_path: Path) -> None:
    """Leftovers of a killed process do not block writing for long."""
    path, temporary = tmp_path / _name(0), tmp_path / f".{_name(0)}.abc"
    assert not archive.is_being_written(path)
    (tmp_path / f".{_name(1)}.abc").touch()
    path.touch()
    assert not archive.is_being_written(path)
    temporary.touch()
    assert archive.is_being_written(path)
    moment = time.time() - 2 * archive.WRITES_FOR
    os.utime(temporary, (moment, moment))
    assert not archive.is_being_written(path)
    assert not archive.is_being_written(tmp_path / "gone" / path.name)


def test_caching_is_the_default(
    empty: Launches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second launch of `compile(model, mesh)`, and of `fully_shard`, captures nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(cache_directory.VARIABLE)
    with caplog.at_level(logging.INFO, "graphshard.cache"):
        empty.run(cache=None)
    assert empty.compiled
    assert f" kept in {tmp_path / 'graphshard'}" in messages(caplog)
    empty.run(cache=None)
    assert not empty.compiled
    monkeypatch.setenv(cache_directory.VARIABLE, "off")
    empty.run(cache=None)
    assert empty.compiled


def test_one_warning_for_all_units(
    fake_world: FakeWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_world(1)
    monkeypatch.setenv(cache_directory.VARIABLE, "~nobody of this name/cache")
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    with caplog.at_level(logging.WARNING, "graphshard.cache"):
        for layer in (*model, model):
            graphshard.fully_shard(layer)
    assert messages(caplog).count("Nothing is kept.") == 1


def test_a_file_that_cannot_be_renamed(
    empty: Launches, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on network file systems: one warning, and no temporary file remains."""

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    for module, name in ((os, "replace"), (os, "rename"), (Path, "replace"), (Path, "rename")):
        monkeypatch.setattr(module, name, fail)
    with caplog.at_level(logging.WARNING, "graphshard.cache"):
        empty.run()
    assert empty.compiled
    assert messages(caplog).count("Stale file handle") == 1
    assert not list(empty.cache.iterdir())


def test_no_room_is_left(empty: Launches, caplog: pytest.LogCaptureFixture) -> None:
    """One warning, the step runs, and no half file remains."""

    def write_bytes(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch.object(Path, "write_bytes", write_bytes), caplog.at_level(logging.WARNING, "graphshard.cache"):
        empty.run()
    assert empty.compiled
    assert messages(caplog).count("No space left on device") == 1
    assert not list(empty.cache.iterdir())


def test_a_user_without_a_home_folder(
    empty: Launches,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Containers may run as unknown users: one warning, and the step runs."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv(cache_directory.VARIABLE, "on")
    monkeypatch.setattr(pwd, "getpwuid", mock.Mock(side_effect=KeyError("uid not found: 12345")))
    with caplog.at_level(logging.WARNING, "graphshard.cache"):
        empty.run(cache=None)
    assert empty.compiled
    assert "cannot be at ~/.cache, as there is no such home folder" in messages(caplog)
    assert "GRAPHSHARD_CACHE=DIRECTORY. Nothing is kept." in messages(caplog)
    assert main(["cache", "list"]) == 2
    assert "cannot be at ~/.cache" in capsys.readouterr().err


def test_off(empty: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache_directory.VARIABLE, str(empty.cache))
    empty.run(cache=False)
    assert not empty.files()
    monkeypatch.setenv(cache_directory.VARIABLE, "off")
    empty.run(cache=None)
    assert not empty.files()
    monkeypatch.setenv(cache_directory.VARIABLE, str(empty.cache))
    empty.run(cache=None)
    assert len(empty.files()) == 1


def test_a_dump_has_every_stage(launches: Launches, tmp_path: Path) -> None:
    """Therefore the cached program is not used."""
    launches.run(dump=tmp_path / "dump")
    assert launches.compiled
    assert list((tmp_path / "dump").rglob("*capture*"))


def test_values_of_the_cache_argument(empty: Launches) -> None:
    with pytest.raises(ArgumentError, match="cache must be a directory, True or False"):
        empty.run(cache=3)
    assert "cache" in graphshard.compile.__kwdefaults__


# --- the command -------------------------------------------------------------------------------------------------


def test_list_and_clear(launches: Launches, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "list", "--dir", str(launches.cache)]) == 0
    out = capsys.readouterr().out
    assert "Net" in out
    assert "float32[2, 4]" in out
    assert "1 programs" in out
    assert main(["cache", "clear", "--dir", str(launches.cache)]) == 0
    assert "removed 1 programs" in capsys.readouterr().out
    assert not launches.files()
    assert main(["cache", "list", "--dir", str(launches.cache)]) == 0
    assert "0 programs" in capsys.readouterr().out


def test_the_command_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from graphshard.cli.main import main; "
        f"main(['cache', 'list', '--dir', {str(tmp_path)!r}]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE)


def test_a_program_from_the_cache_is_measured(launches: Launches) -> None:
    """Predictions read the operators of its regions."""
    model: list[nn.Module] = []
    launches.run(lambda _, made: model.append(made))
    assert not launches.compiled
    profile = graphshard.profiling.profile_step(model[0], (torch.ones(2, 4),))
    assert "predicted for" in str(profile)
