"""Inductor's C++ kernels: collected while code is generated, and compiled together in threads.

    generate region_1, region_2, ...        Python, in this thread
        kernels, 64 KB of source            a compiler, in another thread
        kernels, 64 KB of source            a compiler
    load region_1, region_2, ...            finds libraries where Inductor looks for them

Reading the header and starting the compiler take longer than most kernels do, so one run makes several libraries:

    a.cpp -> a.so      0.6 s        a.cpp, b.cpp, c.cpp -> one library, three copies       0.6 s and a little more
    b.cpp -> b.so      0.6 s
    c.cpp -> c.so      0.6 s        PyInit_kernel() { return number == 0 ? a's : number == 1 ? b's : c's; }

The copies differ in one number, which selects the kernel that a library shows. Options and the text of kernels stay
Inductor's, and each kernel is a separate function. Inductor compiles kernels that fail one by one.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import re
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from graphshard.lower.background_warmup import ASKS_EVERY
from graphshard.lower.inductor_cache import RemovedError, check_whole
from graphshard.lower.triton_kernels import TritonKernels
from graphshard.torch_compat.inductor_compiler import (
    CppPythonBindingsCodeCache,
    async_compile,
    codecache,
    get_cpp_compiler,
    get_lock_dir,
    is_gcc,
)
from graphshard.torch_compat.torch_ops import replaced
from graphshard.utils.files import replacing
from graphshard.utils.progress import check_cancelled

log = logging.getLogger(__name__)

# Characters of source that are compiled together: in half a second, as long as the header takes to read. Where no core
# is left for that next to this thread, four times that.
_TOGETHER, _TOGETHER_ALONE = 64 << 10, 256 << 10
# The header of kernels takes 1.3 s of CPU to read, and 5.1 s to precompile: this number of runs do without.
_RUNS_WITHOUT_HEADER = 3

_MARK = "graphshard-kernel:"
_DIGITS = 6
_WARN_OF_HEADER = "-Winvalid-pch"
_INCLUDE = re.compile(r"^\s*#\s*include\s+[<\"].*$", re.MULTILINE)


# --- kernels in generated code -----------------------------------------------------------------------------------


@dataclass
class Pending:
    """A kernel that is not loaded yet, and stands for it in generated code.

    Attributes:
        argtypes, source: as generated code gives them to Inductor.
        unit: its compilation, with other kernels.
    """

    argtypes: list[str]
    source: str
    unit: Future[None] | None = None
    _load: Callable[[], Any] | None = None

    def prepare(self, submit: Callable[[Any], Future[None]]) -> None:
        """Let Inductor write the source, and call `submit` with how it would compile it, if that is needed."""
        self._load = _Checked.load_pybinding_async(self.argtypes, self.source, submit_fn=submit)

    def wait(self) -> None:
        """Wait until it is compiled, or could not be; raises if the work is cancelled."""
        while self.unit is not None and not wait([self.unit], ASKS_EVERY).done:
            check_cancelled()

    def result(self) -> Any:
        """Load the kernel; compile it by itself if it was not compiled with others, or is damaged."""
        try:
            return self._loaded()
        except RemovedError:
            self._load = None
            return self._loaded()

    def _loaded(self) -> Any:
        if self._load is None:
            self.prepare(lambda work: _done())
            assert self._load is not None
        return self._load()


_READS_TEXT: contextvars.ContextVar[bool] = contextvars.ContextVar("graphshard_reads_text", default=False)


class _Checked(CppPythonBindingsCodeCache):
    """Inductor's cache, which removes damaged libraries; they are compiled when they are asked for again."""

    @classmethod
    def _get_uncompiled_header(cls, device: str) -> str | None:
        return None if _READS_TEXT.get() else super()._get_uncompiled_header(device)

    @classmethod
    def _load_library_inner(cls, path: str, key: str) -> Any:
        try:
            check_whole(Path(path), Path(get_lock_dir(), f"{key}.lock"))
        except RemovedError:
            cls.cache.pop(key, None)
            raise
        return super()._load_library_inner(path, key)


class Batch:
    """Kernels of regions whose code is generated, on their way to compilers.

    Args:
        threads: number of compilers that may run at once.

    Attributes:
        triton: kernels for GPUs, which Inductor's processes compile.
    """

    def __init__(self, threads: int) -> None:
        self._compilers, self._pool = Compilers(), ThreadPoolExecutor(threads, "graphshard-compilers")
        self._together = _TOGETHER if threads > 1 else _TOGETHER_ALONE
        self._waiting: list[Pending] = []
        self._runs = 0
        self.triton = TritonKernels()

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self._compilers.end()
        self._pool.shutdown(cancel_futures=kind is not None)

    @contextlib.contextmanager
    def collecting(self) -> Iterator[list[dict[str, Any]]]:
        """Give this thread's generated code pending kernels; yields the names of each generated module."""
        scopes: list[dict[str, Any]] = []
        before = _COLLECTS.set((self, scopes))
        try:
            with replaced(async_compile, "AsyncCompile", _Collecting):
                yield scopes
        finally:
            _COLLECTS.reset(before)
        if sum(len(kernel.source) for kernel in self._waiting) >= self._together:
            self.submit()

    def add(self, argtypes: list[str], source: str) -> Pending:
        """Add a kernel."""
        self._waiting.append(Pending(argtypes, source))
        return self._waiting[-1]

    def submit(self) -> None:
        """Compile what has been collected."""
        kernels, self._waiting = self._waiting, []
        if kernels:
            # Settings of torch are per thread.
            context = contextvars.copy_context()
            header_is_there = any(Path(codecache._HEADER_DIR).glob("*.gch"))  # if maybe for other flags
            context.run(_READS_TEXT.set, self._runs < _RUNS_WITHOUT_HEADER and not header_is_there)
            self._runs += 1
            unit = self._pool.submit(context.run, _compile, kernels, self._compilers)
            for kernel in kernels:
                kernel.unit = unit


def pending_in(scopes: Iterable[dict[str, Any]]) -> list[Pending]:
    """Return the kernels that generated modules wait for."""
    return [value for scope in scopes for value in scope.values() if isinstance(value, Pending)]


def load(scopes: Iterable[dict[str, Any]]) -> None:
    """Replace pending kernels in generated modules by loaded ones; raises what Inductor raises."""
    for scope in scopes:
        for name, value in list(scope.items()):
            if isinstance(value, Pending):
                scope[name] = value.result()


_COLLECTS: contextvars.ContextVar[tuple[Batch, list[dict[str, Any]]] | None] = contextvars.ContextVar(
    "graphshard_collects", default=None
)


class _Collecting(async_compile.AsyncCompile):
    """The class that generated code calls; in threads that collect nothing it is Inductor's."""

    def cpp_pybinding(self, argtypes: list[str], source_code: str) -> Any:
        if (collects := _COLLECTS.get()) is None:
            return super().cpp_pybinding(argtypes, source_code)
        return collects[0].add(argtypes, source_code)

    def wait(self, scope: dict[str, Any]) -> None:
        if (collects := _COLLECTS.get()) is not None:
            collects[1].append(scope)
        super().wait(scope)


def _compile(kernels: list[Pending], compilers: Compilers) -> None:
    """Compile kernels that are not in Inductor's cache."""
    jobs: list[Job] = []

    def submit(work: Any) -> Future[None]:
        if (job := _job(work)) is not None:
            jobs.append(job)
        return _done()

    for kernel in kernels:
        kernel.prepare(submit)
    said = compile_together(jobs, compilers)
    if not _READS_TEXT.get():
        _check_header(said)


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


def _job(work: Any) -> Job | None:
    """Return how Inductor would compile a kernel; None if that is not by one command."""
    try:
        _, (builder,) = work.args
        command, target = builder.get_command_line(), Path(builder.get_target_file_path())
        (source,) = (word for word in shlex.split(command) if word.endswith(".cpp"))
    except (AttributeError, TypeError, ValueError) as error:
        log.debug("how Inductor compiles is not understood: %s", error)
        return None
    return Job(command, Path(source), target)


def _check_header(said: str) -> None:
    """Warn if the compiler does not use the header that Inductor has compiled for it."""
    compiler = get_cpp_compiler()
    for line in said.splitlines():
        if _WARN_OF_HEADER in line:
            _warn_of_header(compiler, line.strip())
    if said and not is_gcc() and "Free Software Foundation" in _version(compiler):
        _warn_of_header(compiler, "it is GCC, and Inductor does not know that from its name")


@functools.cache
def _warn_of_header(compiler: str, why: str) -> None:
    log.warning(
        "%s does not use the header that Inductor has compiled, so that compiling takes about three times as long: %s. "
        "Set CXX to a compiler with g++ or clang in its name, such as CXX=g++, and remove wrappers.",
        compiler,
        why,
    )


@functools.cache
def _version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


# --- several sources in one run of a compiler --------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A library to be made of one source.

    Attributes:
        command: that makes it, for a shell.
        source: a file that defines a Python module named `kernel`.
        target: the library.
    """

    command: str
    source: Path
    target: Path

    @property
    def template(self) -> tuple[str, ...]:
        """The command without its files: jobs with the same one can be done together."""
        own = {str(self.source): "SOURCE", str(self.target): "TARGET"}
        return tuple(own.get(word, word) for word in shlex.split(self.command))


@dataclass
class Compilers:
    """Runs of compilers that another thread can end."""

    _running: set[subprocess.Popen[str]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    ended: bool = False

    def run(self, command: Sequence[str], directory: Path) -> str:
        """Return the compiler's messages; raises RuntimeError if it fails or is ended."""
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        with self._lock:
            if self.ended:
                raise RuntimeError("nobody waits for it")
            process = subprocess.Popen(command, cwd=directory, text=True, errors="replace", **pipes)
            self._running.add(process)
        try:
            _, said = process.communicate()
        finally:
            with self._lock:
                self._running.discard(process)
        if process.returncode:
            raise RuntimeError(f"{command[0]} ended with {process.returncode}: {said[-2000:]}")
        return said

    def end(self) -> None:
        """End the runs, and start no more."""
        with self._lock:
            self.ended = True
            for process in self._running:
                process.terminate()  # a compiler removes what it has half written


def compile_together(jobs: Iterable[Job], compilers: Compilers) -> str:
    """Make the libraries of jobs, together where they have the same command; return the compilers' messages.

    Failures are logged, and their libraries not made.
    """
    said = []
    groups: dict[tuple[str, ...], list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.template, []).append(job)
    for template, group in groups.items():
        try:
            if len(group) > 1 and {"SOURCE", "TARGET"} <= set(template):
                said.append(_compile_group(template, group, compilers))
            else:
                said += [_compile_one(job, compilers) for job in group]
        except (OSError, RuntimeError, UnicodeError) as error:
            log.debug("%d kernels cannot be compiled together: %s", len(group), error)
    return "\n".join(said)


def _compile_group(template: Sequence[str], group: Sequence[Job], compilers: Compilers) -> str:
    with _scratch() as directory:
        source, target = directory / "kernels.cpp", directory / "kernels.so"
        source.write_text(joined([job.source for job in group]))
        own = {"SOURCE": str(source), "TARGET": str(target)}
        # Debug lines of the sources would be in every copy.
        command = [*(own.get(word, word) for word in template), _WARN_OF_HEADER, "-Wl,--strip-debug"]
        said = compilers.run(command, directory)
        library = target.read_bytes()
    mark = _marked(0)
    if library.count(mark) != 1:
        raise RuntimeError("the compiler has not kept the number of the kernel")
    for number, job in enumerate(group):
        with replacing(job.target) as temporary:
            temporary.write_bytes(library.replace(mark, _marked(number)))
    return f"done\n{said}"


def _compile_one(job: Job, compilers: Compilers) -> str:
    with _scratch() as directory, replacing(job.target) as temporary:
        own = {"SOURCE": str(job.source), "TARGET": str(temporary)}
        said = compilers.run([*(own.get(word, word) for word in job.template), _WARN_OF_HEADER], directory)
    return f"done\n{said}"


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="graphshard-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def joined(sources: Sequence[Path]) -> str:
    """Join sources, each of which defines a Python module named `kernel`.

    Headers are read outside of the namespaces, once; within them they are skipped.
    """
    texts = [source.read_text() for source in sources]
    includes = dict.fromkeys(line.strip() for text in texts for line in _INCLUDE.findall(text))
    lines = ["#define PY_SSIZE_T_CLEAN", *includes, "#undef PY_SSIZE_T_CLEAN"]
    for number, source in enumerate(sources):
        names = ("kernel", "PyInit_kernel")  # both are extern "C", so a namespace does not tell them apart
        lines += [f"#define {name} {name}_{number}" for name in names]
        lines += [f"namespace part_{number} {{", f'#include "{source}"', "}"]
        lines += [f"#undef {name}" for name in (*names, "PY_SSIZE_T_CLEAN")]
    lines += [
        # Volatile, so that the compiler does not take it for a constant.
        f'static volatile const char graphshard_number[] = "{_marked(0).decode()}";',
        'extern "C" __attribute__((visibility("default"))) PyObject* PyInit_kernel(void) {',
        "    long number = 0;",
        f"    for (int place = {len(_MARK)}; graphshard_number[place]; ++place)",
        "        number = 10 * number + (graphshard_number[place] - '0');",
        "    switch (number) {",
        *(f"        case {number}: return part_{number}::PyInit_kernel_{number}();" for number in range(len(sources))),
        "    }",
        "    return nullptr;",
        "}",
    ]
    return "\n".join(lines) + "\n"


def _marked(number: int) -> bytes:
    return f"{_MARK}{number:0{_DIGITS}}".encode()
