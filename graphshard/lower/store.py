"""Code that Inductor made for regions, kept in the directory of its cache, so that other processes generate none.

    graphshard-regions/3f0c....-81aa....region      what the code depends on besides the region, and the region's text

Inductor's own cache is asked with a graph in its decompositions. To trace and to hash that takes most of the time that
is left of compiling, and imports all of Inductor. Here a region is looked up by the text that it is cut out with.

What is not Inductor's own code for the CPU, has dynamic sizes, or calls operators that are not torch's is not kept:
what they are decomposed into may be another tomorrow, and the text does not say so. Files are checked when they are
read. Those that are damaged are removed, and made again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import operator
import sys
from pathlib import Path

import torch
from torch.fx import Node

from graphshard.ir.checked_files import read, remove, remove_left_behind, remove_oldest, touch, write
from graphshard.ir.program import Region
from graphshard.ir.sizes import symbols_of
from graphshard.lower.libraries import KeptRegion, Kernels
from graphshard.torch_compat.inductor_settings import inductor_cache, keeps_code
from graphshard.utils.environment_fingerprint import instruction_set, own_files, settings, variables, vendor

log = logging.getLogger(__name__)

# Bytes that the directory may have; a region has about 0.1 MB for each kernel.
LIMIT = 1 << 30
_ENDING = ".region"
_TORCHS = ("aten", "prims")


class Store:
    """The directory of regions, for processes whose surroundings are what they are here now.

    Args:
        directory: it need not be there; None keeps nothing.
    """

    def __init__(self, directory: Path | None) -> None:
        facts = _facts()
        if " at 0x" in facts:  # a function that somebody gave to Inductor, which could be any other
            directory = None
        self._directory, self._surroundings = directory, _digest(facts)

    def __bool__(self) -> bool:
        """Whether any region was kept."""
        return self._directory is not None and any(self._directory.glob(f"{self._surroundings}-*{_ENDING}"))

    def find(self, region: Region) -> KeptRegion | None:
        """The code of a region; None if it was not kept."""
        path = self._path(region)
        if path is None or not path.exists():
            return None
        try:
            facts, members = read(path)
            libraries = {name: members[name] for name in facts["libraries"]}
            found = KeptRegion(region.key, Kernels(members["code"].decode(), libraries), members["shown"].decode())
        except FileNotFoundError:  # another process has removed it
            return None
        except Exception as error:
            removed = remove(path)
            _warn(str(path.parent), f"{path.name}: {type(error).__name__}: {error}", removed=removed)
            return None
        touch(path)
        return found

    def keep(self, region: Region, kernels: Kernels | None, shown: str) -> None:
        """Keep the code of a region.

        Args:
            kernels: None is not kept.
            shown: all that was generated.
        """
        path = self._path(region)
        if path is None or kernels is None or path.exists():
            return
        facts = {"torch": torch.__version__, "region": region.key, "libraries": list(kernels.libraries)}
        code = {"code": kernels.source.encode(), "shown": shown.encode()}
        with contextlib.suppress(OSError):  # Inductor's cache has it, if that can be written
            write(path, facts, {**code, **kernels.libraries})

    def shrink(self) -> None:
        """Remove what was used longest ago, if there is too much."""
        if self._directory is not None:
            remove_left_behind(self._directory, _ENDING)
            remove_oldest(self._directory.glob(f"*{_ENDING}"), LIMIT)

    def _path(self, region: Region) -> Path | None:
        if self._directory is None or not _depends_on_text_alone(region):
            return None
        return self._directory / f"{self._surroundings}-{_digest(region.text)}{_ENDING}"


def store_here() -> Store:
    """The one in Inductor's cache, if Inductor uses that."""
    try:
        return Store(Path(inductor_cache(), "graphshard-regions") if keeps_code() else None)
    except OSError:
        return Store(None)


def _facts() -> str:
    found = {
        "graphshard": own_files(),
        "torch": [str(torch.__version__), torch.version.git_version, sys.version],
        "processor": [vendor(), instruction_set()],
        "settings": settings(),
        "variables": variables(),
    }
    return json.dumps(found, sort_keys=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _depends_on_text_alone(region: Region) -> bool:
    return all(map(_is_plain, region.module.graph.nodes))


def _is_plain(node: Node) -> bool:
    value = node.meta.get("val")
    on_cpu = not isinstance(value, torch.Tensor) or value.device.type == "cpu"
    known = node.op in ("placeholder", "output") or (
        node.op == "call_function"
        and (node.target is operator.getitem or getattr(node.target, "namespace", "") in _TORCHS)
    )
    return on_cpu and known and not symbols_of(value)


@functools.cache
def _warn(directory: str, why: str, *, removed: bool) -> None:
    what = "It was removed, and is compiled again" if removed else "It cannot be removed: remove the directory"
    log.warning("a compiled region in %s cannot be used, %s. %s.", directory, why, what)
