"""Memory allocated inside a region."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from graphshard.cost.workspace import workspace


def of(fn, *inputs, fused, block=1):
    """Return the workspace of a function's graph."""
    return workspace(list(make_fx(fn, tracing_mode="fake")(*inputs).graph.nodes), fused=fused, block=block)


def test_a_chain():
    """Fused, only the result is written; as separate operators each writes a result, and the last one is then freed."""
    x = torch.zeros(100)
    assert of(lambda x: x.exp().sin().cos(), x, fused=True) == 0
    assert of(lambda x: x.exp().sin().cos(), x, fused=False) == 2 * 400 - 400
    assert of(lambda x: x.exp().sin().cos().sum(), x, fused=False) == 2 * 400 - 4


def test_inputs_owned_by_the_region():
    """Their memory is reusable after their last use, but not by their reader, and not if they are returned."""

    def inside(fn, *, fused):
        nodes = list(make_fx(fn, tracing_mode="fake")(torch.zeros(100), torch.zeros(1000)).graph.nodes)
        return workspace(nodes, fused=fused, freed=[node for node in nodes if node.op == "placeholder"][1:])

    def square(x):
        return (x.view(100, 1) @ x.view(1, 100)) @ x

    for fused in (True, False):
        assert inside(lambda x, y: (y.sum(), square(x)), fused=fused) == 40000 - 4000
        assert inside(lambda x, y: (square(x), y.sum()), fused=fused) == 40000 - 4, "the sum is made behind the peak"
        assert inside(lambda x, y: (y.view(10, 100), square(x)), fused=fused) == 40000


def test_between_products():
    """A matmul result that another matmul reads is alive inside; returned values count outside."""
    x, w = torch.zeros(8, 16), torch.zeros(16, 16)
    assert of(lambda x, w: x @ w, x, w, fused=True) == 0
    assert of(lambda x, w: (x @ w) @ w[:, :1], x, w, fused=True) == 8 * 16 * 4
    assert of(lambda x, w: (x @ w).relu(), x, w, fused=True) == 0, "relu writes in place of what it reads"
    assert of(lambda x, w: (x @ w).relu(), x, w, fused=False) == 8 * 16 * 4
    assert of(lambda x: x.exp().sin(), torch.zeros(3), fused=False, block=512) == 512


def test_logits_in_float32():
    """The loss's float32 logits and their logarithms dominate an eager step; fused they do not exist."""
    logits, targets = torch.zeros(64, 1000, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.long)

    def loss(logits, targets):
        return F.cross_entropy(logits.float(), targets)

    wide = 64 * 1000 * 4
    assert 1.99 * wide < of(loss, logits, targets, fused=False) < 2.1 * wide
    assert of(loss, logits, targets, fused=True) < 0.1 * wide


def test_an_undeclared_view_takes_no_memory():
    """Its schema does not declare the alias. Read by two kernels, and returned, it exists once."""
    x, w = torch.zeros(8, 16), torch.zeros(16, 16)

    def seen(x, w):
        product = torch.ops.aten._unsafe_view(x @ w, [2, 4, 16])
        return product, product.view(8, 16) @ w, product.sin()

    def gated(x, w):
        product = torch.ops.aten._unsafe_view(x @ w, [2, 4, 16])
        return product.view(8, 16) @ w, product.sin()

    for fused in (True, False):
        assert of(seen, x, w, fused=fused) == 0
    assert of(gated, x, w, fused=True) == 0, "the sine is written in place of it"
    assert of(gated, x, w, fused=False) == 8 * 16 * 4
