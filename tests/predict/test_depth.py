"""Few of many equal blocks are captured, and predictions equal those from capturing all."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
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
from graphshard.repeats.find_repeats import find_repeats
from tests.distributed.twins import load_example

PROFILE = graphshard.profiling.load_profile("h100")


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
    """The end of the model needs an output of every block."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states = [self.embed(tokens)]
        for block in self.blocks:
            states.append(block(states[-1]))
        return self.head(torch.stack(states).sum(0)).sum()


class Normed(Block):
    """The first operators need no parameter, so in backward the previous block can wait for later parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Attends(Block):
    """Attention on a CPU draws random numbers, whose state a checkpoint saves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.up(x)[:, None]
        return x + self.down(F.scaled_dot_product_attention(q, q, q)[:, 0])


def explained(model: nn.Module, *, every_block: bool, **options: Any) -> tuple[Explanation, int]:
    """Return the prediction, and the number of captured parameters."""
    inputs = (torch.zeros(2, 4, dtype=torch.long),)
    study = Study(model, inputs, None, Options(**options), every_block=every_block)
    found = study.explain((8,), PROFILE, "isolated")
    captured = study._targets[None].program
    assert captured is not None
    return found, len(captured.params)


def compare(model: nn.Module, **options: Any) -> bool:
    """Check that both predictions are equal; return whether only few blocks were captured."""
    short, few = explained(model, every_block=False, **options)
    long, all_of_them = explained(model, every_block=True, **options)
    assert short.to_dict() == long.to_dict()
    assert short.flop == long.flop
    return few < all_of_them


@pytest.mark.parametrize("depth", [6, 12])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.quick_cases("True-12")
def test_equal_blocks(depth: int, tied: bool) -> None:
    assert compare(Stack([Block() for _ in range(depth)], tied=tied))


@pytest.mark.slow
def test_recomputed_blocks() -> None:
    """The saved generator states of each block have unique names in the copies, too."""
    assert compare(Stack([Attends() for _ in range(8)]), activation="full")


@pytest.mark.parametrize("other", [lambda: Block(width=16), Experts])
@pytest.mark.slow
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
@pytest.mark.slow
def test_no_pass_runs_on_all_blocks(block: type[Block], options: dict[str, Any]) -> None:
    """With kept or partly kept parameters and with recomputation, all graphs contain only few blocks."""
    refused = AssertionError("every block")
    with (
        mock.patch("graphshard.predict.study.instantiate_all_blocks", side_effect=refused),
        mock.patch("graphshard.schedule.template_schedule.instantiate_all_blocks", side_effect=refused),
        mock.patch("graphshard.pipeline.pipeline.instantiate_all_blocks", side_effect=refused),
        mock.patch("graphshard.predict.study.instantiate_blocks", side_effect=refused),
    ):
        assert compare(Stack([block() for _ in range(9)]), **options)


@pytest.mark.slow
def test_saved_values_of_copies() -> None:
    """Copies of saved values have unique names."""
    found = []
    for every_block in (False, True):
        options = Options(activation="full")
        inputs = (torch.zeros(2, 4, dtype=torch.long),)
        study = Study(Stack([Block() for _ in range(7)]), inputs, None, options, every_block=every_block)
        found.append(study.explain((8,), PROFILE, "isolated").to_dict())
    assert found[0] == found[1]


def test_programs_of_all_blocks_are_verified() -> None:
    """Programs of all blocks are built if the passes after planning do not support few blocks."""
    verified: list[bool] = []

    def verify(program: Program, after: str, *, complete: bool = False, **_: Any) -> None:
        if complete:
            verified.append(program.few is not None)

    inputs = (torch.zeros(2, 4, dtype=torch.long),)
    study = Study(Stack([Block() for _ in range(7)]), inputs, None, Options(verify="each"))
    with (
        mock.patch("graphshard.pipeline.instrumentation.verify", side_effect=verify),
        mock.patch("graphshard.pipeline.pipeline.instantiate_blocks", side_effect=BlocksDifferError("blocks differ")),
    ):
        study.explain((8,), PROFILE, "isolated")
    assert verified == [True, False]


@pytest.mark.parametrize("odd", [lambda: Block(scale=0.5), lambda: Block(width=16)])
@pytest.mark.slow
def test_a_block_that_differs(odd: Any) -> None:
    """Seven blocks have no run of six equal ones around the different one in their middle."""
    assert not compare(Stack([*(Block() for _ in range(3)), odd(), *(Block() for _ in range(3))]))


def _times(x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
    return x * by


def _with_attribute(by: float) -> Any:
    function = functools.partial(_times)
    vars(function)["by"] = by
    return function


FUNCTIONS: dict[str, Callable[[float], Any]] = {
    "closure": lambda by: lambda x: x * by,
    "default": lambda by: lambda x, by=by: x * by,
    "keyword default": lambda by: lambda x, *, by=by: x * by,
    "partial": lambda by: functools.partial(_times, by=by),
    "attribute of a partial": _with_attribute,
    "global": lambda by: types.FunctionType(_times.__code__, {"by": by}, argdefs=(1.0,)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_blocks_that_hold_functions_that_differ(name: str) -> None:
    def model(factors: list[float]) -> nn.Module:
        blocks = [Block() for _ in factors]
        for block, factor in zip(blocks, factors):
            block.activation = FUNCTIONS[name](factor)
        return Stack([*blocks])

    assert find_repeats(model([1.0] * 3 + [2.0] + [1.0] * 3)) is None
    assert name == "global" or find_repeats(model([1.0] * 7)) is not None


@pytest.mark.slow
def test_a_block_that_uses_its_index() -> None:
    assert not compare(Stack([UsesItsIndex(index=i) for i in range(7)]))


def test_a_loop_with_other_control_flow() -> None:
    assert not compare(Skips([Block() for _ in range(7)]))


@pytest.mark.slow
def test_a_deep_model_on_a_busy_link_is_close_to_its_bound() -> None:
    """Llama-3 8B on 1,024 B200, where communication takes as long as compute, with about FSDP2's memory.

    The peak leaves hardly any room for larger buckets, unlike all other moments.
    """
    llama = load_example("llama")
    config = llama.LlamaConfig(layers=32, dim=4096, heads=32, kv_heads=8, hidden=14336, vocab=128256, seq=8192)
    with torch.device("meta"):
        model = llama.Llama(config)
    tokens = torch.zeros(1, 8192, dtype=torch.long)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = graphshard.explain(model, 1024, example_inputs=(tokens, tokens), hardware="b200", mp_policy=policy)
    assert found.communication_s > 0.9 * found.compute_s
    assert found.gap < 0.025  # 31 % if the limit is the exact peak, or if gradients are counted too early
