"""Modules show unsharded parameters as FSDP2's do; operations that need shards still get them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

import graphshard
from graphshard.errors import UnsupportedError
from tests.distributed.twins import CountLaunches, assert_same, grads_of, twins, world_mesh
from tests.ranks import Ranks


class Tied(nn.Module):
    """A tied embedding and head, and two blocks; 7 rows do not divide by 2 ranks."""

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
        actual, expected = ours.get_parameter(name), theirs.get_parameter(name)
        assert actual.dtype == expected.dtype == torch.bfloat16
        assert actual.requires_grad == expected.requires_grad is True
        assert torch.equal(actual, expected)
    for model in pair:
        model.layers[0].reshard()
        assert not _is_full(model.layers[0].weight)
        assert _is_full(model.embed.weight)
    assert ours.layers[0].weight is before

    # Calls see writes until the parameters are resharded; then the writes are lost.
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
    """State dicts, copies and conversions use the shards; gathers of old values are not reused."""
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
    ours.reshard()

    handle = ours.unshard(async_op=True)
    assert not _is_full(ours.embed.weight)
    assert handle is not None
    handle.wait()
    assert _is_full(ours.embed.weight)

    ours.zero_grad()
    ours.embed.weight.square().sum().backward()  # gradients of other losses reach the shards
    shard = ours.state_dict()["embed.weight"]
    assert torch.equal(ours.embed.weight.grad.full_tensor(), 2 * shard.full_tensor())


@pytest.mark.slow
def test_unsharded_parameters_match_fsdp2(ranks: Ranks) -> None:
    ranks(2).run(_as_fsdp2)


def test_state_copies_and_conversions_while_unsharded(ranks: Ranks) -> None:
    ranks(2).run(_while_shown)


def _after_a_forward(rank: int, world_size: int) -> None:
    """FSDP2 leaves the root unsharded, and an optimizer gets these parameters; here evaluation sees writes, too."""
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
                        shard.data.mul_(2)  # like swapping averaged weights in and out
    assert not torch.equal(*outputs[0])
    plain = Tied()
    plain.load_state_dict({name: value.full_tensor() / 4 for name, value in ours.state_dict().items()})
    assert torch.equal(plain(_tokens(rank)), outputs[0][0])
    plain.load_state_dict({name: value * 2 for name, value in plain.state_dict().items()})
    assert torch.equal(plain(_tokens(rank)), outputs[0][1])


@pytest.mark.slow
def test_forward_reshards_unless_configured_to_keep(ranks: Ranks) -> None:
    ranks(2).run(_after_a_forward)


def _shown(model: nn.Module) -> dict[str, Tensor]:
    return {name: param for name, param in model.named_parameters() if _is_full(param)}


def _kept(rank: int, world_size: int, dtype: torch.dtype | None) -> None:
    """Check which parameters are shown and when, the bits of steps that read them, and the number of gathers."""
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    pair = ours, theirs = twins(Tied(), world_mesh(), mp_policy=policy, reshard_after_forward=False)
    shards = dict(ours.named_parameters())
    optims = [torch.optim.SGD(model.parameters(), lr=0.1) for model in pair]
    for step in range(4):
        counts: list[dict[str, int]] = []
        seen: list[dict[str, Tensor]] = []
        for model, optim in zip(pair, optims):
            with CountLaunches() as launches:
                loss = model(_tokens(rank + 10 * step)).square().sum()
            assert len(_shown(model)) == 5, step
            assert model.embed.weight is model.head.weight
            assert all(full.dtype == (dtype or torch.float32) for full in _shown(model).values())
            seen.append({name: full.detach().clone() for name, full in _shown(model).items()})
            with launches:
                if step == 1:
                    model.layers[1].reshard()
                    assert sorted(_shown(model)) == ["embed.weight", "layers.0.bias", "layers.0.weight"]
                if step == 2:
                    for module in model.modules():
                        if isinstance(module, FSDPModule):
                            module.reshard()
                    assert not _shown(model)
                loss.backward()
            assert not _shown(model)
            counts.append({kind: launches.of(kind) for kind in ("gather", "scatter")})
            optim.step()
            optim.zero_grad()
        again = 2 if step == 2 else 0  # all freed units are gathered at once
        assert counts[0] == {**counts[1], "gather": counts[1]["gather"] - again}, step
        assert_same(*seen, f"what is shown in step {step}")
        assert_same(ours.state_dict(), theirs.state_dict(), f"parameters after step {step}")
    assert all(param is shards[name] for name, param in ours.named_parameters())


def _some_kept(rank: int, world_size: int) -> None:
    """Only units configured to keep parameters show them; not under no_grad, which keeps nothing for a backward."""
    ours = graphshard.compile(Tied(), world_mesh(), backend="eager")
    ours(_tokens(rank))
    assert not _shown(ours)
    ours.layers[0].set_reshard_after_forward(False)
    ours(_tokens(rank))
    assert sorted(_shown(ours)) == ["layers.0.bias", "layers.0.weight"]
    with torch.no_grad():
        ours(_tokens(rank))
    assert not _shown(ours)
    ours.set_reshard_after_forward(True)
    ours(_tokens(rank))
    assert not _shown(ours)


def _looked_at(rank: int, world_size: int) -> None:
    """Operations between forward and backward reach the shards, or raise an error."""
    ours = graphshard.compile(Tied(), world_mesh(), reshard_after_forward=False, backend="eager")
    shard = ours.layers[0].weight
    ours(_tokens(rank)).square().sum().backward()
    before = {name: grad.clone() for name, grad in grads_of(ours).items() if grad is not None}
    assert len(before) == 5

    loss = ours(_tokens(rank)).square().sum()
    weight = ours.layers[0].weight
    assert weight is not shard
    assert weight.grad is shard.grad
    repr(weight)
    norm = torch.nn.utils.clip_grad_norm_(ours.parameters(), 1e-3)
    assert isinstance(norm, DTensor)
    ours.zero_grad()
    assert shard.grad is None
    assert isinstance(copy.deepcopy(weight), DTensor)
    refused = "was given to an optimizer, and gradients go to its shard. Do"
    with pytest.raises(UnsupportedError, match=f"^the gathered parameter layers.0.weight {refused}"):
        torch.optim.SGD([weight], lr=0.1)
    with pytest.raises(UnsupportedError, match=r"^the gathered parameter layers\.0\.weight was given a"):
        weight.register_post_accumulate_grad_hook(print)
    assert all(isinstance(value, DTensor) for value in ours.state_dict().values())
    assert not _shown(ours)
    loss.backward()
    assert_same(grads_of(ours), before, "gradients")

    ours(_tokens(rank))
    for param in ours.parameters():
        param.requires_grad_(False)
    assert not any(param.requires_grad for param in ours.parameters())
    ours.reshard(units=["*", ""])
    assert not any(param.requires_grad for param in ours.parameters())
    ours.requires_grad_(True)

    again: list[Callable[[Tensor], object]] = [
        lambda loss: loss.backward(),
        lambda _: ours(_tokens(rank)),
        lambda _: ours.layers[0].reshard(),
    ]
    for goes_on in again:
        loss = ours(_tokens(rank)).square().sum()
        with torch.no_grad():
            ours.layers[0].weight.mul_(2)
        with pytest.raises(
            UnsupportedError,
            match=r"^the gathered parameter layers\.0\.weight was written to after a forward that has kept it\. The sh",
        ):
            goes_on(loss)
    ours(_tokens(rank)).square().sum().backward()

    ours.load_state_dict({name: value * 2 for name, value in ours.state_dict().items()})
    ours.zero_grad()
    ours(_tokens(rank))
    twin = copy.deepcopy(ours)
    assert not _shown(twin)
    ours.double()
    assert ours.layers[0].weight.dtype == torch.float64


def _freed(rank: int, world_size: int) -> None:
    """Shown parameters are released by `reshard`, another forward, or a backward."""
    pair = twins(Tied(), world_mesh(), reshard_after_forward=False)
    for model in pair:
        for end in ("reshard", "backward"):
            loss = model(_tokens(rank)).square().sum()
            storages = [StorageWeakRef(full.untyped_storage()) for full in _shown(model).values()]
            kept = list(_shown(model).values())
            assert len(storages) == 5
            assert not any(map(_is_empty, kept))
            if end == "reshard":
                model.reshard()
                for layer in model.layers:
                    layer.reshard()
                assert all(storage.expired() or _is_empty(full) for storage, full in zip(storages, kept))
            loss.backward()
            assert all(storage.expired() or _is_empty(full) for storage, full in zip(storages, kept))


def _is_empty(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.quick_cases("None")
def test_parameters_kept_by_forward_match_fsdp2(ranks: Ranks, dtype: torch.dtype | None) -> None:
    ranks(2).run(_kept, dtype)


@pytest.mark.slow
def test_only_units_that_keep_parameters_show_them(ranks: Ranks) -> None:
    ranks(2).run(_some_kept)


def test_operations_on_shown_parameters_reach_shards_or_raise(ranks: Ranks) -> None:
    ranks(2).run(_looked_at)


def test_shown_parameters_are_freed(ranks: Ranks) -> None:
    ranks(2).run(_freed)
