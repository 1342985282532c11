"""The cost model: what operators do, what kernels and collectives take, and profiles as files."""

from __future__ import annotations

import dataclasses
import json

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim
from torch.utils.flop_counter import FlopCounterMode

import graphshard
from graphshard.cost.builtin import builtin_profiles
from graphshard.cost.costs import Costs
from graphshard.cost.kernels import Work, work_of
from graphshard.cost.multiplications import Gemm, flop_of
from graphshard.cost.profile import Profile, load_profile
from graphshard.ir.mesh import Axis, Mesh
from graphshard.ir.sizes import is_size
from tests.helpers import Blocks, captured

H100 = load_profile("h100")


def work_in(fn, *inputs):
    """The kernels of a function's graph."""
    graph = torch.fx.experimental.proxy_tensor.make_fx(fn, tracing_mode="fake")(*inputs).graph
    return work_of(list(graph.nodes))


def flops_in(fn, *inputs):
    """Our count and torch's."""
    graph = torch.fx.experimental.proxy_tensor.make_fx(fn, tracing_mode="fake")(*inputs).graph
    with FlopCounterMode(display=False) as counter:
        fn(*inputs)
    return sum(flop_of(graph.nodes).values()), counter.get_total_flops()


# What operators do


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
def test_flops_are_torchs(fn, shapes):
    """Where torch counts right, so do we: a multiply-add is two."""
    ours, theirs = flops_in(fn, *(torch.randn(shape) for shape in shapes))
    assert ours == theirs > 0


def test_flops_of_backward():
    """A convolution's two gradients multiply twice as often as its forward."""
    x, w = torch.randn(2, 6, 8, 8, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=True)

    def step(x, w):
        return torch.autograd.grad(F.conv2d(x, w, groups=2).sum(), (x, w))

    forward = 2 * 2 * 6 * 6 * w.numel()
    ours, theirs = flops_in(step, x, w)
    assert ours == 3 * forward
    assert theirs > ours  # torch takes no notice of groups in the gradient of the weight


@pytest.mark.parametrize(("causal", "share"), [(False, 1), (True, 0.5)])
def test_flops_of_attention(causal, share):
    """Two multiplications per pair forward and five backward; causal attention skips half of the pairs."""
    q, k = torch.randn(2, 4, 16, 8, requires_grad=True), torch.randn(2, 4, 24, 8, requires_grad=True)
    v = torch.randn(2, 4, 24, 8, requires_grad=True)

    def step(q, k, v):
        return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=causal).sum(), (q, k, v))

    ours, _ = flops_in(step, q, k, v)
    pair = 2 * 2 * 4 * 16 * 24 * 8
    assert ours == 7 * pair * share


def test_pointwise_chain_is_one_kernel():
    """A chain reads its inputs once and writes its result once, whatever lies between."""
    x, y = torch.randn(64, 32), torch.randn(32)
    (work,) = work_in(lambda x, y: ((x * y).relu() + y).exp(), x, y)
    assert work.num_bytes == (64 * 32 + 32 + 64 * 32) * 4
    assert work.operations == 4 * 64 * 32
    assert work.flop == 0


def test_operators_that_run_one_by_one():
    """Each reads its inputs and writes its result, and takes a launch; a multiplication is what it was."""
    x, y, w = torch.randn(64, 32), torch.randn(32), torch.randn(32, 32)
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x, y, w: (((x * y).relu() + 1) @ w).exp().view(-1))(
        x, y, w
    ).graph
    together, apart = (work_of(list(graph.nodes), fused=fused) for fused in (True, False))
    one = 64 * 32 * 4
    assert [work.num_bytes for work in apart] == [2 * one + 32 * 4, 2 * one, 2 * one, 2 * one + 32 * 32 * 4, 2 * one]
    assert sum(work.operations for work in apart) == sum(work.operations for work in together)
    assert [work for work in apart if work.gemms] == [work for work in together if work.gemms]
    fused, eager = (Costs(H100, fused=fused).compute(list(graph.nodes)) for fused in (True, False))
    moved = sum(work.num_bytes for work in apart) - sum(work.num_bytes for work in together)
    assert eager - fused == pytest.approx(2 * H100.kernel_seconds + moved / H100.memory_bandwidth)


def test_dynamic_sizes_cost_nothing():
    """Numbers that are computed from sizes are no kernels."""
    static, dynamic = (
        captured(Blocks(2), (torch.zeros(6, 3, 4),), dynamic_shapes=shapes) for shapes in (None, ({0: Dim.AUTO},))
    )
    assert dynamic.sizes
    assert any(is_size(node) and node.op == "call_function" for node in dynamic.phases["joint"].module.graph.nodes)
    seconds = [Costs(H100).compute(list(p.phases["joint"].module.graph.nodes)) for p in (static, dynamic)]
    assert seconds[0] == seconds[1]


def test_multiplications_split_chains():
    """What runs before a multiplication cannot be fused with what runs behind it."""
    x, w = torch.randn(64, 32), torch.randn(32, 32)
    works = work_in(lambda x, w: (x.exp() @ w).relu() + x.sin().cos(), x, w)
    assert [work.kind for work in works] == ["pointwise", "matmul", "pointwise"]
    assert works[0].num_bytes == 2 * 64 * 32 * 4
    # sin and cos do not have to wait, and run where their result is used.
    assert works[2].num_bytes == 3 * 64 * 32 * 4
    assert works[2].operations == 4 * 64 * 32
    assert works[1] == Work(
        "matmul", 2 * 64 * 32 * 32, 0, (64 * 32 * 2 + 32 * 32) * 4, "float32", (Gemm(1, 64, 32, 32),)
    )


def test_views_and_picks_cost_what_they_touch():
    """An expanded input is read once; an embedding reads rows, not its table; a slice only what it shows."""
    table, index = torch.randn(1000, 16), torch.zeros(8, dtype=torch.long)
    (work,) = work_in(lambda table, index: F.embedding(index, table) * 2, table, index)
    assert work.num_bytes == 8 * 8 + 2 * 8 * 16 * 4
    row = torch.randn(1, 16)
    (work,) = work_in(lambda row: row.expand(100, 16) * 2, row)
    assert work.num_bytes == 16 * 4 + 100 * 16 * 4
    (work,) = work_in(lambda table: table[:10] * 2, table)
    assert work.num_bytes == 2 * 10 * 16 * 4


# What it takes


def test_kernel_is_a_roofline():
    """Launch, and then the slower of computing and moving."""
    costs = Costs(dataclasses.replace(H100, units=0))
    rate = H100.rate("bfloat16")
    large = Gemm(1, 8192, 8192, 8192)
    work = Work("matmul", large.flop, 0, 3 * 8192**2 * 2, "bfloat16", (large,))
    assert costs.kernel(work) == pytest.approx(3e-6 + 2 * 8192**3 / (rate.peak * rate.matmul))
    thin = Gemm(1, 1, 8192, 8192)
    work = Work("matmul", thin.flop, 0, 8192**2 * 2, "bfloat16", (thin,))
    assert costs.kernel(work) == pytest.approx(3e-6 + 8192**2 * 2 / H100.memory_bandwidth)
    assert costs.kernel(Work("pointwise", 0, 1, 8, "float32")) == pytest.approx(3e-6)
    # A thread of a CPU does one after the other.
    here = Costs(dataclasses.replace(H100, units=0, device="cpu"))
    work = Work("matmul", large.flop, 0, 3 * 8192**2 * 2, "bfloat16", (large,))
    both = 3e-6 + 2 * 8192**3 / (rate.peak * rate.matmul) + 3 * 8192**2 * 2 / H100.memory_bandwidth
    assert here.kernel(work) == pytest.approx(both)


def test_small_multiplications_achieve_less():
    """Tiles in waves: one row more than fills the chip takes another wave."""
    costs = Costs(H100)

    def speed(size: int) -> float:
        gemm = Gemm(1, size, size, size)
        return gemm.flop / costs.kernel(Work("matmul", gemm.flop, 0, 0, "bfloat16", (gemm,)))

    assert speed(256) < 0.1 * speed(8192)
    assert speed(8192) == pytest.approx(0.65 * 989e12, rel=0.05)
    one = Costs(dataclasses.replace(H100, tiles=H100.tiles[:1], kernel_seconds=0.0))
    full, over = Gemm(1, 128 * 132, 256, 1024), Gemm(1, 128 * 132 + 1, 256, 1024)
    seconds = [one.kernel(Work("matmul", g.flop, 0, 0, "bfloat16", (g,))) for g in (full, over)]
    assert seconds[1] == pytest.approx(2 * seconds[0])


def test_collectives():
    """Latency and bandwidth, inside and between nodes; one rank needs none."""
    costs = Costs(H100)
    eight, many = Axis("shard", 8, "shard"), Axis("shard", 256, "shard")
    assert costs.collective("gather", 10**9, 1, Axis("shard", 1, "shard")) == 0
    # NCCL's all-gather on 8 GPUs in one node fits 30 us + S / 394 GB/s.
    for size in (10**8, 10**9):
        assert costs.collective("gather", size, 1, eight) == pytest.approx(30e-6 + size / 394e9, rel=0.03)
    assert costs.collective("gather", 2 * 10**9, 1, many) == pytest.approx(2e9 / 200e9, rel=0.15)
    assert costs.collective("all_reduce", 10**9, 1, eight) == pytest.approx(
        2 * costs.collective("reduce", 10**9, 1, eight), rel=0.01
    )
    assert costs.collective("gather", 10**6, 5, eight) > costs.collective("gather", 10**6, 1, eight)
    slow = Costs(H100, "in-training")
    assert slow.collective("gather", 10**9, 1, many) > 2.5 * costs.collective("gather", 10**9, 1, many)
    assert slow.collective("gather", 10**9, 1, eight) == costs.collective("gather", 10**9, 1, eight)


def test_all_to_all_between_nodes_pays_for_every_pair():
    """A ring crosses each border of a node once; all-to-all sends what every rank of another node wants."""
    costs, axis = Costs(H100), Axis("shard", 64, "shard")
    assert costs.collective("all_to_all", 10**9, 1, axis) > 5 * costs.collective("gather", 10**9, 1, axis)


def test_outer_axis_leaves_the_node():
    """Ranks along an outer axis are a node apart, along an inner one they share it."""
    mesh = Mesh.of_shape((8, 8))
    costs = Costs(H100, mesh=mesh)
    inside, outside = (costs.collective("all_reduce", 10**9, 1, axis) for axis in (mesh.shard, mesh.replicate))
    assert inside == Costs(H100).collective("all_reduce", 10**9, 1, Axis("shard", 8, "shard"))
    assert outside > 10 * inside


def test_copies():
    """Packing reads and writes; the host is far away."""
    costs = Costs(H100)
    assert costs.copy(10**9) == pytest.approx(3e-6 + 2e9 / H100.memory_bandwidth)
    assert costs.host_copy(10**9) == pytest.approx(3e-6 + 1e9 / H100.host_bandwidth)


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
    region = cut(program.phases["joint"])[0].region
    assert Costs(H100, measured={region.key: 1.5}).region(region) == 1.5
    assert 0 < Costs(H100, measured={"other": 1.5}).region(region) < 1e-3


# Profiles


@pytest.mark.parametrize("name", builtin_profiles())
def test_builtin_profiles_have_sources(name):
    """Every number says where it is from, and the file is what it would be written as."""
    profile = load_profile(name)
    assert profile.name == name
    assert all(profile.sources.values())
    assert Profile.from_json(profile.to_json()) == profile
    assert len(profile.hash) == 64


def test_hash_is_of_the_numbers():
    """Another number is another hash; another name or source is not."""
    renamed = dataclasses.replace(H100, name="other", title="x", sources={}, made={"date": "today"})
    assert renamed.hash == H100.hash
    assert dataclasses.replace(H100, memory_bandwidth=1e12).hash != H100.hash
    assert len({load_profile(name).hash for name in builtin_profiles()}) == len(builtin_profiles())


def broken(tmp_path, change):
    """An H100 profile file with something changed."""
    data = json.loads(H100.to_json())
    change(data)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema=99), "is no profile of schema 1"),
        (lambda d: d.update(memory_bandwidth=3e12), "memory_bandwidth has no source"),
        (lambda d: d["memory_bandwidth"].update(value="fast"), "memory_bandwidth must be a number"),
        (lambda d: d["memory_bandwidth"].update(value=0), "memory_bandwidth must be positive, got 0"),
        (lambda d: d["contention"].update(value=1), "contention must be below 1, got 1"),
        (lambda d: d.pop("contention"), r"is no profile: 'contention' is missing\. Write it with `graphshard"),
        (lambda d: d["inside"].pop("reduce"), "lacks inside.reduce"),
        (lambda d: d.pop("vector"), "is no profile: .*vector"),
        (lambda d: d.update(colour="red"), "is no profile: .*colour"),
    ],
)
def test_broken_profiles(tmp_path, change, message):
    """The message names the file and the fault."""
    path = broken(tmp_path, change)
    with pytest.raises(graphshard.ArgumentError, match=message) as error:
        load_profile(path)
    assert str(path) in str(error.value)


def test_unknown_hardware(tmp_path):
    """The message lists what there is, and how to measure what is not."""
    with pytest.raises(graphshard.ArgumentError, match=r"neither a file nor one of a100, b200.*graphshard calibrate"):
        load_profile("tpu")
    with pytest.raises(graphshard.ArgumentError, match="hardware must be a name, a file or a Profile, got 8"):
        load_profile(8)
    path = tmp_path / "x.json"
    path.write_text("{")
    with pytest.raises(graphshard.ArgumentError, match="is not JSON"):
        load_profile(path)
