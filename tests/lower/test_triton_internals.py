"""Kernels for GPUs are waited for after the code of all regions is there; a module stands for generated code here."""

from __future__ import annotations

import pkgutil
from concurrent.futures import Future
from typing import Any

from graphshard.lower import triton_internals

async_compile = pkgutil.resolve_name("torch._inductor.async_compile")
config = pkgutil.resolve_name("torch._inductor.config")

# As Inductor writes it; no kernel is made.
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
    kernels: list[Future[str]] = [Future(), Future()]
    with config.patch(compile_threads=2):
        with triton_internals.not_waiting() as scopes:
            modules = [_module(kernel) for kernel in kernels]
        for number, kernel in enumerate(kernels):
            kernel.set_result(f"kernel {number}")
        assert all(isinstance(module["kernel"], Future) for module in modules)
        triton_internals.load(scopes)
    assert [module["kernel"] for module in modules] == ["kernel 0", "kernel 1"]


def test_others_wait_as_ever() -> None:
    kernel: Future[str] = Future()
    kernel.set_result("kernel")
    before = async_compile.AsyncCompile
    with config.patch(compile_threads=2):
        with triton_internals.not_waiting():
            pass
        assert async_compile.AsyncCompile is before
        assert _module(kernel)["kernel"] == "kernel"
