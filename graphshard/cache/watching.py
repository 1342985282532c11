"""Which code runs while a program is captured, and whether that could be told at the next launch."""

from __future__ import annotations

import builtins
import contextlib
import functools
import gc
import inspect
import io
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from graphshard.cache.calls import free_tool, told_of_calls
from graphshard.cache.origins import origin, origin_of_code
from graphshard.capture.witness import FUNCTIONS, same, witness_of
from graphshard.ir.state import MISSING
from graphshard.ir.wanted import still_wanted

# How many functions a finder of modules calls within each other.
_FINDERS_CALLS = 8
# What differs between ranks or launches, and what code may ask of torch.
_ASKS = {
    "torch.distributed.get_rank": dist.get_rank,
    "torch.distributed.get_node_local_rank": dist.get_node_local_rank,
    "torch.distributed.get_group_rank": dist.get_group_rank,
    "DeviceMesh.get_rank": DeviceMesh.get_rank,
    "DeviceMesh.get_local_rank": DeviceMesh.get_local_rank,
    "DeviceMesh.get_coordinate": DeviceMesh.get_coordinate,
    "torch.initial_seed": torch.initial_seed,
    "torch.get_rng_state": torch.get_rng_state,
    "torch.cuda.mem_get_info": torch.cuda.mem_get_info,
    "torch.cuda.memory_stats": torch.cuda.memory_stats,
    "torch.cuda.memory_allocated": torch.cuda.memory_allocated,
    "torch.cuda.current_device": torch.cuda.current_device,
}


@dataclass
class Ran:
    """What ran while a program was captured.

    Attributes:
        codes: of the user's and of libraries, by identity, with the names of their modules.
        files: of torch, Python and what they need.
        problems: why it cannot be told if the same would run at another launch.
    """

    codes: dict[int, tuple[types.CodeType, str]] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    _alive: list[types.CodeType] = field(default_factory=list)
    _globals: list[tuple[str, dict[str, Any], str, Any]] = field(default_factory=list)

    def add(self, frame: types.FrameType) -> None:
        """A function runs for the first time."""
        code, names = frame.f_code, frame.f_globals
        module = str(names.get("__name__", ""))
        if origin_of_code(code, module) != "users":
            self._alive.append(code)  # so that no other has its identity
            self.files.add(code.co_filename)
            return
        if code.co_name != "<module>" and _finds_modules(frame):
            self._alive.append(code)
            return
        self.codes[id(code)] = code, module
        if code.co_name == "<module>" and code.co_filename.startswith("<"):
            self.problems.append("forward runs code that it makes (eval or exec)")
        elif code.co_name == "<module>":
            self.problems.append(f"forward imports {module} when it runs: import it before")
        for name in code.co_names:
            value = names.get(name, MISSING)
            if value is not MISSING and not isinstance(value, (*FUNCTIONS, type, types.ModuleType)):
                self._globals.append((module, names, name, witness_of(value)))

    def and_(self, other: Ran) -> Ran:
        """What ran in one block or in another."""
        found = Ran({**self.codes, **other.codes}, self.files | other.files, [*self.problems, *other.problems])
        found._alive = [*self._alive, *other._alive]
        return found

    def finish(self) -> None:
        """Nothing that functions read as globals may be another than when they ran first."""
        for module, names, name, witness in self._globals:
            if not same(witness, names.get(name, MISSING)):
                self.problems.append(f"the global {module}.{name} changes while forward is captured")
        self._globals.clear()


@contextlib.contextmanager
def watching() -> Iterator[Ran]:
    """Watch what runs in the block, in this thread."""
    ran = Ran()
    if sys.version_info < (3, 11):  # codes have no qualified names
        ran.problems.append("Python 3.10 does not say which functions run: use a newer one")
        yield ran
        return
    if sys.gettrace() is not None:
        ran.problems.append("a debugger, or a tool that measures coverage, follows the code")
        yield ran
        return
    if free_tool() is None:
        ran.problems.append("other tools have all numbers of sys.monitoring, as several debuggers or profilers do")
        yield ran
        return
    asks = {id(function.__code__): name for name, function in _ASKS.items() if hasattr(function, "__code__")}
    known: set[int] = set()
    # They run when it is time to, on one rank and not on another: no part of forward.
    at_times = {id(function.__code__) for function in (still_wanted, *gc.callbacks) if hasattr(function, "__code__")}

    def note(frame: types.FrameType) -> bool:
        """A function is called; whether its other calls do not matter."""
        key = id(frame.f_code)
        if key in asks:
            if frame.f_back is not None and _is_users(frame.f_back):
                ran.problems.append(f"forward asks {asks[key]}, which another rank or launch answers otherwise")
            return False
        if _is_called_by(at_times, frame):
            return False
        ran.add(frame)
        known.add(key)
        return True

    def asked(what: str) -> None:
        if _is_users(_asking()):
            ran.problems.append(f"forward {what}")

    filled = _filled_caches()
    with _told_of_files(asked), told_of_calls(note, known):
        yield ran
    for cache, hits in filled:
        if cache.cache_info().hits != hits:
            name = getattr(cache, "__qualname__", repr(cache))
            ran.problems.append(f"forward is given what {name} had computed before, and nothing says of what")
    ran.finish()


CACHED: Any = type(functools.lru_cache(len))
"""The type of functions that `functools.lru_cache` makes."""


def _filled_caches() -> list[tuple[Any, int]]:
    """Functions of the user's that remember results (`functools.lru_cache`), with how often they have done so."""
    found = []
    for value in gc.get_objects():
        if type(value) is CACHED and value.cache_info().currsize:
            inner = inspect.unwrap(value)
            code = getattr(inner, "__code__", None)
            users = code is not None and origin_of_code(code, getattr(inner, "__module__", None) or "") == "users"
            if users and not _remembers_nothing(value):
                found.append((value, value.cache_info().hits))
    return found


def _remembers_nothing(cache: Any) -> bool:
    """Whether all results are None, as of what warns once."""
    kept = [each for each in gc.get_referents(cache) if type(each) is dict and each is not vars(cache)]
    return len(kept) == 1 and all(value is None for value in kept[0].values())


# What of `os` asks the file system or the machine. The number of the process is not among them: logging asks for it.
_OF_OS = ("stat", "lstat", "listdir", "scandir", "access", "readlink", "getcwd", "walk", "uname")


@contextlib.contextmanager
def _told_of_files(asked: Callable[[str], None]) -> Iterator[None]:
    """In the block `asked` is told what is opened, or otherwise asked of the file system."""
    places = ((builtins, "open"), (io, "open"), (os, "open"), *((os, name) for name in _OF_OS if hasattr(os, name)))
    kept = [(module, name, getattr(module, name)) for module, name in places]

    def telling(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def tell(*args: Any, **kwargs: Any) -> Any:
            given = (*args, *kwargs.values())[:1]
            asked(f"reads the file {given[0]}" if name == "open" else f"calls os.{name}")
            return function(*args, **kwargs)

        return tell

    for module, name, function in kept:
        setattr(module, name, telling(name, function))
    try:
        yield
    finally:
        for module, name, function in kept:
            setattr(module, name, function)


def _finds_modules(frame: types.FrameType) -> bool:
    """Whether a function runs because some code imports a module, which a finder of somebody's looks for."""
    before: types.FrameType | None = frame
    for _ in range(_FINDERS_CALLS):
        before = before.f_back if before is not None else None
        if before is not None and before.f_code.co_filename.startswith("<frozen importlib"):
            return True
    return False


def _is_called_by(functions: set[int], frame: types.FrameType | None) -> bool:
    """Whether one of these codes runs."""
    while frame is not None:
        if id(frame.f_code) in functions:
            return True
        frame = frame.f_back
    return False


def _asking() -> types.FrameType:
    """Who asks Python's own library for something."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename == __file__ or origin(frame.f_code.co_filename) == "python"
    ):
        frame = frame.f_back
    return frame


def _is_users(frame: types.FrameType) -> bool:
    return origin_of_code(frame.f_code, str(frame.f_globals.get("__name__", ""))) == "users"
