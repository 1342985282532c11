"""What Inductor needs before its first kernel for a CPU: vector instructions that work.

    this thread     capture, passes ...                 kernels
    another         everything the CPU says it has: does it compile and load?

Inductor asks one thing after the other, and compiles and loads a file for each, which is 4 s of CPU of two ranks. Here
it is told that all of it works, and what it has asked is compiled as one file. If that fails it asks by itself.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import re
import threading
from collections.abc import Iterator
from typing import Any

from graphshard.lower.background_warmup import Beginning
from graphshard.lower.inductor_cache import VARIABLE
from graphshard.torch_compat.inductor_settings import VecISA, cpu_vec_isa, inductor_config
from graphshard.torch_compat.operators import replaced

log = logging.getLogger(__name__)

_FUNCTION = re.compile(r'extern "C" [^(]*?(\w+)\(')
_BEGINNING = Beginning(lambda known: _begin(known), of=lambda: os.environ.get(VARIABLE, ""))


def begin() -> None:
    """Start to find out what the CPU can do, in a thread; returns at once."""
    _BEGINNING.begin()


def wait_for_cpu() -> None:
    """Wait until it is known what the CPU can do, which generated code depends on."""
    _BEGINNING.wait()


def _begin(known: threading.Event) -> None:
    try:
        # On other machines, and where vector instructions were chosen, Inductor asks little.
        chosen = (
            inductor_config.cpp.vec_isa_ok is not None
            or inductor_config.cpp.simdlen is not None
            or "ATEN_CPU_CAPABILITY" in os.environ
        )
        if not chosen and cpu_vec_isa.x86_isa_checker():
            before = [dict(vars(isa)) for isa in cpu_vec_isa.supported_vec_isa_list]
            with _assumed() as asked:
                best = next(iter(cpu_vec_isa.valid_vec_isa_list()), None)
            if best is None or _works(best, asked[best]):
                return
            _forget(before)
        cpu_vec_isa.valid_vec_isa_list()
    except Exception:  # it comes again where a kernel is compiled
        log.debug("Inductor cannot begin", exc_info=True)
    finally:
        known.set()


@contextlib.contextmanager
def _assumed() -> Iterator[dict[VecISA, dict[str, str]]]:
    """In the block all that Inductor asks works; yields the code it asks of each set of instructions, with flags."""
    asked: dict[VecISA, dict[str, str]] = {}

    def check_build(isa: VecISA, code: str) -> bool:
        asked.setdefault(isa, {})[code] = isa.build_arch_flags()
        return True

    with contextlib.ExitStack() as stack:
        for isa in cpu_vec_isa.supported_vec_isa_list:
            stack.enter_context(replaced(isa, "check_build", functools.partial(check_build, isa)))
        yield asked


def _works(isa: VecISA, asked: dict[str, str]) -> bool:
    """Whether all that was asked of a set of instructions works together; then each does alone, with fewer flags."""
    together: list[str] = []
    apart: list[str] = []  # what has a function of a name that is taken
    names: set[str] = set()
    for code in asked:
        own = set(_FUNCTION.findall(code))
        (apart if own & names else together).append(code)
        names |= own
    whole = copy.copy(isa)
    whole._arch_flags = " ".join(dict.fromkeys(flag for flags in asked.values() for flag in flags.split()))
    return all(whole.check_build(code) for code in ["\n".join(together), *apart])


def _forget(before: list[dict[str, Any]]) -> None:
    """Let Inductor ask again, one thing after the other: not all works here.

    Args:
        before: the attributes that sets of instructions had before anything was assumed.
    """
    for isa, attributes in zip(cpu_vec_isa.supported_vec_isa_list, before, strict=True):
        vars(isa).clear()
        vars(isa).update(attributes)
        for kind in type(isa).__mro__:
            for value in vars(kind).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
