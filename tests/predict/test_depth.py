"""Equal blocks are captured few times, and what is said of the model is what capturing all of them says."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from graphshard.ir.program import Program
from graphshard.ir.repeats import BlocksDifferError
from graphshard.options.options import Options
from graphshard.predict.explanation import Explanation
from graphshard.predict.study import Study
from tests.distributed.twins import load_example

PROFILE = graphshard.load_profile("h100")


class Block(nn.Module):
    def __init__(self, width: int = 8, scale: float = 1.0, index: int = 0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)
        self.scale, self.index = scale, index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(self.up(x).relu())


class UsesItsIndex(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.index


class Experts(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        return super().forward(x) + sum(weights[..., i : i + 1] * e(x) for i, e in enumerate(self.experts))


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module], *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(8, 16, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).sum()


class Skips(Stack):
    """What every block makes is needed at the end."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states = [self.embed(tokens)]
        for block in self.blocks:
            states.append(block(states[-1]))
        return self.head(torch.stack(states).sum(0)).sum()


class Normed(Block):
    """Its first operators need no parameter: in backward the block before may wait for parameters behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Attends(Block):
    """Attention on a CPU may draw random numbers, whose state a checkpoint saves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.up(x)[:, None]
        return x + self.down(F.scaled_dot_product_attention(q, q, q)[:, 0])


def explained(model: nn.Module, *, every_block: bool, **options: Any) -> tuple[Explanation, int]:
    """What is predicted, and how many parameters were captured."""
    inputs = (torch.zeros(2, 4, dtype=torch.long),)
    study = Study(model, inputs, None, Options(**options), every_block=every_block)
    found = study.explain((8,), PROFILE, "isolated")
    captured = study._targets[None].program
    assert captured is not None
    return found, len(captured.params)


def compare(model: nn.Module, **options: Any) -> bool:
    """Whether only few blocks were captured; the results must be equal."""
    short, few = explained(model, every_block=False, **options)
    long, all_of_them = explained(model, every_block=True, **options)
    assert short.to_dict() == long.to_dict()
    assert short.flop == long.flop
    return few < all_of_them


@pytest.mark.parametrize("depth", [6, 12])
@pytest.mark.parametrize("tied", [False, True])
def test_equal_blocks(depth: int, tied: bool) -> None:
    assert compare(Stack([Block() for _ in range(depth)], tied=tied))


def test_blocks_that_are_computed_again() -> None:
    """What each saves of a generator has a name of its own in the copies, too."""
    assert compare(Stack([Attends() for _ in range(8)]), activation="full")


@pytest.mark.parametrize("other", [lambda: Block(width=16), Experts])
def test_blocks_that_alternate(other: Any) -> None:
    assert compare(Stack([make() for _ in range(6) for make in (Block, other)]))


@pytest.mark.parametrize(
    ("block", "options"),
    [
        (Block, {}),
        (Block, {"reshard_after_forward": False}),
        (Block, {"reshard_after_forward": 2}),
        (Normed, {"activation": "full"}),
    ],
    ids=["reshard", "keep", "in the node", "full"],
)
def test_no_pass_is_of_every_block(block: type[Block], options: dict[str, Any]) -> None:
    """Whether parameters stay gathered, or in part, or blocks are computed again: graphs are of few to the end."""
    refused = AssertionError("every block")
    with (
        mock.patch("graphshard.predict.study.instantiate_all_blocks", side_effect=refused),
        mock.patch("graphshard.schedule.template_schedule.instantiate_all_blocks", side_effect=refused),
        mock.patch("graphshard.schedule.planner.instantiate_all_blocks", side_effect=refused),
        mock.patch("graphshard.predict.study.instantiate_blocks", side_effect=refused),
    ):
        assert compare(Stack([block() for _ in range(9)]), **options)


def test_less_is_saved() -> None:
    """Copies of saved values have names that no other has."""
    found = []
    for every_block in (False, True):
        options = Options(activation="full")
        inputs = (torch.zeros(2, 4, dtype=torch.long),)
        study = Study(Stack([Block() for _ in range(7)]), inputs, None, options, every_block=every_block)
        found.append(study.explain((8,), PROFILE, "isolated").to_dict())
    assert found[0] == found[1]


def test_programs_of_all_blocks_are_verified() -> None:
    """Those that are made where the passes behind the plan could not be of few blocks."""
    verified: list[bool] = []

    def verify(program: Program, after: str, *, complete: bool = False) -> None:
        if complete:
            verified.append(program.few is not None)

    inputs = (torch.zeros(2, 4, dtype=torch.long),)
    study = Study(Stack([Block() for _ in range(7)]), inputs, None, Options(verify="each"))
    with (
        mock.patch("graphshard.predict.study.verify", side_effect=verify),
        mock.patch("graphshard.predict.study.stamped", side_effect=BlocksDifferError("blocks differ")),
    ):
        study.explain((8,), PROFILE, "isolated")
    assert verified == [True, False]


@pytest.mark.parametrize("odd", [lambda: Block(scale=0.5), lambda: Block(width=16)])
def test_a_block_that_differs(odd: Any) -> None:
    """Seven blocks have no run of six equal ones beside the odd one in their middle."""
    assert not compare(Stack([*(Block() for _ in range(3)), odd(), *(Block() for _ in range(3))]))


def test_a_block_that_uses_its_index() -> None:
    assert not compare(Stack([UsesItsIndex(index=i) for i in range(7)]))


def test_no_plain_loop() -> None:
    assert not compare(Skips([Block() for _ in range(7)]))


@pytest.mark.slow
def test_a_deep_model_on_a_busy_link_is_close_to_its_bound() -> None:
    """Llama-3 8B on 1,024 B200, where communication takes as long as compute: in about the memory of FSDP2's order.

    Its peak leaves hardly room for a larger bucket, and all other moments do.
    """
    llama = load_example("llama")
    config = llama.LlamaConfig(layers=32, dim=4096, heads=32, kv_heads=8, hidden=14336, vocab=128256, seq=8192)
    with torch.device("meta"):
        model = llama.Llama(config)
    tokens = torch.zeros(1, 8192, dtype=torch.long)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = graphshard.explain(model, 1024, example_inputs=(tokens, tokens), hardware="b200", mp_policy=policy)
    assert found.communication_s > 0.9 * found.compute_s
    assert found.gap < 0.025  # 31 % where the limit was the very peak, or gradients counted before they were made
