"""Settings of torch that forward asks for, or that attention goes by: a program holds while they are what they were.

    torch.are_deterministic_algorithms_enabled()        asked by code of the user's
    F.scaled_dot_product_attention(q, k, v)             chooses a kernel by `torch.nn.attention.sdpa_kernel`

    torch.use_deterministic_algorithms(True)            an error that names the line
    torch.set_grad_enabled(False)                       an error at the end of forward, if nothing takes it back

What is in the signature of a call is not among them: gradients and autocast. Torch's own code may ask for others, and
what it makes of them is equal up to rounding.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from graphshard.capture.outside import asks, exchanged, namespaces_of, refusing
from graphshard.capture.parametrizations import are_remembered
from graphshard.capture.untraceable import Located, Untraceable
from graphshard.ir.classes import users_class
from graphshard.ir.state import MISSING

_ATTENTION = "the kernels of attention"
_REMEMBERED = "torch.nn.utils.parametrize.cached"
_CUDA = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")
_TORCH = (
    *("get_num_threads", "get_num_interop_threads", "get_default_dtype", "get_default_device"),
    *("are_deterministic_algorithms_enabled", "is_deterministic_algorithms_warn_only_enabled"),
    *("get_deterministic_debug_mode", "get_float32_matmul_precision", "is_autocast_cache_enabled"),
    "is_warn_always_enabled",
)
_SETTERS = (
    *("set_num_threads", "set_num_interop_threads", "set_default_dtype", "set_default_device"),
    *("use_deterministic_algorithms", "set_deterministic_debug_mode", "set_float32_matmul_precision"),
    "set_warn_always",
)


def _attention() -> str:
    """The kernels that may be chosen, the first choice first."""
    allowed = [name.removesuffix("_sdp_enabled") for name in _CUDA if getattr(torch.backends.cuda, name)()]
    return f"{', '.join(allowed)} in the order {torch._C._get_sdp_priority_order()}"


# What tells a setting, by its name.
SETTINGS: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {
        **{f"torch.{name}": getattr(torch, name) for name in _TORCH},
        **{f"torch.backends.cuda.{name}": getattr(torch.backends.cuda, name) for name in _CUDA},
        "torch.backends.mha.get_fastpath_enabled": torch.backends.mha.get_fastpath_enabled,
        _ATTENTION: _attention,
        _REMEMBERED: are_remembered,
    }
)


def setting(name: str, _: Any = MISSING) -> Any:
    """What a setting is now."""
    return SETTINGS[name]()


@contextlib.contextmanager
def watched_settings(module: nn.Module, note: Callable[[str, Any], None]) -> Iterator[None]:
    """In the block `note` is told the names of settings that forward depends on, and their values.

    Raises, in the block:
        Untraceable: code of the user's sets one.
    """

    def noting(name: str) -> Callable[[], Any]:
        @functools.wraps(SETTINGS[name])
        def ask() -> Any:
            value = setting(name)
            if asks(namespaces):
                note(name, value)
            return value

        return ask

    if any(map(is_parametrized, module.modules())):
        note(_REMEMBERED, are_remembered())
    namespaces = [vars(torch), vars(torch.backends.cuda), vars(torch.backends.mha)]
    others: dict[int, Callable[..., Any]] = {id(function): noting(name) for name, function in SETTINGS.items()}
    for name in _SETTERS:
        function = getattr(torch, name)
        others[id(function)] = refusing(namespaces, function, lambda name: Untraceable("setting", f"torch.{name}"))
    with exchanged(others, [*namespaces, *namespaces_of(module)]), _Attention(note):
        yield


@contextlib.contextmanager
def modes_stay(module: nn.Module) -> Iterator[None]:
    """In the block, forward may switch gradients and autocast, and has them at its end as they were.

    Raises, at its end:
        Located: it has not.
    """
    device_types = ("cpu", "cuda")

    def now() -> dict[str, bool]:
        autocast = {f"autocast of {kind}": torch.is_autocast_enabled(kind) for kind in device_types}
        return {"gradients": torch.is_grad_enabled(), **autocast}

    before = now()
    yield
    changed = [f"{name} {'on' if on else 'off'}" for name, on in now().items() if on != before[name]]
    if changed:
        torch.set_grad_enabled(before["gradients"])
        for kind in device_types:
            torch.set_autocast_enabled(kind, before[f"autocast of {kind}"])
        raise Located(
            f"graphshard cannot capture {users_class(module).__name__}.forward: it leaves {' and '.join(changed)}, "
            "which only the capture would. Switch in a block, as with torch.no_grad(): ..., or outside of the call."
        )


class _Attention(TorchFunctionMode):
    """Sees where attention chooses its kernel, in torch's layers, too."""

    def __init__(self, note: Callable[[str, Any], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self._note(_ATTENTION, _attention())
        return func(*args, **(kwargs or {}))
