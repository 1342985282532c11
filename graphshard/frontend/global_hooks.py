"""Hooks of all modules that torch sets to count, such as CommDebugMode's: they run around the model, and not in it.

Those of the user's are traced and guarded by Dynamo.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch.nn.modules import module as modules

from graphshard.frontend.graph_breaks import is_users

# What `register_module_forward_hook` and its like fill.
_HOOKS: tuple[dict[int, Any], ...] = (
    modules._global_forward_pre_hooks,
    modules._global_forward_hooks,
    modules._global_backward_pre_hooks,
    modules._global_backward_hooks,
)
_NONE: AbstractContextManager[None] = contextlib.nullcontext()


def without_torchs_hooks() -> AbstractContextManager[None]:
    """Set torch's own hooks of all modules aside in the block, which traces or looks at guards."""
    return _set_aside() if any(_HOOKS) else _NONE


@contextlib.contextmanager
def _set_aside() -> Iterator[None]:
    kept = [(hooks, dict(hooks)) for hooks in _HOOKS]
    for hooks, content in kept:
        hooks.clear()
        hooks.update({key: hook for key, hook in content.items() if _is_users_hook(hook)})
    try:
        yield
    finally:
        for hooks, content in kept:
            hooks.clear()
            hooks.update(content)


def _is_users_hook(hook: Any) -> bool:
    function = getattr(hook, "__func__", hook)
    code = getattr(function, "__code__", getattr(type(hook).__call__, "__code__", None))
    return code is None or is_users(code.co_filename)
