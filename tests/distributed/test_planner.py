"""Cost-based plans on real ranks: FSDP2's bits under any plan, memory limits, different inputs on ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import graphshard
from graphshard.cost.costs import Costs
from graphshard.cost.profile import load_profile
from graphshard.errors import InfeasibleError
from graphshard.passes import MakePlan
from graphshard.runtime.collective_launches import exchange
from graphshard.schedule.planner import PlanByCost
from tests.distributed.twins import assert_same, example_llama, fsdp2, grads_of, params_of, world_mesh
from tests.ranks import Ranks

VOCAB = 101


def _train(rank: int, world_size: int, limited: bool) -> None:
    torch.manual_seed(0)
    model, _ = example_llama(layers=4)
    mesh = world_mesh()
    theirs = fsdp2(copy.deepcopy(model), mesh)
    options = {}
    if limited:
        # If no plan fits, all ranks report the least limit, which then works.
        tokens = torch.zeros(2, 8, dtype=torch.long)
        with pytest.raises(InfeasibleError, match="memory_limit of 1,000 bytes") as error:
            graphshard.compile(model, mesh, backend="eager", memory_limit=1000, example_inputs=(tokens, tokens))
        options["memory_limit"] = error.value.smallest
    else:
        planner = PlanByCost(Costs(load_profile("cpu-gloo")))
        options["passes"] = graphshard.Pipeline().replace("plan", MakePlan(planner))
    ours = graphshard.compile(model, mesh, backend="eager", **options)
    optims = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs)]
    for step in range(3):
        # Ranks have batches of different sizes, and in the last step only one of them has a new size.
        rows = 1 + rank + (step == 2 and rank == 1)
        batch = torch.randint(VOCAB, (2, rows, 8), generator=torch.Generator().manual_seed(step * world_size + rank))
        losses = []
        for m in (ours, theirs):
            loss = m(*batch)
            loss.backward()
            losses.append(loss.detach())
        assert_same({"loss": losses[0]}, {"loss": losses[1]}, f"step {step}")
        assert_same(grads_of(ours), grads_of(theirs), f"gradients of step {step}")
        for optim in optims:
            optim.step()
            optim.zero_grad()
        assert_same(params_of(ours), params_of(theirs), f"parameters after step {step}")
        if limited and step == 1:
            break  # under a limit a new size is planned again, so all ranks must have it
    programs = graphshard.programs(ours)
    forward = [b for b in programs[0].plan.buckets if (b.kind, b.phase) == ("gather", "forward")]
    if limited:
        assert programs[0].plan.prediction.peak_bytes <= options["memory_limit"]
    else:
        assert len(forward) < 5, "gathers of units are joined"
        assert len({tuple(p.communication) for p in programs}) == 1
        exchanged = [node for node in programs[0].backward.graph.nodes if node.target is exchange]
        reductions = [b for b in programs[0].plan.buckets if b.kind == "reduce"]
        assert len(exchanged) == sum(b.exchanged for b in reductions) == (len(reductions) if world_size == 2 else 0)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.slow
def test_cost_based_plans_match_fsdp2(ranks: Ranks, world_size: int) -> None:
    """Packed and early gathers; ranks with other batch sizes use the first rank's plan."""
    ranks(world_size).run(_train, False)


@pytest.mark.slow
def test_plans_of_least_memory_match_fsdp2(ranks: Ranks) -> None:
    ranks(2).run(_train, True)


class Branching(nn.Module):
    """A model whose computation depends on the size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            for _ in range(x.shape[0]):
                x = x.sin()
            x = layer(x)
        return x


def _branch(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model, mesh = Branching(), world_mesh()
    theirs = fsdp2(copy.deepcopy(model), mesh)
    ours = graphshard.compile(model, mesh, backend="eager")
    # In the second step one rank captures because the other knows the size; in the third both do.
    for step, rows in enumerate(((2, 3), (2, 1), (4, 5))):
        x = torch.randn(rows[rank], 8, generator=torch.Generator().manual_seed(step * world_size + rank))
        for m in (ours, theirs):
            m.zero_grad()
            m(x).square().mean().backward()
        assert_same(grads_of(ours), grads_of(theirs), f"gradients of step {step}")


def test_ranks_with_different_computations(ranks: Ranks) -> None:
    """No rank waits for a plan that another rank has already, and all launch the same collectives in the same order."""
    ranks(2).run(_branch)
