"""Several kernels in one compiler run: each library exports its kernel, and failures are isolated."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import shlex
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphshard.lower._batch_compile import Compilers, Job, compile_together, joined

HEADERS = shlex.quote(sysconfig.get_paths()["include"])
# Named as in Inductor's sources: all kernels have one name, and some names are local to the file.
SOURCE = """
#include <cstdlib>
extern "C" void kernel(long* result) {{ *result = {value}; }}
#define PY_SSIZE_T_CLEAN
#include <Python.h>
template <typename T> static inline T parsed(T value) {{ return value; }}
template <> inline long parsed<long>(long value) {{ return value + {more}; }}
static PyObject* kernel_py(PyObject*, PyObject*) {{
    long result;
    kernel(&result);
    return PyLong_FromLong(parsed(result));
}}
static PyMethodDef py_methods[] = {{{{"kernel", kernel_py, METH_VARARGS, ""}}, {{NULL, NULL, 0, NULL}}}};
static struct PyModuleDef py_module = {{PyModuleDef_HEAD_INIT, "kernel", NULL, -1, py_methods}};
PyMODINIT_FUNC PyInit_kernel(void) {{ return PyModule_Create(&py_module); }}
"""


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Job]:
    """Return a function that creates a job of one file."""

    def make(name: str, text: str, options: str = "") -> Job:
        source, target = tmp_path / f"{name}.cpp", tmp_path / f"{name}.so"
        source.write_text(text)
        return Job(f"g++ {source} {options} -I{HEADERS} -shared -fPIC -o {target}", source, target)

    return make


def _loaded(path: Path, name: str) -> Any:
    full = f"test_together_{name}.kernel"
    loader = importlib.machinery.ExtensionFileLoader(full, str(path))
    spec = importlib.util.spec_from_file_location(full, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module.kernel


class Counting(Compilers):
    """Compilers that count runs."""

    commands: list[str]

    def run(self, command: Any, directory: Path) -> str:
        self.__dict__.setdefault("commands", []).append(shlex.join(command))
        return super().run(command, directory)


def test_libraries_of_one_run_show_their_own_kernels(job: Callable[..., Job]) -> None:
    jobs = [job(f"one{n}", SOURCE.format(value=10 * n, more=n)) for n in range(3)]
    compilers = Counting()
    compile_together(jobs, compilers)
    assert len(compilers.commands) == 1
    assert [_loaded(each.target, each.target.stem)(()) for each in jobs] == [0, 11, 22]
    assert {path.suffix for path in jobs[0].target.parent.iterdir()} == {".cpp", ".so"}  # no temporary files remain


def test_different_options_need_separate_runs(job: Callable[..., Job]) -> None:
    jobs = [job(f"two{n}", SOURCE.format(value="VALUE", more=n), f"-DVALUE={n // 2}") for n in range(3)]
    compilers = Counting()
    compile_together(jobs, compilers)
    assert len(compilers.commands) == 2
    assert [_loaded(each.target, each.target.stem)(()) for each in jobs] == [0, 1, 3]


def test_incompatible_sources_fail_together(job: Callable[..., Job], caplog: pytest.LogCaptureFixture) -> None:
    jobs = [job("right", SOURCE.format(value=1, more=0)), job("wrong", "int wrong(")]
    with caplog.at_level("DEBUG", "graphshard"):
        compile_together(jobs, Compilers())
    assert "2 kernels cannot be compiled together: g++ ended with 1" in caplog.text
    assert not any(each.target.exists() for each in jobs)


def test_a_missing_compiler(job: Callable[..., Job], caplog: pytest.LogCaptureFixture) -> None:
    right = job("right", SOURCE.format(value=1, more=0))
    with caplog.at_level("DEBUG", "graphshard"):
        compile_together([Job(right.command.replace("g++", "no-such-compiler"), *_files(right))], Compilers())
    assert "No such file or directory: 'no-such-compiler'" in caplog.text
    assert sorted(path.name for path in right.source.parent.iterdir()) == ["right.cpp"]


def _files(job: Job) -> tuple[Path, Path]:
    return job.source, job.target


def test_compilers_are_killed(tmp_path: Path) -> None:
    """From another thread, as on an interrupt; no compiler starts afterwards."""
    compilers, errors = Compilers(), []

    def run() -> None:
        try:
            compilers.run(["sleep", "600"], tmp_path)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    end = time.monotonic() + 60
    while not compilers._running:
        assert time.monotonic() < end
        time.sleep(0.01)
    compilers.end()
    thread.join(60)
    assert errors == ["sleep ended with -15: "]
    with pytest.raises(RuntimeError, match="nobody waits for it"):
        compilers.run(["sleep", "600"], tmp_path)


def test_headers_are_read_outside_of_namespaces(job: Callable[..., Job]) -> None:
    """Each once, in the order of first use."""
    text = joined([job("a", SOURCE.format(value=1, more=0)).source, job("b", "#include <cstdlib>\n").source])
    head, _, rest = text.partition("namespace part_0")
    assert [line for line in head.splitlines() if "include" in line] == ["#include <cstdlib>", "#include <Python.h>"]
    assert rest.count("#include") == 2
