"""Several C++ kernels of Inductor's in one run of the compiler.

    a.cpp -> a.so      0.6 s        a.cpp, b.cpp, c.cpp -> one library, three copies       0.6 s and a little more
    b.cpp -> b.so      0.6 s
    c.cpp -> c.so      0.6 s        PyInit_kernel() { return number == 0 ? a's : number == 1 ? b's : c's; }

Reading the header and starting the compiler take longer than most kernels do. The copies differ in one number, which
says whose kernel a library shows. Options and the text of kernels are as they were, each kernel is a function of its
own, and so is its machine code.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from graphshard.utils.files import replacing

log = logging.getLogger(__name__)

_MARK = "graphshard-kernel:"
_DIGITS = 6
_SAY_SO = "-Winvalid-pch"  # if a precompiled header is not used
_INCLUDE = re.compile(r"^\s*#\s*include\s+[<\"].*$", re.MULTILINE)


@dataclass(frozen=True)
class Job:
    """A library to be made of one source.

    Attributes:
        command: that makes it, for a shell.
        source: a file that shows a Python module named `kernel`.
        target: the library.
    """

    command: str
    source: Path
    target: Path

    @property
    def template(self) -> tuple[str, ...]:
        """The command without what is its own: jobs with the same one can be done together."""
        own = {str(self.source): "SOURCE", str(self.target): "TARGET"}
        return tuple(own.get(word, word) for word in shlex.split(self.command))


@dataclass
class Compilers:
    """Runs of compilers that can be ended from another thread.

    Attributes:
        ended: nobody waits for them any more.
    """

    _running: set[subprocess.Popen[str]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    ended: bool = False

    def run(self, command: Sequence[str], directory: Path) -> str:
        """What a compiler says.

        Raises:
            RuntimeError: it fails, or was ended.
        """
        with self._lock:
            if self.ended:
                raise RuntimeError("nobody waits for it")
            process = subprocess.Popen(
                command,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
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
        """End those that run, and start no more."""
        with self._lock:
            self.ended = True
            for process in self._running:
                process.terminate()  # a compiler removes what it has half written


def compile_together(jobs: Iterable[Job], compilers: Compilers) -> str:
    """Make the libraries of jobs, together where they have the same command; what the compiler says of them.

    What does not work is not made, and logged: whoever needs it makes it alone.
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
        # Lines of the sources would be in every copy.
        command = [*(own.get(word, word) for word in template), _SAY_SO, "-Wl,--strip-debug"]
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
        said = compilers.run([*(own.get(word, word) for word in job.template), _SAY_SO], directory)
    return f"done\n{said}"


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="graphshard-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def joined(sources: Sequence[Path]) -> str:
    """One source of several, each of which shows a Python module named `kernel`.

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
        # Volatile, so that the compiler does not take it for what it is here.
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
