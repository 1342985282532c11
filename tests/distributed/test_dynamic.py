"""One capture and one lowering serve many batch sizes and sequence lengths, and match FSDP2 bit for bit."""

from __future__ import annotations

import copy
import logging
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim
from torch.utils.checkpoint import checkpoint

import graphshard
import graphshard.lower.inductor
from graphshard.errors import CaptureError
from tests.distributed.twins import assert_same, fsdp2, grads_of, params_of, world_mesh
from tests.ranks import Ranks

VOCAB = 11


class _Block(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.mlp = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 6, 4).transpose(1, 2).chunk(3, dim=1)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.dropout(self.mlp(attention))


class _Net(nn.Module):
    """A small language model whose positions depend on the sequence length."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.positions = nn.Embedding(64, 8)
        self.layers = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(8, VOCAB)
        self.checkpointed = checkpointed

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.layers:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


BOTH = {0: Dim("batch"), 1: Dim("sequence", max=64)}
# The last batch of an epoch is ragged.
SHAPES = [(2 + i % 5, 3 + 7 * i % 13) for i in range(19)] + [(2, 5)]


def _batch(shape: tuple[int, int], seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(0, VOCAB, (2, *shape), generator=generator)
    return tokens, targets


def _pair(options: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = _Net(checkpointed=options.pop("checkpointed", False))
    twin = fsdp2(copy.deepcopy(model), world_mesh())
    return graphshard.compile(model, world_mesh(), **options), twin


def _step(model: nn.Module, shape: tuple[int, int], seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)  # for dropout
    model.zero_grad()
    loss = model(*_batch(shape, seed))
    loss.backward()
    return {"loss": loss.detach(), **{name: grad.to_local() for name, grad in grads_of(model).items()}}


def _many_shapes(rank: int, world_size: int, checkpointed: bool) -> int:
    pair = _pair({"backend": "eager", "dynamic_shapes": (BOTH, BOTH), "checkpointed": checkpointed})
    optims = [torch.optim.SGD(model.parameters(), lr=0.1) for model in pair]
    for index in range(len(SHAPES)):
        shape = SHAPES[(index + 3 * rank) % len(SHAPES)]  # differs between ranks
        assert_same(*(_step(model, shape, index) for model in pair), f"{shape}")
        for optim in optims:
            optim.step()
    assert_same(*map(params_of, pair), "parameters")
    return len(graphshard.programs(pair[0]))


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.slow
def test_many_shapes_one_program(ranks: Ranks, checkpointed: bool) -> None:
    """20 shapes, which differ between ranks in the same step; checkpointed blocks recompute dropout."""
    assert ranks(2).run(_many_shapes, checkpointed) == [1, 1]


def _ragged(rank: int, world_size: int) -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("graphshard.module.installed_programs")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        pair = _pair({"backend": "eager", "dynamic_shapes": (BOTH, BOTH)})
        for index, shape in enumerate([(4, 6), (1 if rank == 0 else 3, 5), (1, 7), (5, 9)]):
            assert_same(*(_step(model, shape, index) for model in pair), f"{shape}")
    finally:
        logger.removeHandler(handler)
    return [message for message in messages if message.startswith("capture")]


@pytest.mark.slow
def test_a_batch_of_one_is_captured_again(ranks: Ranks) -> None:
    """One rank captures again first, and the other does not wait; the sequence stays dynamic."""
    for logged, shape in zip(ranks(2).run(_ragged), ("1, 5", "1, 7"), strict=True):
        assert logged == [
            "capture 0 of _Net: first call",
            f"capture 1 of _Net: args[0] was int64[4, 6] and is int64[{shape}] (2 <= args[0].size()[0])",
        ]


def _marked(rank: int, world_size: int) -> None:
    pair = _pair({"backend": "eager"})
    first = _batch((4, 6), 0)
    for tensor in first:
        torch._dynamo.mark_dynamic(tensor, 1)
    pair[0](*first).backward()
    for index, length in enumerate((6, 9, 4, 30)):
        assert_same(*(_step(model, (4, length), index) for model in pair), f"{length}")
    assert len(graphshard.programs(pair[0])) == 1
    assert_same(*(_step(model, (3, 6), 9) for model in pair), "another batch size")
    assert len(graphshard.programs(pair[0])) == 2


@pytest.mark.slow
def test_dimensions_marked_on_the_first_inputs(ranks: Ranks) -> None:
    ranks(2).run(_marked)


def _inductor(rank: int, world_size: int) -> None:
    pair = _pair({"dynamic_shapes": (BOTH, BOTH), "checkpointed": True})
    pair[0].eval(), pair[1].eval()
    compiled: list[int] = []

    def compile_region(*args: Any) -> Any:
        compiled.append(index)
        return compile_fx_inner(*args)

    compile_fx_inner = graphshard.lower.inductor.compile_fx_inner
    with mock.patch("graphshard.lower.inductor.compile_fx_inner", compile_region):
        for index, shape in enumerate(SHAPES[rank::4]):
            ours, theirs = (_step(model, shape, index) for model in pair)
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert set(compiled) == {0}
    assert len(graphshard.programs(pair[0])) == 1


@pytest.mark.slow
def test_inductor_compiles_once_for_all_shapes(ranks: Ranks) -> None:
    ranks(2).run(_inductor)


def _slices(rank: int, world_size: int, backend: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    model, plain = _Net().eval(), _Net().eval()
    plain.load_state_dict(model.state_dict())
    shapes = {name: {1: Dim("sequence", min=2, max=64)} for name in ("tokens", "targets")} if dynamic else None
    graphshard.compile(model, world_mesh(), backend=backend, dynamic_shapes=shapes)
    for length in (9, 12, 15):
        sequence = torch.randint(VOCAB, (2, length), generator=torch.Generator().manual_seed(length))
        losses = [net(sequence[:, :-1], sequence[:, 1:]) for net in (model, plain)]
        losses[0].backward()
        torch.testing.assert_close(*losses)
    assert len(graphshard.programs(model)) == (1 if dynamic else 2)  # the second length makes it dynamic


@pytest.mark.parametrize(
    ("backend", "dynamic"),
    [
        *(("eager", True), ("inductor", False)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("eager", False), ("inductor", True))),
    ],
)
@pytest.mark.quick_cases("eager-True")
def test_inputs_that_are_strided_slices(ranks: Ranks, backend: str, dynamic: bool) -> None:
    """Inputs and targets that are slices of one tensor with longer rows."""
    ranks(1).run(_slices, backend, dynamic)


class _Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        seen.add_(1)
        return self.lin(x * seen).sum()


def _written(rank: int, world_size: int) -> None:
    model = graphshard.compile(_Counts(), world_mesh(), dynamic_shapes=({0: Dim("batch")}, {0: Dim("batch")}))
    for batch in (3, 5):
        seen = torch.zeros(batch, 5)
        model(torch.ones(batch, 4), seen[:, :-1]).backward()
        assert torch.equal(seen, torch.tensor([1.0, 1, 1, 1, 0]).expand(batch, 5))
    assert len(graphshard.programs(model)) == 1


@pytest.mark.slow
def test_writes_to_a_strided_input(ranks: Ranks) -> None:
    ranks(1).run(_written)


class _FourRows(_Counts):
    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        return self.lin(x.view(4, 4)).sum() + seen.sum()


def _declared(rank: int, world_size: int) -> None:
    model = graphshard.compile(_FourRows(), world_mesh(), backend="eager", dynamic_shapes=({0: Dim("batch")}, None))
    with pytest.raises(CaptureError, match=r"with these dynamic sizes: .*batch.* Declare other ranges"):
        model(torch.ones(4, 4), torch.ones(2))


def test_rejects_a_declared_size_that_forward_specializes(ranks: Ranks) -> None:
    ranks(1).run(_declared)
