"""What Inductor needs before its first kernel for a CPU: vector instructions that work, and a header compiled for them.

    this thread     capture, passes ...                             kernels
    another         smaller checks | the header ------------------ |
    a third         the best set: does it compile and load? |

The header takes longest, so it is compiled for the best set that the CPU says it has, before that is known to work.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import os
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch._inductor import config, cpu_vec_isa
from torch._inductor.codecache import CppPythonBindingsCodeCache

from graphshard.ir.wanted import still_wanted
from graphshard.lower.cache import VARIABLE

log = logging.getLogger(__name__)

ASKS_EVERY = 0.5
"""Seconds between questions whether what is waited for is still wanted."""

_NOTHING = '#include <torch/csrc/inductor/cpp_prefix.h>\nextern "C" void kernel(float* nothing) {}\n'


@dataclass
class Beginning:
    """Of a process that uses one directory for Inductor's cache.

    Attributes:
        cpu: set when it is known what the CPU can do, which generated code depends on.
        header: set when the header is there as well.
    """

    cpu: threading.Event = field(default_factory=threading.Event)
    header: threading.Event = field(default_factory=threading.Event)


# By process, as a fork has none of the threads of the process that it comes from, and directory.
_beginnings: dict[tuple[int, str], Beginning] = {}
_LOCK = threading.Lock()


def begin() -> None:
    """Start to find out what the CPU can do, and to compile the header of kernels, in threads; returns at once."""
    beginning()


def wait_for_cpu() -> None:
    """Wait until it is known what the CPU can do."""
    while not beginning().cpu.wait(ASKS_EVERY):
        still_wanted()


def beginning() -> Beginning:
    """What has begun; it is begun if it was not."""
    key = os.getpid(), os.environ.get(VARIABLE, "")
    with _LOCK:
        if key not in _beginnings:
            _beginnings[key] = begun = Beginning()
            _in_thread(_begin, begun)
        return _beginnings[key]


def _begin(begun: Beginning) -> None:
    try:
        best = _expected()
        if best is None:
            cpu_vec_isa.valid_vec_isa_list()
            begun.cpu.set()
            _compile_header()
            return
        check = _in_thread(best.check_build, cpu_vec_isa.VecISA._avx_code)
        with config.patch({"cpp.vec_isa_ok": True}):
            cpu_vec_isa.valid_vec_isa_list()
        header = _in_thread(_compile_header)
        if not check.result():
            _ask_again()
        begun.cpu.set()
        header.result()
        if not check.result():
            _compile_header()
    except Exception:  # it comes again where a kernel is compiled
        log.debug("Inductor cannot begin", exc_info=True)
    finally:
        begun.cpu.set()
        begun.header.set()


def _expected() -> cpu_vec_isa.VecISA | None:
    """The best vector instructions that the CPU says it has; None if others were chosen.

    Inductor compiles one file for each set of them, and takes the best. Where that works so do the others, which are
    parts of it, and their files need not be compiled.
    """
    if config.cpp.vec_isa_ok is not None or config.cpp.simdlen is not None or "ATEN_CPU_CAPABILITY" in os.environ:
        return None
    known = cpu_vec_isa.x86_isa_checker()
    return next((isa for isa in cpu_vec_isa.supported_vec_isa_list if set(str(isa).split()) <= set(known)), None)


def _ask_again() -> None:
    """Let Inductor try each set of vector instructions: the best does not work here."""
    for kind in {base for isa in cpu_vec_isa.supported_vec_isa_list for base in type(isa).__mro__}:
        clear = getattr(vars(kind).get("__bool__"), "cache_clear", None)
        if clear is not None:
            clear()
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    cpu_vec_isa.valid_vec_isa_list()


def _compile_header() -> None:
    """Inductor compiles the header before it has a kernel compiled; the kernel is not wanted here."""
    CppPythonBindingsCodeCache.load_pybinding_async(["float*"], _NOTHING, submit_fn=lambda work: done())


def done() -> Future[None]:
    """Of work that need not be done."""
    future: Future[None] = Future()
    future.set_result(None)
    return future


def _in_thread(work: Any, *args: Any) -> Future[Any]:
    """Run something in a thread that does not keep the process from ending."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work(*args))
        except BaseException as error:
            future.set_exception(error)

    target = functools.partial(contextvars.copy_context().run, run)
    threading.Thread(target=target, name="graphshard-begin", daemon=True).start()
    return future
