"""Seeds that forward sets: a program draws from torch's generators in order, and sets none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from graphshard.capture.outside import exchanged, namespaces_of, refusing
from graphshard.capture.untraceable import Untraceable
from graphshard.ir.torch_internals import without_dispatch_modes

_MODULES = (torch.random, torch.cuda.random, torch.cuda, torch)
_NAMES = (
    *("manual_seed", "manual_seed_all", "seed", "seed_all", "initial_seed", "fork_rng"),
    *("get_rng_state", "get_rng_state_all", "set_rng_state", "set_rng_state_all"),
)


@contextlib.contextmanager
def no_seeds(module: nn.Module) -> Iterator[None]:
    """In the block, code of the user's that reads or sets the state of torch's generators is an error.

    Raises, in the block or at its end:
        Untraceable: names the function, or says that the state has changed.
    """
    namespaces = [vars(owner) for owner in _MODULES]
    functions = [namespace[name] for namespace in namespaces for name in _NAMES if name in namespace]
    refused = {
        id(function): refusing(namespaces, function, lambda name: Untraceable("seed", f"torch.{name}"))
        for function in functions
    }
    before = _state()
    with exchanged(refused, [*namespaces, *namespaces_of(module)]):
        yield
    if _state() != before:  # by a method of the generator
        raise Untraceable("seed", "torch.default_generator is in another state than before")


def _state() -> bytes:
    with without_dispatch_modes():
        return torch.default_generator.get_state().numpy().tobytes()
