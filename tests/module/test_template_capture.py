"""Programs built from few blocks equal programs that capture every block; in doubt every block is captured."""

from __future__ import annotations

import copy
import os
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard.ir.plan import Event, Plan
from graphshard.ir.printer import print_phase
from graphshard.ir.program import Program
from graphshard.module.tracer import VARIABLE
from graphshard.schedule.planner import PlanByCost
from tests.conftest import FakeWorld
from tests.predict.test_depth import Attends, Block, Experts, Normed, Skips, Stack, UsesItsIndex
from tests.ranks import Ranks

BATCH = (torch.zeros(2, 4, dtype=torch.long),)


class Drops(Block):
    """Draws random numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(super().forward(x), 0.5, self.training)


class Normalizes(Block):
    """Writes its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(x).transpose(1, 2)).transpose(1, 2)


class Again(Block):
    """A block checkpointed by the user."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Counts(Stack):
    """Counts the block's calls in an object that all blocks share."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.now = {"layer": 0}
        for block in blocks:
            block.now = self.now

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            self.now["layer"] = number
            x = block(x)
        return self.head(x).sum()


class UsesSharedIndex(Block):
    now: dict[str, int]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if self.now["layer"] == 4 else 1)


class Frozen(Stack):
    """Blocks in the middle without gradients."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            with torch.set_grad_enabled(number != 4):
                x = block(x)
        return self.head(x).sum()


class Scales(nn.Module):
    """A block whose forward uses its index."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(8, 8), {"by": 0.5}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale["by"] * self.inner(x).relu()


def program_of(model: nn.Module, **options: Any) -> Program:
    mesh = init_device_mesh("cpu", (4,))
    options = {"backend": "eager", **options}
    graphshard.compile(model, mesh, example_inputs=BATCH, **options)
    (program,) = graphshard.programs(model)
    return program


def describe(program: Program) -> dict[str, Any]:
    """Describe a program completely, with values numbered in order."""
    for phase in program.phases.values():
        for node in phase.module.graph.nodes:
            node.meta.pop("number", None)
    return {
        **{name: print_phase(phase) for name, phase in program.phases.items()},
        **{f"{name} in": [(slot.kind, slot.of) for slot in p.inputs] for name, p in program.phases.items()},
        "regions": list(program.regions),
        "calls": program.region_calls,
        "communication": program.communication,
        "gathered": program.peak_gathered,
        "saved": program.saved,
        "params": program.params,
        "differentiated": program.differentiated,
        "rewritten": program.rewritten,
        "established": program.established,
        "tangents": program.tangents,
        "plan": program.plan,
    }


def compare(model: nn.Module, monkeypatch: pytest.MonkeyPatch, **options: Any) -> bool:
    """Check that both programs are equal; return whether few blocks were captured."""
    long = copy.deepcopy(model)
    monkeypatch.setenv(VARIABLE, "1")
    expected = program_of(long, **options)
    monkeypatch.delenv(VARIABLE)
    found = program_of(model, **options)
    expected_says, says = describe(expected), describe(found)
    for key, value in expected_says.items():
        assert says[key] == value, key
    assert not any(stage.name == "stamp" for stage in expected.history)
    return any(stage.name == "stamp" for stage in found.history)


@pytest.mark.parametrize("depth", [6, 12])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.slow
def test_equal_blocks(fake_world: FakeWorld, monkeypatch: pytest.MonkeyPatch, depth: int, tied: bool) -> None:
    fake_world(4)
    assert compare(Stack([Block() for _ in range(depth)], tied=tied), monkeypatch)


@pytest.mark.parametrize("other", [lambda: Block(width=16), Experts])
@pytest.mark.slow
def test_blocks_that_alternate(fake_world: FakeWorld, monkeypatch: pytest.MonkeyPatch, other: Any) -> None:
    fake_world(4)
    assert compare(Stack([make() for _ in range(6) for make in (Block, other)]), monkeypatch)


@pytest.mark.parametrize("block", [Attends, Drops, Again])
@pytest.mark.slow
def test_blocks_with_state_and_random_numbers(
    fake_world: FakeWorld, monkeypatch: pytest.MonkeyPatch, block: type[Block]
) -> None:
    fake_world(4)
    assert compare(Stack([block() for _ in range(8)]), monkeypatch)


@pytest.mark.slow
def test_uncaptured_blocks_cost_nearly_nothing(fake_world: FakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo takes about 15 us per traced instruction."""
    fake_world(4)
    step, followed = InstructionTranslatorBase.step, Counter[int]()

    def counted(self: InstructionTranslatorBase) -> bool:
        followed[depth] += 1
        return bool(step(self))

    monkeypatch.setattr(InstructionTranslatorBase, "step", counted)
    for depth in (8, 12):
        program_of(Stack([Block() for _ in range(depth)]))
    assert 0 < followed[12] - followed[8] <= 4 * 200


@pytest.mark.slow
def test_buffers_that_blocks_write(fake_world: FakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_world(4)
    assert compare(Stack([Normalizes() for _ in range(7)]), monkeypatch)


@pytest.mark.parametrize(
    "options",
    [
        {"activation": "full"},
        {"reshard_after_forward": False},
        {"units": ["blocks.*"]},
        {"offload_policy": torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=False)},
        {"mp_policy": torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.slow
def test_options(fake_world: FakeWorld, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    fake_world(4)
    assert compare(Stack([Attends() for _ in range(7)]), monkeypatch, **options)


@pytest.mark.slow
def test_blocks_that_begin_without_parameters(fake_world: FakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward recomputes a part of a block before that block's parameters arrive."""
    fake_world(4)
    model = Stack([Normed() for _ in range(9)])
    assert compare(copy.deepcopy(model), monkeypatch, activation="full")
    assert stages(model, activation="full")[-3:] == ["reorder", "stamp", "lower"]


@pytest.mark.parametrize("odd", [lambda: Block(scale=0.5), lambda: Block(width=16)])
@pytest.mark.slow
def test_a_block_that_differs(fake_world: FakeWorld, monkeypatch: pytest.MonkeyPatch, odd: Any) -> None:
    fake_world(4)
    assert not compare(Stack([*(Block() for _ in range(3)), odd(), *(Block() for _ in range(3))]), monkeypatch)


@pytest.mark.parametrize(
    "model",
    [
        lambda: Stack([UsesItsIndex(index=number) for number in range(8)]),
        lambda: Skips([Block() for _ in range(8)]),
        lambda: Counts([UsesSharedIndex() for _ in range(8)]),
        lambda: Frozen([Block() for _ in range(8)]),
    ],
    ids=["index", "skips", "counts", "frozen"],
)
@pytest.mark.slow
def test_captures_every_block_in_doubt(fake_world: FakeWorld, monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    fake_world(4)
    assert not compare(model(), monkeypatch)


class Parallel(Stack):
    """Passes the same input to all blocks, so no block's result is the next one's input."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(sum((block(x) for block in self.blocks), x)).sum()


def test_captures_every_block_after_a_dynamo_error(fake_world: FakeWorld) -> None:
    """Dynamo wraps exceptions that are raised during a trace."""
    fake_world(2)
    mesh = init_device_mesh("cpu", (2,))
    model = graphshard.compile(Parallel([Block() for _ in range(9)]), mesh, backend="eager", example_inputs=BATCH)
    (program,) = graphshard.programs(model)
    assert not any(stage.name == "stamp" for stage in program.history), "every block was captured"


@pytest.mark.slow
def test_guards_check_uncaptured_blocks(fake_world: FakeWorld) -> None:
    """Block 4 was not captured, and its index changes."""
    fake_world(4)
    model = Stack([Scales() for _ in range(9)])
    graphshard.compile(model, init_device_mesh("cpu", (4,)), backend="eager")
    model(*BATCH)
    assert [stage.name for stage in graphshard.programs(model)[0].history].count("stamp") == 1
    model(*BATCH)
    assert len(graphshard.programs(model)) == 1
    model.blocks[4].scale["by"] = 2.0
    model(*BATCH)
    assert len(graphshard.programs(model)) == 2
    assert "blocks.4" in graphshard.programs(model)[1].reason
    model.blocks[5].inner.register_forward_hook(lambda module, args, out: out * 2)
    model(*BATCH)
    assert "blocks.5" in graphshard.programs(model)[2].reason


class Activates(Block):
    """Has a function that closes over a number."""

    def __init__(self, slope: float = 0.1) -> None:
        super().__init__()
        self.activation = lambda x: torch.nn.functional.leaky_relu(x, slope)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(super().forward(x))


def test_functions_of_the_same_code(fake_world: FakeWorld) -> None:
    """Functions are equal if their code and what they close over are; another one in a block left out is noticed."""
    fake_world(4)
    model = Stack([Activates() for _ in range(9)])
    graphshard.compile(model, init_device_mesh("cpu", (4,)), backend="eager")
    model(*BATCH)
    model(*BATCH)
    (program,) = graphshard.programs(model)
    assert any(stage.name == "stamp" for stage in program.history)
    model.blocks[4].activation = Activates(0.2).activation
    model(*BATCH)
    assert len(graphshard.programs(model)) == 2
    assert not any(stage.name == "stamp" for stage in graphshard.programs(model)[1].history)


def stages(model: nn.Module, **options: Any) -> list[str]:
    return [stage.name for stage in program_of(model, **options).history]


def test_passes_run_on_few_blocks_if_plans_are_equal(fake_world: FakeWorld) -> None:
    """Parameters kept between blocks accumulate: then passes run on all blocks."""
    fake_world(4)
    model = Stack([Block() for _ in range(9)])
    assert stages(copy.deepcopy(model))[-3:] == ["reorder", "stamp", "lower"]
    assert stages(model, reshard_after_forward=False)[-4:] == ["stamp", "bucket", "reorder", "lower"]


def test_planner_that_treats_blocks_differently(fake_world: FakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan covers all blocks and is made once."""
    fake_world(4)
    model, plans = Stack([Block() for _ in range(9)]), []
    before = PlanByCost._best

    def later(planner: PlanByCost, program: Program) -> Plan:
        plan = before(planner, program)
        odd = Event("start", "gather blocks.4 in forward", -1)
        events = [replace(e, at=e.at + 1) if replace(e, at=-1) == odd else e for e in plan.events["forward"]]
        plans.append(replace(plan, events={**plan.events, "forward": tuple(events)}))
        return plans[-1]

    monkeypatch.setattr(PlanByCost, "_best", later)
    program = program_of(model)
    assert len(plans) == 1
    assert program.plan == plans[0]
    assert [stage.name for stage in program.history][-4:] == ["stamp", "bucket", "reorder", "lower"]


class LooksInside(Stack):
    """Reads a submodule of a block between two blocks."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) * block.up.in_features
        return self.head(x).sum()


@pytest.mark.slow
def test_a_part_of_a_block_that_is_read_from_outside(fake_world: FakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_world(4)
    assert not compare(LooksInside([Block() for _ in range(8)]), monkeypatch)


class Elsewhere(Stack):
    """Block 4 is also in another list."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.others = nn.ModuleList(blocks[4:5])


def test_a_block_in_two_lists(fake_world: FakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_world(4)
    assert not compare(Elsewhere([Block() for _ in range(9)]), monkeypatch)


def _trained(rank: int, world_size: int, few: bool) -> list[torch.Tensor]:
    """Return losses of three steps, the second of two microbatches, and the final parameters."""
    os.environ[VARIABLE] = "" if few else "1"
    torch.manual_seed(0)
    model = Stack([Drops() for _ in range(8)], tied=True)
    graphshard.compile(model, init_device_mesh("cpu", (world_size,)), backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    losses = []
    for step in range(3):
        if step == 1:
            model.set_requires_gradient_sync(False)
            model(torch.randint(16, (2, 4))).backward()
            model.set_requires_gradient_sync(True)
        loss = model(torch.randint(16, (2, 4)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    (program,) = graphshard.programs(model)
    assert any(stage.name == "stamp" for stage in program.history) == few
    del os.environ[VARIABLE]
    return [*losses, *(param.detach().to_local().clone() for param in model.parameters())]


def test_ranks_train_the_same_bits(ranks: Ranks) -> None:
    few, every = (ranks(2).run(_trained, few) for few in (True, False))
    for actual, expected in zip(few, every, strict=True):
        assert len(actual) == len(expected)
        assert [i for i, (one, other) in enumerate(zip(actual, expected)) if not torch.equal(one, other)] == []
