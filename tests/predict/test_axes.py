"""Models with model-parallel axes, predicted on meshes that need not exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import graphshard
from graphshard.cost.costs import MODEL_KINDS, Costs
from graphshard.errors import ArgumentError, BatchError, CaptureError, InfeasibleError, UnsupportedError
from graphshard.ir.mesh import Axis
from graphshard.options.options import Options
from graphshard.predict.study import Study
from graphshard.schedule.build_problem import Settings, build
from graphshard.schedule.clock import Launch, TimedWait, run
from tests.conftest import FakeWorld
from tests.distributed.context_parallel import ATTENTIONS, Decoder, whole
from tests.distributed.expert_parallel import Moe, grouped, one_by_one
from tests.predict.test_explain import BF16, meta_net

H100 = graphshard.profiling.load_profile("h100")
TOKENS = torch.zeros(2, 16, dtype=torch.long)
WIDTH, DEPTH = 64, 6


def megatron(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard blocks of `Net` column-wise, then row-wise."""
    for block in model.get_submodule("layers").children():
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})


def explain_net(shape: dict[str, int], **options: Any) -> Any:
    """Explain `Net` on a mesh with a tensor axis."""
    given = {"mp_policy": BF16, "parallelize": megatron, "example_inputs": (TOKENS,), **options}
    return graphshard.explain(meta_net(width=WIDTH, depth=DEPTH), shape, **given)


def own(found: Any) -> list[Launch]:
    """Return the model's collectives."""
    return [event for event in found._timeline.events if isinstance(event, Launch) and event.kind in MODEL_KINDS]


@pytest.mark.slow
def test_a_tensor_axis() -> None:
    """Each block reduces once in each direction; the model is unchanged afterwards."""
    model = meta_net(width=WIDTH, depth=DEPTH)
    before = dict(model.named_parameters())
    found = graphshard.explain(
        model, {"dp": 4, "tp": 2}, example_inputs=(TOKENS,), mp_policy=BF16, parallelize=megatron
    )
    assert not dist.is_initialized()
    assert dict(model.named_parameters()) == before
    assert not any(isinstance(param, DTensor) for param in model.parameters())
    sent = own(found)
    assert [launch.name for launch in sent] == ["reduced over tp"] * 2 * DEPTH
    costs = Costs(H100, mesh=found._program.mesh)
    num_bytes = TOKENS.numel() * WIDTH * 2
    assert {launch.seconds for launch in sent} == {
        costs.collective("all_reduce", num_bytes, 1, Axis("tp", 2, "tensor"))
    }
    assert {launch.where.partition(".")[0] for launch in sent} == {"layers"}
    assert found.mesh == {"dp": 4, "tp": 2}
    assert found.tokens_per_second == pytest.approx(4 * TOKENS.numel() / found.step_time_s)
    waits = [wait for wait in found.waits if wait.why == "model"]
    # In backward the gradients of weights overlap all of it.
    assert [launch.at_once for launch in sent] == [True] * DEPTH + [False] * DEPTH
    assert [wait.phase for wait in waits] == ["forward"] * DEPTH
    alone = sum(launch.seconds for launch in sent if launch.at_once)
    assert found.model_comm_s == pytest.approx(alone)
    assert found.critical_path["reduced over tp"] <= alone * (1 + 1e-9)


@pytest.mark.slow
def test_memory_counts_shards() -> None:
    """Two ranks of the tensor axis have half of each block; the other parameters are sharded over the data axis."""
    one, two = (explain_net({"dp": 2, "tp": size}).memory["optimizer state"] for size in (1, 2))
    block = 4 * (2 * 4 * WIDTH * WIDTH + 4 * WIDTH)  # sharded; the second bias is replicated
    assert one - two == pytest.approx(2 * DEPTH * block / 2 / 2, rel=1e-6)


@pytest.mark.slow
def test_links_of_axes() -> None:
    """Eight ranks share a node; neighbors on the data axis are as far apart as the tensor axis is long."""
    near, far = explain_net({"dp": 2, "tp": 8}), explain_net({"dp": 2, "tp": 16})
    assert {launch.link for launch in own(near)} == {"node"}
    assert {launch.link for launch in own(far)} == {"network"}
    gathers = {
        event.link for event in near._timeline.events if isinstance(event, Launch) and event.kind not in MODEL_KINDS
    }
    assert gathers == {"network"}
    assert far.model_comm_s > 1.5 * near.model_comm_s
    assert far.limit == "model"
    assert "own collectives over tp (16 ranks, between nodes)" in far.advice[-1]


@pytest.mark.parametrize(
    ("shape", "hardware"),
    [
        ({"dp": 4, "tp": 2}, "cpu-gloo"),
        ({"replicate": 2, "dp": 8, "tp": 8}, "h100"),
        ({"dp": 4, "tp": 2}, "h100"),
        ({"replicate": 2, "dp": 8, "tp": 8}, "cpu-gloo"),
    ],
)
@pytest.mark.slow
def test_no_step_is_shorter_than_the_bound(shape: dict[str, int], hardware: str) -> None:
    """Also where collectives slow compute down; the model's collectives are part of the bound."""
    found = explain_net(shape, hardware=hardware)
    assert found.step_time_s >= found.lower_bound_s * (1 - 1e-9)
    assert found.lower_bound_s >= found._timeline.compute + found._timeline.at_once


@pytest.mark.parametrize("shape", [{"dp": 4, "tp": 2}, {"dp": 2, "tp": 8}], ids=str)
@pytest.mark.slow
def test_the_plan_counts_the_models_collectives(shape: dict[str, int]) -> None:
    """In a node they share the link of the gathers; with eight ranks on the tensor axis they have a separate one."""
    found = explain_net(shape)
    program = found._program
    forward, backward, _ = build(program, Costs(H100, mesh=program.mesh), Settings()).problem.chains
    both = (*forward.own, *backward.own)
    assert [each.at_once for each in both] == [True] * DEPTH + [False] * DEPTH
    assert [each.seconds for each in both] == [launch.seconds for launch in own(found)]
    assert {each.channel for each in both} == {0 if shape["tp"] == 2 else 1}
    assert found.lower_bound_s >= sum(each.seconds for each in forward.own) + sum(backward.seconds)


def test_contention_slows_collectives_of_the_model() -> None:
    """On another link than a gather, a collective slows down during the gather; on the same link it queues."""
    gather = Launch("gather", "forward", 0, None, "gather", "network", 1, 10.0)
    for link, end in (("node", 4 + 0.5 * 8), ("network", 10 + 4)):
        mine = Launch("reduced over tp", "forward", 0, None, "reduced", link, 1, 4.0, at_once=True)
        times = run([gather, mine, TimedWait("reduced over tp", "forward", 0, None, 1)], contention=0.5)
        assert times.ends[-1] == end
    assert run([gather, mine], contention=0.0).ends == [10.0, 14.0]


@pytest.mark.slow
def test_prediction_equals_an_existing_mesh(fake_world: FakeWorld) -> None:
    """A model parallelized on a DeviceMesh has the same prediction."""
    expected = explain_net({"dp": 4, "tp": 2}).to_dict()
    fake_world(8)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    model = meta_net(width=WIDTH, depth=DEPTH)
    megatron(model, mesh)
    assert graphshard.explain(model, mesh, example_inputs=(TOKENS,), mp_policy=BF16).to_dict() == expected


def sequence_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Parallelize with hooks before and after modules, and gradients that are partial sums."""
    for block in model.get_submodule("layers").children():
        plan = {
            "norm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "mlp.0": ColwiseParallel(),
            "mlp.2": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh["tp"], plan)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Sequences(nn.Module):
    def __init__(self, depth: int = 7) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Normed() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("activation", [None, "full"])
@pytest.mark.quick_cases("None")
def test_few_blocks_represent_all(activation: Any) -> None:
    """The result equals capturing all blocks, although few are captured."""
    found, captured = [], []
    for every_block in (False, True):
        options = Options(mp_policy=BF16, activation=activation)
        study = Study(
            Sequences(),
            (torch.zeros(2, 8, WIDTH),),
            None,
            options,
            parallelize=sequence_parallel,
            every_block=every_block,
        )
        found.append(study.explain({"dp": 2, "tp": 2}, H100, "isolated").to_dict())
        (subject,) = study._targets.values()
        assert subject.program is not None
        captured.append(len(subject.program.params))
    assert found[0] == found[1]
    assert captured[0] < captured[1]
    assert any("scattered over tp" in name or "joined over tp" in name for name in found[0]["critical_path"])


@pytest.mark.slow
def test_formulas() -> None:
    """At the explained sizes they return the explained numbers."""
    found = explain_net({"dp": 4, "tp": 2}, symbols={"batch": 0})
    assert found.formulas is not None
    values = found.formulas.evaluate()
    assert values["step_time_s"] == pytest.approx(found.step_time_s)
    assert values["communication_s"] == pytest.approx(found.communication_s)
    longer = explain_net({"dp": 4, "tp": 2}, example_inputs=(torch.zeros(8, 16, dtype=torch.long),))
    assert found.formulas.evaluate(batch=8)["communication_s"] == pytest.approx(longer.communication_s)


@pytest.mark.parametrize(("name", "kinds"), [("gathered", {"joined", "scattered"}), ("by heads", {"exchanged"})])
@pytest.mark.quick_cases("by heads-kinds1")
def test_a_context_axis(name: str, kinds: set[str]) -> None:
    """Attention communicates among neighbors on the sharding axis; every rank has different tokens."""

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
        for block in model.get_submodule("layers").children():
            block.axis, block.attention = mesh["cp"], ATTENTIONS[name]

    tokens = torch.zeros(2, 8, dtype=torch.long)
    model = Decoder(whole, None)
    found = graphshard.explain(model, {"dp": 4, "cp": 2}, example_inputs=(tokens, tokens), parallelize=parallelize)
    assert {launch.name for launch in own(found)} == {f"{kind} over dp_cp/2" for kind in kinds}
    assert {launch.link for launch in own(found)} == {"node"}
    assert found.data_ranks == 8
    assert found.step_time_s >= found.lower_bound_s * (1 - 1e-9)


@pytest.mark.slow
def test_an_expert_axis() -> None:
    """Each rank receives the same number of tokens as it sends, and all experts get equal numbers."""

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return Moe(mesh["ep"], grouped)

    rows = torch.zeros(2, 6, 8)
    found = graphshard.explain(Moe(None), {"dp": 4, "ep": 2}, example_inputs=(rows,), parallelize=parallelize)
    sent = [launch for launch in own(found) if launch.name == "exchanged over ep"]
    assert {launch.num_bytes for launch in sent} == {4 * 8, 12 * 2 * 8 * 4}  # counts, and two experts for each token
    assert found.step_time_s >= found.lower_bound_s * (1 - 1e-9)
    assert {launch.link for launch in sent} == {"node"}


@pytest.mark.parametrize("product", [grouped, one_by_one], ids=["grouped", "one by one"])
@pytest.mark.quick_cases("grouped")
def test_formulas_of_experts(product: Any) -> None:
    """The batch determines the numbers of tokens; more ranks extend the data axis, not the expert axis."""

    def explain_net(shape: dict[str, int], batch: int, symbols: dict[str, int] | None = None) -> Any:
        return graphshard.explain(
            Moe(None),
            shape,
            example_inputs=(torch.zeros(batch, 16, 8),),
            parallelize=lambda model, mesh: Moe(mesh["ep"], product),
            symbols=symbols,
        )

    formulas = explain_net({"dp": 4, "ep": 2}, 8, {"batch": 0}).formulas
    assert formulas.at == {"batch": 8, "ranks": 8}
    for batch in (8, 16):
        expected, values = explain_net({"dp": 4, "ep": 2}, batch), formulas.evaluate(batch=batch)
        for name in ("step_time_s", "compute_s", "optimizer_s", "communication_s", "exposed_comm_s"):
            assert values[name] == pytest.approx(getattr(expected, name), rel=1e-9), name
    more = explain_net({"dp": 8, "ep": 2}, 8)
    assert formulas.evaluate(ranks=16)["communication_s"] == pytest.approx(more.communication_s, rel=1e-9)
    for found, ranks in ((expected, 8), (more, 16)):
        held = sum(4 * row.shard_bytes(row.dtype) for row in found._program.params)
        assert formulas.evaluate(ranks=ranks)["state_bytes"] == held


@pytest.mark.slow
def test_microbatches() -> None:
    """Each gathers, computes and reduces; gradients accumulate, and there is one optimizer step."""
    one, four = explain_net({"dp": 4, "tp": 2}), explain_net({"dp": 4, "tp": 2}, global_batch=32)
    assert (one.microbatches, four.microbatches) == (1, 4)
    assert four.tokens == 4 * one.tokens
    added = four.step_time_s - one.optimizer_s - 4 * (one.step_time_s - one.optimizer_s)
    assert 0 < added < 0.1 * one.step_time_s
    assert four.peak_memory_bytes == one.peak_memory_bytes + four.memory["gradients of earlier microbatches"]
    assert four.step_time_s >= four.lower_bound_s * (1 - 1e-9)
    assert four.exposed_comm_s == pytest.approx(4 * one.exposed_comm_s)


def test_ranks_meshes_by_time_per_token() -> None:
    """Ranked by time per token; meshes that exceed the batch or memory are named with the reason."""
    small = H100.__class__(**{**{f: getattr(H100, f) for f in H100.__dataclass_fields__}, "memory_capacity": 1.0})
    grid = graphshard.explain_grid(
        meta_net(width=WIDTH, depth=DEPTH),
        [{"dp": 2, "tp": 4}, {"dp": 4, "tp": 2}, {"dp": 64, "tp": 2}, {"dp": 3, "tp": 2}],
        example_inputs=(TOKENS,),
        mp_policy=BF16,
        parallelize=megatron,
        global_batch=16,
        hardware=[H100, small],
    )
    per_token = [row.seconds_per_token for row in grid.rows if row.limit != "memory"]
    text = grid.ranking(1)
    best = min(grid.rows, key=lambda row: (row.limit == "memory", row.seconds_per_token))
    assert best.seconds_per_token == min(per_token)
    name = ", ".join(f"{axis} {size}" for axis, size in best.mesh.items())
    assert f"* {name} is best, because" in text
    assert "left out: mesh dp 64, tp 2 is larger than the batch: 64 ranks with inputs of their own, 2 each" in text
    assert "left out: mesh dp 3, tp 2 does not divide the batch" in text
    assert "are needed, 1 B are there" in text
    assert len(text.splitlines()) == 2 + 1 + 1 + 2 + 2
    with pytest.raises(BatchError, match=r"^mesh dp 64, tp 2 is larger than the batch"):
        explain_net({"dp": 64, "tp": 2}, global_batch=16)


def test_ignored_parameters() -> None:
    """Parameters of the model and of the copy are matched by name."""
    model = meta_net(width=WIDTH, depth=DEPTH)
    found = graphshard.explain(
        model,
        {"dp": 2, "tp": 2},
        example_inputs=(TOKENS,),
        parallelize=megatron,
        ignored_params=[model.embed.weight],
    )
    assert [row.name for row in found._program.params if row.ignored] == ["embed.weight"]


def _failing(model: nn.Module, mesh: DeviceMesh) -> None:
    raise KeyError("tp")


@pytest.mark.parametrize(
    ("shape", "parallelize", "message"),
    [
        ({"dp": 2, "tp": 2}, None, r"^mesh \{'dp': 2, 'tp': 2\}: a model communicates along some .* Give it\.$"),
        ({"dp": 2, "xy": 2}, megatron, r"^mesh has an axis 'xy', and it is not known what it is for\. Use 'dp', "),
        (
            {"tp": 2, "dp": 4},
            megatron,
            r"^mesh \('tp', 'dp'\): the tensor axis 'tp' lies inside .*\{'dp': 4, 'tp': 2\}",
        ),
        ({"dp": 2, "tp": 0}, megatron, r"^mesh must have positive sizes, got 0 for 'tp'\.$"),
        ({"tp": 2}, megatron, r"must have one data axis .* and has none\.$"),
        ({"dp": 2, "data": 2, "shard": 2, "tp": 2}, megatron, r"must have one data axis .* or two"),
        ({"dp": 1 << 15, "tp": 1 << 15}, megatron, r"^mesh must have at most 1048576 ranks"),
        ({"dp": 2, "tp": 2}, lambda m, mesh: None, r"^mesh has a tensor axis, 'tp', and no parameter of Net is distri"),
        ({"dp": 2, "tp": 2}, _failing, r"^parallelize: .* failed with KeyError: 'tp'\. Correct it"),
        ({"dp": 2, "tp": 2}, 3, r"^parallelize must be a function"),
        ({"dp": 2}, megatron, r"^parallelize: .* failed with KeyError"),
        ("dp=2", megatron, r"^mesh must be sizes by names of axes, such as \{'dp': 16, 'tp': 8\}, got 'dp=2'"),
    ],
)
def test_wrong_meshes(shape: Any, parallelize: Any, message: str) -> None:
    with pytest.raises((ArgumentError, UnsupportedError), match=message):
        explain_net(shape, parallelize=parallelize)
    assert not dist.is_initialized()


def test_sizes_that_a_tensor_axis_does_not_divide() -> None:
    """Matmuls of local shards then do not match, as in eager mode; the error names the line."""
    message = (
        r"^graphshard cannot capture Net\.forward at .*(.|\n)*same reduction dim, but got \[32, 258\] X \[256, 64\]"
    )
    with pytest.raises(CaptureError, match=message):
        explain_net({"dp": 2, "tp": 3})
    assert not dist.is_initialized()


@pytest.mark.slow
def test_two_tensor_axes() -> None:
    """Blocks on either axis; an axis without distributed parameters is an error."""

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
        for index, block in enumerate(model.get_submodule("layers").children()):
            axis = mesh["tp" if index % 2 else "tensor"]
            parallelize_module(block, axis, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    shape = {"dp": 2, "tensor": 2, "tp": 2}
    found = explain_net(shape, parallelize=parallelize)
    assert {launch.name for launch in own(found)} == {"reduced over tensor", "reduced over tp"}
    assert (found.data_ranks, found.mesh) == (2, shape)
    assert found.step_time_s >= found.lower_bound_s * (1 - 1e-9)
    with pytest.raises(ArgumentError, match=r"^mesh has a tensor axis, 'tensor', and no parameter of Net is distrib"):
        explain_net(shape)


@pytest.mark.slow
def test_the_program_of_a_gpu() -> None:
    """Captured without a GPU, on a mesh that need not exist; on an existing mesh it is an error."""
    pytest.importorskip("cffi")
    found = explain_net({"dp": 4, "tp": 2}, device="cuda", backend="eager")
    assert [launch.name for launch in own(found)] == ["reduced over tp"] * 2 * DEPTH
    (phase, *_) = found._program.phases.values()
    assert {node.meta["val"].device.type for node in phase.placeholders} == {"cuda"}


def test_the_program_of_a_gpu_on_a_mesh_that_exists(fake_world: FakeWorld) -> None:
    pytest.importorskip("cffi")
    fake_world(8)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    model = meta_net(width=WIDTH, depth=DEPTH)
    megatron(model, mesh)
    with pytest.raises(ArgumentError, match=r"^device='cuda': a program is captured for a GPU on meshes that need not"):
        graphshard.explain(model, mesh, example_inputs=(TOKENS,), device="cuda")


def test_rejects_existing_process_groups(fake_world: FakeWorld) -> None:
    """A simulated mesh is rejected next to them, and so are groups of a different mesh than the parameters'."""
    fake_world(8)
    with pytest.raises(ArgumentError, match=r"^mesh \{'dp': 2, 'tp': 2\} need not exist, .* this process has process"):
        explain_net({"dp": 2, "tp": 2})
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(
        ArgumentError, match=r"^parallelize is for meshes that need not exist, and mesh is a DeviceMesh"
    ):
        explain_net(mesh)
    other = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    model = meta_net(width=WIDTH, depth=DEPTH)
    megatron(model, other)
    with pytest.raises(
        ArgumentError, match=r"^parameter layers\.0\.0\.weight is distributed over .*, and the tensor ax"
    ):
        graphshard.explain(model, mesh, example_inputs=(TOKENS,))


def test_the_copy_keeps_ties() -> None:
    """The parallelized copy on the meta device has the same tied parameters as the model."""
    from graphshard.options.simulated_mesh import on_meta

    model = meta_net(width=WIDTH, depth=1)
    model.head.weight = nn.Parameter(torch.ones(1024, WIDTH), requires_grad=False)
    model.embed.weight = model.head.weight
    made = on_meta(model)
    assert made.head.weight is made.embed.weight
    assert made.head.weight.is_meta
    assert not made.head.weight.requires_grad
    assert not model.head.weight.is_meta


@pytest.mark.slow
def test_uneven_shards_are_planned_by_cost() -> None:
    """As `compile` plans them: the program is the first rank's, which has the largest shards."""

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()})

    model = nn.Sequential(nn.Linear(6, 13), nn.ReLU(), nn.Linear(13, 6))
    given = {"parallelize": parallelize, "example_inputs": (torch.randn(3, 6),), "hardware": "h100"}
    free = graphshard.explain(model, {"dp": 2, "tp": 2}, **given)
    with pytest.raises(InfeasibleError, match=r"no schedule fits in a memory_limit of 10 bytes") as error:
        graphshard.explain(model, {"dp": 2, "tp": 2}, memory_limit=10, **given)
    tight = graphshard.explain(model, {"dp": 2, "tp": 2}, memory_limit=error.value.smallest, **given)
    assert tight.peak_memory_bytes <= error.value.smallest <= free.peak_memory_bytes
