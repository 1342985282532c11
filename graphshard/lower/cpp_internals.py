"""Inductor's C++ kernels: collected while code is generated, and compiled together in other threads.

    generate region_1, region_2, ...        Python, in this thread
        kernels, 64 KB of source            a compiler, in another: `together.py`
        kernels, 64 KB of source            a compiler
    load region_1, region_2, ...            finds libraries where Inductor looks for them

What is not there by then, for whatever reason, is compiled by Inductor one by one.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import shlex
import subprocess
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from graphshard.lower.background_warmup import ASKS_EVERY
from graphshard.lower.batch_compile import Compilers, Job, compile_together
from graphshard.lower.inductor_cache import RemovedError, check_whole
from graphshard.lower.triton_internals import Kernels
from graphshard.torch_compat.inductor import (
    CppPythonBindingsCodeCache,
    async_compile,
    codecache,
    get_cpp_compiler,
    get_lock_dir,
    is_gcc,
)
from graphshard.torch_compat.operators import replaced
from graphshard.utils.progress import check_cancelled

log = logging.getLogger(__name__)

# Characters of source that are compiled together: in half a second, as long as the header takes to read. Where there is
# no core for that beside this thread, four times as many.
_TOGETHER, _TOGETHER_ALONE = 64 << 10, 256 << 10

# The header of kernels takes 1.3 s of CPU to read, and 5.1 s to precompile: so many runs of a compiler do without.
_RUNS_WITHOUT_HEADER = 3


@dataclass
class Pending:
    """A kernel that is not loaded yet; it stands in generated code in the kernel's place.

    Attributes:
        argtypes, source: as generated code gives them to Inductor.
        unit: what compiles it, with others.
    """

    argtypes: list[str]
    source: str
    unit: Future[None] | None = None
    _load: Callable[[], Any] | None = None

    def prepare(self, submit: Callable[[Any], Future[None]]) -> None:
        """Let Inductor write the source, and say by `submit` how it would compile it, if it has to be."""
        self._load = _Checked.load_pybinding_async(self.argtypes, self.source, submit_fn=submit)

    def wait(self) -> None:
        """Wait until it is compiled, or could not be; raises what ends the work."""
        while self.unit is not None and not wait([self.unit], ASKS_EVERY).done:
            check_cancelled()

    def result(self) -> Any:
        """The kernel, which is compiled by itself if it was not with others, or is damaged."""
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
    """Inductor's, which loads what is whole; what is not is removed, and is compiled when somebody asks again."""

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
        threads: how many compilers may run at once.

    Attributes:
        triton: those for GPUs, which Inductor's own processes compile.
    """

    def __init__(self, threads: int) -> None:
        self._compilers, self._pool = Compilers(), ThreadPoolExecutor(threads, "graphshard-compilers")
        self._together = _TOGETHER if threads > 1 else _TOGETHER_ALONE
        self._waiting: list[Pending] = []
        self._runs = 0
        self.triton = Kernels()

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self._compilers.end()
        self._pool.shutdown(cancel_futures=kind is not None)

    @contextlib.contextmanager
    def collecting(self) -> Iterator[list[dict[str, Any]]]:
        """In the block this thread's generated code gets pending kernels; yields the names of each of its modules."""
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
        """One more kernel."""
        self._waiting.append(Pending(argtypes, source))
        return self._waiting[-1]

    def submit(self) -> None:
        """Compile what has been collected."""
        kernels, self._waiting = self._waiting, []
        if kernels:
            # Settings of torch are those of a thread.
            context = contextvars.copy_context()
            context.run(_READS_TEXT.set, self._runs < _RUNS_WITHOUT_HEADER and not _header_is_there())
            self._runs += 1
            unit = self._pool.submit(context.run, _compile, kernels, self._compilers)
            for kernel in kernels:
                kernel.unit = unit


def pending_in(scopes: Iterable[dict[str, Any]]) -> list[Pending]:
    """The kernels that generated modules wait for."""
    return [value for scope in scopes for value in scope.values() if isinstance(value, Pending)]


def load(scopes: Iterable[dict[str, Any]]) -> None:
    """Put kernels into generated modules, in the place of pending ones.

    Raises:
        Exception: whatever Inductor says if it cannot compile or load one.
    """
    for scope in scopes:
        for name, value in list(scope.items()):
            if isinstance(value, Pending):
                scope[name] = value.result()


_COLLECTS: contextvars.ContextVar[tuple[Batch, list[dict[str, Any]]] | None] = contextvars.ContextVar(
    "graphshard_collects", default=None
)


class _Collecting(async_compile.AsyncCompile):
    """What generated code calls; in threads that collect nothing it is Inductor's."""

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


def _header_is_there() -> bool:
    """Whether Inductor has precompiled the header before, if maybe for other flags."""
    return any(Path(codecache._HEADER_DIR).glob("*.gch"))


def _done() -> Future[None]:
    """Of work that need not be done."""
    future: Future[None] = Future()
    future.set_result(None)
    return future


def _job(work: Any) -> Job | None:
    """How Inductor would compile a kernel; None if that is not by one command."""
    try:
        _, (builder,) = work.args
        command, target = builder.get_command_line(), Path(builder.get_target_file_path())
        (source,) = (word for word in shlex.split(command) if word.endswith(".cpp"))
    except (AttributeError, TypeError, ValueError) as error:
        log.debug("how Inductor compiles is not understood: %s", error)
        return None
    return Job(command, Path(source), target)


def _check_header(said: str) -> None:
    """Say so if the compiler does not use the header that Inductor has compiled for it."""
    compiler = get_cpp_compiler()
    for line in said.splitlines():
        if "-Winvalid-pch" in line:
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
