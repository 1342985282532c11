"""One capture per program: the first rank of a run captures, the others read what it captured from JSON.

The program is the same on all ranks by design, and capturing it takes most of the time of a small test. So the others
test, too, that nothing of a program is lost on the way through JSON. Where the design is what is tested (ranks that
differ), a run says `share=False`.

    rank 0                              rank 1
    capture, set "Net ... 0: begun"     wait for "begun", a moment; capture alone if it does not come
    set "Net ... 0" to the program      wait for the program; capture alone if it cannot be read from JSON
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from graphshard.capture.capture import CaptureSpec, capture
from graphshard.codec.stage import program_from_json, program_to_json
from graphshard.ir.program import Program

# How long the first rank may be behind: it verifies, and comes a little later.
MOMENT = timedelta(seconds=2)
PLAIN = frozenset({None, list, tuple, dict})
NOTHING = b""


@contextlib.contextmanager
def shared_captures(store: dist.Store, rank: int) -> Iterator[None]:
    """Within the block programs that `compile` makes are captured by rank 0."""
    store = dist.PrefixStore("captures", store)
    seen: Counter[str] = Counter()

    def capture_once(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], spec: CaptureSpec, *, grad: bool
    ) -> Program:
        if spec.tensor is not None and any(spec.tensor.get_coordinate() or ()):
            return capture(module, args, kwargs, spec, grad=grad)  # the program is that of a place on this axis
        call = _call(module, args, kwargs, spec, grad)
        key = f"{call}-{seen[call]}"
        seen[call] += 1
        if rank == 0:
            store.set(f"{key}: begun", NOTHING)
            text = NOTHING
            try:
                program = capture(module, args, kwargs, spec, grad=grad)
                text = program_to_json(program).encode() if _in_full(program) else NOTHING
                return program
            finally:
                store.set(key, text)
        try:
            store.wait([f"{key}: begun"], MOMENT)
        except RuntimeError:
            return capture(module, args, kwargs, spec, grad=grad)
        text = store.get(key)
        return program_from_json(text.decode()) if text else capture(module, args, kwargs, spec, grad=grad)

    with mock.patch("graphshard.module.tracer.capture", capture_once):
        yield


def _call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], spec: CaptureSpec, grad: bool) -> str:
    """A name for what is captured that is the same on all ranks that capture the same."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    told = [(leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    modes = [sub.training for sub in module.modules()]
    text = repr((type(module), str(structure), told, modes, grad, spec.params, spec.units, spec.method))
    return hashlib.sha256(text.encode()).hexdigest()


def _in_full(program: Program) -> bool:
    """Whether JSON holds all of it.

    Values of constants, conditions on sizes, classes of outputs and groups of the model's own are not in it.
    """
    kinds = {spec.type for spec in _specs(program.out_spec)}
    own = any(axis.role == "inner" for axis in program.mesh.axes)
    return not (program.constants or program.sizes or own) and kinds <= PLAIN


def _specs(spec: pytree.TreeSpec) -> Iterator[pytree.TreeSpec]:
    yield spec
    for child in spec.children():
        yield from _specs(child)
