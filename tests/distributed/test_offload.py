"""CPUOffloadPolicy on a CPU mesh, without pinned memory, and with forced copies."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import graphshard
from graphshard.errors import ArgumentError, MaterializationError
from graphshard.passes import OffloadActivations, OffloadParameters
from tests.distributed.nets import Net, full, rows, train
from tests.distributed.twins import assert_same, fsdp2, grads_of, world_mesh
from tests.ranks import Ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _offload(rank: int, world_size: int, backend: str) -> None:
    mesh = world_mesh()
    for policy in (MixedPrecisionPolicy(), BF16):
        torch.manual_seed(0)
        model = Net(dim=7)
        twins = [copy.deepcopy(model) for _ in range(3)]
        theirs = fsdp2(twins[0], mesh, mp_policy=policy, offload_policy=CPUOffloadPolicy(pin_memory=False))
        options = {"mp_policy": policy, "backend": "eager", "offload_policy": CPUOffloadPolicy()}
        ours = graphshard.compile(model, mesh, **options)
        copies = graphshard.Pipeline().insert(OffloadParameters(always=True), before="plan")
        forced = graphshard.compile(twins[1], mesh, passes=copies, **{**options, "backend": backend})
        inputs = [rows(rank + 10 * step) for step in range(3)]
        expected = train(theirs, inputs)
        assert_same(train(ours, inputs), expected, "offloaded")
        if backend == "eager":
            host = graphshard.Pipeline().insert(OffloadParameters(always=True, cast_on_host=True), before="plan")
            cast = graphshard.compile(twins[2], mesh, passes=host, **options)
            assert_same(train(cast, inputs), expected, "cast on the host")
        got = train(forced, inputs)
        if backend == "eager":
            assert_same(got, expected, "with copies")
        else:
            without = graphshard.compile(twins[2], mesh, mp_policy=policy, backend=backend)
            assert_same(got, train(without, inputs), "without copies")
            if policy.param_dtype is None:  # Inductor rounds less often to bfloat16 than FSDP2
                for name, value in full(expected).items():
                    torch.testing.assert_close(
                        full(got)[name], value, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
                    )
        (program,) = graphshard.programs(forced)
        assert "torch.ops.graphshard.upload.default" in program.forward.code
        assert "torch.ops.graphshard.download.default" in program.backward.code
        assert all(p.device.type == "cpu" and p.grad.device.type == "cpu" for p in ours.parameters())


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.slow
def test_offloaded_training_equals_fsdp2(ranks: Ranks, backend: str) -> None:
    ranks(2).run(_offload, backend)


def _by_hand(rank: int, world_size: int) -> None:
    mesh = world_mesh()
    for policy in (MixedPrecisionPolicy(), BF16):
        torch.manual_seed(0)
        model = Net(dim=7)
        twin = copy.deepcopy(model)
        theirs = fsdp2(twin, mesh, mp_policy=policy, offload_policy=CPUOffloadPolicy(pin_memory=False))
        passes = graphshard.Pipeline().insert(OffloadParameters(always=True), before="plan")
        options = {"mp_policy": policy, "backend": "eager", "offload_policy": CPUOffloadPolicy(), "passes": passes}
        ours = graphshard.compile(model, mesh, **options)
        inputs = [rows(rank + 10 * step) for step in range(3)]
        for each in (ours, theirs):
            for module in (each, *each.blocks):
                module.unshard()
            each(inputs[0]).sum().backward()
        assert_same(grads_of(ours), grads_of(theirs), "gathered by hand")
        by_hand = graphshard.programs(ours)[0]
        assert by_hand.forward.code.count("torch.ops.graphshard.upload.default") == 0
        for microbatch in (1, 2):
            for each in (ours, theirs):
                each.set_reshard_after_backward(microbatch == 2)
                each.set_requires_gradient_sync(microbatch == 2)
                each(inputs[microbatch]).sum().backward()
        assert_same(grads_of(ours), grads_of(theirs), "kept for microbatches")
        assert_same(train(ours, inputs), train(theirs, inputs), "afterwards")


@pytest.mark.slow
def test_unshard_of_offloaded_shards(ranks: Ranks) -> None:
    """Programs read the unsharded parameters, upload nothing, and see the optimizer's later updates of the shards."""
    ranks(2).run(_by_hand)


def _activations(rank: int, world_size: int) -> None:
    mesh = world_mesh()
    passes = graphshard.Pipeline().insert(OffloadActivations(least=1), before="plan")
    for policy in (MixedPrecisionPolicy(), BF16):
        torch.manual_seed(0)
        model = Net(dim=7)
        twin = copy.deepcopy(model)
        theirs = fsdp2(twin, mesh, mp_policy=policy)
        ours = graphshard.compile(model, mesh, mp_policy=policy, backend="eager", passes=passes)
        inputs = [rows(rank + 10 * step) for step in range(3)]
        assert_same(train(ours, inputs), train(theirs, inputs), "saved on the host")
        for microbatch in range(3):  # separate backwards
            for each in (ours, theirs):
                each.set_requires_gradient_sync(microbatch == 2)
                each(inputs[microbatch]).sum().backward()
        (program,) = graphshard.programs(ours)
        assert len(program.on_host) > 2
        assert program.backward.code.count("torch.ops.graphshard.reload.default") == len(program.on_host)
        assert_same(grads_of(ours), grads_of(theirs), "microbatches")


@pytest.mark.slow
def test_offloaded_activations_match_fsdp2(ranks: Ranks) -> None:
    ranks(2).run(_activations)


def _wrong(rank: int, world_size: int) -> None:
    with pytest.raises(ArgumentError, match=r"must be a .*CPUOffloadPolicy or None, got str"):
        graphshard.compile(Net(), world_mesh(), offload_policy="cpu")
    with torch.device("meta"):
        model = Net()
    model = graphshard.compile(model, world_mesh(), backend="eager", offload_policy=CPUOffloadPolicy())
    with pytest.raises(MaterializationError, match=r"on the meta device: stem.weight"):
        model(rows(rank))


def test_wrong_policy_and_parameters_on_the_meta_device(ranks: Ranks) -> None:
    ranks(2).run(_wrong)
