"""`schedule_graph`: rewritten graphs, rejected graphs, and reports."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import graphshard
from graphshard import Group, schedule_graph
from graphshard.errors import ArgumentError, InfeasibleError, UnsupportedError
from graphshard.schedule.graph_collectives import GroupCosts
from graphshard.torch_compat.fake_tensors import FakeTensorMode
from tests.foreign.emulation import results, same
from tests.foreign.planes import planes
from tests.ranks import FakeWorld

# Kernels no longer than gathers; a longer one would hide each gather by itself, with other plans.
SHORT = dataclasses.replace(
    graphshard.profiling.load_profile("h100"),
    contention=0.0,
    kernel_seconds=3e-6,
    tile_seconds=0.0,
    host_seconds={"eager": 0.0, "compiled": 0.0},
)

c10d = torch.ops._c10d_functional
aten = torch.ops.aten
wait = c10d.wait_tensor
GROUPS = {"dp": 8, "tp": Group(2)}
DIM = 1024


def traced(function: Callable[..., Any], *inputs: torch.Tensor) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def calls(gm: GraphModule) -> list[str]:
    """Return the operators of a graph in order, without namespace and overload."""
    return [str(n.target).split(".")[-2] for n in gm.graph.nodes if n.op == "call_function" and "." in str(n.target)]


def gathered(weights: int = 4, dim: int = DIM) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """Build a stack that casts and gathers its weights where they are used."""

    def run(x: torch.Tensor, *shards: torch.Tensor) -> torch.Tensor:
        for shard in shards:
            x = torch.relu(x @ wait(c10d.all_gather_into_tensor(shard.to(torch.bfloat16), 8, "dp")))
        return x

    return run, [torch.zeros(dim, dim, dtype=torch.bfloat16), *(torch.zeros(dim // 8, dim) for _ in range(weights))]


def test_gathers_start_ahead_and_casts_with_them() -> None:
    function, inputs = gathered(2, 4096)
    gm = traced(function, *inputs)
    found = schedule_graph(gm, GROUPS, memory_limit=math.inf)
    assert calls(gm)[:6] == ["_to_copy", "all_gather_into_tensor", "wait_tensor", "mm", "relu", "_to_copy"]
    after = calls(found.module)
    assert after.index("mm") > len(after) - 1 - after[::-1].index("all_gather_into_tensor")
    assert [len(bucket.members) for bucket in found.buckets] == [1, 1]
    assert found.exposed_after < 0.6 * found.exposed_before


def test_small_gathers_are_coalesced() -> None:
    function, inputs = gathered(6, 64)
    found = schedule_graph(traced(function, *inputs), GROUPS, hardware=SHORT, memory_limit=math.inf)
    assert "all_gather_into_tensor_coalesced" in calls(found.module)
    assert sum(len(bucket.members) for bucket in found.buckets) == 6
    assert found.seconds_after < found.seconds_before


def test_only_equal_collectives_are_coalesced() -> None:
    """Members share kind, group, reduction and dtype; gloo sums on more than two ranks stay separate."""

    def run(*shards: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for shard in shards:
            for cast in (shard, shard.to(torch.float64)):
                for group, size in (("dp", 8), ("tp", 2)):
                    found.append(wait(c10d.all_gather_into_tensor(cast, size, group)))
                    found += [wait(c10d.all_reduce(cast, op, group)) for op in ("sum", "max")]
        return found

    gm = traced(run, *(torch.zeros(8, 8) for _ in range(3)))
    nodes = {node.name: node for node in gm.graph.nodes}
    found = schedule_graph(gm, {"dp": Group(8, link="one"), "tp": Group(2, link="one")}, memory_limit=math.inf)
    assert sorted(len(bucket.members) for bucket in found.buckets) == [1] * 6 + [3] * 10
    for bucket in found.buckets:
        members = [nodes[name] for name in bucket.members]
        keys = {(node.target, node.args[1:], node.args[0].meta["val"].dtype) for node in members}
        assert len(keys) == 1
        assert members[0].args[-1] == bucket.group


def test_groups_on_separate_links_do_not_queue() -> None:
    """Two collectives overlap on two links, and run in sequence on one."""

    def run(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [wait(c10d.all_gather_into_tensor(value, 2, name)) for value, name in ((x, "dp"), (y, "tp"))]

    gm = traced(run, torch.zeros(4096, 4096), torch.zeros(4096, 4096))
    apart = schedule_graph(gm, {"dp": Group(2, link="a"), "tp": Group(2, link="b")})
    shared = schedule_graph(gm, {"dp": Group(2, link="a"), "tp": Group(2, link="a")})
    one = apart.buckets[0].seconds
    assert apart.seconds_after == pytest.approx(one)
    assert shared.seconds_after == pytest.approx(2 * one)


def test_the_link_of_a_group_follows_from_its_ranks() -> None:
    profile = graphshard.profiling.load_profile("h100")
    assert GroupCosts(Group(8), profile, "isolated").link == "node"
    assert GroupCosts(Group(2, apart=8), profile, "isolated").link == "network"
    assert GroupCosts(Group(2, apart=4), profile, "isolated").link == "node"
    near, far = (GroupCosts(Group(2, apart=apart), profile, "isolated") for apart in (1, 8))
    assert far.seconds("gather", 1 << 20, 1) > near.seconds("gather", 1 << 20, 1)


def test_reductions_follow_compute_to_the_end() -> None:
    def run(x: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for _ in range(4):
            x = torch.relu(x @ x)
            found.append(wait(c10d.reduce_scatter_tensor(x, "avg", 8, "dp")) / 2)
        return found

    found = schedule_graph(traced(run, torch.zeros(DIM, DIM)), GROUPS, memory_limit=math.inf)
    after = calls(found.module)
    assert after.index("wait_tensor") > after.index("mm") + 2
    assert found.exposed_after < found.exposed_before


def test_a_write_is_not_crossed() -> None:
    """A gather of a written value starts after the write; another one starts ahead."""

    def run(x: torch.Tensor, buffer: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        x = torch.relu(x @ x)
        buffer.mul_(2)
        first = wait(c10d.all_gather_into_tensor(buffer, 8, "dp"))
        second = wait(c10d.all_gather_into_tensor(shard, 8, "dp"))
        buffer.add_(1)
        return x @ first + x @ second.to(torch.float32)

    inputs = [torch.randn(64, 64), torch.randn(8, 64), torch.randn(8, 64, dtype=torch.float64)]
    gm = traced(run, *inputs)
    found = schedule_graph(gm, GROUPS, hardware=SHORT)
    after = [node.name for node in found.module.graph.nodes]
    assert after.index("mul_") < after.index("all_gather_into_tensor") < after.index("add_")
    assert after.index("all_gather_into_tensor_1") < after.index("mm")
    assert after.index("wait_tensor") < after.index("add_")
    assert same(results(gm, inputs), results(found.module, inputs))


def test_views_of_one_input_alias() -> None:
    """If each input's fake tensor has its own mode, any two may alias: a write blocks both."""

    def run(x: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        x = torch.relu(x @ x)
        one.mul_(2)
        return x @ wait(c10d.all_gather_into_tensor(other, 8, "dp"))

    gm = traced(run, torch.randn(64, 64), torch.randn(8, 64), torch.randn(8, 64))
    after = [node.name for node in schedule_graph(gm, GROUPS).module.graph.nodes]
    assert after.index("mul_") > after.index("all_gather_into_tensor")
    for node in gm.graph.find_nodes(op="placeholder"):
        node.meta["val"] = FakeTensorMode().from_tensor(torch.empty(node.meta["val"].shape))
    after = [node.name for node in schedule_graph(gm, GROUPS).module.graph.nodes]
    assert after.index("mul_") < after.index("all_gather_into_tensor")


def test_a_print_is_not_crossed() -> None:
    function, inputs = gathered(3, 2048)
    gm = traced(function, *inputs)
    (first, *_) = gm.graph.find_nodes(op="call_function", target=aten.relu.default)
    with gm.graph.inserting_after(first):
        gm.graph.call_function(print, ("here",))
    gm.recompile()
    after = [node.name for node in schedule_graph(gm, GROUPS).module.graph.nodes]
    place = after.index("print_1")
    starts = [place for place, name in enumerate(after) if name.startswith("all_gather_into_tensor")]
    assert starts[0] < place < starts[1]


def test_a_graph_without_collectives_does_not_change() -> None:
    gm = traced(lambda x: (torch.relu(x @ x), torch.rand(3)), torch.zeros(4, 4))
    found = schedule_graph(gm)
    assert found.module.code == gm.code
    assert found.module is not gm
    assert (found.seconds_before, found.exposed_after, found.buckets) == (found.seconds_after, 0, ())
    assert "predicted" in str(found)


def test_the_given_graph_is_not_changed() -> None:
    function, inputs = gathered()
    gm = traced(function, *inputs)
    code, nodes = gm.code, list(gm.graph.nodes)
    metas = [dict(node.meta) for node in nodes]
    schedule_graph(gm, GROUPS)
    assert (gm.code, list(gm.graph.nodes)) == (code, nodes)
    assert [dict(node.meta) for node in nodes] == metas


def test_the_same_graph_gives_the_same_schedule() -> None:
    function, inputs = gathered(6, 64)
    codes = {schedule_graph(traced(function, *inputs), GROUPS).module.code for _ in range(3)}
    assert len(codes) == 1


def test_dynamic_sizes_count_at_their_hints() -> None:
    function, inputs = gathered(2, 64)
    gm = make_fx(function, tracing_mode="symbolic")(*inputs)
    found = schedule_graph(gm, GROUPS)
    fixed = schedule_graph(traced(function, *inputs), GROUPS)
    assert [bucket.num_bytes for bucket in found.buckets] == [bucket.num_bytes for bucket in fixed.buckets]


def test_a_memory_limit_is_kept_and_the_least_is_named() -> None:
    function, inputs = gathered()
    gm = traced(function, *inputs)
    free = schedule_graph(gm, GROUPS, memory_limit=math.inf)
    tight = schedule_graph(gm, GROUPS, memory_limit=free.peak_before)
    assert schedule_graph(gm, GROUPS).buckets == tight.buckets, "what the graph takes as it is limits it by itself"
    assert tight.peak_after <= free.peak_before < free.peak_after
    assert free.seconds_after <= tight.seconds_after <= tight.seconds_before
    with pytest.raises(
        InfeasibleError, match=r"no order that was found fits in a memory_limit of 1,000 bytes"
    ) as error:
        schedule_graph(gm, GROUPS, memory_limit=1000)
    least = schedule_graph(gm, GROUPS, memory_limit=error.value.smallest)
    assert least.peak_after <= error.value.smallest
    with pytest.raises(InfeasibleError):
        schedule_graph(gm, GROUPS, memory_limit=error.value.smallest - 1)


def test_the_bound_knows_the_limit() -> None:
    """Hand-computed: next to the first matmul, whose input is the graph's, one more weight fits, later none.

    Of four gathers the first, the third and the fourth are therefore fully exposed, with their casts.
    """
    function, inputs = gathered(4, 2048)
    gm = traced(function, *inputs)
    with pytest.raises(InfeasibleError) as error:
        schedule_graph(gm, GROUPS, hardware=SHORT, memory_limit=1000)
    free = schedule_graph(gm, GROUPS, hardware=SHORT, memory_limit=math.inf)
    tight = schedule_graph(gm, GROUPS, hardware=SHORT, memory_limit=error.value.smallest)
    assert tight.peak_after <= error.value.smallest < free.peak_after

    def compute(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.relu(x @ weight)
        return x

    alone = schedule_graph(traced(compute, inputs[0], inputs[0]), hardware=SHORT).seconds_after
    # The duration of the cast, which runs without other compute.
    cast = schedule_graph(traced(lambda shard: torch.relu(shard.bfloat16()), inputs[1]), hardware=SHORT).seconds_after
    assert tight.lower_bound == pytest.approx(alone + 3 * (cast + tight.buckets[0].seconds))
    assert free.lower_bound <= free.seconds_after < tight.lower_bound <= tight.seconds_after


def test_parameters_sharded_over_two_axes() -> None:
    """As captured by AutoParallel: the same bits; a gather over tp starts where the gather over dp ends."""
    function, inputs = planes("dp", "tp", 2, dim=64, rows=16)
    gm = traced(function, *inputs)
    found = {}
    for name, groups in {
        "apart": {"dp": Group(2, link="network"), "tp": Group(2, link="node")},
        "shared": {"dp": Group(2, link="one"), "tp": Group(2, link="one")},
    }.items():
        for limit in (None, math.inf):
            each = found[name, limit] = schedule_graph(gm, groups, hardware=SHORT, memory_limit=limit)
            assert same(results(gm, inputs), results(each.module, inputs))
            assert each.lower_bound <= each.seconds_after <= each.seconds_before
            assert limit == math.inf or each.peak_after <= each.peak_before
        assert each.seconds_after < 0.8 * each.seconds_before
        assert {(bucket.kind, bucket.group) for bucket in each.buckets if len(bucket.members) > 1} >= {
            ("gather", "dp"),
            ("reduce", "dp"),
        }
    assert found["apart", math.inf].seconds_after < found["shared", math.inf].seconds_after
    assert found["apart", math.inf].seconds_after <= found["apart", None].seconds_after


def test_the_bound_of_one_link_is_nearly_met() -> None:
    """A stack as run by FSDP2, with compute to overlap."""

    def run(x: torch.Tensor, *shards: torch.Tensor) -> Any:
        saved, reduced = [], []
        for shard in shards:
            saved.append(x)
            x = torch.relu(x @ wait(c10d.all_gather_into_tensor(shard, 8, "dp")))
        for shard, before in zip(reversed(shards), reversed(saved)):
            full = wait(c10d.all_gather_into_tensor(shard, 8, "dp"))
            reduced.append(wait(c10d.reduce_scatter_tensor(before.t() @ x, "avg", 8, "dp")))
            x = x @ full.t()
        return x, reduced

    inputs = [torch.empty(4096, 2048, dtype=torch.bfloat16, device="meta")]
    inputs += [torch.empty(256, 2048, dtype=torch.bfloat16, device="meta") for _ in range(8)]
    found = schedule_graph(traced(run, *inputs), GROUPS, memory_limit=math.inf)
    assert found.gap < 0.02
    assert found.seconds_after < 0.9 * found.seconds_before


def one_gather(x: torch.Tensor) -> torch.Tensor:
    return wait(c10d.all_gather_into_tensor(x, 8, "dp"))


def unwaited(x: torch.Tensor) -> torch.Tensor:
    return c10d.all_gather_into_tensor(x, 8, "dp")


def read_early(x: torch.Tensor) -> list[torch.Tensor]:
    full = c10d.all_gather_into_tensor(x, 8, "dp")
    return [full + 1, wait(full)]


ERRORS = [
    (one_gather, {}, ArgumentError, r"%all_gather_into_tensor communicates over the group 'dp', which does not exist"),
    (one_gather, {"tp": 8}, ArgumentError, r"The groups given are 'tp'\. Name it, as in groups=\{'dp': 8\}"),
    (one_gather, {"dp": 4}, ArgumentError, r"'dp' has 4 ranks, but %all_gather_into_tensor communicates with 8"),
    (one_gather, {"dp": "8"}, ArgumentError, r"groups must be .* got '8' for 'dp'"),
    (one_gather, {"dp": 0}, ArgumentError, r"groups\['dp'\] must be a positive number of ranks, got 0"),
    (unwaited, GROUPS, ArgumentError, r"%all_gather_into_tensor is used without a wait: the graph returns it"),
    (read_early, GROUPS, ArgumentError, r"%all_gather_into_tensor is used without a wait: %add reads it"),
]


@pytest.mark.parametrize(("function", "groups", "kind", "text"), ERRORS)
def test_wrong_graphs_and_groups(function: Any, groups: Any, kind: Any, text: str) -> None:
    gm = traced(function, torch.zeros(2, 2))
    code = gm.code
    with pytest.raises(kind, match=text):
        schedule_graph(gm, groups)
    assert gm.code == code


def test_a_launch_without_a_wait() -> None:
    gm = traced(one_gather, torch.zeros(2, 2))
    (launch,) = gm.graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default)
    launch.users.copy().popitem()[0].replace_all_uses_with(next(iter(gm.graph.nodes)))
    gm.graph.erase_node(next(iter(launch.users)))
    with pytest.raises(ArgumentError, match=r"nothing waits for the collective %all_gather_into_tensor"):
        schedule_graph(gm, GROUPS)


UNSUPPORTED = [
    (
        lambda x: wait(c10d.broadcast(x, 0, "dp")),
        r"%broadcast calls _c10d_functional\.broadcast, which is not scheduled",
    ),
    (lambda x: wait(c10d.all_reduce_(x, "sum", "dp")), r"%all_reduce_ calls _c10d_functional\.all_reduce_"),
]


@pytest.mark.parametrize(("function", "text"), UNSUPPORTED)
def test_unknown_communication(function: Any, text: str) -> None:
    gm = traced(function, torch.zeros(2, 2))
    with pytest.raises(UnsupportedError, match=text):
        schedule_graph(gm, GROUPS)


def test_a_legacy_collective() -> None:
    gm = traced(one_gather, torch.zeros(2, 2))
    (launch,) = gm.graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default)
    launch.target = torch.ops.c10d_functional.all_gather_into_tensor.default
    text = (
        r"%all_gather_into_tensor calls c10d_functional\.all_gather_into_tensor, a legacy collective\. Use "
        r"torch\.distributed\._functional_collectives"
    )
    with pytest.raises(UnsupportedError, match=text):
        schedule_graph(gm, GROUPS)


def test_rejects_objects_other_than_graphs_and_missing_sizes() -> None:
    with pytest.raises(ArgumentError, match=r"gm must be a torch\.fx\.GraphModule of ATen operators, got a Linear"):
        schedule_graph(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    gm = traced(one_gather, torch.zeros(2, 2))
    for node in gm.graph.nodes:
        node.meta.clear()
    with pytest.raises(ArgumentError, match=r"%x_1 has no meta\['val'\].*Trace the graph with make_fx"):
        schedule_graph(gm, GROUPS)


def test_a_size_that_depends_on_values() -> None:
    gm = make_fx(lambda x: one_gather(x.nonzero()), tracing_mode="symbolic")(torch.zeros(2, 2))
    with pytest.raises(UnsupportedError, match=r"%nonzero has the size u0, which depends on values and has no hint"):
        schedule_graph(gm, GROUPS)


def test_existing_groups_need_no_description(fake_world: FakeWorld) -> None:
    """Ranks 0 to 15 in pairs, on torch's fake backend."""
    fake_world(16)
    mesh = init_device_mesh("cpu", (8, 2), mesh_dim_names=("dp", "tp"))
    data, tensor = (mesh.get_group(axis).group_name for axis in ("dp", "tp"))

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return wait(c10d.all_gather_into_tensor(x, 8, data)) + wait(c10d.all_reduce(y, "sum", tensor))

    gm = traced(run, torch.zeros(1, 8), torch.zeros(8, 8))
    known = {data: Group(8, apart=2), tensor: Group(2)}
    assert schedule_graph(gm).groups == schedule_graph(gm, mesh).groups == known
