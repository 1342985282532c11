"""Work of Inductor that is done once, started in a thread before it is needed.

For a CPU Inductor asks compiler and processor for vector instructions, one thing after the other, and compiles and
loads a file for each: 4 s of CPU on two ranks. Here it is told that all of it works, and what it has asked is compiled
as one file. If that fails Inductor asks by itself.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

from graphshard.lower.inductor_cache import VARIABLE
from graphshard.torch_compat.inductor_settings import VecISA, cpu_vec_isa, inductor_config
from graphshard.torch_compat.torch_ops import replaced
from graphshard.utils.progress import check_cancelled

log = logging.getLogger(__name__)

# Seconds between questions whether work is cancelled.
ASKS_EVERY = 0.5
_FUNCTION = re.compile(r'extern "C" [^(]*?(\w+)\(')


class Warmup:
    """Work that each process does once for each `key`, in a thread; failures come again where a kernel is compiled.

    A fork has none of the threads of the process that it comes from, so it does the work, too.
    """

    def __init__(self, work: Callable[[], None], key: Callable[[], str] = lambda: "") -> None:
        self._work, self._key = work, key
        self._known: dict[tuple[int, str], threading.Event] = {}
        self._lock = threading.Lock()

    def begin(self) -> threading.Event:
        """Begin, unless it has begun; returns at once an event that is set at the end."""
        key = os.getpid(), self._key()
        with self._lock:
            if key not in self._known:
                self._known[key] = done = threading.Event()

                def run() -> None:
                    try:
                        self._work()
                    except Exception:
                        log.debug("Inductor cannot begin", exc_info=True)
                    finally:
                        done.set()

                # Settings of torch are per thread.
                work = functools.partial(contextvars.copy_context().run, run)
                threading.Thread(target=work, name="graphshard-begin", daemon=True).start()
            return self._known[key]

    def wait(self) -> None:
        """Wait for the end, and begin if it has not begun; raises if the work that waits is cancelled."""
        done = self.begin()
        while not done.wait(ASKS_EVERY):
            check_cancelled()


def _find_vector_instructions() -> None:
    # On other machines, and where vector instructions were chosen, Inductor asks little.
    cpp = inductor_config.cpp
    chosen = cpp.vec_isa_ok is not None or cpp.simdlen is not None or "ATEN_CPU_CAPABILITY" in os.environ
    if not chosen and cpu_vec_isa.x86_isa_checker():
        before = [dict(vars(isa)) for isa in cpu_vec_isa.supported_vec_isa_list]
        with _assumed() as asked:
            best = next(iter(cpu_vec_isa.valid_vec_isa_list()), None)
        if best is None or _works(best, asked[best]):
            return
        _forget(before)
    cpu_vec_isa.valid_vec_isa_list()


VECTOR_INSTRUCTIONS = Warmup(_find_vector_instructions, key=lambda: os.environ.get(VARIABLE, ""))
"""Vector instructions of the CPU, which generated code depends on."""


@contextlib.contextmanager
def _assumed() -> Iterator[dict[VecISA, dict[str, str]]]:
    """Let all that Inductor asks work; yields the code it asks of each set of instructions, with flags."""
    asked: dict[VecISA, dict[str, str]] = {}

    def check_build(isa: VecISA, code: str) -> bool:
        asked.setdefault(isa, {})[code] = isa.build_arch_flags()
        return True

    with contextlib.ExitStack() as stack:
        for isa in cpu_vec_isa.supported_vec_isa_list:
            stack.enter_context(replaced(isa, "check_build", functools.partial(check_build, isa)))
        yield asked


def _works(isa: VecISA, asked: dict[str, str]) -> bool:
    """Return whether all code works together; then each works alone, with fewer flags."""
    together, apart, names = list[str](), list[str](), set[str]()
    for code in asked:  # apart is code with a function of a name that is taken
        own = set(_FUNCTION.findall(code))
        (apart if own & names else together).append(code)
        names |= own
    whole = copy.copy(isa)
    whole._arch_flags = " ".join(dict.fromkeys(flag for flags in asked.values() for flag in flags.split()))
    return all(whole.check_build(code) for code in ["\n".join(together), *apart])


def _forget(before: list[dict[str, Any]]) -> None:
    """Let Inductor ask again, one thing after the other, of sets that had these attributes before."""
    for isa, attributes in zip(cpu_vec_isa.supported_vec_isa_list, before, strict=True):
        vars(isa).clear()
        vars(isa).update(attributes)
        for value in (value for kind in type(isa).__mro__ for value in vars(kind).values()):
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
