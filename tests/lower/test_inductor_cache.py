"""Inductor's cache if it is read-only, on a full disk, and after a process killed during compilation."""

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
READ_ONLY = "/proc/self"  # even for root


def _compiling(cache: Path, **options: Any) -> subprocess.Popen[str]:
    """Start a process that compiles into a cache."""
    environment = {**os.environ, **ENVIRONMENT, VARIABLE: str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.lower.compiles"]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def _finished(process: subprocess.Popen[str]) -> str:
    """Check that the process found equal results; return its log."""
    out, err = process.communicate(timeout=300)
    assert out.split() == ["compiling", "equal"], out + err
    return err


def test_a_cache_that_can_be_written_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    with writable_cache() as directory:
        assert directory == os.environ[VARIABLE] == str(tmp_path / "cache")
    assert (tmp_path / "cache").is_dir()


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary directory replaces it during compilation."""
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
    """Files are limited to 4,000 bytes, less than any kernel: regions run as operators with a warning each."""

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
def test_a_process_killed_during_compilation(tmp_path: Path, number: signal.Signals) -> None:
    """Its children end, too, and the next process finds no held lock and no partial file."""
    first = _compiling(tmp_path, start_new_session=True)
    assert first.stdout is not None
    assert first.stdout.readline() == "compiling\n"
    here = psutil.Process(first.pid)
    _wait_for(lambda: _compilers(here))
    children = here.children(recursive=True)
    os.killpg(first.pid, number)  # like a terminal or a scheduler
    _, err = first.communicate(timeout=60)
    assert first.returncode != 0
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in err
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []
    _finished(_compiling(tmp_path))
    assert not list(tmp_path.rglob("*.tmp"))
