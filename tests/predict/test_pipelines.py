"""Pipeline axes: the program is cut into stages, and a schedule runs them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graphshard
from graphshard.cost.costs import Costs
from graphshard.errors import ArgumentError, InfeasibleError, StageError
from graphshard.ir.mesh import Axis, Mesh
from graphshard.ir.program import Program, Slot
from graphshard.ir.repeats import Repeats
from graphshard.predict._pipeline_stages import Blocks, Stages, blocks_of, lists_of
from tests.conftest import FakeWorld
from tests.helpers import captured, full_gradients, mean_gradients, padded_shard, run_ranks, through
from tests.predict.test_explain import BF16, meta_net

H100 = graphshard.profiling.load_profile("h100")
TOKENS = torch.zeros(2, 128, dtype=torch.long)
DEPTH = 8


def explained(mesh: Any, **options: Any) -> Any:
    """Explain `Net` with eight blocks."""
    given = {"mp_policy": BF16, "example_inputs": (TOKENS,), **options}
    return graphshard.explain(meta_net(width=256, depth=DEPTH), mesh, **given)


# --- cutting ------------------------------------------------------------------------------------------------------


class Body(nn.Module):
    """Blocks between an embedding and a head; all read one table, and the head reads the first block's output."""

    def __init__(self, depth: int = 5, *, skip: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))
        self.register_buffer("table", torch.linspace(0, 1, 4))
        self.skip = skip
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        angle, first = self.table.cos(), None
        for layer in self.layers:
            x = x + (layer(x) * angle).tanh()
            first = x if first is None else first
        logits = self.head(x + first if self.skip else x)
        return nn.functional.cross_entropy(logits, targets)


BATCHES = [(torch.tensor([0, 1, 5]), torch.tensor([1, 2, 3])), (torch.tensor([2, 3, 4]), torch.tensor([0, 0, 5]))]


def run_pipeline(stages: Stages, model: nn.Module) -> dict[str, Any]:
    """Run every stage's program in sequence on two simulated ranks; return all their results."""
    programs = [stages.program_of(stage) for stage in range(len(stages.counts))]
    common = []
    for rank, batch in enumerate(BATCHES):
        given: dict[Slot, Any] = {Slot("input", str(i)): tensor for i, tensor in enumerate(batch)}
        given |= {Slot("buffer", name): buffer for name, buffer in model.named_buffers()}
        rows = [row for program in programs for row in program.params]
        given |= {Slot("param", row.name): padded_shard(model.get_parameter(row.name), row, rank) for row in rows}
        common.append({**given, Slot("tangent", "0"): torch.ones(())})
    sent: list[dict[str, Any]] = [{}, {}]
    left = []
    for program in programs:
        given = [{**c, **{Slot("saved", name): v for name, v in s.items()}} for c, s in zip(common, sent)]
        left.append(run_ranks(program.phases["forward"], given))
        for own, results in zip(sent, left[-1]):
            own.update({slot.name: value for slot, value in results.items() if slot.kind == "output"})
    back: list[dict[str, Any]] = [{}, {}]
    found: list[dict[str, Any]] = [{}, {}]
    for program, outputs in zip(reversed(programs), reversed(left)):
        given = [
            {**c, **out, **{Slot("tangent", name): v for name, v in s.items()}}
            for c, out, s in zip(common, outputs, back)
        ]
        for own, total, results in zip(back, found, run_ranks(program.phases["backward"], given)):
            own.update({slot.name: value for slot, value in results.items() if slot.of == "input"})
            total.update({str(slot): value for slot, value in results.items() if slot.of == "param"})
    return {"gradients": found, "loss": [out[Slot("output", "0")] for out in left[-1]]}


def cut(model: nn.Module, counts: tuple[int, ...]) -> Stages:
    program = captured(model, BATCHES[0], reshard_after_forward=False)
    through(program, "partition")
    return Stages(program, blocks_of(lists_of(model), None, "Body"), lambda _: counts)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("counts", [(5,), (2, 3), (1, 1, 2, 1)])
@pytest.mark.quick_cases("counts0-True", "counts1-False", "counts1-True", "counts2-False", "counts2-True")
def test_stages_compute_the_models_results(counts: tuple[int, ...], skip: bool) -> None:
    """In sequence they compute the model's loss and gradients; each stage has separate parameters."""
    model = Body(skip=skip)
    stages = cut(model, counts)
    found = run_pipeline(stages, model)
    names = [row.name for stage in range(len(counts)) for row in stages.program_of(stage).params]
    assert sorted(names) == sorted(dict(model.named_parameters()))
    whole = stages.program
    torch.testing.assert_close(full_gradients(whole, found["gradients"]), mean_gradients(model, BATCHES))
    torch.testing.assert_close(found["loss"], [model(*batch) for batch in BATCHES])
    one = 3 * 4 * 4  # a row for each token
    for border in range(len(counts) - 1):
        # Values used by later stages cross every border in between.
        apart = skip and sum(counts[: border + 1]) > 1
        assert stages.sent(border) == (2 * one if apart else one)
        assert stages.sent(border, backward=True) == (2 * one if apart else one)


def test_no_operator_is_duplicated() -> None:
    """Except the table, which every stage computes; all other operators occur once."""

    def count(program: Program) -> int:
        nodes = [node for phase in program.phases.values() for node in phase.module.graph.nodes]
        return sum(node.op == "call_function" and "cos" not in str(node.target) for node in nodes)

    stages = cut(Body(), (2, 2, 1))
    assert sum(count(stages.program_of(stage)) for stage in range(3)) == count(stages.program)


def test_a_parameter_of_several_stages() -> None:
    message = r"^parameter embed\.weight is used in stages 0 and 1 of 2, and stages have parameters of their own\."
    with pytest.raises(StageError, match=message):
        cut(Body(tied=True), (3, 2))


def test_blocks_to_cut() -> None:
    """The equal blocks, or else the longest list."""
    repeats = Repeats("layers", 1, 2, 6)
    blocks = blocks_of({"heads": 40, "layers": 14}, repeats, "Net")
    assert (blocks.path, blocks.count) == ("layers", 14)
    assert [blocks.kind(index) for index in (0, 1, 2, 3, 13)] == [0, "0", "1", "0", 13]
    assert blocks_of({"heads": 40, "layers": 14}, None, "Net").path == "heads"
    assert Blocks("layers", 14, None).every.group_of("layers.13.up") == 13
    assert Blocks("layers", 14, None).every.group_of("layers_other.1") is None
    with pytest.raises(StageError, match=r"^mesh has a pipeline axis, and Net has no nn\.ModuleList"):
        blocks_of({}, None, "Net")


# --- predictions --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_stage_equals_no_pipeline() -> None:
    """With pp 1 the prediction is the same as without, except for the name of the mesh."""
    plain, one = explained({"dp": 8}, accumulate=4).to_dict(), explained({"dp": 8, "pp": 1}, accumulate=4).to_dict()
    assert one.pop("mesh") == {"pp": 1, "dp": 8}
    assert plain.pop("mesh") == {"dp": 8}
    assert one == plain


def test_a_step_adds_up() -> None:
    """Compute, exposed communication, optimizer and bubble of the slowest rank add up; the bubble is known."""
    found = explained({"pp": 4, "dp": 4}, accumulate=8)
    made = found.pipeline
    assert found.mesh == {"pp": 4, "dp": 4}
    assert (found.num_ranks, found.data_ranks, found.microbatches) == (16, 4, 8)
    assert found.step_tokens == 8 * 4 * TOKENS.numel()
    parts = found.compute_s + found.exposed_comm_s + found.optimizer_s + found.bubble_s
    assert parts == pytest.approx(found.step_time_s)
    assert found.step_time_s >= found.lower_bound_s
    assert found.step_range_s[0] < found.step_time_s < found.step_range_s[1]
    slowest = made.stages[made.slowest]
    least = (4 - 1) * min(stage.forward_s + stage.backward_s for stage in made.stages)
    most = (4 - 1) * (max(s.forward_s + s.backward_s + s.gathers_s for s in made.stages) + 4 * made.sending_s)
    assert least < found.bubble_s < most
    assert found.limit == "bubble"
    assert found.advice[0].startswith("ranks wait for other stages for ")
    assert "with 8 microbatches for 4 stages" in found.advice[0]
    assert slowest.forward_s > 0
    assert f"bubble {graphshard.utils.text.format_seconds(found.bubble_s)}; slowest stage {made.slowest}" in str(found)
    assert json.loads(found.to_json())["pipeline"]["schedule"] == "1f1b"


@pytest.mark.slow
def test_parameters_are_gathered_once() -> None:
    """Doubling the microbatches doubles compute, but not gathers and reductions."""
    some, more = (explained({"pp": 2, "dp": 4}, accumulate=count) for count in (8, 16))
    assert more.communication_s == pytest.approx(some.communication_s)
    assert more.exposed_comm_s == pytest.approx(some.exposed_comm_s)
    assert more.compute_s == pytest.approx(2 * some.compute_s, rel=0.1)
    assert more.bubble_s == pytest.approx(some.bubble_s, rel=0.1)


@pytest.mark.slow
def test_memory_by_stage() -> None:
    """A stage holds one microbatch per later stage, with full gradients and parameters."""
    found = explained({"pp": 4, "dp": 4}, accumulate=8)
    made = found.pipeline
    assert [stage.alive for stage in made.stages] == [4, 3, 2, 1]
    assert found.peak_memory_bytes == sum(found.memory.values()) == made.rank_bytes[made.largest]
    assert made.memory_by_stage()["stage 1"] == made.rank_bytes[1]
    assert made.rank_bytes[1] > made.rank_bytes[2]
    saved = 2 * 128 * 256 * 2 * (1 + 4 + 4)  # of a block: its input, and the input and output of the GELU
    assert made.rank_bytes[1] - made.rank_bytes[2] == made.stages[1].blocks * saved
    full = 4 * (4 * 256 * 256 * 2 + 5 * 256)  # float32 gradients of a block
    extra = made.stages[made.largest].blocks * full
    assert extra <= found.memory["gradients of earlier microbatches"] <= extra + 4 * 1024 * 257
    assert "gradients of earlier microbatches" not in explained({"pp": 4, "dp": 4}).memory


@pytest.mark.slow
def test_schedules() -> None:
    """GPipe holds all microbatches; interleaved stages have a shorter bubble, and each rank has two."""
    one, all_, two = (explained({"pp": 2, "dp": 4}, accumulate=8, pipeline=p) for p in ("1f1b", "gpipe", "interleaved"))
    assert [stage.alive for stage in all_.pipeline.stages] == [8, 8]
    assert all_.peak_memory_bytes > one.peak_memory_bytes
    assert len(two.pipeline.stages) == 4
    assert two.bubble_s < one.bubble_s
    assert set(two.pipeline.memory_by_stage()) == {"stages 0 and 2", "stages 1 and 3"}
    assert two.peak_memory_bytes == sum(two.memory.values())


def test_a_limit_applies_to_a_rank() -> None:
    """Each stage is planned with the memory that other microbatches leave."""
    free = explained({"pp": 2, "dp": 4}, accumulate=4)
    same = explained({"pp": 2, "dp": 4}, accumulate=4, memory_limit=2 * free.peak_memory_bytes)
    assert same.peak_memory_bytes <= free.peak_memory_bytes
    message = r"^stage 0, of which other microbatches hold [\d,]+ bytes of memory_limit=\d+: no schedule fits"
    with pytest.raises(InfeasibleError, match=message) as caught:
        explained({"pp": 2, "dp": 4}, accumulate=4, memory_limit=free.peak_memory_bytes * 2 // 3)
    assert explained({"pp": 2, "dp": 4}, accumulate=4, memory_limit=caught.value.smallest * 11 // 10)
    with pytest.raises(
        InfeasibleError, match=r"^memory_limit=1000: other microbatches alone hold \d+ bytes in stage 0"
    ):
        explained({"pp": 2, "dp": 4}, accumulate=4, memory_limit=1000)


@pytest.mark.slow
def test_sends_take_the_link_between_stages() -> None:
    """Stages in one node use its link, others the network, for the bytes of one activation."""
    near, far = explained({"pp": 2, "dp": 4}, accumulate=4), explained({"pp": 2, "dp": 8}, accumulate=4)
    size = 2 * 128 * 256 * 2
    assert near.pipeline.sent_bytes == far.pipeline.sent_bytes == size
    for found, ranks in ((near, 4), (far, 8)):
        costs = Costs(H100, mesh=Mesh.of_shape({"dp": ranks}).with_pipeline("pp", 2))
        pair = Axis("pp", 2, "pipeline")
        assert costs.link(pair) == ("node" if found is near else "network")
        assert found.pipeline.sending_s == costs.collective("all_to_all", 2.0 * size, 1, pair)
    assert far.pipeline.sending_s > near.pipeline.sending_s


def megatron(model: nn.Module, mesh: Any) -> None:
    for block in model.get_submodule("layers").children():
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})


@pytest.mark.slow
def test_with_a_tensor_axis() -> None:
    """All three axes, in any order; the model communicates in every microbatch."""
    found = explained({"dp": 2, "tp": 2, "pp": 2}, parallelize=megatron, accumulate=4)
    again = explained({"pp": 2, "dp": 2, "tp": 2}, parallelize=megatron, accumulate=4)
    assert found.to_dict() == again.to_dict()
    assert found.mesh == {"pp": 2, "dp": 2, "tp": 2}
    assert (found.num_ranks, found.data_ranks) == (8, 2)
    assert found.model_comm_s > 0
    assert found.step_time_s >= found.lower_bound_s


def test_ranks_meshes() -> None:
    """All combinations of degrees are tried; each alternative lists its losses, including the bubble."""
    grid = graphshard.explain_grid(
        meta_net(width=256, depth=DEPTH),
        [16],
        degrees={"pp": (1, 2, 4, 16)},
        example_inputs=(TOKENS,),
        mp_policy=BF16,
        global_batch=64,
        settings={"": {}, "interleaved": {"pipeline": "interleaved"}},
    )
    assert [row.mesh for row in grid.rows[:3]] == [{"pp": 1, "dp": 16}, {"pp": 2, "dp": 8}, {"pp": 4, "dp": 4}]
    assert [row.microbatches for row in grid.rows[:3]] == [2, 4, 8]
    text = grid.ranking(4)
    assert "bubble" in text.splitlines()[0]
    assert "the bubble" in text
    assert "is best, because" in text
    assert "* left out: mesh has pp 16, and Net.layers has 8 blocks to cut into stages. Give pp of at most 8." in text
    assert "bubble" in str(grid).splitlines()[0]
    assert [row.mesh["pp"] for row in grid.rows] == [1, 2, 4, 2, 4]  # one stage has no schedule


def test_what_if() -> None:
    """Doubling and halving the stages is tried, and more ranks grow the sharding axis."""
    found = graphshard.what_if(
        meta_net(width=64, depth=4),
        {"pp": 2, "dp": 4},
        example_inputs=(TOKENS,),
        changes=["mesh", "reshard"],
        ranks=(16,),
        accumulate=4,
    )
    assert {each.change for each in found.changes} == {"mesh pp 4, dp 2", "mesh pp 1, dp 8"}
    assert [each.outcome.mesh for each in found.scaling] == [{"pp": 2, "dp": 4}, {"pp": 2, "dp": 8}]


@pytest.mark.parametrize(
    ("mesh", "options", "message"),
    [
        ({"pp": 16, "dp": 2}, {}, r"^mesh has pp 16, and Net\.layers has 8 blocks .* Give pp of at most 8\.$"),
        (
            {"pp": 8, "dp": 2},
            {"pipeline": "interleaved", "accumulate": 8},
            r"^mesh has pp 8 with 2 stages each, and Net\.layers has 8 blocks .* Give pp of at most 4\.$",
        ),
        (
            {"pp": 4, "dp": 2},
            {"pipeline": "interleaved", "accumulate": 9},
            r'^pipeline="interleaved" on pp 4 takes 9 microbatches in 2 rounds, .* Give a multiple of 4 microbatches',
        ),
        (
            {"pp": 4, "dp": 2},
            {"pipeline": "interleaved", "memory_limit": 1 << 30},
            r'^memory_limit with pipeline="interleaved": .* take pipeline="1f1b"\.$',
        ),
        ({"pp": 2, "dp": 2}, {"pipeline": "zigzag"}, r"^pipeline must be one of '1f1b', 'gpipe', 'interleaved', got"),
        ({"pp": 2, "dp": 2}, {"stages_per_rank": 0}, r"^stages_per_rank must be a positive number of stages"),
        (
            {"pp": 2, "dp": 2},
            {"reshard_after_forward": True},
            r"^reshard_after_forward=True on a mesh with pp: .* Leave",
        ),
        ({"pp": 2, "dp": 2}, {"symbols": {"batch": 0}}, r"^symbols: there are no formulas of a pipeline\. Leave"),
        ({"pp": 2, "pipeline": 2, "dp": 2}, {}, r"^mesh has 2 pipeline axes: 'pp', 'pipeline'\. Give one\.$"),
        ({"pp": 0, "dp": 2}, {}, r"^mesh\['pp'\] must be a positive number of stages such as 4, got 0\.$"),
        ({"pp": 1 << 15, "dp": 1 << 15}, {}, r"^mesh must have at most 1048576 ranks"),
        ({"pp": 2, "dp": 2, "xy": 2, "z": 2}, {}, r"^mesh must have one axis .* or two"),
    ],
)
@pytest.mark.quick_cases(
    "mesh2-options2-message2",
    'mesh3-options3-^memory_limit with pipeline="interleaved": .* take pipeline="1f1b"\\\\.$',
    "mesh4-options4-^pipeline must be one of '1f1b', 'gpipe', 'interleaved', got",
    "mesh5-options5-^stages_per_rank must be a positive number of stages",
    "mesh6-options6-^reshard_after_forward=True on a mesh with pp: .* Leave",
    "mesh7-options7-^symbols: there are no formulas of a pipeline\\\\. Leave",
    "mesh8-options8-^mesh has 2 pipeline axes: 'pp', 'pipeline'\\\\. Give one\\\\.$",
    "mesh9-options9-^mesh\\\\['pp'\\\\] must be a positive number of stages such as 4, got 0\\\\.$",
    "mesh10-options10-^mesh must have at most 1048576 ranks",
    "mesh11-options11-^mesh must have one axis .* or two",
)
def test_wrong_arguments(mesh: Any, options: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        explained(mesh, **options)


@pytest.mark.parametrize(
    ("meshes", "degrees", "message"),
    [
        ([8], {"pp": 2}, r"^degrees\['pp'\] must be a list of sizes such as \(1, 2, 4\), got 2\.$"),
        ([8], {"pp": (0,)}, r"^degrees\['pp'\] must be a positive list of sizes"),
        ([8], [2], r"^degrees must be such as"),
        ([8], {"xy": (2,)}, r"^degrees has an axis 'xy'\. Use 'pp', "),
        ([(8,)], {"pp": (2,)}, r"^meshes must be a positive list of numbers of ranks, beside degrees, got"),
        ([9], {"pp": (2, 4)}, r"^degrees .*: none divides \[9\] ranks\. Give others\.$"),
    ],
)
def test_wrong_degrees(meshes: Any, degrees: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        graphshard.explain_grid(meta_net(), meshes, degrees=degrees, example_inputs=(TOKENS,))


def test_rejects_an_existing_mesh(fake_world: FakeWorld) -> None:
    """Its model is already one stage."""
    fake_world(4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    with pytest.raises(
        ArgumentError, match=r"^mesh has a pipeline axis, 'pp', and is a DeviceMesh, .* mesh\['dp'\]\.$"
    ):
        explained(mesh)
