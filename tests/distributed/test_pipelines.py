"""Pipeline stages of torch.distributed.pipelining match FSDP2, with one gather and one reduction per step."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.torch_version import TorchVersion

import graphshard
from graphshard.errors import UnsupportedError
from graphshard.runtime._end_collectives import end_collectives
from tests.distributed.twins import BF16, FP32, CountLaunches, assert_same, fsdp2, grads_of, groups_of, params_of
from tests.ranks import Ranks

MICROBATCHES = 4


class Stage(nn.Module):
    """Some of the layers of a model."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x * self.scale


def _parallelized(axis: DeviceMesh) -> nn.Module:
    stage = Stage(2)
    plan = {
        "layers.0": ColwiseParallel(output_layouts=Replicate()),
        "layers.1": RowwiseParallel(input_layouts=Replicate()),
    }
    return parallelize_module(stage, axis, plan)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def _ours(module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> nn.Module:
    return graphshard.compile(module, mesh, mp_policy=policy, reshard_after_forward=False, backend="eager")


def _theirs(module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> nn.Module:
    return fsdp2(module, mesh, mp_policy=policy, reshard_after_forward=False)


# Schedules, and the number of stages of a rank.
SCHEDULES: dict[str, tuple[Callable[..., Any], int]] = {
    "GPipe": (ScheduleGPipe, 1),
    "1F1B": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
}


class Pipeline:
    """A model's stages on this rank, sharded by graphshard or FSDP2, and the schedule that runs them.

    Args:
        shape: of the mesh; a third axis is a tensor axis.
    """

    def __init__(
        self,
        shard: Callable[..., nn.Module],
        schedule: str,
        policy: MixedPrecisionPolicy,
        shape: tuple[int, ...] = (2, 2),
    ) -> None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp")[: len(shape)])
        make, stages = SCHEDULES.get(schedule, (ScheduleInterleavedZeroBubble, 2))
        rank, self.group = mesh.get_local_rank("pp"), mesh.get_group("pp")
        torch.manual_seed(0)
        parts = [Stage(2) if len(shape) == 2 else _parallelized(mesh["tp"]) for _ in range(2 * stages)]
        mine = range(rank, 2 * stages, 2)
        self.models = {index: shard(parts[index], mesh["dp"], policy) for index in mine}
        made = [PipelineStage(self.models[i], i, 2 * stages, torch.device("cpu"), group=self.group) for i in mine]
        one = made[0] if stages == 1 else made
        self.schedule = make(one, MICROBATCHES, loss_fn=_loss)
        self.first, self.last = 0 in mine, 2 * stages - 1 in mine
        self.optims = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in self.models.values()]

    def step(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        losses: list[Tensor] = []
        args = (x,) if self.first else ()
        self.schedule.step(*args, target=target if self.last else None, losses=losses if self.last else None)
        return {f"loss of microbatch {index}": loss.detach() for index, loss in enumerate(losses)}

    def train(self, x: Tensor, target: Tensor) -> None:
        """Run a step and the optimizers."""
        self.step(x, target)
        for optim in self.optims:
            optim.step()
            optim.zero_grad()

    def states(self) -> dict[str, dict[str, Any]]:
        """Return the states of the models and optimizers by stage."""
        found = zip(self.models.items(), self.optims, strict=True)
        both = {str(index): get_state_dict(model, optim) for (index, model), optim in found}
        return {index: {"model": model, "optim": optim} for index, (model, optim) in both.items()}

    def named(self, of: Callable[[nn.Module], dict[str, Any]]) -> dict[str, Any]:
        return {f"{index}.{name}": value for index, model in self.models.items() for name, value in of(model).items()}


def _train(
    rank: int, world_size: int, schedule: str, policy: MixedPrecisionPolicy, shape: tuple[int, ...] = (2, 2)
) -> list[dict[str, int]]:
    pair = [Pipeline(shard, schedule, policy, shape) for shard in (_ours, _theirs)]
    counts = []
    for step in range(3):
        place = rank // (world_size // 4) % 2  # on the data axis: ranks of a tensor axis have the same inputs
        random = torch.Generator().manual_seed(10 * step + place)
        x, target = torch.randn(8, 8, generator=random), torch.randn(8, 8, generator=random)
        losses, counts = [], []
        for pipeline in pair:
            with CountLaunches() as count:
                losses.append(pipeline.step(x, target))
            counts.append({kind: count.of(kind) for kind in ("gather", "scatter")})
        assert_same(*losses, f"step {step}")
        assert_same(*(pipeline.named(grads_of) for pipeline in pair), f"gradients of step {step}")
        assert all(grad is not None for grad in pair[0].named(grads_of).values())
        for optim in (optim for pipeline in pair for optim in pipeline.optims):
            optim.step()
            optim.zero_grad()
        assert_same(*(pipeline.named(params_of) for pipeline in pair), f"parameters after step {step}")
    return counts


@pytest.mark.parametrize("policy", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.quick_cases("GPipe-fp32")
def test_stages_equal_fsdp2(ranks: Ranks, schedule: str, policy: MixedPrecisionPolicy) -> None:
    """Gradients are reduced once a step; parameters are gathered at most as often as with FSDP2."""
    for ours, theirs in ranks(4).run(_train, schedule, policy):
        assert ours["scatter"] <= theirs["scatter"], (ours, theirs)
        assert ours["gather"] <= theirs["gather"], (ours, theirs)
        assert min(ours.values()) > 0


def _counted(rank: int, world_size: int, schedule: str) -> tuple[dict[str, int], dict[str, int], int]:
    """Count the collectives of a pipeline step, and of a single forward and backward of a stage."""
    pipeline, x = Pipeline(_ours, schedule, FP32), torch.randn(8, 8)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = _ours(Stage(2), mesh["dp"], FP32)
    for _ in range(2):
        with CountLaunches() as many:
            pipeline.step(x, x)
        with CountLaunches() as one:
            stage(x[:2]).sum().backward()
        for optim in pipeline.optims:  # parameters without updates stay gathered
            optim.step()
    found, alone = ({kind: count.of(kind) for kind in ("gather", "scatter")} for count in (many, one))
    return found, alone, len(pipeline.models)


@pytest.mark.parametrize("schedule", ["1F1B", "interleaved"])
@pytest.mark.quick_cases("1F1B")
def test_many_microbatches_launch_the_collectives_of_one(ranks: Ranks, schedule: str) -> None:
    """As `graphshard.explain` assumes: one reduction, and one gather per unit or one gather for all units."""
    for found, alone, stages in ranks(4).run(_counted, schedule):
        assert found["scatter"] == stages * alone["scatter"] > 0
        assert stages <= found["gather"] <= stages * alone["gather"]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_with_a_tensor_axis(ranks: Ranks, schedule: str) -> None:
    """2 stages x 2 data ranks x 2 tensor ranks, combined."""
    for ours, theirs in ranks(8).run(_train, schedule, FP32, (2, 2, 2)):
        assert ours["scatter"] <= theirs["scatter"], (ours, theirs)
        assert ours["gather"] <= theirs["gather"], (ours, theirs)
        assert min(ours.values()) > 0


def _resume(rank: int, world_size: int, folder: Path) -> None:
    saved, *others = pipelines = [Pipeline(shard, "1F1B", FP32) for shard in (_ours, _ours, _theirs)]
    random = torch.Generator().manual_seed(rank % 2)
    batches = [(torch.randn(8, 8, generator=random), torch.randn(8, 8, generator=random)) for _ in range(2)]
    saved.train(*batches[0])
    dcp.save(saved.states(), checkpoint_id=folder)
    for pipeline in others:
        states = pipeline.states()
        dcp.load(states, checkpoint_id=folder)
        for (index, model), optim in zip(pipeline.models.items(), pipeline.optims, strict=True):
            state = states[str(index)]
            set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
    for pipeline in pipelines:
        pipeline.train(*batches[1])
    for pipeline in others:
        assert_same(pipeline.named(params_of), saved.named(params_of), "parameters")


@pytest.mark.slow
def test_a_checkpoint_of_all_stages(ranks: Ranks, tmp_path: Path) -> None:
    """DCP saves the states of all ranks in one checkpoint; training resumes from it, also with FSDP2."""
    ranks(4).run(_resume, tmp_path)


def _zero_bubble(rank: int, world_size: int) -> str:
    """Return this rank's error. A rank without an error waits for the others until they close their connections."""
    pipeline = Pipeline(_ours, "zero bubble", FP32)
    with pytest.raises((UnsupportedError, RuntimeError)) as caught:
        pipeline.step(torch.randn(8, 8), torch.randn(8, 8))
    end_collectives(pipeline.group)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.12", reason="zero-bubble stages of torch 2.11 fail themselves")
@pytest.mark.slow
def test_rejects_separate_backwards_of_weights(ranks: Ranks) -> None:
    """A program's backward computes all its gradients."""
    message = (
        r"UnsupportedError: inputs: the gradient of .* is added up over microbatches, .*zero-bubble schedules of "
        r"torch\.distributed"
    )
    errors = ranks(4).run(_zero_bubble)
    assert re.match(message, errors[0])
    for error in errors:
        assert re.match(message, error) or re.search("[Cc]onnection|Application timeout", error), error


def _reduce(model: Any) -> None:
    """Reduce like torch's stages."""
    model.set_requires_gradient_sync(True)
    if _by_hand(model):
        model.finalize_backward()
        return
    state = fully_shard.state(model)  # type: ignore[attr-defined]
    for one in state._state_ctx.all_states:
        for group in groups_of(one):
            group.post_backward()
    state._root_post_backward_final_callback()


def _by_hand(model: Any) -> bool:
    """Return whether FSDP2 is torch 2.15's, which reduces without a backward only if configured in advance."""
    finalize = getattr(type(model), "finalize_backward", None)
    return finalize is not None and finalize.__module__.startswith("torch.")


def _finished(rank: int, world_size: int, by_replicas: bool) -> None:
    """Accumulate without sync. FSDP2 cannot do it without all-reduce: it must know before its last backward."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    ours, theirs = pair = Stage(3), Stage(3)
    theirs.load_state_dict(ours.state_dict())
    graphshard.compile(ours, mesh, mp_policy=BF16, backend="eager")
    fsdp2(theirs, mesh, mp_policy=BF16)
    if not by_replicas and _by_hand(theirs):
        theirs.set_manual_backward_finalization(True)  # type: ignore[attr-defined]
    for step in range(2):
        for model in pair:
            for microbatch in range(3):
                if by_replicas:
                    model.set_requires_all_reduce(model is theirs and microbatch == 2)
                else:
                    model.set_requires_gradient_sync(False)
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + 10 * microbatch + rank))
                model(x).square().sum().backward()
        assert step or all(param.grad is None for param in ours.parameters())
        if by_replicas:
            ours.finalize_backward()  # too early: nothing is reduced yet
            assert step or all(param.grad is None for param in ours.parameters())
            ours.set_requires_all_reduce(True)
            ours.finalize_backward()
        else:
            for model in pair:
                _reduce(model)
        assert_same(*map(grads_of, pair), f"gradients of step {step}")
        assert all(param.grad is not None for param in ours.parameters())


@pytest.mark.parametrize("by_replicas", [False, True])
@pytest.mark.quick_cases("True")
def test_accumulated_gradients_are_reduced_without_a_backward(ranks: Ranks, by_replicas: bool) -> None:
    ranks(4).run(_finished, by_replicas)
