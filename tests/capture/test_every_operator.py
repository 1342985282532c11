"""Each operator that torch has samples for, forward and backward: the bits of eager mode, or an error of graphshard's.

What an operator makes of equal random numbers, what it leaves of the generator, and whether a result requires a
gradient are compared, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import graphshard
from graphshard.ir.errors import GraphshardError

PARTS = 8
# Results that nobody has written to.
UNWRITTEN = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
# Of gradients, the last bits, as docs/supported.md says.
ROUNDED = {"prod", "ormqr"}


class _Net(nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))  # that nothing reads: a model has parameters
        self.op = op

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)


def _copied(given: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), given)


def _run(model: nn.Module, sample: Any) -> tuple[list[Any], list[Tensor], list[Tensor | None], Tensor]:
    """Leaves of the result, its tensors among them, gradients of the inputs, and what is drawn next."""
    args, kwargs = _copied(((sample.input, *sample.args), sample.kwargs))
    torch.manual_seed(0)
    leaves = pytree.tree_leaves(model(*args, **kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
    sums = [(t.abs() if t.is_complex() else t).double().sum() for t in tensors if t.requires_grad]
    grads = torch.autograd.grad(sum(sums), given, allow_unused=True) if given and sums else ()  # type: ignore[call-overload]
    return [leaf for leaf in leaves if not isinstance(leaf, Tensor)], tensors, list(grads), torch.rand(3)


def _same(one: Tensor | None, other: Tensor | None, error: float = 0.0) -> bool:
    """Whether both have the same bits, or are as close; a gradient that is None counts as zeros."""
    if one is None or other is None:
        return all(not each.count_nonzero() for each in (one, other) if each is not None)
    if one.shape != other.shape or one.dtype != other.dtype or one.requires_grad != other.requires_grad:
        return False
    if one.layout is not torch.strided:
        return one.layout is other.layout and _same(one.to_dense(), other.to_dense(), error)
    one, other = (torch.view_as_real(each.resolve_conj()) if each.is_complex() else each for each in (one, other))
    return torch.equal(one, other) or torch.allclose(one, other, rtol=error, atol=error, equal_nan=True)


def _differences(op: Any, samples: Iterator[Any], mesh: DeviceMesh) -> Iterator[str]:
    for number, sample in enumerate(samples):
        try:
            others, tensors, grads, after = _run(_Net(op.op), sample)
        except Exception:
            continue  # samples of errors, and of what has no backward
        model = graphshard.compile(_Net(op.op), mesh, backend="eager", units=[])
        try:
            found = _run(model, sample)
        except GraphshardError:
            continue
        error = 1e-5 if op.name in ROUNDED else 0.0
        what = {
            "numbers": str(found[0]) == str(others),
            "tensors": len(found[1]) == len(tensors) and all(map(_same, found[1], tensors)),
            "gradients": len(found[2]) == len(grads) and all(_same(*pair, error) for pair in zip(found[2], grads)),
            "what is drawn next": _same(found[3], after),
        }
        yield from (f"{op.formatted_name}, sample {number}: {name}" for name, equal in what.items() if not equal)


def _compared(mesh: DeviceMesh, part: int, samples_each: int) -> None:
    differences = []
    # Torch's wrapper seeds in forward, which is for users an error.
    unseeded = mock.patch.object(common_methods_invocations, "wrapper_set_seed", lambda op, *a, **k: op(*a, **k))
    with unseeded:
        for op in op_db[part::PARTS]:
            dtype = torch.float32 if torch.float32 in op.dtypes else next(iter(sorted(op.dtypes, key=str)), None)
            if dtype is None or op.name in UNWRITTEN:
                continue
            samples = op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd and dtype.is_floating_point)
            differences += _differences(op, itertools.islice(samples, samples_each), mesh)
    assert differences == []


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.filterwarnings("ignore")
def test_the_first_sample(mesh: DeviceMesh, part: int) -> None:
    _compared(mesh, part, 1)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.filterwarnings("ignore")
def test_more_samples(mesh: DeviceMesh, part: int) -> None:
    _compared(mesh, part, 6)
