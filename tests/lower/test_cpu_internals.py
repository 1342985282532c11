"""What Inductor needs before its first kernel is begun early, and is what Inductor would find by itself."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from graphshard.lower import cpu_internals
from graphshard.lower.cpu_internals import Beginning

isa = cpu_internals.cpu_vec_isa
SETS = set(isa.supported_vec_isa_list)


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty cache, and a process that has asked nothing of the CPU; it is asked again for later tests."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    _forget()
    yield
    _forget()


def _forget() -> None:
    with mock.patch.object(isa.VecISA, "check_build", return_value=True):
        cpu_internals._ask_again()  # empties what is remembered
    isa.valid_vec_isa_list.cache_clear()
    for each in SETS:
        for kind in type(each).__mro__:
            for name in ("__bool__", "_VecISA__bool__impl", "_VecISA__bool__"):
                clear = getattr(vars(kind).get(name), "cache_clear", None)
                if clear is not None:
                    clear()


def _found() -> list[str]:
    return list(map(str, isa.valid_vec_isa_list()))


@contextlib.contextmanager
def _checked(works: Any) -> Iterator[list[str]]:
    """What is asked of compilers for the kernel that every set is tried with."""
    asked: list[str] = []

    def check(self: Any, code: str) -> bool:
        if code != isa.VecISA._avx_code:  # of instructions that not every CPU with the set has
            return True
        asked.append(str(self))
        return bool(works(self))

    with mock.patch.object(isa.VecISA, "check_build", check):
        yield asked


def test_the_cpu_is_what_inductor_finds_itself() -> None:
    """Fewer files are compiled, and the answer is the same."""
    with mock.patch.object(cpu_internals, "_compile_header"):
        cpu_internals._begin(Beginning())
    ours = _found()
    assert ours
    _forget()
    assert _found() == ours
    assert cpu_internals.config.cpp.vec_isa_ok is None


def test_the_header_does_not_wait_for_the_check_of_the_best_set() -> None:
    begun, compiling = Beginning(), threading.Event()
    cpu_known: list[bool] = []

    def header() -> None:
        cpu_known.append(begun.cpu.is_set())
        compiling.set()

    with (
        _checked(lambda each: compiling.wait(20)) as asked,
        mock.patch.object(cpu_internals, "_compile_header", side_effect=header) as compiled,
    ):
        cpu_internals._begin(begun)
    assert cpu_known == [False]
    assert compiled.call_count == 1
    assert asked == [str(cpu_internals._expected())]
    assert begun.cpu.is_set()
    assert begun.header.is_set()


@pytest.mark.skipif(len(cpu_internals.cpu_vec_isa.x86_isa_checker()) < 2, reason="a CPU with one set of instructions")
def test_where_the_best_set_does_not_work_another_is_taken() -> None:
    """With a header of its own."""
    best, begun = cpu_internals._expected(), threading.Event()
    headers: list[list[str]] = []

    def header() -> None:
        headers.append(_found())
        begun.set()

    with (
        _checked(lambda each: begun.wait(20) and each is not best),
        mock.patch.object(cpu_internals, "_compile_header", side_effect=header),
    ):
        cpu_internals._begin(Beginning())
        assert str(best) not in _found()
    (assumed, taken) = headers
    assert assumed[0] == str(best)
    assert taken == assumed[1:]


def test_what_fails_keeps_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    begun = Beginning()
    with mock.patch.object(cpu_internals, "_expected", side_effect=OSError("no compiler")), caplog.at_level("DEBUG"):
        cpu_internals._begin(begun)
    assert begun.cpu.is_set()
    assert begun.header.is_set()
    assert "no compiler" in caplog.text


def test_what_begins_is_begun_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(cpu_internals, "_begin", lambda new: (begun.append(new), new.cpu.set()))
    cpu_internals.begin()
    cpu_internals.begin()
    cpu_internals.wait_for_cpu()
    assert len(begun) == 1
    monkeypatch.setattr(os, "getpid", lambda: -1)  # a fork has no thread that goes on with it
    cpu_internals.wait_for_cpu()
    assert len(begun) == 2
