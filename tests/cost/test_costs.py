"""Cost model: FLOPs and bytes of operators, times of kernels and collectives, and profile files."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim
from torch.utils.flop_counter import FlopCounterMode

from graphshard.cost.costs import Costs, joined_updates
from graphshard.cost.flops import Attention, Gemm, flop_of
from graphshard.cost.kernels import Work, work_of
from graphshard.cost.profile import Profile, builtin_profiles, load_profile
from graphshard.errors import ArgumentError
from graphshard.ir.mesh import Axis, Mesh
from graphshard.ir.sizes import is_size
from tests.helpers import Blocks, captured

H100 = load_profile("h100")


def work_in(fn, *inputs):
    """Return the kernels of a function's graph."""
    graph = torch.fx.experimental.proxy_tensor.make_fx(fn, tracing_mode="fake")(*inputs).graph
    return work_of(list(graph.nodes))


def flops_in(fn, *inputs):
    """Return graphshard's FLOP count and torch's."""
    graph = torch.fx.experimental.proxy_tensor.make_fx(fn, tracing_mode="fake")(*inputs).graph
    with FlopCounterMode(display=False) as counter:
        fn(*inputs)
    return sum(flop_of(graph.nodes).values()), counter.get_total_flops()


# FLOPs and bytes


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (torch.mm, [(3, 5), (5, 7)]),
        (torch.addmm, [(7,), (3, 5), (5, 7)]),
        (torch.bmm, [(2, 3, 5), (2, 5, 7)]),
        (torch.baddbmm, [(2, 3, 7), (2, 3, 5), (2, 5, 7)]),
        (lambda x, w: F.conv2d(x, w, padding=1), [(2, 6, 8, 8), (4, 6, 3, 3)]),
        (lambda x, w: F.conv2d(x, w, groups=2), [(2, 6, 8, 8), (4, 3, 3, 3)]),
        (lambda x, w: F.conv_transpose2d(x, w, stride=2), [(2, 6, 8, 8), (6, 4, 3, 3)]),
    ],
)
def test_flops_match_torch(fn, shapes):
    """Where torch counts correctly, both agree: a multiply-add is two."""
    ours, theirs = flops_in(fn, *(torch.randn(shape) for shape in shapes))
    assert ours == theirs > 0


def test_flops_of_backward():
    """A convolution's two gradients have twice the multiplications of its forward."""
    x, w = torch.randn(2, 6, 8, 8, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=True)

    def step(x, w):
        return torch.autograd.grad(F.conv2d(x, w, groups=2).sum(), (x, w))

    forward = 2 * 2 * 6 * 6 * w.numel()
    ours, theirs = flops_in(step, x, w)
    assert ours == 3 * forward
    assert theirs > ours  # torch ignores groups in the gradient of the weight


@pytest.mark.parametrize(("causal", "share"), [(False, 1), (True, 0.5)])
def test_flops_of_attention(causal, share):
    """Two multiplications per pair in forward and five in backward; causal attention skips half of the pairs."""
    q, k = torch.randn(2, 4, 16, 8, requires_grad=True), torch.randn(2, 4, 24, 8, requires_grad=True)
    v = torch.randn(2, 4, 24, 8, requires_grad=True)

    def step(q, k, v):
        return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=causal).sum(), (q, k, v))

    ours, _ = flops_in(step, q, k, v)
    pair = 2 * 2 * 4 * 16 * 24 * 8
    assert ours == 7 * pair * share


def test_pointwise_chain_is_one_kernel():
    """A chain reads its inputs once and writes its result once, whatever is in between."""
    x, y = torch.randn(64, 32), torch.randn(32)
    (work,) = work_in(lambda x, y: ((x * y).relu() + y).exp(), x, y)
    assert work.num_bytes == (64 * 32 + 32 + 64 * 32) * 4
    assert work.operations == 4 * 64 * 32
    assert work.flop == 0


def test_operators_that_run_one_by_one():
    """Each reads its inputs, writes its result, and is launched separately; matmuls cost the same."""
    x, y, w = torch.randn(64, 32), torch.randn(32), torch.randn(32, 32)
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x, y, w: (((x * y).relu() + 1) @ w).exp().view(-1))(
        x, y, w
    ).graph
    together, apart = (work_of(list(graph.nodes), fused=fused) for fused in (True, False))
    one = 64 * 32 * 4
    assert [work.num_bytes for work in apart] == [2 * one + 32 * 4, 2 * one, 2 * one, 2 * one + 32 * 32 * 4, 2 * one]
    assert sum(work.operations for work in apart) == sum(work.operations for work in together)
    assert [work for work in apart if work.gemms] == [work for work in together if work.gemms]
    device = dataclasses.replace(H100, host_seconds={"eager": 0.0, "compiled": 0.0})
    fused, eager = (Costs(device, fused=fused).compute(list(graph.nodes)) for fused in (True, False))
    moved = sum(work.num_bytes for work in apart) - sum(work.num_bytes for work in together)
    assert eager - fused == pytest.approx(2 * H100.kernel_seconds + moved / H100.memory_bandwidth)


def test_dynamic_sizes_cost_nothing():
    """Numbers computed from sizes are not kernels."""
    static, dynamic = (
        captured(Blocks(2), (torch.zeros(6, 3, 4),), dynamic_shapes=shapes) for shapes in (None, ({0: Dim.AUTO},))
    )
    assert dynamic.sizes
    assert any(is_size(node) and node.op == "call_function" for node in dynamic.phases["joint"].module.graph.nodes)
    seconds = [Costs(H100).compute(list(p.phases["joint"].module.graph.nodes)) for p in (static, dynamic)]
    assert seconds[0] == seconds[1]


def test_multiplications_split_chains():
    """Operators before a matmul cannot be fused with operators after it."""
    x, w = torch.randn(64, 32), torch.randn(32, 32)
    works = work_in(lambda x, w: (x.exp() @ w).relu() + x.sin().cos(), x, w)
    assert [work.kind for work in works] == ["pointwise", "matmul", "pointwise"]
    assert works[0].num_bytes == 2 * 64 * 32 * 4
    # sin and cos are fused with the user of their result.
    assert works[2].num_bytes == 3 * 64 * 32 * 4
    assert works[2].operations == 4 * 64 * 32
    assert works[1] == Work(
        "matmul", 2 * 64 * 32 * 32, 0, (64 * 32 * 2 + 32 * 32) * 4, "float32", (Gemm(1, 64, 32, 32),)
    )


def test_views_and_indexing_cost_their_elements():
    """An expanded input is read once; an embedding reads rows, not its table; a slice only its elements."""
    table, index = torch.randn(1000, 16), torch.zeros(8, dtype=torch.long)
    (work,) = work_in(lambda table, index: F.embedding(index, table) * 2, table, index)
    assert work.num_bytes == 8 * 8 + 2 * 8 * 16 * 4
    row = torch.randn(1, 16)
    (work,) = work_in(lambda row: row.expand(100, 16) * 2, row)
    assert work.num_bytes == 16 * 4 + 100 * 16 * 4
    (work,) = work_in(lambda table: table[:10] * 2, table)
    assert work.num_bytes == 2 * 10 * 16 * 4


def test_like_functions_read_nothing():
    """Zeros in the shape of a tensor do not read the tensor."""
    x, y = torch.randn(64, 32), torch.randn(8)
    graph = torch.fx.experimental.proxy_tensor.make_fx(
        lambda x, y: (torch.zeros_like(x), x.new_zeros(16), torch.full_like(y, 2.0), x.new_ones(4))
    )(x, y).graph
    one_by_one = work_of(list(graph.nodes), fused=False)
    assert [work.num_bytes for work in one_by_one] == [64 * 32 * 4, 16 * 4, 8 * 4, 4 * 4]
    (work,) = work_in(lambda x: torch.zeros_like(x) + 1, x)
    assert work.num_bytes == 64 * 32 * 4


def test_an_undeclared_view_is_not_a_kernel():
    """Matmuls of three dimensions end in one."""
    x, w = torch.randn(2, 32, 16), torch.randn(16, 16)
    graph = torch.fx.experimental.proxy_tensor.make_fx(
        lambda x, w: torch.ops.aten._unsafe_view(x.view(64, 16) @ w, (2, 32, 16)).transpose(0, 1)
    )(x, w).graph
    for fused in (True, False):
        (work,) = work_of(list(graph.nodes), fused=fused)
        assert work.kind == "matmul"
        assert work.num_bytes == (2 * 64 * 16 + 16 * 16) * 4


# Times


def test_kernel_is_a_roofline():
    """A launch, plus the slower of computing and moving."""
    costs = Costs(dataclasses.replace(H100, units=0))
    rate, launch = H100.rate("bfloat16"), H100.kernel_seconds
    large = Gemm(1, 8192, 8192, 8192)
    work = Work("matmul", large.flop, 0, 3 * 8192**2 * 2, "bfloat16", (large,))
    computed = 2 * 8192**3 / (rate.peak * min(rate.matmul, H100.sustained))
    assert costs.kernel(work) == pytest.approx(launch + computed)
    thin = Gemm(1, 1, 8192, 8192)
    work = Work("matmul", thin.flop, 0, 8192**2 * 2, "bfloat16", (thin,))
    assert costs.kernel(work) == pytest.approx(launch + 8192**2 * 2 / H100.memory_bandwidth)
    assert costs.kernel(Work("pointwise", 0, 1, 8, "float32")) == pytest.approx(launch, rel=1e-5)
    # A CPU thread computes and moves sequentially.
    here = Costs(dataclasses.replace(H100, units=0, device="cpu"))
    work = Work("matmul", large.flop, 0, 3 * 8192**2 * 2, "bfloat16", (large,))
    assert here.kernel(work) == pytest.approx(launch + computed + 3 * 8192**2 * 2 / H100.memory_bandwidth)


def seconds_of(gemm, profile=H100):
    """Return the seconds of one bfloat16 matmul."""
    return Costs(profile).kernel(Work("matmul", gemm.flop, 0, 0, "bfloat16", (gemm,)))


def test_products_measured_on_an_h100():
    """111 matmuls, limited like the largest one in short runs: 4 % root mean square error, at most 17 %.

    The table is OpenXLA's for sm_90, xla/service/gpu/model/matmul_interpolator_data.h; the constants were fitted to it.
    """
    short = dataclasses.replace(H100, sustained=794 / 989)
    with (Path(__file__).parent / "h100_products.csv").open() as file:
        rows = list(csv.DictReader(file))
    errors = []
    for row in rows:
        gemm = Gemm(*(int(row[name]) for name in ("batch", "rows", "columns", "inner")))
        moved = 2 * gemm.batch * (gemm.rows * gemm.inner + gemm.inner * gemm.columns + gemm.rows * gemm.columns)
        found = Costs(short).kernel(Work("matmul", gemm.flop, 0, moved, "bfloat16", (gemm,)))
        errors.append(found / (gemm.flop / (float(row["tflops"]) * 1e12)) - 1)
    assert len(errors) == 111
    assert (sum(e * e for e in errors) / len(errors)) ** 0.5 < 0.045
    assert max(map(abs, errors)) < 0.18


@pytest.mark.parametrize(("name", "measured"), [("a100", 271e12), ("h100", 794e12), ("b200", 1745e12)])
def test_largest_products(name, measured):
    """The largest one measured on each chip (stas00/ml-engineering, MAMF) is limited by power and tiles."""
    profile = load_profile(name)
    rate = profile.rate("bfloat16")
    assert profile.sustained < measured / rate.peak < rate.matmul, "in training it is less"
    profile = dataclasses.replace(profile, sustained=measured / rate.peak)
    best = max(
        g.flop / seconds_of(g, profile) for g in (Gemm(1, size, size, size) for size in range(4096, 20480, 1024))
    )
    assert best == pytest.approx(measured, rel=0.02)


def test_small_multiplications_achieve_less():
    """Waves of tiles, and overhead of a tile: one row too many adds a wave."""

    def speed(size: int, inner: int) -> float:
        gemm = Gemm(1, size, size, inner)
        return gemm.flop / seconds_of(gemm)

    assert speed(256, 256) < 0.1 * speed(8192, 8192)
    assert speed(8192, 256) < 0.7 * speed(8192, 8192), "a short inner dimension"
    limit = H100.rate("bfloat16").peak * H100.sustained
    assert 0.9 * limit < speed(8192, 8192) < limit
    one = dataclasses.replace(H100, tiles=H100.tiles[:1], kernel_seconds=0.0, split=0, sustained=1.0)
    full, over = Gemm(1, 128 * 132, 256, 1024), Gemm(1, 128 * 132 + 1, 256, 1024)
    assert seconds_of(over, one) == pytest.approx(2 * seconds_of(full, one))
    # Few tiles are split along the inner dimension, so that all units are busy.
    few = Gemm(1, 512, 512, 8192)
    assert seconds_of(few) < 0.8 * seconds_of(few, dataclasses.replace(H100, split=0))


def test_products_are_monotone():
    """More rows, columns or a longer inner dimension are never faster, except an inner dimension that can be split."""
    for rows, columns, inner in itertools.product((1, 100, 1000, 5000), repeat=3):
        seconds = seconds_of(Gemm(1, rows, columns, inner))
        assert seconds >= H100.kernel_seconds
        assert seconds_of(Gemm(1, rows + 300, columns, inner)) >= seconds
        assert seconds_of(Gemm(1, rows, columns + 300, inner)) >= seconds
        assert seconds_of(Gemm(2, rows, columns, inner)) >= seconds


@pytest.mark.parametrize(
    ("kernel", "backward", "tflops"),
    [
        *(("flash", False, 333), ("flash", True, 318), ("cudnn", False, 529), ("cudnn", True, 518)),
        *(("flash3", False, 602), ("flash3", True, 559)),
    ],
)
def test_attention_of_an_h100(kernel, backward, tflops):
    """FlashAttention-3's paper: head size 128, causal, length 8,192, 16,384 tokens, width 2,048; within 3 %."""
    flop = (10 if backward else 4) * 2 * 16 * 8192**2 * 128 / 2
    shape = Attention(kernel, backward, 128, 8192, True, flop)
    seconds = Costs(H100).kernel(Work("attention", flop, 0, 0, "bfloat16", (), shape))
    assert flop / seconds == pytest.approx(tflops * 1e12, rel=0.03)
    narrow, short = dataclasses.replace(shape, dim=64), dataclasses.replace(shape, queries=256)
    for slower in (narrow, short):
        assert Costs(H100).kernel(Work("attention", flop, 0, 0, "bfloat16", (), slower)) > 1.05 * seconds
    assert Costs(H100).kernel(Work("attention", flop, 0, 0, "bfloat16")) > 0, "of unknown sizes"


def test_attention_has_a_kernel_and_a_direction():
    """The CPU's operator counts as flash attention; the graph gives direction, mask and head size."""
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))

    def step(q, k, v):
        return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True).sum(), (q, k, v))

    found = [work.attention for work in work_in(step, q, k, v) if work.attention]
    assert [(a.kernel, a.backward, a.dim, a.queries, a.causal) for a in found] == [
        ("flash", False, 8, 16, True),
        ("flash", True, 8, 16, True),
    ]


def test_host_time_is_a_lower_bound():
    """Small kernels are not faster than the host launches them; eager mode is slower than compiled regions."""
    works = [Work("pointwise", 0, 1, 8, "float32")] * 10
    compiled, eager = (Costs(H100, fused=fused).kernels(works) for fused in (True, False))
    assert compiled == pytest.approx(10 * H100.kernel_seconds, rel=1e-5)
    assert eager == pytest.approx(10 * H100.host_seconds["eager"])


def test_stragglers():
    """An additional fraction for every doubling of the nodes; a single node waits for none."""
    works = [Work("pointwise", 0, 0, 10**9, "float32")]
    alone, node, many = (Costs(H100, mesh=Mesh.of_shape((n,))).kernels(works) for n in (1, 8, 1024))
    assert alone == node == Costs(H100).kernels(works)
    assert many == pytest.approx(node * (1 + 7 * H100.straggler))


def test_optimizers():
    """A fused one reads and writes everything once; separate operators move 20 times the parameters for AdamW."""
    costs = Costs(H100)
    assert costs.optimizer(10**9, 2) == pytest.approx(7e9 / H100.memory_bandwidth)
    assert costs.optimizer(10**9, 2, foreach=True) == pytest.approx(20e9 / H100.memory_bandwidth)
    assert costs.clipping(10**9) == pytest.approx(3e9 / H100.memory_bandwidth)


def test_collectives():
    """Latency and bandwidth, within and between nodes; one rank needs none."""
    costs = Costs(H100)
    eight, many = Axis("shard", 8, "shard"), Axis("shard", 256, "shard")
    assert costs.collective("gather", 10**9, 1, Axis("shard", 1, "shard")) == 0
    # NCCL's all-gather on 8 GPUs in one node fits 30 us + S / 394 GB/s.
    for size in (10**8, 10**9):
        assert costs.collective("gather", size, 1, eight) == pytest.approx(30e-6 + size / 394e9, rel=0.03)
    assert costs.collective("gather", 2 * 10**9, 1, many) == pytest.approx(2e9 / 200e9, rel=0.15)
    rings = Costs(load_profile("a100"))
    assert rings.collective("all_reduce", 10**9, 1, eight) == pytest.approx(
        2 * rings.collective("reduce", 10**9, 1, eight), rel=0.01
    )
    assert costs.collective("gather", 10**6, 5, eight) > costs.collective("gather", 10**6, 1, eight)
    slow = Costs(H100, "in-training")
    assert slow.collective("gather", 10**9, 1, many) > 2.5 * costs.collective("gather", 10**9, 1, many)
    assert slow.collective("gather", 10**9, 1, eight) == costs.collective("gather", 10**9, 1, eight)


def by(name, protocols, **changes):
    """Return the costs of a profile with one protocol only."""
    profile = load_profile(name)
    (only,) = [protocol for protocol in profile.protocols if protocol.name == protocols]
    return Costs(dataclasses.replace(profile, protocols=(only,), **changes))


def test_a_tree_takes_few_steps_between_nodes():
    """NCCL uses a tree for small all-reduces on many nodes, and a ring for large ones on few."""
    few, many = Axis("shard", 16, "shard"), Axis("shard", 1024, "shard")
    costs = Costs(H100)
    tree = by("h100", "Tree LL").collective("all_reduce", 4, 1, many)
    assert tree == pytest.approx(6.8e-6 + 2 * (7 * 0.6e-6 + 7 * 5e-6), rel=1e-3), "2 ((local - 1) + log2 nodes)"
    assert costs.collective("all_reduce", 4, 1, many) == tree
    assert tree < 0.05 * by("h100", "Ring LL").collective("all_reduce", 4, 1, many)
    ring = by("h100", "Ring Simple")
    assert costs.collective("all_reduce", 10**9, 1, few) == ring.collective("all_reduce", 10**9, 1, few)
    assert ring.collective("all_reduce", 10**9, 1, few) < by("h100", "Tree Simple").collective(
        "all_reduce", 10**9, 1, few
    )
    gathers = {name: by("h100", name) for name in ("Ring LL", "Ring LL128", "Ring Simple")}
    assert costs.collective("gather", 4, 1, many) == min(c.collective("gather", 4, 1, many) for c in gathers.values())


def test_the_switch_of_a_node_adds_and_multicasts():
    """NVLS from Hopper on, in one NVLink domain: 470 GB/s for an all-reduce on 8 H100, without steps between ranks."""
    eight, sixteen = Axis("tp", 8, "tensor"), Axis("tp", 16, "tensor")
    seconds = Costs(H100).collective("all_reduce", 10**9, 1, eight)
    assert 2 * 7 / 8 * 1e9 / seconds == pytest.approx(470e9, rel=0.01)
    rings = [protocol for protocol in H100.protocols if protocol.algorithm != "nvls"]
    ringed = Costs(dataclasses.replace(H100, protocols=tuple(rings)))
    assert ringed.collective("all_reduce", 10**9, 1, eight) > 1.2 * seconds
    mean = Costs(H100).collective("all_reduce", 10**9, 1, eight, averages=True)
    assert mean == ringed.collective("all_reduce", 10**9, 1, eight), "the switch adds, and does not divide"
    for kind in ("gather", "reduce", "all_reduce"):
        beyond = Costs(H100).collective(kind, 10**9, 1, sixteen)
        assert beyond == ringed.collective(kind, 10**9, 1, sixteen), "not between nodes"
    assert not any(protocol.algorithm == "nvls" for protocol in load_profile("a100").protocols)


def test_an_nvlink_domain_of_72():
    """A gather of 64 GPUs stays on NVLink there, and crosses the network on boards of 8."""
    axis = Axis("shard", 64, "shard")
    inside, beyond = (Costs(load_profile(name)) for name in ("gb200", "b200"))
    assert (inside.link(axis), beyond.link(axis)) == ("node", "network")
    assert beyond.collective("gather", 10**9, 1, axis) > 3 * inside.collective("gather", 10**9, 1, axis)
    small = inside.collective("gather", 10**7, 1, axis)
    assert small == pytest.approx(25e-6 + 10**7 * 63 / 64 / (0.7 * 720e9)), "the switch instead of 63 steps"


def test_networks_by_cards_and_rails():
    """Half the cards, or shared switches, halve the bandwidth between nodes, but not within a node."""
    axis, node = Axis("shard", 64, "shard"), Axis("shard", 8, "shard")

    def seconds(axis, kind="gather", **changes):
        networks = {"isolated": dataclasses.replace(H100.outside["isolated"], **changes)}
        return Costs(dataclasses.replace(H100, outside=networks)).collective(kind, 10**10, 1, axis)

    for kind in ("gather", "all_reduce", "all_to_all"):
        whole = seconds(axis, kind)
        assert seconds(axis, kind, nics=0.5) == pytest.approx(2 * whole, rel=0.02)
        assert seconds(axis, kind, rails=0, crossing=0.5) == pytest.approx(2 * whole, rel=0.02)
        assert seconds(axis, kind, crossing=0.5) == whole, "traffic keeps to its rail"
        assert seconds(node, kind, nics=0.5) == seconds(node, kind)
    assert H100.outside["isolated"].of_rank == 25e9
    assert H100.outside["in-training"].of_rank == 6.25e9


def test_the_host_posts_the_steps_of_a_ring_between_nodes():
    """As NCCL counts it: steps within a node take that long, too."""
    axis, node = Axis("shard", 64, "shard"), Axis("shard", 8, "shard")
    costs = by("h100", "Ring LL")
    assert costs.collective("gather", 8, 1, axis) == pytest.approx(6.6e-6 + 56 * 1e-6 + 7 * 2.7e-6, rel=1e-4)
    assert costs.collective("gather", 8, 1, node) == pytest.approx(6.6e-6 + 7 * 0.6e-6, rel=1e-4)


def test_all_to_all_between_nodes_pays_for_every_pair():
    """A ring crosses each node border once; all-to-all sends a separate part to every rank of the other nodes."""
    costs, axis = Costs(H100), Axis("shard", 64, "shard")
    assert costs.collective("all_to_all", 10**9, 1, axis) > 5 * costs.collective("gather", 10**9, 1, axis)


def test_outer_axis_leaves_the_node():
    """Ranks along an outer axis are on different nodes, along an inner one they share a node."""
    mesh = Mesh.of_shape((8, 8))
    costs = Costs(H100, mesh=mesh)
    inside, outside = (costs.collective("all_reduce", 10**9, 1, axis) for axis in (mesh.shard, mesh.replicate))
    assert inside == Costs(H100).collective("all_reduce", 10**9, 1, Axis("shard", 8, "shard"))
    assert outside > 10 * inside


def test_copies():
    """Packing reads and writes; host copies are slow."""
    costs = Costs(H100)
    assert costs.copy(10**9) == pytest.approx(H100.kernel_seconds + 2e9 / H100.memory_bandwidth)
    assert costs.host_copy(10**9) == pytest.approx(H100.kernel_seconds + 1e9 / H100.host_bandwidth)


@pytest.mark.parametrize("ranks", [2, 8, 9, 64, 1000])
@pytest.mark.parametrize("kind", ["gather", "reduce", "all_reduce", "all_to_all"])
def test_expressions_equal_numbers(kind, ranks):
    """The same formula in symbols: number of ranks and bytes."""
    costs = Costs(H100)
    n, size = sympy.symbols("n size", positive=True, integer=True)
    formula = costs.collective(kind, size, 3, Axis("shard", n, "shard"))
    evaluate = sympy.lambdify([n, size], formula, "math")
    for num_bytes in (10**3, 10**7, 10**10):
        assert evaluate(ranks, num_bytes) == pytest.approx(
            costs.collective(kind, num_bytes, 3, Axis("shard", ranks, "shard"))
        )


def test_measured_regions_replace_estimates():
    """By key, and only those."""
    from graphshard.lower.regions import cut

    program = captured(nn.Linear(4, 4), (torch.randn(2, 4),))
    region = cut(program.phases["joint"])[0].region.as_region()
    assert Costs(H100, measured={region.key: 1.5}).region(region) == 1.5
    assert 0 < Costs(H100, measured={"other": 1.5}).region(region) < 1e-3


# Profiles


@pytest.mark.parametrize("name", builtin_profiles())
def test_builtin_profiles_have_sources(name):
    """Every number has a source, and the file is in canonical form."""
    profile = load_profile(name)
    assert profile.name == name
    assert all(profile.sources.values())
    assert Profile.from_json(profile.to_json()) == profile
    assert len(profile.hash) == 64


def test_every_number_in_a_file_needs_a_source():
    sources = {path: source for path, source in H100.sources.items() if path != "inside.gather.latency"}
    with pytest.raises(AssertionError, match=r"^inside\.gather\.latency has no source"):
        dataclasses.replace(H100, sources=sources).to_json()


def test_the_hash_covers_the_numbers():
    """A different number changes the hash; a different name or source does not."""
    renamed = dataclasses.replace(H100, name="other", title="x", sources={}, made={"date": "today"})
    assert renamed.hash == H100.hash
    assert dataclasses.replace(H100, memory_bandwidth=1e12).hash != H100.hash
    assert len({load_profile(name).hash for name in builtin_profiles()}) == len(builtin_profiles())


def broken(tmp_path, change):
    """Write an H100 profile file with a change."""
    data = json.loads(H100.to_json())
    change(data)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema=99), "is not a profile of schema 3, it says 99"),
        (lambda d: d.pop("schema"), r"is not a profile of schema 3.*Write it with `graphshard calibrate`"),
        (
            lambda d: d["sustained"].update(range=[0.9, 0.95]),
            r"sustained has the range .*with 0.* between them\.",
        ),
        (lambda d: d["sustained"].update(range=1), "sustained has the range 1, which must be two numbers"),
        (lambda d: d["sustained"].update(value=75, range=[70, 80]), "sustained must be at most 1, got 75"),
        (lambda d: d["memory_bandwidth"].update(value=3e18, range=[0, 4e18]), r"at most 1e\+15, got 3e\+18.*SI units"),
        (lambda d: d["kernel_seconds"].update(value=50, range=[0, 60]), "kernel_seconds must be at most 10, got 50"),
        (lambda d: d["rates"]["bfloat16"]["attention"].pop("flash"), "lacks rates.bfloat16.attention.flash"),
        (lambda d: d["host_seconds"].pop("eager"), "lacks host_seconds.eager"),
        (lambda d: d.update(tiles=[]), "units is 132, so tiles must have at least one. Set units to 0"),
        (
            lambda d: d["outside"]["isolated"]["reached"].update(value=0, range=[0, 1]),
            "outside.isolated.reached must be positive, got 0",
        ),
        (
            lambda d: d["outside"]["isolated"]["nics"].update(value=400),
            "outside.isolated.nics must be at most 64, got 400",
        ),
        (
            lambda d: d["outside"]["isolated"]["rails"].update(value=2),
            "outside.isolated.rails must be at most 1, got 2",
        ),
        (lambda d: d.update(protocols=d["protocols"][3:]), "lacks a protocol whose algorithm is ring"),
        (lambda d: d["protocols"][0].update(algorithm="star"), "'star' is none of ring, tree, nvls"),
        (lambda d: d.update(memory_bandwidth=3e12), "memory_bandwidth has no source"),
        (lambda d: d["memory_bandwidth"].update(value="fast"), "memory_bandwidth must be a number"),
        (lambda d: d["memory_bandwidth"].update(value=0, range=[0, 1]), "memory_bandwidth must be positive, got 0"),
        (lambda d: d["contention"].update(value=1, range=[0, 1]), "contention must be below 1, got 1"),
        (lambda d: d.pop("contention"), r"is not a profile: 'contention' is missing\. Write it with `graphshard"),
        (lambda d: d["inside"].pop("reduce"), "lacks inside.reduce"),
        (lambda d: d.pop("vector"), "is not a profile: .*vector"),
        (lambda d: d.update(colour="red"), "is not a profile: .*colour"),
    ],
)
def test_broken_profiles(tmp_path, change, message):
    """The message names the file and the error."""
    path = broken(tmp_path, change)
    with pytest.raises(ArgumentError, match=message) as error:
        load_profile(path)
    assert str(path) in str(error.value)


def test_unknown_hardware(tmp_path):
    """The message lists known hardware, and how to measure other hardware."""
    with pytest.raises(ArgumentError, match=r"neither a file nor one of a100, a100-40gb.*graphshard calibrate"):
        load_profile("tpu")
    with pytest.raises(ArgumentError, match="hardware must be a name, a file or a Profile, got 8"):
        load_profile(8)
    path = tmp_path / "x.json"
    path.write_text("{")
    with pytest.raises(ArgumentError, match="is not JSON"):
        load_profile(path)


def test_updates_are_joined_where_the_host_is_slower() -> None:
    """AdamW for 9 gradients takes the host 0.5 ms; so does the device for 80 MB, and a host of no cost joins none."""
    costs = Costs(H100)
    assert joined_updates(costs, []) == []
    assert joined_updates(costs, [(9, 200_000_000)] * 4) == [1, 1, 1, 1]
    assert joined_updates(costs, [(9, 60_000_000)] * 5) == [2, 2, 1]
    # A call by itself is then less than a tenth of what it takes for its gradients.
    assert joined_updates(costs, [(9, 1_000)] * 32) == [9, 9, 9, 5]
    assert joined_updates(Costs(load_profile("cpu-gloo")), [(9, 1_000)] * 3) == [1, 1, 1]
