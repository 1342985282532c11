"""Opaque calls run for real: what they keep, what they copy, and what they reject."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphshard.cost.costs import Costs
from graphshard.cost.profile import load_profile
from graphshard.errors import GraphBreak
from graphshard.ir.opaque_calls import OPAQUE_FORWARD, TENSOR, NotAffineError, OpaqueCall, call_of
from graphshard.ir.tensor_memory import Affine, TensorMeta
from graphshard.torch_compat.torch_ops import pytree

N = Affine(1, 0)


def _call(function: Any, *shapes: tuple[Any, ...], size: int = 0) -> OpaqueCall:
    sizes = [tuple(each if isinstance(each, Affine) else Affine(0, each) for each in shape) for shape in shapes]
    strides = [(*shape[1:], Affine(0, 1)) for shape in sizes]
    metas = [TensorMeta(s, t, torch.float32, torch.device("cpu"), True) for s, t in zip(sizes, strides)]
    structure = pytree.tree_structure(((0,) * len(shapes), {}))
    return OpaqueCall(function, "f", [TENSOR] * len(shapes), structure, metas, size, contextlib.nullcontext)


def test_gradients_and_what_is_kept() -> None:
    """Between forward and backward nothing of the inputs is kept, so a gathered parameter can be freed."""
    x, w = torch.randn(4, 3), torch.randn(1, 3)
    call = _call(lambda x, w: (x * w).tanh() * w, (4, 3), (1, 3))
    result, *inner, state = call.run([x, w], 0)
    assert sorted(source.kind for source in call.reads) == ["inner", "input", "input"]
    assert [each.shape for each in inner] == [(12,)]
    copies, memory = (x.clone(), w.clone()), [StorageWeakRef(each.untyped_storage()) for each in (x, w)]
    del x, w
    assert all(each.expired() for each in memory)
    leaves = [each.requires_grad_() for each in copies]
    expected = (leaves[0] * leaves[1]).tanh() * leaves[1]
    grads = torch.autograd.grad(expected.sum(), leaves)
    assert torch.equal(result, expected)
    values = {"input": [each.detach() for each in leaves], "inner": inner}
    reads = [values[source.kind][source.number] for source in call.reads]
    for _ in range(2):  # as with retain_graph=True
        found = call.run_backward(state, reads, [torch.ones(4, 3)], 0)
        assert all(map(torch.equal, found, grads))


def test_results_share_no_memory() -> None:
    """An input that is written to is copied, and its new value is a result; so is a result that is an input."""

    def write(x: Tensor, w: Tensor) -> Any:
        x.data.mul_(2)
        return w, x + w

    call = _call(write, (2, 3), (1, 3))
    x, w = torch.ones(2, 3), torch.ones(1, 3)
    same, result, written, *_ = call.run([x, w], 0)
    assert torch.equal(x, torch.ones(2, 3))
    assert torch.equal(written, 2 * x)
    assert torch.equal(result, torch.full((2, 3), 3.0))
    assert same.data_ptr() != w.data_ptr()


def test_seconds_are_measured() -> None:
    """Of forward and of backward, for each byte: a slow function costs more than its bytes say."""

    def slow(x: Tensor) -> Tensor:
        time.sleep(0.02)
        return x.sin()

    call = _call(slow, (8, 16))
    forward, backward = call.found.seconds
    assert 0 < backward < forward
    graph = torch.fx.Graph()
    given = graph.placeholder("x")
    given.meta["val"] = torch.empty(16, 16)
    node = graph.call_function(OPAQUE_FORWARD, (call.key, [given], 0))
    node.meta["val"] = [torch.empty(16, 16), torch.empty(0)]
    here, gpu = Costs(load_profile("cpu-gloo")), Costs(load_profile("h100"))
    assert 0.04 < here.compute([node]) < 1
    assert gpu.compute([node]) < 0.001


def test_a_dynamic_size() -> None:
    """Shapes are functions of the size; if they are not, the size is a number."""
    call = _call(lambda x: torch.cat([x, x[:2]]).sin(), (N, 3), size=4)
    assert call.found.results[0].shape == (Affine(1, 2), Affine(0, 3))
    assert [each.shape for each in call.fake_results(7)][:1] == [(9, 3)]
    with pytest.raises(NotAffineError):
        _call(lambda x: x @ x.t().contiguous() @ x.new_ones(len(x), len(x) ** 2), (N, 3), size=4)


def _all_positive(x: Tensor) -> Tensor:
    return x[x > 0]


def test_rejects_other_results_than_those_of_the_first_run() -> None:
    call = _call(_all_positive, (4, 3))
    with pytest.raises(RuntimeError, match=r"f returns or keeps .*when its call was captured.*register_fake"):
        call.run([-torch.ones(4, 3)], 0)


def test_rejects_calls_that_it_does_not_know() -> None:
    """Such as those of a program from another process."""
    with pytest.raises(RuntimeError, match="was captured in another process"):
        call_of("unknown")
    with pytest.raises(GraphBreak, match=r"It is given no tensor\."):
        _call(lambda: None)
    with pytest.raises(GraphBreak, match=r"It writes to an input, with gradients\. Return the new value"):
        _call(lambda x: x.mul_(2), (2, 3))
