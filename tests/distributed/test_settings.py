"""Settings changed after compile: resharding, unshard, divide factors, precision of units, other methods."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

import graphshard
from graphshard.errors import UnsupportedError
from graphshard.module.compiled_module import CompiledModule
from tests.distributed.twins import (
    BF16,
    CountLaunches,
    assert_same,
    example_llama,
    grads_of,
    params_of,
    train_side_by_side,
    twins,
    world_mesh,
)
from tests.helpers import Blocks
from tests.ranks import RankError, Ranks

X = torch.linspace(-1, 1, 16).view(2, 8)


def _step(model: nn.Module) -> tuple[int, int]:
    """Count the gathers of forward and of backward."""
    with CountLaunches() as forward:
        loss = model(X)
    with CountLaunches() as backward:
        loss.backward()
    return forward.of("gather"), backward.of("gather")


def _blocks(**options: Any) -> nn.Module:
    return graphshard.compile(Blocks(3, 8), world_mesh(), backend="eager", **options)


def _warm(model: nn.Module) -> None:
    """Compile before anything is counted."""
    model(X).backward()


def _resharding(rank: int, world_size: int) -> list[tuple[int, int]]:
    model = _blocks()
    counts = []
    for change in (
        lambda: None,
        lambda: model.set_reshard_after_forward(False),
        lambda: model.set_reshard_after_forward(True, units=["layers.1"]),
        lambda: model.set_reshard_after_forward(True),
    ):
        change()
        _warm(model)
        counts.append(_step(model))
    assert len(graphshard.programs(model)) == 3  # the last setting equals the first
    return counts


@pytest.mark.slow
def test_resharding_changes_at_run_time(ranks: Ranks) -> None:
    """Backward gathers two of three layers again (it does not need the first), or none, or one."""
    for counts in ranks(2).run(_resharding):
        assert counts == [(3, 2), (3, 0), (3, 1), (3, 2)]


def _unsharded(rank: int, world_size: int) -> dict[str, Any]:
    model, twin = twins(Blocks(3, 8), world_mesh(), mp_policy=BF16)
    for each in (model, twin):
        _warm(each)
        each.zero_grad()
    expected = twin(X)
    expected.backward()
    found: dict[str, Any] = {}
    model.unshard(units=["*"])
    _warm(model)
    assert_same(grads_of(model), grads_of(twin), "gathered by hand")
    handle = model.unshard(async_op=True, units=["*"])
    handle.wait()
    found["all"] = _step(model)
    found["after backward"] = _step(model)
    for _ in range(2):  # the first iteration compiles
        model.unshard(async_op=True, units=["layers.1"])
        with CountLaunches() as counted:
            assert torch.equal(model(X), expected)
        model.reshard(units=["*"])
    found["but one"] = counted.of("gather")
    found["resharded"] = _step(model)
    return found


@pytest.mark.slow
def test_unshard_and_reshard(ranks: Ranks) -> None:
    """Unsharded parameters are used until the next backward ends."""
    for found in ranks(2).run(_unsharded):
        assert found == {"all": (0, 0), "after backward": (3, 2), "but one": 2, "resharded": (3, 2)}


def _microbatches(rank: int, world_size: int) -> list[tuple[int, int]]:
    """Keep parameters gathered over three microbatches, bitwise equal to FSDP2."""
    model, batch = example_llama(layers=1)
    pair = twins(model, world_mesh())
    optims = [torch.optim.SGD(model.parameters(), lr=0.1) for model in pair]
    for step in range(2):
        for compiled, optim in zip(pair, optims):
            for microbatch in range(3):
                last = microbatch == 2
                compiled.set_requires_gradient_sync(last)
                compiled.set_reshard_after_backward(last)
                torch.manual_seed(10 * step + 2 * microbatch + rank)
                compiled(**batch()).backward()
            optim.step()
            optim.zero_grad()
    assert_same(*map(params_of, pair), "parameters")
    model = _blocks()
    counts = []
    for _ in range(2):
        for last in (False, False, True):
            model.set_reshard_after_backward(last)
            counts.append(_step(model))
    return counts[3:]


@pytest.mark.slow
def test_parameters_stay_gathered_between_microbatches(ranks: Ranks) -> None:
    """Gathered before the first microbatch, small ones packed, and freed after the last."""
    for counts in ranks(2).run(_microbatches):
        assert counts == [(1, 0), (0, 0), (0, 0)]


def _square() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def _divided(rank: int, world_size: int, factor: float, reduce_dtype: torch.dtype, force_sum: bool) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    pair = twins(Blocks(2, 6), _square() if world_size == 4 else world_mesh(), mp_policy=policy)
    for model in pair:
        for module in [m for m in model.modules() if isinstance(m, FSDPModule)] or [model]:
            module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(force_sum)
        torch.manual_seed(rank)
        model(torch.randn(3, 6)).backward()
    assert_same(*map(grads_of, pair), "gradients")


@pytest.mark.parametrize(
    ("factor", "dtype", "force_sum"),
    [(2.0, torch.float32, False), (3.0, torch.float32, True), (3.0, torch.float16, False), (4.0, torch.bfloat16, True)],
    ids=str,
)
@pytest.mark.quick_cases("4.0-torch.bfloat16-True")
def test_divide_factor_and_forced_sums(ranks: Ranks, factor: float, dtype: torch.dtype, force_sum: bool) -> None:
    ranks(2).run(_divided, factor, dtype, force_sum)


@pytest.mark.slow
def test_divide_factor_on_two_axes(ranks: Ranks) -> None:
    ranks(4).run(_divided, 2.0, torch.float32, False)
    ranks(4).run(_divided, 5.0, torch.float32, True)


def _scaled(rank: int, world_size: int) -> None:
    """A divide factor that is applied before the reduction, for which FSDP2 needs NCCL; compare with arithmetic."""
    model = _blocks()
    model.set_gradient_divide_factor(3.0, units=["*"])
    reference = Blocks(3, 8)
    reference.load_state_dict({name: p.full_tensor() for name, p in model.named_parameters()})
    model(X).backward()
    reference(X).backward()
    for name, param in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), param.grad * world_size / 3.0)


def test_a_divisor_that_is_not_the_number_of_ranks(ranks: Ranks) -> None:
    ranks(2).run(_scaled)


class Mixed(nn.Module):
    """A stem in full precision, blocks in half."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.half(x).square().sum()

    def half(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32
        return x


def _policies(rank: int, world_size: int) -> None:
    half = MixedPrecisionPolicy(torch.float16, torch.float32, output_dtype=torch.float32)
    whole = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    model = Mixed()
    import copy

    twin = copy.deepcopy(model)
    for block in twin.blocks:
        fully_shard(block, mesh=world_mesh(), mp_policy=half)
    fully_shard(twin, mesh=world_mesh(), mp_policy=whole)
    policies = {"blocks.*": half, "": whole}
    ours = graphshard.compile(model, world_mesh(), mp_policy=policies, units=["blocks.*"], backend="eager")
    for _ in range(2):
        losses = []
        for compiled in (ours, twin):
            torch.manual_seed(rank)
            loss = compiled(torch.randn(3, 4))
            loss.backward()
            losses.append({"loss": loss.detach()})
        assert_same(*losses, "step")
        assert_same(grads_of(ours), grads_of(twin), "gradients")


@pytest.mark.slow
def test_precision_of_single_units(ranks: Ranks) -> None:
    """Inputs are cast at the border of each unit, outputs are cast back."""
    ranks(2).run(_policies)


class Encoder(nn.Module):
    """Has another method that calls forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 1)

    def encode(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x * scale

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x)).sum()

    def score(self, x: Tensor) -> Tensor:
        return self(x) + self.encode(x).sum()


def _methods(rank: int, world_size: int) -> None:
    import copy

    ours, theirs = twins(Encoder(), world_mesh())
    for method in ("encode", "score"):
        register_fsdp_forward_method(theirs, method)
        graphshard.register_forward_method(ours, method)
    copied = copy.deepcopy(ours)
    torch.manual_seed(rank)
    x = torch.randn(3, 4)
    for model in (ours, theirs, copied):
        model.encode(x, scale=2.0).square().sum().backward()
        model.score(x).backward()
        model(x).backward()
    assert_same(grads_of(ours), grads_of(theirs), "gradients")
    assert_same(grads_of(copied), grads_of(theirs), "gradients of a copy")
    assert [p.title for p in graphshard.programs(ours)] == ["Encoder-encode-0", "Encoder-score-0", "Encoder-0"]


def test_other_methods_than_forward(ranks: Ranks) -> None:
    """Each method is a separate program on the same shards; one may call the model itself."""
    ranks(2).run(_methods)


ERRORS = {
    r"reshard_after_forward must be True or False, got 0\.5": lambda m: m.set_reshard_after_forward(0.5),
    r"reshard_after_forward=3 must divide the number of ranks that parameters are sharded over, 2\. Give one of 1, 2": (
        lambda m: _blocks(reshard_after_forward=3)
    ),
    r"reshard_after_forward must be True, False, None, or a number of ranks .*, got 0\.5": lambda m: _blocks(
        reshard_after_forward=0.5
    ),
    r"reshard_after_backward must be True or False, got None": lambda m: m.set_reshard_after_backward(None),
    r"factor must be a positive number, got 0": lambda m: m.set_gradient_divide_factor(0),
    r"enable must be True or False, got 'yes'": lambda m: m.set_force_sum_reduction_for_comms("yes"),
    r"units: 'block' names no unit; there are '', 'layers\.0'": lambda m: m.unshard(units=["block"]),
    r"method: Blocks has no method 'encode'\.": lambda m: graphshard.register_forward_method(m, "encode"),
    r"method: Blocks has no submodule 'encoder'\.": lambda m: graphshard.register_forward_method(m, "encoder.forward"),
    r"Linear is not compiled\. Call graphshard\.compile": lambda m: graphshard.register_forward_method(
        m.layers[0], "f"
    ),
    r"mp_policy: 'block' names no unit; there are '', 'layers\.0'": lambda m: _blocks(mp_policy={"block": BF16}),
    r"mp_policy\[''\] must be a .*MixedPrecisionPolicy, such as .*, got torch\.": lambda m: _blocks(
        mp_policy={"": torch.bfloat16}
    ),
}


def _wrong(rank: int, world_size: int, message: str) -> None:
    ERRORS[message](_blocks())


@pytest.mark.parametrize("message", ERRORS)
def test_errors_name_the_argument(ranks: Ranks, message: str) -> None:
    with pytest.raises(RankError, match=message):
        ranks(2).run(_wrong, message)


REFUSED = {
    "set_keep_unsharded_storage": r"keeps it over microbatches",
}


def _refused(rank: int, world_size: int) -> dict[str, str]:
    model = _blocks()
    model.set_unshard_in_backward(False)
    model.set_reduce_scatter_unused_params(True)
    messages = {}
    for name in REFUSED:
        with pytest.raises(UnsupportedError) as caught:
            getattr(model, name)(True)
        messages[name] = str(caught.value)
    return messages


def test_missing_fsdp2_methods_name_the_alternative(ranks: Ranks) -> None:
    """Every method of FSDP2's modules exists, or its error names the alternative."""
    for messages in ranks(2).run(_refused):
        for name, pattern in REFUSED.items():
            assert messages[name].startswith(f"{name} is not supported by graphshard. ")
            assert re.search(pattern, messages[name])
    public = [name for name in vars(FSDPModule) if not name.startswith("_")]
    renamed = {"set_reduce_scatter_divide_factor"}  # deprecated by FSDP2
    assert [name for name in public if name not in renamed and not hasattr(CompiledModule, name)] == []


def _regathered(rank: int, world_size: int) -> tuple[list[tuple[int, int]], list[str]]:
    model, batch = example_llama(layers=2)
    pair = twins(model, world_mesh(), reshard_after_forward=2)
    train_side_by_side(pair, batch, steps=2)
    model = _blocks(reshard_after_forward=2)
    _warm(model)
    program = graphshard.programs(model)[0]
    return [_step(model)], [bucket.axis for bucket in program.plan.buckets if bucket.kind == "gather"]


@pytest.mark.slow
def test_gathered_again_among_fewer_ranks(ranks: Ranks) -> None:
    for counts, axes in ranks(4).run(_regathered):
        assert counts == [(3, 2)]
        assert axes == ["shard", "shard", "shard", "shard/2", "shard/2"]
