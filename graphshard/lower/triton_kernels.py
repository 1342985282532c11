"""Inductor's Triton kernels: its processes compile them while the code of further regions is generated.

    this thread          region_1 | region_2 | region_3 | wait for kernels
    Inductor's pool      starts ... | kernels of region_1, region_2 ...

By default Inductor waits for the kernels of a region before it goes on to the next, and compiles kernels in this
process until its processes have started, which takes seconds. Here these are started when `compile` is called, and
kernels that are wanted before wait for them. Inductor's cache entries contain the kernels, so a region is put there
when its kernels are compiled.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from graphshard.lower.background_warmup import Warmup
from graphshard.torch_compat.aot_autograd import TracingContext, tracing
from graphshard.torch_compat.inductor_compiler import FxGraphCache, TritonBundler, async_compile, triton_compat
from graphshard.torch_compat.torch_ops import replaced

# Names of a generated module.
Scope = dict[str, Any]


def _start_processes() -> None:
    async_compile.maybe_warm_pool()
    triton_compat.triton_key()  # reads 500 MB, and is kept


TRITON_COMPILER = Warmup(_start_processes)
"""Inductor's processes, unless it is set to have none, and the hash of Triton."""


class Scopes(list[Scope]):
    """Names of the generated modules of a region.

    Attributes:
        keep: puts the region's code and a bundle of its kernels into Inductor's cache; None if it came from there.
    """

    keep: Callable[[Any], None] | None = None


@dataclass
class TritonKernels:
    """Kernels of regions whose code is generated, in one thread.

    Attributes:
        early: the generated modules whose kernels Inductor's processes may not have been given yet.
    """

    early: list[Scope] = field(default_factory=list)

    @contextlib.contextmanager
    def not_waiting(self) -> Iterator[Scopes]:
        """Let generated modules not wait for their kernels; yields the names of each of them."""
        scopes = Scopes()
        before = _WAITING.set(scopes)
        try:
            with (
                replaced(async_compile, "AsyncCompile", _NotWaiting),
                replaced(FxGraphCache, "_save_graph", staticmethod(_kept_later(FxGraphCache._save_graph))),
            ):
                yield scopes
        finally:
            _WAITING.reset(before)
        self.early += scopes

    def load(self, scopes: Scopes) -> None:
        """Wait for the kernels of generated modules, and let Inductor keep them; raises what Inductor raises."""
        inductors = async_compile.AsyncCompile()
        early, self.early = self.early, []
        for scope in early:
            for name, value in list(scope.items()):
                if isinstance(value, _Early):
                    inductors.wait_pool_ready()
                    scope[name] = _begun(inductors, value)
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


def _begun(inductors: async_compile.AsyncCompile, kernel: _Early) -> Any:
    """Start to compile a kernel; a failure is raised where its own region waits."""
    try:
        return inductors.triton(*kernel.args, **kernel.kwargs)
    except Exception as error:
        failed: Future[None] = Future()
        failed.set_exception(error)
        return failed


def _kept_later(save: Callable[..., None]) -> Callable[..., None]:
    """Delay Inductor's function that keeps a graph's code until the kernels are there."""

    def keep(key: str, graph: Any, *args: Any, **kwargs: Any) -> None:
        scopes = _WAITING.get()
        if scopes is None:
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


_WAITING: contextvars.ContextVar[Scopes | None] = contextvars.ContextVar("graphshard_waiting", default=None)


class _NotWaiting(async_compile.AsyncCompile):
    """The class that generated code calls; in threads that are to wait it is Inductor's."""

    def triton(self, kernel_name: str, source_code: str, *args: Any, **kwargs: Any) -> Any:
        alone = async_compile.get_compile_threads() <= 1
        known = async_compile.CompiledTritonKernels.get(source_code) is not None
        if _WAITING.get() is None or alone or known or self.use_process_pool():
            return super().triton(kernel_name, source_code, *args, **kwargs)
        return _Early((kernel_name, source_code, *args), kwargs)

    def wait(self, scope: Scope) -> None:
        scopes = _WAITING.get()
        if scopes is None:
            super().wait(scope)
        else:
            scopes.append(scope)
