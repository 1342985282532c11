"""Injected faults: errors that verification names, and errors that only `bisect` finds by running the stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from graphshard import Pass, Pipeline, Program
from graphshard.errors import ArgumentError, PassError
from graphshard.ir.collective_regions import CollectiveRegions, collectives
from graphshard.ir.graph import aten, calls_of, replace_after
from graphshard.lower.regions import RegionCall
from tests.distributed.context_parallel import ATTENTIONS, Decoder
from tests.distributed.expert_parallel import Moe
from tests.distributed.tensor_parallel import llama, tokens
from tests.distributed.test_partial_sums import Scaled
from tests.distributed.twins import world_mesh
from tests.ranks import Ranks


class _Net(nn.Module):
    """Parameters of uneven size, tied weights, dropout, a buffer that is updated, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 6)) for _ in range(3))
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x).relu()
        logits = self.head(self.norm(x.flatten(0, 1)))
        return torch.nn.functional.cross_entropy(logits, tokens.flatten()), logits


@dataclass(frozen=True)
class DropWait(Pass):
    """Forgets to wait for a gather."""

    name: ClassVar[str] = "drop-wait"

    def rewrite(self, program: Program) -> int:
        wait = collectives(program.phases["forward"])[1].waits[0]
        wait.replace_all_uses_with(wait.all_input_nodes[0])
        wait.graph.erase_node(wait)
        return 1


@dataclass(frozen=True)
class SwapReductions(Pass):
    """Runs a reduction after the next one."""

    name: ClassVar[str] = "swap-reductions"

    def rewrite(self, program: Program) -> int:
        phase = program.phases["backward"]
        layout = CollectiveRegions.of(phase)
        first, second, *_ = [c for c in collectives(phase) if c.kind == "reduce"]
        anchor = [second.waits[-1], *layout.after[second.waits[-1]]][-1]
        moved = [first.node, *first.node.users, *(n for wait in first.waits for n in (wait, *layout.after[wait]))]
        for node in dict.fromkeys(moved):
            anchor.append(node)
            anchor = node
        return 1


@dataclass(frozen=True)
class ScaleGradient(Pass):
    """Scales a gradient by about a percent, and claims to be exact."""

    name: ClassVar[str] = "scale-gradient"
    factor: float = 1.01

    def rewrite(self, program: Program) -> int:
        relu = calls_of(program.phases["backward"], aten.threshold_backward.default)[1]
        replace_after(relu, aten.mul.Tensor, self.factor)
        return 1


@dataclass(frozen=True)
class ScaleReduced(Pass):
    """Sums instead of averaging."""

    name: ClassVar[str] = "sum-instead-of-mean"

    def rewrite(self, program: Program) -> int:
        node = [c.node for c in collectives(program.phases["backward"]) if c.kind == "reduce"][1]
        node.args = (node.args[0], "sum", *node.args[2:])
        return 1


def _compiled(**options: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    options = {"backend": "eager", "verify": "off", **options}
    model = graphshard.compile(_Net(), world_mesh(), **options)
    tokens = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
    return model, tokens


def _sound(rank: int, world_size: int, policy: MixedPrecisionPolicy | None) -> None:
    model, tokens = _compiled(mp_policy=policy)
    before = {name: value.full_tensor().detach().clone() for name, value in model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    found = graphshard.bisect(model, (tokens,))
    assert found.culprit is None, str(found)
    assert [stage.name for stage in found.stages] == [step.name for step in Pipeline()]
    # On some backends only the reduction adds in a different order than the captured program.
    assert all(stage.error == 0 for stage in found.stages[1:]), str(found)
    assert "no stage differs" in str(found)
    assert not graphshard.programs(model)
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), before[name])
        assert param.grad is None
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name])


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "policy",
    [None, MixedPrecisionPolicy(reduce_dtype=torch.float64)],
    ids=["float32", "mixed"],
)
@pytest.mark.slow
def test_a_correct_program(ranks: Ranks, world_size: int, policy: MixedPrecisionPolicy | None) -> None:
    """Every stage of the default pipeline computes the same, including dropout, and the model is unchanged."""
    ranks(world_size).run(_sound, policy)


def _faulty(rank: int, world_size: int, fault: Pass, after: str, where: str) -> None:
    model, tokens = _compiled(passes=Pipeline().insert(fault, after=after))
    found = graphshard.bisect(model, (tokens,))
    assert found.culprit is not None
    assert found.culprit.name == fault.name
    assert where in found.culprit.where
    assert f"{fault.name} is the first to differ: " in str(found)


@pytest.mark.parametrize(
    ("fault", "after", "where"),
    [
        (ScaleGradient(), "partition", "grad:"),
        (ScaleGradient(), "reorder", "grad:"),
        (ScaleReduced(), "reorder", "grad:"),
    ],
    ids=["scaled", "scaled at the end", "summed"],
)
@pytest.mark.quick_cases("summed")
def test_finds_wrong_numbers(ranks: Ranks, fault: Pass, after: str, where: str) -> None:
    """A fault that no rule can find: a pass that wrongly claims to be exact."""
    ranks(2).run(_faulty, fault, after, where)


AXES: dict[str, Any] = {
    "tensor": (("dp", "tp"), llama, tokens),
    "expert": (("dp", "ep"), Moe, lambda: (torch.randn(2, 6, 8),)),
    "context": (("dp", "cp"), lambda cp: Decoder(ATTENTIONS["by heads"], cp), lambda: (torch.ones(2, 4).long(),) * 2),
}


def _along_axes(rank: int, world_size: int, name: str) -> None:
    names, make, batch = AXES[name]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    torch.manual_seed(rank // 2)
    inputs = batch()
    model = graphshard.compile(make(mesh[names[1]]), mesh, backend="eager")
    found = graphshard.bisect(model, inputs)
    assert found.culprit is None, str(found)
    assert all(stage.error == 0 for stage in found.stages[1:]), str(found)
    wrong = Pipeline().insert(ScaleReduced(), after="reorder")
    model = graphshard.compile(make(mesh[names[1]]), mesh, backend="eager", passes=wrong, verify="off")
    assert graphshard.bisect(model, inputs).culprit.name == ScaleReduced.name


@pytest.mark.parametrize("name", AXES)
@pytest.mark.slow
def test_model_parallel_axes(ranks: Ranks, name: str) -> None:
    """Shards are gathered and reduced over the sharding axes, and partial sums are added up."""
    ranks(4).run(_along_axes, name)


def _sums_that_are_cut(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(rank // 2)
    model = graphshard.compile(Scaled(mesh["tp"], 1, 4), mesh, backend="eager")
    found = graphshard.bisect(model, (torch.randn(5, 4, 6),))
    assert found.culprit is None, str(found)
    assert all(stage.error == 0 for stage in found.stages[1:]), str(found)


def test_partial_sums(ranks: Ranks) -> None:
    ranks(4).run(_sums_that_are_cut)


def _refused(rank: int, world_size: int, fault: Pass, message: str) -> None:
    model, tokens = _compiled(passes=Pipeline().insert(fault, after="reorder"), verify="each")
    with pytest.raises(PassError, match=message):
        model(tokens)
    assert not graphshard.programs(model)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (DropWait(), "drop-wait broke the rule waited_once in forward"),
        (SwapReductions(), "swap-reductions broke the rule planned_order in backward"),
    ],
    ids=["wait", "order"],
)
@pytest.mark.slow
def test_rules_name_wrong_communication(ranks: Ranks, fault: Pass, message: str) -> None:
    """A missing wait and swapped reductions often compute correct numbers; the rules name the pass."""
    ranks(2).run(_refused, fault, message)


def _wrong_region(rank: int, world_size: int) -> None:
    model, tokens = _compiled(backend="inductor")
    model(tokens)[0].backward()
    (program,) = graphshard.programs(model)
    key = program.region_calls[3]
    right = model._graphshard.tracer.compiled[key]
    model._graphshard.tracer.compiled[key] = RegionCall(lambda inputs: [r * 1.5 for r in right(inputs)])
    found = graphshard.bisect(model, (tokens,))
    assert found.culprit is not None
    name = f"region_{list(program.regions).index(key)}"
    assert found.culprit.name.startswith(f"{name} (call ")
    assert len(found.regions) == program.num_regions
    assert all(stage.error <= found.tolerance for stage in found.stages)


@pytest.mark.slow
def test_finds_a_wrong_region(ranks: Ranks) -> None:
    """With Inductor each compiled region is compared with its eager operators."""
    ranks(2).run(_wrong_region)


def _errors(rank: int, world_size: int) -> None:
    with pytest.raises(ArgumentError, match=r"Linear is not compiled\. Call graphshard\.compile"):
        graphshard.bisect(nn.Linear(2, 2))
    model, tokens = _compiled()
    with pytest.raises(ArgumentError, match=r"args must be a tuple .* Pass \(tensor,\)"):
        graphshard.bisect(model, tokens)


def test_errors(ranks: Ranks) -> None:
    ranks(2).run(_errors)
