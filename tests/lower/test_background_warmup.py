"""Preparations for Inductor's first kernel start early, and give Inductor's own results."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from graphshard.lower import _background_warmup

isa = _background_warmup.cpu_vec_isa
SETS = set(isa.supported_vec_isa_list)
AVX512 = pytest.mark.skipif("avx512" not in isa.x86_isa_checker(), reason="a CPU without AVX-512")


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use an empty cache, and forget all queries of the CPU before and after."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    _forget()
    yield
    _forget()


def _forget() -> None:
    cached = "_is_"  # prefix of names that sets cache on themselves
    sets = isa.supported_vec_isa_list
    _background_warmup._forget([{k: v for k, v in vars(each).items() if not k.startswith(cached)} for each in sets])


def _found() -> list[tuple[str, str]]:
    return [(str(each), each.build_arch_flags()) for each in isa.valid_vec_isa_list()]


@contextlib.contextmanager
def _checked(works: Callable[[Any, str], bool]) -> Iterator[list[str]]:
    """Replace the compiler; yield the requested code."""
    asked: list[str] = []

    def check(self: Any, code: str) -> bool:
        asked.append(code)
        return works(self, code)

    with mock.patch.object(isa.VecISA, "check_build", check):
        yield asked


@pytest.mark.slow
def test_the_cpu_matches_inductors_detection() -> None:
    """One file is compiled by a working compiler, and the answer is the same."""
    check, asked = isa.VecISA.check_build, []

    def counted(self: Any, code: str) -> bool:
        asked.append(code)
        return bool(check(self, code))

    with mock.patch.object(isa.VecISA, "check_build", counted):
        _background_warmup._find_vector_instructions()
        ours, by_us = _found(), list(asked)
        _forget()
        assert _found() == ours
    assert ours
    assert len(by_us) == 1
    assert all(code in by_us[0] for code in asked[1:])
    assert not any("check_build" in vars(each) for each in SETS)


@AVX512
def test_falls_back_to_inductors_detection() -> None:
    """Nothing assumed stays: here no function compiles together with another."""

    def alone(each: Any, code: str) -> bool:
        return code.count('extern "C"') < 2

    with _checked(alone) as asked:
        _background_warmup._find_vector_instructions()
        ours = _found()
    _forget()
    with _checked(alone) as by_inductor:
        theirs = _found()
    assert ours == theirs
    assert asked[1:] == by_inductor


@AVX512
def test_uses_another_set_if_the_best_fails() -> None:
    best = _background_warmup.cpu_vec_isa.supported_vec_isa_list[0]
    with _checked(lambda each, code: type(each) is not type(best)):
        _background_warmup._find_vector_instructions()
        assert str(best) not in dict(_found())
        assert "avx2" in dict(_found())


def test_functions_of_one_name_are_compiled_separately() -> None:
    """For example both kinds of AMX, which Inductor tests with functions of one name."""
    codes = ['extern "C" void a() {}', 'extern "C" void b(int) {}', 'struct s {};\nextern "C" void a() {}']
    with _checked(lambda each, code: True) as asked:
        assert _background_warmup._works(isa.VecAVX2(), dict.fromkeys(codes, "-mavx2 -mfma"))
    assert asked == ["\n".join(codes[:2]), codes[2]]


def test_flags_are_combined() -> None:
    flags: list[str] = []

    def check(each: Any, code: str) -> bool:
        flags.append(each.build_arch_flags())
        return True

    asked = isa.VecAVX2()
    with _checked(check):
        assert _background_warmup._works(asked, {"int a;": "-mavx2 -mfma", "int b;": "-mavx2 -mf16c"})
    assert flags == ["-mavx2 -mfma -mf16c"]
    assert asked.build_arch_flags() == isa.VecAVX2._arch_flags


@pytest.mark.parametrize("chosen", ["cpp.simdlen", "cpp.vec_isa_ok", "ATEN_CPU_CAPABILITY"])
def test_explicit_settings_are_respected(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if chosen == "ATEN_CPU_CAPABILITY":
        monkeypatch.setenv(chosen, "avx2")
    patched = {} if chosen == "ATEN_CPU_CAPABILITY" else {chosen: 256}
    with (
        _checked(lambda each, code: True),
        isa.config.patch(patched),
        mock.patch.object(_background_warmup, "_works") as works,
    ):
        _background_warmup.Warmup(_background_warmup._find_vector_instructions).wait()
    assert not works.called


def test_failures_do_not_block(caplog: pytest.LogCaptureFixture) -> None:
    warmup = _background_warmup.Warmup(_background_warmup._find_vector_instructions)
    with mock.patch.object(isa, "x86_isa_checker", side_effect=OSError("no compiler")), caplog.at_level("DEBUG"):
        warmup.wait()
    assert "no compiler" in caplog.text


def test_starts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    warmup = _background_warmup.Warmup(lambda: begun.append(os.getpid()))
    warmup.begin()
    warmup.begin()
    warmup.wait()
    assert len(begun) == 1
    monkeypatch.setattr(os, "getpid", lambda: -1)  # a fork does not have the thread
    warmup.wait()
    assert len(begun) == 2
