"""After `unshard()` modules show full parameters, as FSDP2's do; what works with shards still finds these."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import graphshard
from tests.distributed.twins import assert_same, grads_of, twins, world_mesh
from tests.ranks import Ranks


class Tied(nn.Module):
    """An embedding that is the head's weight, too, and two blocks; 7 rows do not divide by 2 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


def _tokens(rank: int) -> Tensor:
    return torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(rank))


def _is_full(param: object) -> bool:
    return isinstance(param, nn.Parameter) and not isinstance(param, DTensor)


def _as_fsdp2(rank: int, world_size: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    pair = ours, theirs = twins(Tied(), world_mesh(), mp_policy=policy)
    before = ours.layers[0].weight
    for model in pair:
        model.layers[0].unshard()
        assert _is_full(model.layers[0].weight)
        assert not _is_full(model.layers[1].weight)
        assert not _is_full(model.embed.weight)
        model.unshard()
        assert _is_full(model.embed.weight)
        assert model.embed.weight is model.head.weight
    for name in ("layers.0.weight", "layers.0.bias", "embed.weight"):
        mine, other = ours.get_parameter(name), theirs.get_parameter(name)
        assert mine.dtype == other.dtype == torch.bfloat16
        assert mine.requires_grad == other.requires_grad is True
        assert torch.equal(mine, other)
    for model in pair:
        model.layers[0].reshard()
        assert not _is_full(model.layers[0].weight)
        assert _is_full(model.embed.weight)
    assert ours.layers[0].weight is before

    # Writes are seen by the calls until the shards are back, and then lost.
    results = []
    for model in pair:
        with torch.no_grad():
            model.embed.weight.mul_(2)
            results.append(model(_tokens(rank)))
    assert torch.equal(*results)
    for model in pair:
        model(_tokens(rank)).sum().backward()
        model.reshard()
    assert not any(map(_is_full, ours.parameters()))
    assert_same(grads_of(ours), grads_of(theirs), "gradients")
    assert_same(ours.state_dict(), theirs.state_dict(), "parameters")


def _while_shown(rank: int, world_size: int) -> None:
    """State dicts, copies and conversions are those of shards; what was gathered of old values is not used again."""
    ours, theirs = twins(Tied(), world_mesh())
    for model in (ours, theirs):
        model.unshard()
        model.layers[0].unshard()
        state = model.state_dict()
        assert all(isinstance(value, DTensor) for value in state.values())
        model.unshard()
        model.layers[0].unshard()
        model.load_state_dict({name: value * 2 for name, value in state.items()})
    assert torch.equal(ours(_tokens(rank)), theirs(_tokens(rank)))
    ours.reshard(units=["*", ""])

    ours.unshard(units=["*", ""])
    twin = copy.deepcopy(ours)
    assert not any(map(_is_full, twin.parameters()))
    assert torch.equal(twin(_tokens(rank)), ours(_tokens(rank)))
    assert all(map(_is_full, ours.parameters()))  # a call shows them again
    ours(_tokens(rank)).sum().backward()
    assert not any(map(_is_full, ours.parameters()))

    ours.unshard(units=["*", ""])
    ours.double()
    assert not any(map(_is_full, ours.parameters()))
    assert ours(_tokens(rank)).dtype == torch.float64

    handle = ours.unshard(async_op=True)
    assert not _is_full(ours.embed.weight)
    assert handle is not None
    handle.wait()
    assert _is_full(ours.embed.weight)

    with pytest.raises(graphshard.UnsupportedError) as error:
        ours.embed.weight.square().sum().backward()
    assert str(error.value) == (
        "a gradient reached the gathered parameter embed.weight, which unshard() shows: something outside of the "
        "model's forward computed with it. Compute that in forward, or under torch.no_grad()."
    )


def test_modules_show_what_was_gathered_as_fsdp2s_do(ranks: Ranks) -> None:
    ranks(2).run(_as_fsdp2)


def test_state_copies_and_conversions_while_parameters_are_shown(ranks: Ranks) -> None:
    ranks(2).run(_while_shown)


def _after_a_forward(rank: int, world_size: int) -> None:
    """FSDP2 leaves the root's behind, and an optimizer is given these; here evaluation sees what is written, too."""
    pair = ours, _ = twins(Tied(), world_mesh())
    before = ours.embed.weight.full_tensor().detach().clone()
    trained = []
    for model in pair:
        model(_tokens(rank))
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        model(_tokens(rank)).square().sum().backward()
        optim.step()
        trained.append(not torch.equal(model.embed.weight.full_tensor(), before))
    assert trained == [True, False]

    outputs: list[list[Tensor]] = [[], []]
    with torch.no_grad():
        for model, seen in zip(pair, outputs):
            for _ in range(2):
                seen.append(model(_tokens(rank)))
                for name, shard in model.state_dict().items():
                    if name != "head.weight":
                        shard.data.mul_(2)  # as averages of weights are put in and out
    assert not torch.equal(*outputs[0])
    plain = Tied()
    plain.load_state_dict({name: value.full_tensor() / 4 for name, value in ours.state_dict().items()})
    assert torch.equal(plain(_tokens(rank)), outputs[0][0])
    plain.load_state_dict({name: value * 2 for name, value in plain.state_dict().items()})
    assert torch.equal(plain(_tokens(rank)), outputs[0][1])


def test_a_forward_leaves_no_full_parameters_behind(ranks: Ranks) -> None:
    ranks(2).run(_after_a_forward)
