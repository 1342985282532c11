"""Settings of Inductor, its cache and its packages, without an import of the compiler itself, which takes seconds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor import cpu_vec_isa
from torch._inductor.cpu_vec_isa import VecISA
from torch._inductor.runtime.cache_dir_utils import cache_dir as inductor_cache


def changed_settings(modules: Sequence[Any] = (functorch_config, inductor_config)) -> dict[str, str]:
    """Return the settings, of AOTAutograd and Inductor or of other modules, that differ from their defaults."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of deprecated settings
        for module in modules:
            for name, entry in module._config.items():
                value = entry.default if entry.alias is not None else getattr(module, name)
                if value is not entry.default and value != entry.default:
                    found[f"{module.__name__}.{name}"] = repr(value)
    return dict(sorted(found.items()))


def keeps_code() -> bool:
    """Return whether Inductor caches the code that it generates, and is not asked to trace how."""
    settings: Any = inductor_config
    return bool(settings.fx_graph_cache and not settings.force_disable_caches and not settings.trace.enabled)


def data_pointer() -> Any:
    """Return the function that Inductor's C++ kernels read the address of a tensor with."""
    return torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
