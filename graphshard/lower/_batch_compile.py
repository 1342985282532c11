"""Inductor's kernels: collected while code is generated, and compiled together in threads, or in its processes.

Reading the header and starting the compiler take longer than most C++ kernels do, so one run makes several libraries:

    a.cpp -> a.so      0.6 s        a.cpp, b.cpp, c.cpp -> one library, three copies       0.6 s and a little more
    b.cpp -> b.so      0.6 s
    c.cpp -> c.so      0.6 s        PyInit_kernel() { return number == 0 ? a's : number == 1 ? b's : c's; }

The copies differ in one number, which selects the kernel that a library shows. Options and the text of kernels stay
Inductor's, and each kernel is a separate function. The libraries are put where Inductor looks for them. Inductor
compiles kernels that fail one by one.

By default Inductor waits for the Triton kernels of a region before it goes on to the next, and compiles kernels in this
process until its processes have started, which takes seconds. Here these are started when `compile` is called, and
kernels that are wanted before wait for them. Inductor's cache entries contain the kernels, so a region is put there
when its kernels are compiled.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
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

from graphshard.lower._background_warmup import ASKS_EVERY, Warmup
from graphshard.lower.inductor_cache import RemovedError, check_whole
from graphshard.torch_compat.aot_autograd import TracingContext, tracing
from graphshard.torch_compat.inductor_compiler import (
    CppPythonBindingsCodeCache,
    FxGraphCache,
    TritonBundler,
    async_compile,
    get_lock_dir,
    triton_compat,
)
from graphshard.torch_compat.torch_ops import replaced
from graphshard.utils.files import replacing
from graphshard.utils.progress import check_cancelled

log = logging.getLogger(__name__)

# Characters of source that are compiled together: in half a second, as long as the header takes to read. Where no core
# is left for that next to this thread, four times that.
_TOGETHER, _TOGETHER_ALONE = 64 << 10, 256 << 10

_MARK = "graphshard-kernel:"
_DIGITS = 6
_INCLUDE = re.compile(r"^\s*#\s*include\s+[<\"].*$", re.MULTILINE)


# --- kernels in generated code -----------------------------------------------------------------------------------


class Scopes(list[dict[str, Any]]):
    """Names of the generated modules of a region, whose kernels for CPUs a batch collects.

    `keep` gives its code and its kernels for GPUs to Inductor's cache, unless they are from it.
    """

    keep: Callable[[Any], None] | None = None

    def __init__(self, batch: Batch | None = None) -> None:
        super().__init__()
        self.batch = batch


_SCOPES: contextvars.ContextVar[Scopes | None] = contextvars.ContextVar("graphshard_scopes", default=None)


@contextlib.contextmanager
def _collecting(scopes: Scopes) -> Iterator[Scopes]:
    before = _SCOPES.set(scopes)
    try:
        with replaced(async_compile, "AsyncCompile", _Collecting):
            yield scopes
    finally:
        _SCOPES.reset(before)


class _Collecting(async_compile.AsyncCompile):
    """The class that generated code calls; in threads that collect nothing it is Inductor's."""

    def cpp_pybinding(self, argtypes: list[str], source_code: str) -> Any:
        scopes = _SCOPES.get()
        if scopes is None or scopes.batch is None:
            return super().cpp_pybinding(argtypes, source_code)
        return scopes.batch.add(argtypes, source_code)

    def triton(self, kernel_name: str, source_code: str, *args: Any, **kwargs: Any) -> Any:
        scopes, alone = _SCOPES.get(), async_compile.get_compile_threads() <= 1
        known = async_compile.CompiledTritonKernels.get(source_code) is not None
        if scopes is None or scopes.batch is not None or alone or known or self.use_process_pool():
            return super().triton(kernel_name, source_code, *args, **kwargs)
        return _Early((kernel_name, source_code, *args), kwargs)

    def wait(self, scope: dict[str, Any]) -> None:
        scopes = _SCOPES.get()
        if scopes is not None:
            scopes.append(scope)
        if scopes is None or scopes.batch is not None:
            super().wait(scope)


@dataclass
class Pending:
    """A kernel that is not loaded yet, and stands for it in generated code; `unit` compiles it with others."""

    argtypes: list[str]
    source: str
    unit: Future[None] | None = None
    _load: Callable[[], Any] | None = None

    def prepare(self, submit: Callable[[Any], Future[None]]) -> Callable[[], Any]:
        """Let Inductor write the source, and call `submit` with how it would compile it, if that is needed."""
        self._load = _Checked.load_pybinding_async(self.argtypes, self.source, submit_fn=submit)
        return self._load

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
            return self.prepare(lambda work: _done())()
        return self._load()


class _Checked(CppPythonBindingsCodeCache):
    """Inductor's cache, which removes damaged libraries; they are compiled when they are asked for again."""

    @classmethod
    def _get_uncompiled_header(cls, device: str) -> str | None:
        return None  # to precompile the header takes as long as to read it four times

    @classmethod
    def _load_library_inner(cls, path: str, key: str) -> Any:
        try:
            check_whole(Path(path), Path(get_lock_dir(), f"{key}.lock"))
        except RemovedError:
            cls.cache.pop(key, None)
            raise
        return super()._load_library_inner(path, key)


class Batch:
    """Kernels of regions whose code is generated, on their way to compilers, of which `threads` may run at once."""

    def __init__(self, threads: int) -> None:
        self._compilers, self._pool = Compilers(), ThreadPoolExecutor(threads, "graphshard-compilers")
        self._together = _TOGETHER if threads > 1 else _TOGETHER_ALONE
        self._waiting: list[Pending] = []
        self.triton = TritonKernels()  # for GPUs

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self._compilers.end()
        self._pool.shutdown(cancel_futures=kind is not None)

    @contextlib.contextmanager
    def collecting(self) -> Iterator[Scopes]:
        """Give this thread's generated code pending kernels; yields the names of each generated module."""
        with _collecting(Scopes(self)) as scopes:
            yield scopes
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
            unit = self._pool.submit(contextvars.copy_context().run, _compile, kernels, self._compilers)
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


def _compile(kernels: list[Pending], compilers: Compilers) -> None:
    """Compile kernels that are not in Inductor's cache."""
    jobs: list[Job] = []

    def submit(work: Any) -> Future[None]:
        try:
            _, (builder,) = work.args
            command, target = builder.get_command_line(), Path(builder.get_target_file_path())
            (source,) = (word for word in shlex.split(command) if word.endswith(".cpp"))
            jobs.append(Job(command, Path(source), target))
        except (AttributeError, TypeError, ValueError) as error:
            log.debug("how Inductor compiles is not understood: %s", error)
        return _done()

    for kernel in kernels:
        kernel.prepare(submit)
    compile_together(jobs, compilers)


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


# --- kernels for GPUs --------------------------------------------------------------------------------------------


def _start_processes() -> None:
    async_compile.maybe_warm_pool()
    triton_compat.triton_key()  # reads 500 MB, and is kept


TRITON_COMPILER = Warmup(_start_processes)
"""Inductor's processes, unless it is set to have none, and the hash of Triton."""


@dataclass
class TritonKernels:
    """Kernels of regions; modules in `early` may have some that Inductor's processes have not been given yet."""

    early: list[dict[str, Any]] = field(default_factory=list)

    @contextlib.contextmanager
    def not_waiting(self) -> Iterator[Scopes]:
        """Let generated modules not wait for their kernels; yields the names of each of them."""
        save = staticmethod(_kept_later(FxGraphCache._save_graph))
        with replaced(FxGraphCache, "_save_graph", save), _collecting(Scopes()) as scopes:
            yield scopes
        self.early += scopes

    def load(self, scopes: Scopes) -> None:
        """Wait for the kernels of generated modules, and let Inductor keep them; raises what Inductor raises."""
        inductors = async_compile.AsyncCompile()
        early, self.early = self.early, []
        for scope in early:
            for name, value in list(scope.items()):
                if isinstance(value, _Early):
                    inductors.wait_pool_ready()
                    try:
                        scope[name] = inductors.triton(*value.args, **value.kwargs)
                    except Exception as error:  # is raised where the kernel's own region waits
                        scope[name] = Future()
                        scope[name].set_exception(error)
        if scopes.keep is not None:
            TritonBundler.begin_compile()
        try:
            for scope in scopes:
                inductors.wait(scope)
            if scopes.keep is not None:
                bundle, _ = TritonBundler.collect()
                scopes.keep(bundle)
        finally:
            TritonBundler.end_compile()


@dataclass
class _Early:
    """A kernel that was wanted before there was a process to compile it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _kept_later(save: Callable[..., None]) -> Callable[..., None]:
    """Delay Inductor's function that keeps a graph's code until the kernels are there."""

    def keep(key: str, graph: Any, *args: Any, **kwargs: Any) -> None:
        scopes = _SCOPES.get()
        if scopes is None or scopes.batch is not None:
            return save(key, graph, *args, **kwargs)
        kept, context = copy.copy(graph), TracingContext.try_get()
        kept.compiled_fn_runner = None  # a graph that ends takes that apart, and it is the other one's

        def with_kernels(bundle: Any) -> None:
            kept.set_triton_bundle(bundle)
            with tracing(context):
                save(key, kept, *args, **kwargs)

        scopes.keep = with_kernels
        return None

    return keep


# --- several sources in one run of a compiler --------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A library to be made, by a shell's command, of one source that defines a Python module named `kernel`."""

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

    def run(self, command: Sequence[str], directory: Path) -> None:
        """Run a compiler; raises RuntimeError with its messages if it fails or is ended."""
        null, pipe = subprocess.DEVNULL, subprocess.PIPE
        with self._lock:
            if self.ended:
                raise RuntimeError("nobody waits for it")
            process = subprocess.Popen(
                command, cwd=directory, text=True, errors="replace", stdin=null, stdout=null, stderr=pipe
            )
            self._running.add(process)
        try:
            _, said = process.communicate()
        finally:
            with self._lock:
                self._running.discard(process)
        if process.returncode:
            raise RuntimeError(f"{command[0]} ended with {process.returncode}: {said[-2000:]}")

    def end(self) -> None:
        """End the runs, and start no more."""
        with self._lock:
            self.ended = True
            for process in self._running:
                process.terminate()  # a compiler removes what it has half written


def compile_together(jobs: Iterable[Job], compilers: Compilers) -> None:
    """Make the libraries of jobs, together where they have the same command; failures are logged."""
    groups: dict[tuple[str, ...], list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.template, []).append(job)
    for template, group in groups.items():
        try:
            _compile_group(template, group, compilers)
        except (OSError, RuntimeError, UnicodeError) as error:
            log.debug("%d kernels cannot be compiled together: %s", len(group), error)


def _compile_group(template: Sequence[str], group: Sequence[Job], compilers: Compilers) -> None:
    with tempfile.TemporaryDirectory(prefix="graphshard-", ignore_cleanup_errors=True) as directory:
        source, target = Path(directory, "kernels.cpp"), Path(directory, "kernels.so")
        source.write_text(joined([job.source for job in group]))
        own = {"SOURCE": str(source), "TARGET": str(target)}
        # Debug lines of the sources would be in every copy.
        command = [*(own.get(word, word) for word in template), "-Wl,--strip-debug"]
        compilers.run(command, Path(directory))
        library = target.read_bytes()
    mark = _marked(0)
    if library.count(mark) != 1:
        raise RuntimeError("the compiler has not kept the number of the kernel")
    for number, job in enumerate(group):
        with replacing(job.target) as temporary:
            temporary.write_bytes(library.replace(mark, _marked(number)))


def joined(sources: Sequence[Path]) -> str:
    """Join sources. Headers are read outside of the namespaces, once; within them they are skipped."""
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
