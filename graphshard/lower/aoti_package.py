"""Packages of compiled regions: AOTInductor's output, checked and called.

A package is a zip, a `.pt2` with one shared library. Its members are checked before AOTInductor's loader unpacks it and
loads the library. The loader is C++ in torch itself: nothing of Inductor is imported.
"""

from __future__ import annotations

import re
import tempfile
import zipfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from graphshard.errors import ArtifactError
from graphshard.torch_compat.inductor_settings import load_package

_FIXED = frozenset({"archive_format", "archive_version", ".data/version", "byteorder", ".data/serialization_id"})
# Sources are for reading; the library is what runs.
_FILE = re.compile(r"data/aotinductor/model/[\w-]+(\.[\w-]+)*\.(so|cpp|json|cubin)")


@dataclass(frozen=True)
class Package:
    """A region compiled for another process: AOTInductor's package, or why there is none.

    `codes` has `graphshard.cross.gpu_kernels.GpuCode` for each kind of GPU that it was compiled for.
    """

    content: bytes = b""
    problem: str = ""
    codes: tuple[Any, ...] = ()

    @property
    def source_code(self) -> str:
        """Code for GPUs, for people."""
        return "\n".join(code.text for code in self.codes)

    def __call__(self, inputs: list[Any]) -> Any:
        raise AssertionError("a package is compiled for another process")


class PackagedRegion:
    """A region of a package; the library is loaded at the first call, and frees inputs as they are used up."""

    # AOTInductor's container asks for the event that it has recorded at the end of each call.
    can_be_captured = False

    def __init__(self, key: str, content: bytes, device: torch.device) -> None:
        self._key, self._content, self._device = key, content, device
        self._run: Any = None

    def __call__(self, inputs: list[Any]) -> Any:
        self.load()
        values = [value for value in inputs if isinstance(value, torch.Tensor)]  # it reads dynamic sizes off them
        inputs.clear()
        return self._run(values)

    def load(self) -> None:
        """Load the library; raise ArtifactError if the dynamic loader refuses it."""
        if self._run is not None:
            return
        with tempfile.TemporaryDirectory(prefix="graphshard-") as directory:
            path = Path(directory) / "region.pt2"
            path.write_bytes(self._content)
            try:
                self._run = load_package(path, self._device)
            except RuntimeError as error:
                raise ArtifactError(
                    f"the compiled region {self._key} cannot be loaded here: {str(error).splitlines()[0]}. It needs "
                    "the C++ and OpenMP runtime libraries of the machine that compiled it (libstdc++, libgomp): "
                    "install them, or export again on this machine."
                ) from error
        self._content = b""


def check_package(name: str, content: bytes) -> None:
    """Raise ArtifactError if this is not a package of one library; nothing is executed or extracted."""
    try:
        with zipfile.ZipFile(BytesIO(content)) as archive:
            names = [info.filename for info in archive.infolist()]
            sizes = sum(info.file_size for info in archive.infolist())
            stored = all(info.compress_type == zipfile.ZIP_STORED for info in archive.infolist())
    except Exception as error:  # what zipfile says of damaged input is of many kinds
        raise ArtifactError(f"{name} is not a package: {type(error).__name__}: {error}. It is not loaded.") from None
    roots = {entry.partition("/")[0] for entry in names}
    inner = [entry.partition("/")[2] for entry in names]
    odd = [entry for entry in inner if entry not in _FIXED and not _FILE.fullmatch(entry)]
    if odd or len(roots) != 1 or len(set(names)) != len(names):
        shown = odd[0] if odd else ", ".join(sorted(names)[:4])
        raise ArtifactError(f"{name} has a member {shown!r}, which no package of a region has. It is not loaded.")
    libraries = [entry for entry in inner if entry.endswith(".so")]
    if len(libraries) != 1 or not stored or sizes > len(content):
        raise ArtifactError(f"{name} is no package of one library, as regions are. It is not loaded.")
