"""Inductor's cache where it cannot be written, on a full disk, and after a process that was ended while it compiled."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from graphshard.lower.inductor_cache import VARIABLE, writable_cache
from tests.ranks import ENVIRONMENT

ROOT = Path(__file__).parents[2]
READ_ONLY = "/proc/self"  # for root, too


def _compiling(cache: Path, **options: Any) -> subprocess.Popen[str]:
    """A process that compiles into a cache."""
    environment = {**os.environ, **ENVIRONMENT, VARIABLE: str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.lower.compiles"]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def _finished(process: subprocess.Popen[str]) -> str:
    """What it has logged, after it has found that numbers are equal."""
    out, err = process.communicate(timeout=300)
    assert out.split() == ["compiling", "equal"], out + err
    return err


def test_a_cache_that_can_be_written_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    with writable_cache() as directory:
        assert directory == os.environ[VARIABLE] == str(tmp_path / "cache")
    assert (tmp_path / "cache").is_dir()


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary directory takes its place, while there is something to compile."""
    monkeypatch.setenv(VARIABLE, READ_ONLY)
    with contextlib.ExitStack() as stack:
        with pytest.warns(UserWarning, match=rf"cache cannot be written \(.*\): .* Set {VARIABLE} to"):
            directory = stack.enter_context(writable_cache())
        assert os.environ[VARIABLE] == directory
        Path(directory, "something").write_text("")
    assert not Path(directory).exists()
    assert os.environ[VARIABLE] == READ_ONLY


@pytest.mark.slow
def test_training_with_a_cache_that_cannot_be_written() -> None:
    err = _finished(_compiling(Path(READ_ONLY)))
    assert err.count("Inductor's cache cannot be written") == 1


@pytest.mark.slow
def test_training_on_a_full_disk(tmp_path: Path) -> None:
    """No file can be longer than 4,000 bytes, less than any kernel: regions run as operators, and each says so."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))

    err = _finished(_compiling(tmp_path, preexec_fn=limit))
    assert "it runs as plain ATen operators" in err


def _compilers(process: psutil.Process) -> list[psutil.Process]:
    return [child for child in process.children(recursive=True) if "cc1plus" in child.name()]


def _wait_for(holds: Callable[[], object]) -> None:
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["SIGINT", "SIGKILL"])
def test_a_process_that_is_ended_while_it_compiles(tmp_path: Path, number: signal.Signals) -> None:
    """Nothing of it runs on, and the next one finds no lock that is held and no file that is half."""
    first = _compiling(tmp_path, start_new_session=True)
    assert first.stdout is not None
    assert first.stdout.readline() == "compiling\n"
    here = psutil.Process(first.pid)
    _wait_for(lambda: _compilers(here))
    children = here.children(recursive=True)
    os.killpg(first.pid, number)  # as a terminal does, or a scheduler
    _, err = first.communicate(timeout=60)
    assert first.returncode != 0
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in err
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []
    _finished(_compiling(tmp_path))
    assert not list(tmp_path.rglob("*.tmp"))
