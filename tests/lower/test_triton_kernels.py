"""GPU kernels are waited for after code generation of all regions; a fake module replaces generated code."""

from __future__ import annotations

import os
import pkgutil
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from graphshard.lower import _batch_compile
from graphshard.lower._batch_compile import TritonKernels

async_compile = pkgutil.resolve_name("torch._inductor.async_compile")
config = pkgutil.resolve_name("torch._inductor.config")

# As written by Inductor; no kernel is compiled.
_GENERATED = """
from torch._inductor.async_compile import AsyncCompile
async_compile = AsyncCompile()
kernel = given
async_compile.wait(globals())
"""


def _module(given: Any) -> dict[str, Any]:
    scope = {"given": given}
    exec(_GENERATED, scope)
    return scope


def test_modules_do_not_wait() -> None:
    made = TritonKernels()
    kernels: list[Future[str]] = [Future(), Future()]
    with config.patch(compile_threads=2):
        with made.not_waiting() as scopes:
            modules = [_module(kernel) for kernel in kernels]
        for number, kernel in enumerate(kernels):
            kernel.set_result(f"kernel {number}")
        assert all(isinstance(module["kernel"], Future) for module in modules)
        made.load(scopes)
    assert [module["kernel"] for module in modules] == ["kernel 0", "kernel 1"]


def test_others_wait_immediately() -> None:
    kernel: Future[str] = Future()
    kernel.set_result("kernel")
    before = async_compile.AsyncCompile
    with config.patch(compile_threads=2):
        with TritonKernels().not_waiting():
            pass
        assert async_compile.AsyncCompile is before
        assert _module(kernel)["kernel"] == "kernel"


_WITH_A_KERNEL = """
from torch._inductor.async_compile import AsyncCompile
async_compile = AsyncCompile()
kernel = async_compile.triton("name", "source", device_str="cuda")
async_compile.wait(globals())
"""


def test_kernels_are_compiled_in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes get all kernels when the first region is loaded."""
    asked: list[str] = []
    inductors = async_compile.AsyncCompile

    def triton(self: Any, name: str, source: str, device_str: str) -> Future[str]:
        asked.append(f"{name} {source} {device_str}")
        kernel: Future[str] = Future()
        kernel.set_result("kernel")
        return kernel

    monkeypatch.setattr(inductors, "triton", triton)
    monkeypatch.setattr(inductors, "use_process_pool", classmethod(lambda cls: False))
    monkeypatch.setattr(inductors, "wait_pool_ready", classmethod(lambda cls: asked.append("ready")))
    made = TritonKernels()
    modules: list[dict[str, Any]] = [{}, {}]
    found = []
    with config.patch(compile_threads=2):
        for module in modules:
            with made.not_waiting() as scopes:
                exec(_WITH_A_KERNEL, module)
            found.append(scopes)
        assert not asked
        made.load(found[0])
        assert asked == ["ready", "name source cuda"] * 2
        made.load(found[1])
    assert [module["kernel"] for module in modules] == ["kernel", "kernel"]
    assert len(asked) == 4


def test_a_kernel_that_cannot_start_fails_only_its_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other regions are not affected."""
    inductors = async_compile.AsyncCompile
    kernel: Future[str] = Future()
    kernel.set_result("kernel")

    def triton(self: Any, name: str, source: str, device_str: str) -> Future[str]:
        if source == "wrong":
            raise RuntimeError("no such instruction")
        return kernel

    monkeypatch.setattr(inductors, "triton", triton)
    monkeypatch.setattr(inductors, "use_process_pool", classmethod(lambda cls: False))
    monkeypatch.setattr(inductors, "wait_pool_ready", classmethod(lambda cls: None))
    made = TritonKernels()
    modules: list[dict[str, Any]] = [{}, {}]
    found = []
    with config.patch(compile_threads=2):
        for module, source in zip(modules, ("source", "wrong")):
            with made.not_waiting() as scopes:
                exec(_WITH_A_KERNEL.replace('"source"', f'"{source}"'), module)
            found.append(scopes)
        made.load(found[0])
        with pytest.raises(RuntimeError, match="no such instruction"):
            made.load(found[1])
    assert modules[0]["kernel"] == "kernel"


def test_cached_kernels_need_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example code that Inductor has cached with its kernels."""
    kernel: Future[str] = Future()
    kernel.set_result("kernel")
    monkeypatch.setattr(async_compile.AsyncCompile, "triton", lambda self, *args, **kwargs: kernel)
    monkeypatch.setattr(async_compile.AsyncCompile, "use_process_pool", classmethod(lambda cls: False))
    monkeypatch.setattr(async_compile.CompiledTritonKernels, "get", staticmethod(lambda source: kernel))
    module: dict[str, Any] = {}
    with config.patch(compile_threads=2), TritonKernels().not_waiting():
        exec(_WITH_A_KERNEL, module)
    assert module["kernel"] is kernel


def test_code_is_cached_with_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor would cache it without kernels, and the next process would compile them again."""
    cache = pkgutil.resolve_name("torch._inductor.codecache:FxGraphCache")
    bundler = pkgutil.resolve_name("torch._inductor.triton_bundler:TritonBundler")
    guards = pkgutil.resolve_name("torch._guards")
    kept: list[tuple[str, str, object, object]] = []
    ended: list[object] = []

    class Graph:
        name, bundle = "as generated", None
        compiled_fn_runner: object = "what runs it"

        def __del__(self) -> None:
            ended.append(self.compiled_fn_runner)

        def set_triton_bundle(self, bundle: object) -> None:
            self.bundle = bundle

    class Kernel(Future[str]):
        def result(self, timeout: float | None = None) -> str:
            bundler.put("a kernel", 0)
            return super().result(timeout)

    def save(key: str, graph: Graph, local: bool) -> None:
        kept.append((key, graph.name, graph.bundle, guards.TracingContext.try_get()))

    monkeypatch.setattr(cache, "_save_graph", staticmethod(save))
    monkeypatch.setattr(
        bundler, "collect", classmethod(lambda cls: ({entry.kernel_hash for entry in cls._entries}, None))
    )
    monkeypatch.setattr(bundler, "is_enabled", staticmethod(lambda: True))
    made, kernel, graph, context = TritonKernels(), Kernel(), Graph(), guards.TracingContext(None)
    kernel.set_result("kernel")
    with config.patch(compile_threads=2):
        with made.not_waiting() as scopes:
            _module(kernel)
            with guards.tracing(context):
                cache._save_graph("key", graph, local=True)
        graph.name = "changed since"
        assert not kept
        made.load(scopes)
    assert kept == [("key", "as generated", {"a kernel"}, context)]
    scopes.keep = None
    assert ended == [None]  # Inductor's graph would destroy the state of the other
    assert graph.compiled_fn_runner == "what runs it"
    assert bundler._entries is None
    cache._save_graph("other", graph, local=True)  # unchanged
    assert kept[1:] == [("other", "changed since", None, None)]


def test_kernels_of_code_from_the_cache_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No one would use the bundle, and it reads all binaries."""
    bundler = pkgutil.resolve_name("torch._inductor.triton_bundler:TritonBundler")
    bundled: list[bool] = []
    monkeypatch.setattr(bundler, "begin_compile", classmethod(lambda cls: bundled.append(True)))
    made = TritonKernels()
    kernel: Future[str] = Future()
    kernel.set_result("kernel")
    with config.patch(compile_threads=2):
        with made.not_waiting() as scopes:
            module = _module(kernel)
        made.load(scopes)
    assert module["kernel"] == "kernel"
    assert not bundled


def test_warmup_runs_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error there is ignored: it occurs again when a kernel is compiled."""
    started, go = threading.Event(), threading.Event()

    def warm() -> None:
        started.set()
        go.wait(60)
        raise OSError("no processes")

    monkeypatch.setattr(_batch_compile.async_compile, "maybe_warm_pool", warm)
    monkeypatch.setattr(os, "getpid", lambda: -2)  # this process may have started it already
    _batch_compile.TRITON_COMPILER.begin()
    assert started.wait(60)
    go.set()
    _batch_compile.TRITON_COMPILER.wait()
