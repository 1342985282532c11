"""Generated code of regions, kept next to Inductor's cache, and run in other processes without importing Inductor.

    graphshard-regions/3f0c....-81aa....region      everything else that the code depends on, and the region's text

    cpp_fused_0 = async_compile.cpp_pybinding(...)      left out; the file has the library
    class Runner: def call(self, args): ...             kept as it is

Inductor's own cache is asked with a graph in its decompositions. To trace and to hash that takes most of the time that
is left of compiling, and imports all of Inductor. Here a region is looked up by the text that it is cut out with.

A region is not kept if it is on several devices, has dynamic sizes, names more of Inductor than the calls of kernels,
or calls operators that are not torch's: what they are decomposed into may change, and the text does not say so. Files
are checked when they are read; damaged ones are removed, and made again. Code for GPUs (`cubin_kernels.py`) is kept
without the number of the GPU that it was compiled on, so all ranks of a machine find it.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dis
import functools
import hashlib
import importlib.machinery
import importlib.util
import json
import logging
import operator
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.fx import Node

from graphshard.errors import ArtifactError
from graphshard.ir.program import Region
from graphshard.ir.sizes import symbols_of
from graphshard.lower.cubin_kernels import CubinKernel, LoadedKernel, aligned
from graphshard.lower.inductor_rewrites import NEVER_RUN
from graphshard.torch_compat.inductor_settings import data_pointer, inductor_cache, keeps_code
from graphshard.utils.archive import read_private, remove, remove_left_behind, remove_oldest, touch, write_archive
from graphshard.utils.environment_fingerprint import instruction_set, own_files, settings, variables, vendor
from graphshard.utils.files import replacing
from graphshard.utils.source_lines import codes_of

log = logging.getLogger(__name__)

# Bytes that the directory may have; a region has about 0.1 MB for each kernel.
LIMIT = 1 << 30
_ENDING = ".region"
_TORCHS = ("aten", "prims")
# Functions of torch that generated code calls, by Inductor's names.
EXTERN_KERNELS: Mapping[str, Any] = {
    "mm": torch.mm,
    "bmm": torch.bmm,
    "addmm": torch.addmm,
    "baddbmm": torch.baddbmm,
    "convolution": torch.convolution,
}
# Variable of kept code for the number of the GPU.
_GPU = "graphshard_gpu"
_POINTER = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"


@dataclass(frozen=True)
class Kernels:
    """Code of a region: Python that defines `call`, and libraries or GPU kernels by the names that it calls them by."""

    source: str
    libraries: Mapping[str, bytes] = field(default_factory=dict)
    on_gpu: Mapping[str, CubinKernel] = field(default_factory=dict)


@dataclass(frozen=True)
class Package:
    """A region compiled for another process: its code for CPUs, or for each kind of GPU, or why there is none.

    `codes` has `graphshard.cross.gpu_kernels.GpuCode` for each kind of GPU that it was compiled for.
    """

    kernels: Kernels | None = None
    problem: str = ""
    codes: tuple[Any, ...] = ()

    @property
    def source_code(self) -> str:
        """Code for GPUs, for people."""
        return "\n".join(code.text for code in self.codes)

    def __call__(self, inputs: list[Any]) -> Any:
        raise AssertionError("a package is compiled for another process")


class _AnyGpu(ast.NodeTransformer):
    """Replace the number of the GPU that code was generated on by a variable."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        called = ast.unparse(node.func).rpartition(".")[2]
        if called in ("_DeviceGuard", "set_device", "get_raw_stream"):
            node.args = [ast.Name(_GPU, ast.Load())]
        for keyword in node.keywords:
            if called == "device" and keyword.arg == "index":
                keyword.value = ast.Name(_GPU, ast.Load())
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if not re.fullmatch(r"cuda:\d+", str(node.value)):
            return node
        return ast.parse(f"f'cuda:{{{_GPU}}}'", mode="eval").body


def trimmed(
    source: str, libraries: Mapping[str, bytes], on_gpu: Mapping[str, CubinKernel] | None = None
) -> Kernels | None:
    """Remove what makes kernels from generated code; None if the rest needs Inductor. Code for a GPU has `on_gpu`."""
    kept: list[ast.stmt] = []
    for statement in ast.parse(source).body:
        names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        if isinstance(statement, ast.If) or (isinstance(statement, ast.FunctionDef) and statement.name in NEVER_RUN):
            continue
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("torch._inductor"):
            continue
        if isinstance(statement, ast.Import) and statement.names[0].name.startswith("triton"):
            continue
        making = names & {"async_compile", "AsyncCompile"}
        if making and isinstance(statement, (ast.Assign, ast.Expr, ast.Delete)):
            continue
        attributes = [node for node in ast.walk(statement) if isinstance(node, ast.Attribute)]
        used = {n.attr for n in attributes if isinstance(n.value, ast.Name) and n.value.id == "extern_kernels"}
        if making or not used <= EXTERN_KERNELS.keys():
            return None
        kept.append(statement if on_gpu is None else _AnyGpu().visit(statement))
    text = ast.unparse(ast.fix_missing_locations(ast.Module(kept, [])))
    code = compile(text, "<region>", "exec")
    # Names of the module itself, or imported, are in `co_names`.
    defined = {"extern_kernels", *libraries, *(on_gpu or ()), *vars(builtins), *code.co_names}
    if on_gpu is not None:
        defined.add(_GPU)
    steps = (step for part in codes_of(code) if part is not code for step in dis.get_instructions(part))
    needed = {str(step.argval) for step in steps if step.opname == "LOAD_GLOBAL"}
    return Kernels(text, libraries, on_gpu or {}) if needed <= defined else None


class KeptRegion:
    """A region whose code was kept; it is loaded by `load`, or the first call.

    `source_code` is shown; by default it is the code that runs, without the code of kernels. `gpu` is the number of the
    GPU that runs it. `rewrite` is called once all variants of its kernels have been measured.
    """

    def __init__(
        self,
        key: str,
        kernels: Kernels,
        source_code: str = "",
        gpu: int | None = None,
        rewrite: Callable[[Kernels], None] = lambda kernels: None,
    ) -> None:
        self.kernels, self._key, self._gpu, self._rewrite = kernels, key, gpu, rewrite
        self.source_code = source_code or kernels.source
        self._call: Any = None

    def __call__(self, inputs: list[Any]) -> Any:
        if self._call is None:
            self.load()
        return self._call(inputs)

    def load(self) -> KeptRegion:
        """Load the code; raise ArtifactError if the dynamic loader, or the GPU's driver, refuses a part of it."""
        names: dict[str, Any] = {"extern_kernels": SimpleNamespace(**EXTERN_KERNELS)}
        try:
            names |= {"__name__": f"graphshard_region_{self._key}", **_loaded(self._key, self.kernels.libraries)}
        except ImportError as error:
            raise ArtifactError(
                f"the compiled region {self._key} cannot be loaded here: {str(error).splitlines()[0]}. It needs "
                "the C++ and OpenMP runtime libraries of the machine that compiled it (libstdc++, libgomp): "
                "install them, or export again on this machine."
            ) from error
        if self._gpu is not None:
            on_gpu = {name: LoadedKernel(kernel, self._gpu) for name, kernel in self.kernels.on_gpu.items()}
            names |= {_GPU: self._gpu, **on_gpu}
        exec(compile(self.kernels.source, f"<region {self._key}>", "exec"), names)
        self._call = names["call"]
        if self._gpu is not None:
            self._call = self._measuring(names["call"], on_gpu)
        return self

    def _measuring(self, call: Any, on_gpu: Mapping[str, LoadedKernel]) -> Any:
        """Return `call` with aligned inputs, which older releases of Inductor leave to the caller."""
        aligns = "copy_if_misaligned" not in self.kernels.source

        def run(inputs: list[Any]) -> Any:
            if aligns:
                inputs[:] = [aligned(value) if isinstance(value, torch.Tensor) else value for value in inputs]
            return call(inputs)

        def first(inputs: list[Any]) -> Any:
            results = run(inputs)
            found = {name: loaded.kernel for name, loaded in on_gpu.items()}
            if all(len(kernel.variants) == 1 for kernel in found.values()):
                self._call, self.kernels = steady, replace(self.kernels, on_gpu=found)
                self._rewrite(self.kernels)
            return results

        steady = run if aligns else call
        measured = all(len(loaded.kernel.variants) == 1 for loaded in on_gpu.values())
        return steady if measured else first


def _loaded(key: str, libraries: Mapping[str, bytes]) -> dict[str, Any]:
    """Load the functions of shared libraries."""
    os.environ[_POINTER] = str(data_pointer())
    found = {}
    with tempfile.TemporaryDirectory(prefix="graphshard-", ignore_cleanup_errors=True) as directory:
        for name, content in libraries.items():
            path = Path(directory) / f"{name}.so"
            path.write_bytes(content)
            full = f"graphshard_region_{key}.{name}.kernel"  # libraries initialize what the last part names
            loader = importlib.machinery.ExtensionFileLoader(full, str(path))
            module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(full, loader, origin=str(path)))
            loader.exec_module(module)
            found[name] = module.kernel
    return found


class Store:
    """Directory of regions, for processes in the same environment as this one; None keeps nothing."""

    def __init__(self, directory: Path | None) -> None:
        found = {
            "graphshard": own_files(),
            "torch": [str(torch.__version__), torch.version.git_version, sys.version],
            "processor": [vendor(), instruction_set()],
            "settings": settings(),
            "variables": variables(),
        }
        facts = json.dumps(found, sort_keys=True)
        if " at 0x" in facts:  # a function that the user gave to Inductor, which could be any other
            directory = None
        self._directory, self._environment = directory, _digest(facts)

    def has(self, device_type: str) -> bool:
        """Return whether any region on such a device was kept."""
        pattern = f"{self._environment}-{device_type}-*{_ENDING}"
        return self._directory is not None and any(self._directory.glob(pattern))

    def find(self, region: Region) -> KeptRegion | None:
        """Return a region's code; None if it was not kept."""
        path = self._path(region)
        if path is None or not path.exists():
            return None
        try:
            archive = read_private(path)
            members = archive.members
            libraries = {name: members[name] for name in archive.facts["libraries"]}
            on_gpu = {
                name: CubinKernel.of(facts, [members[f"{name}.{n}"] for n in range(len(facts["variants"]))])
                for name, facts in archive.facts["kernels"].items()
            }
            kernels, shown = Kernels(members["code"].decode(), libraries, on_gpu), members["shown"].decode()
            (device,) = _devices_of(region)
            gpu = None if device.type == "cpu" else device.index or 0
            found = KeptRegion(region.key, kernels, shown, gpu, lambda new: _write(path, region, new, shown)).load()
        except FileNotFoundError:  # another process has removed it
            return None
        except Exception as error:
            removed = remove(path)
            _warn(str(path.parent), f"{path.name}: {type(error).__name__}: {error}", removed=removed)
            return None
        touch(path)
        return found

    def keep(self, region: Region, kernels: Kernels | None, shown: str, *, again: bool = False) -> None:
        """Keep the code of a region, unless it is None; `shown` is all that was generated. `again` replaces it."""
        path = self._path(region)
        if path is not None and kernels is not None and (again or not path.exists()):
            _write(path, region, kernels, shown)

    def name(self, region: Region) -> str:
        """Return the name of a region's file, equal wherever its code would be; "" if it is not to be kept."""
        path = self._path(region)
        return "" if path is None else path.name

    def content(self, region: Region) -> bytes:
        """Return the file of a region, for another machine; empty if there is none."""
        path = self._path(region)
        return path.read_bytes() if path is not None and path.exists() else b""

    def receive(self, region: Region, content: bytes) -> KeptRegion | None:
        """Keep the file of another machine, and return its code; None if it cannot be written or used."""
        path = self._path(region)
        if path is None or not content:
            return None
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(path) as temporary:
                temporary.write_bytes(content)
        except OSError:
            return None
        return self.find(region)

    def shrink(self) -> None:
        """Remove the least recently used regions over the limit."""
        if self._directory is not None:
            remove_left_behind(self._directory, _ENDING)
            remove_oldest(self._directory.glob(f"*{_ENDING}"), LIMIT)

    def _path(self, region: Region) -> Path | None:
        devices = _devices_of(region)
        if self._directory is None or len(devices) != 1 or not all(map(_is_plain, region.module.graph.nodes)):
            return None
        (device,) = devices
        if device.type not in ("cpu", "cuda"):
            return None
        text = region.text if device.type == "cpu" else region.text + json.dumps(_gpu_facts(device))
        return self._directory / f"{self._environment}-{device.type}-{_digest(text)}{_ENDING}"


def _write(path: Path, region: Region, kernels: Kernels, shown: str) -> None:
    facts = {
        "torch": torch.__version__,
        "region": region.key,
        "libraries": list(kernels.libraries),
        "kernels": {name: kernel.facts() for name, kernel in kernels.on_gpu.items()},
    }
    cubins = {f"{name}.{n}": v.cubin for name, kernel in kernels.on_gpu.items() for n, v in enumerate(kernel.variants)}
    code = {"code": kernels.source.encode(), "shown": shown.encode()}
    with contextlib.suppress(OSError):  # Inductor's cache has it, if that can be written
        write_archive(path, facts, {**code, **kernels.libraries, **cubins})


def _gpu_facts(device: torch.device) -> list[str]:
    """Return what kernels depend on of a GPU and its compiler."""
    properties = torch.cuda.get_device_properties(device)
    read = ("name", "major", "minor", "multi_processor_count", "total_memory", "shared_memory_per_block_optin")
    triton = ""
    for package in ("triton", "pytorch-triton"):  # the second one comes with nightly builds of torch
        with contextlib.suppress(PackageNotFoundError):
            triton += f"{package} {version(package)}"
    return [*(str(getattr(properties, name, "")) for name in read), str(torch.version.cuda), triton]


def store_here() -> Store:
    """Return the store in Inductor's cache; one that keeps nothing if Inductor does not use its cache."""
    try:
        return Store(Path(inductor_cache(), "graphshard-regions") if keeps_code() else None)
    except OSError:
        return Store(None)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _devices_of(region: Region) -> set[torch.device]:
    values = (node.meta.get("val") for node in region.module.graph.nodes)
    return {value.device for value in values if isinstance(value, torch.Tensor)}


def _is_plain(node: Node) -> bool:
    """Return whether the region's text says all about a node, except the device."""
    value = node.meta.get("val")
    known = node.op in ("placeholder", "output") or (
        node.op == "call_function"
        and (node.target is operator.getitem or getattr(node.target, "namespace", "") in _TORCHS)
    )
    return known and not symbols_of(value)


@functools.cache
def _warn(directory: str, why: str, *, removed: bool) -> None:
    what = "It was removed, and is compiled again" if removed else "It cannot be removed: remove the directory"
    log.warning("a compiled region in %s cannot be used, %s. %s.", directory, why, what)
