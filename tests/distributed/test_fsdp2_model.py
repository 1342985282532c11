"""Models that FSDP2 has sharded train on with graphshard: equal bits, the same parameter objects, the same settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graphshard
from graphshard.errors import ArgumentError
from tests.distributed.twins import assert_same, local, params_of, world_mesh
from tests.ranks import Ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Shardings = dict[str, Callable[[nn.Module], None]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Net(nn.Module):
    """Seven rows of an embedding make uneven shards."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(7, 6), nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 7, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens.flatten())


def _by_block(model: Any, **options: Any) -> None:
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def _as_torchtitan_does(model: Any) -> None:
    """One group of the norm and the head, which stay gathered; other policies for some; a fixed divisor."""
    head = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=world_mesh(), mp_policy=BF16, reshard_after_forward=True)
    fully_shard([model.norm, model.head], mesh=world_mesh(), mp_policy=head, reshard_after_forward=False)
    fully_shard(model, mesh=world_mesh(), mp_policy=BF16)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(3.0)


def _along_other_dims(model: Any) -> None:
    _by_block(model, shard_placement_fn=lambda param: Shard(1) if param.ndim == 2 and len(param) == 10 else None)


def _tied_afterwards(model: Any) -> None:
    """As transformers does when it has loaded weights."""
    model.head.weight = model.embed.weight
    fully_shard([model.norm, model.embed], mesh=world_mesh())
    _by_block(model)
    model.head.weight = model.embed.weight


def _with_replicas(model: Any) -> None:
    _by_block(model, mesh=init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicas", "fsdp")))


def _with_tensor_axis(model: Any) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("fsdp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    _by_block(model, mesh=mesh["fsdp"])


def _partly_frozen(model: Any) -> None:
    model.embed.requires_grad_(False)
    _by_block(model, ignored_params={model.head.weight})


SHARDINGS: Shardings = {
    "blocks": _by_block,
    "mixed": lambda model: _by_block(model, mp_policy=BF16),
    "kept": lambda model: _by_block(model, reshard_after_forward=False),
    "torchtitan": _as_torchtitan_does,
    "other dims": _along_other_dims,
    "frozen": _partly_frozen,
    "replicas": _with_replicas,
}


def _model(sharding: Callable[[nn.Module], None]) -> Any:
    torch.manual_seed(0)
    model = Net()
    sharding(model)
    return model


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.1, foreach=False)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> dict[str, Tensor]:
    torch.manual_seed(10 * number + dist.get_rank())
    loss = model(torch.randint(7, (2, 3)))
    loss.backward()
    found = {f"{name}.grad": local(param.grad) for name, param in model.named_parameters() if param.grad is not None}
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss.detach(), **found}


def _continues(rank: int, world_size: int, names: list[str]) -> None:
    for name in names:
        sharding = SHARDINGS[name]
        ours, theirs = _model(sharding), _model(sharding)
        optimizers = _optimizer(ours), _optimizer(theirs)
        _step(ours, optimizers[0], 0)  # by FSDP2
        _step(theirs, optimizers[1], 0)
        before = list(ours.parameters())
        losses = ours(torch.ones(2, 3, dtype=torch.long)), theirs(torch.ones(2, 3, dtype=torch.long))
        assert graphshard.compile(ours, backend="eager") is ours
        assert all(a is b for a, b in zip(ours.parameters(), before, strict=True))
        for loss in losses:  # by FSDP2, which runs the backward of its forward
            loss.backward()
        for number in (1, 2):
            found, expected = (_step(model, opt, number) for model, opt in zip((ours, theirs), optimizers, strict=True))
            assert_same(found, expected, f"{name}: step {number}")
        assert_same(params_of(ours), params_of(theirs), name)
        assert len(graphshard.programs(ours)) == 1
        units = [name for name, module in theirs.named_modules() if isinstance(module, FSDPModule)]
        assert [name for name, module in ours.named_modules() if isinstance(module, FSDPModule)] == units


def test_training_continues_with_equal_bits(ranks: Ranks) -> None:
    """The optimizer, with its state, is of before."""
    ranks(2).run(_continues, list(SHARDINGS))


SHARDINGS["tensor axis"] = _with_tensor_axis


@pytest.mark.slow
def test_training_continues_on_two_axes(ranks: Ranks) -> None:
    ranks(4).run(_continues, ["replicas", "tensor axis"])


def _choices(rank: int, world_size: int) -> None:
    model = _model(_as_torchtitan_does)
    model.set_requires_gradient_sync(False)
    graphshard.compile(model, backend="eager")
    optimizer = _optimizer(model)
    assert list(_step(model, optimizer, 0)) == ["loss"]
    model.set_requires_gradient_sync(True)
    assert len(_step(model, optimizer, 1)) > 1
    (*_, program) = graphshard.programs(model)
    assert program.params["head.weight"].unit == "norm, head"
    assert not program.params["head.weight"].reshard
    assert program.params["blocks.0.up.weight"].compute_dtype == torch.bfloat16

    torch.manual_seed(0)
    with torch.device("meta"):
        model = Net()
    _by_block(model)
    graphshard.compile(model, backend="eager")
    model.to_empty(device="cpu")
    for param in model.parameters():
        nn.init.constant_(param, 0.5)
    assert torch.isfinite(_step(model, _optimizer(model), 0)["loss"])

    tied = _model(_tied_afterwards)
    graphshard.compile(tied, backend="eager")
    assert tied.head.weight is tied.embed.weight
    plain = _model(lambda model: setattr(model.head, "weight", model.embed.weight))
    for number in (0, 1):  # FSDP2 trains both names with the values of one of them
        torch.manual_seed(number)
        tokens, losses = torch.randint(7, (2, 3)), []
        for each in (tied, plain):
            loss = each(tokens)
            loss.backward()
            losses.append(loss.item())
            with torch.no_grad():
                for param in each.parameters():
                    param.sub_(0.1 * param.grad)
            each.zero_grad()
        assert losses[0] == losses[1]


def test_settings_meta_parameters_and_later_ties(ranks: Ranks) -> None:
    ranks(2).run(_choices)


class Failing(Net):
    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            return super().forward(tokens)
        raise ValueError("not while evaluating")


def _refuses(rank: int, world_size: int) -> None:
    def message(model: nn.Module, kind: type[Exception] = ArgumentError, **arguments: Any) -> str:
        with pytest.raises(kind) as caught:
            graphshard.compile(model, **{"backend": "eager", **arguments})
        return str(caught.value)

    assert "units: Net is sharded by FSDP2, which decided it." in message(_model(_by_block), units=["blocks.*"])
    other = init_device_mesh("cpu", (world_size,), mesh_dim_names=("x",))
    text = message(_model(_by_block), mesh=other)
    assert "parameter embed.weight is (Shard(dim=0),) on DeviceMesh(" in text
    assert "Leave mesh out" in text
    left = _model(_by_block)
    left.set_requires_gradient_sync(False)
    left(torch.ones(2, 3, dtype=torch.long)).backward()
    assert "it is within a step, or holds gradients that were not reduced" in message(left)
    inner = Net()
    fully_shard(inner.blocks[0])
    assert "its submodule 'blocks.0' is sharded by FSDP2. Call torch's fully_shard on the model" in message(inner)
    assert "its submodule 'blocks.0' is sharded by FSDP2" in _message_of_fully_shard(inner)
    numbers = _model(lambda model: [fully_shard(model.blocks[0], reshard_after_forward=False), fully_shard(model)])
    graphshard.compile(numbers, backend="eager")
    assert "is already compiled" in message(numbers)

    # A failed call leaves FSDP2's model as it was.
    torch.manual_seed(0)
    ours, theirs = Failing(), _model(_by_block)
    _by_block(ours)
    ours.eval()
    forward = ours.forward
    message(ours, ValueError, example_inputs=(torch.ones(2, 3, dtype=torch.long),), fullgraph=True)
    assert type(ours).__name__ == "FSDPFailing"
    assert ours.forward == forward
    ours.train()
    for number in (0, 1):
        assert_same(_step(ours, _optimizer(ours), number), _step(theirs, _optimizer(theirs), number), str(number))
    graphshard.compile(ours, backend="eager")
    assert_same(_step(ours, _optimizer(ours), 2), _step(theirs, _optimizer(theirs), 2), "after the error")


def _message_of_fully_shard(model: nn.Module) -> str:
    with pytest.raises(ArgumentError) as caught:
        graphshard.fully_shard(model, backend="eager")
    return str(caught.value)


def test_errors_leave_the_model_as_it_was(ranks: Ranks) -> None:
    ranks(2).run(_refuses)
