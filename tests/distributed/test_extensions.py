"""Parameters that are tensor subclasses, or whose shards have all-gather extensions, match FSDP2 bit for bit."""

from __future__ import annotations

import copy
import functools
import tempfile
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.testing._internal.two_tensor import TwoTensor

import graphshard
from tests.distributed.extended import (
    BF16,
    Net,
    Rounded,
    before,
    before_with_policy,
    even,
    pair,
    pairs_follow,
    patch_shards,
    plain_parts,
    train_and_compare_with_fsdp2,
    widened,
)
from tests.distributed.nets import rows
from tests.distributed.twins import assert_same, local, world_mesh
from tests.ranks import Ranks


def _pairs() -> nn.Module:
    return even(pair)


def _train_pairs(rank: int, world_size: int) -> None:
    for how, options in (
        (before, {}),
        (before_with_policy, {"reshard_after_forward": False}),
        (before, {"mp_policy": BF16}),
        (before_with_policy, {"mp_policy": BF16, "reshard_after_forward": True}),
        (before, {"shard_placement_fn": lambda param: Shard(param.dim() - 1)}),
    ):
        with pairs_follow(how):
            ours = train_and_compare_with_fsdp2(_pairs, world_mesh(), **options)
            assert isinstance(local(ours.blocks[0][0].weight), TwoTensor)
            assert type(local(ours.blocks[0][2].weight)) is TwoTensor


def test_both_parts_are_gathered_and_trained(ranks: Ranks) -> None:
    ranks(2).run(_train_pairs)


def _train_patched(rank: int, world_size: int) -> None:
    ours = train_and_compare_with_fsdp2(even, world_mesh(), prepare=patch_shards)
    (program,) = graphshard.programs(ours)
    assert program.plan is not None
    sent = [
        bucket for bucket in program.plan.buckets if bucket.kind == "gather" and "blocks.0.0.weight" in bucket.members
    ]
    assert {bucket.num_bytes for bucket in sent} == {2 * 8 * 16 * torch.bfloat16.itemsize}  # two weights
    train_and_compare_with_fsdp2(even, world_mesh(), prepare=patch_shards, mp_policy=BF16)

    def on_shards_alone(model: nn.Module) -> None:
        model.to_empty(device="cpu")
        patch_shards(model)
        torch.manual_seed(0)
        for param in model.parameters():
            nn.init.normal_(param)

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return even(pair)

    train_and_compare_with_fsdp2(on_meta, world_mesh(), prepare=on_shards_alone)


@pytest.mark.slow
def test_methods_set_on_shards(ranks: Ranks) -> None:
    """Also on shards of a subclass without them, whose values are then gathered like a plain tensor's."""
    ranks(2).run(_train_patched)


def _train_uneven(rank: int, world_size: int) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Net(Rounded, dim=3)

    # FSDP2 cannot gather such a parameter a second time.
    train_and_compare_with_fsdp2(make, world_mesh(), steps=1, dim=3, reshard_after_forward=False)
    ours = graphshard.compile(make(), world_mesh(), backend="eager")
    kept = graphshard.compile(make(), world_mesh(), backend="eager", reshard_after_forward=False)
    for model in (ours, kept):
        model(rows(rank, 5, 3)).sum().backward()
    for param, other in zip(ours.parameters(), kept.parameters(), strict=True):
        assert_same(plain_parts(param.grad), plain_parts(other.grad), "gathered twice")


def test_padding_by_the_method(ranks: Ranks) -> None:
    ranks(2).run(_train_uneven)


# The recorder is a module-level mock, because a method must not change the variables that it reads.
_note_out = mock.Mock()


def _notes_out(self: Any, gathered: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
    traced = type(gathered[0]) is not Tensor
    _note_out("ours" if traced else "theirs", out is not None)
    return widened(self, gathered, metadata, param_dtype, out=out)


def _train_noting(rank: int, world_size: int) -> dict[str, list[bool]]:
    train_and_compare_with_fsdp2(even, world_mesh(), prepare=functools.partial(patch_shards, post=_notes_out))
    noted = [call.args for call in _note_out.call_args_list]
    return {whose: [given for who, given in noted if who == whose] for whose in ("ours", "theirs")}


@pytest.mark.slow
def test_out_is_never_passed(ranks: Ranks) -> None:
    """FSDP2 passes `out` from the second gather on, to be written in place; a program creates a new parameter."""
    for given in ranks(2).run(_train_noting):
        assert given["ours"]
        assert not any(given["ours"])
        assert any(given["theirs"])


_note_mesh = mock.Mock()


def _tells_mesh(self: Any, mesh: Any) -> Any:
    _note_mesh(mesh.ndim, mesh.size())
    return (self.a, self.b), None


def _train_on_two_axes(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with pairs_follow(_tells_mesh):
        train_and_compare_with_fsdp2(_pairs, mesh)
    assert {call.args for call in _note_mesh.call_args_list} == {(1, 2)}


@pytest.mark.slow
def test_replicas(ranks: Ranks) -> None:
    ranks(4).run(_train_on_two_axes)


def _meta(rank: int, world_size: int) -> None:
    with pairs_follow(), torch.device("meta"):
        model = even(pair)
    with pairs_follow():
        ours = graphshard.compile(model, world_mesh(), backend="eager", mp_policy=BF16)
        ours.to_empty(device="cpu")
        for param in ours.parameters():
            nn.init.normal_(param)
        optim = torch.optim.Adam(ours.parameters(), foreach=True)
        for step in range(2):
            old = plain_parts(ours.blocks[0][0].weight)
            ours(rows(step, 2, 8)).sum().backward()
            optim.step()
            optim.zero_grad()
            new = plain_parts(ours.blocks[0][0].weight)
            assert all(not torch.equal(old[i], new[i]) for i in ("0", "1"))


@pytest.mark.slow
def test_from_the_meta_device(ranks: Ranks) -> None:
    ranks(2).run(_meta)


def _state(rank: int, world_size: int) -> None:
    x = rows(rank, 4, 8)
    with pairs_follow():
        ours = graphshard.compile(_pairs(), world_mesh(), backend="eager", example_inputs=(x,))
        expected = plain_parts(ours(x))
        assert len(graphshard.programs(ours)) == 1
        twin = copy.deepcopy(ours)
        other = graphshard.compile(even(lambda weight: pair(2 * weight)), world_mesh(), backend="eager")
        other.load_state_dict(ours.state_dict())
        full = graphshard.compile(even(lambda weight: pair(2 * weight)), world_mesh(), backend="eager")
        full.load_state_dict({name: value.full_tensor() for name, value in ours.state_dict().items()})
        restored = graphshard.compile(even(lambda weight: pair(2 * weight)), world_mesh(), backend="eager")
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        with torch.serialization.safe_globals([TwoTensor, torch.device, getattr]):
            dcp.save(ours.state_dict(), checkpoint_id=folder[0], no_dist=False)
            state = restored.state_dict()
            dcp.load(state, checkpoint_id=folder[0])
        restored.load_state_dict(state)
        for model in (twin, other, full, restored):
            assert_same(plain_parts(model(x)), expected, "loaded")
            assert type(local(model.state_dict()["blocks.0.0.weight"])) is TwoTensor
        ours.unshard()
        assert_same(plain_parts(ours(x)), expected, "gathered by hand")
        with torch.no_grad():
            assert_same(plain_parts(ours(x)), expected, "without gradients")
        block = ours.blocks[0](x)
        assert isinstance(block, TwoTensor)
        block.sum().backward()
        assert ours.blocks[0][0].weight.grad is not None
    patched = graphshard.compile(even(), world_mesh(), backend="eager")
    plain = plain_parts(patched(x))
    patch_shards(patched)
    changed = plain_parts(patched(x))
    assert not torch.equal(changed["0"], plain["0"])
    assert_same(plain_parts(copy.deepcopy(patched)(x)), changed, "copied with its methods")


@pytest.mark.slow
def test_state_and_copies(ranks: Ranks) -> None:
    ranks(2).run(_state)


def _accumulate(rank: int, world_size: int) -> None:
    with pairs_follow():
        once = graphshard.compile(_pairs(), world_mesh(), backend="eager")
        thrice = graphshard.compile(_pairs(), world_mesh(), backend="eager")
        for step in range(3):
            once(rows(step, 4, 8)).sum().backward()
            thrice.set_requires_gradient_sync(step == 2)
            thrice(rows(step, 4, 8)).sum().backward()
        for param, other in zip(once.parameters(), thrice.parameters(), strict=True):
            torch.testing.assert_close(local(param.grad), local(other.grad))


@pytest.mark.slow
def test_microbatches(ranks: Ranks) -> None:
    ranks(2).run(_accumulate)


@pytest.mark.slow
def test_inductor(ranks: Ranks) -> None:
    ranks(2).run(_inductor)


def _inductor(rank: int, world_size: int) -> None:
    with pairs_follow():
        eager = graphshard.compile(_pairs(), world_mesh(), backend="eager")
        fused = graphshard.compile(_pairs(), world_mesh())
        x: Tensor = rows(rank, 4, 8)
        for model in (eager, fused):
            model(x).sum().backward()
        for param, other in zip(eager.parameters(), fused.parameters(), strict=True):
            torch.testing.assert_close(local(param.grad), local(other.grad))
