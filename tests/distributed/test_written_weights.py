"""Weights that are written to in any way, while parameters are kept gathered in any way: training sees the new ones.

Both ranks get the same batch, so that plain torch in one process is the reference, bit for bit. FSDP2 is not: it reads
stale parameters in most of these cases.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

import graphshard
from graphshard.errors import ParameterError
from tests.distributed.twins import world_mesh
from tests.ranks import Ranks

Params = list[nn.Parameter]


class Net(nn.Module):
    """Units whose weights backward reads, between parameters of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4) + 0.5)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x).square().mean()


def _locals(params: Params) -> list[Tensor]:
    return [param.to_local() if isinstance(param, DTensor) else param for param in params]


def _add(params: Params) -> None:
    for param in params:
        param.add_(0.125)


def _copy(params: Params) -> None:
    for param in params:
        param.copy_(param * 0.75)


def _data(params: Params) -> None:
    for param in params:
        param.data.mul_(0.75)


def _set_data(params: Params) -> None:
    for param in params:
        if isinstance(param, DTensor):  # `param.data = ` changes nothing in a DTensor (torch 2.13)
            param._local_tensor.data = param._local_tensor * 0.75
        else:
            param.data = param.data * 0.75


def _one_element(params: Params) -> None:
    local = _locals([params[1]])[0]
    if local.shape[0] == 4 or torch.distributed.get_rank() == 0:  # of the first rank's shard
        local.data[0, 0] += 0.5


def _foreach(params: Params) -> None:
    torch._foreach_mul_(params, 0.75)


def _foreach_copy(params: Params) -> None:
    local = _locals(params)  # DTensor has no _foreach_copy_
    torch._foreach_copy_(local, [(each * 0.75).detach() for each in local])


def _foreach_of_locals(params: Params) -> None:
    torch._foreach_add_(_locals(params), 0.125)


def _local(params: Params) -> None:
    for local in _locals(params):
        local.sub_(0.0625)


def _step(optimizer: type[torch.optim.Optimizer], **options: Any) -> Callable[[Params], None]:
    def step(params: Params) -> None:
        for param in params:
            param.grad = (param * 0.5).detach()
        optimizer(params, **options).step()
        for param in params:
            param.grad = None

    step.__name__ = f"{optimizer.__name__} {options}"
    return step


WRITES = [
    _add,
    _copy,
    _data,
    _set_data,
    _one_element,
    _foreach,
    _foreach_copy,
    _foreach_of_locals,
    _local,
    _step(torch.optim.SGD, lr=0.1, foreach=False),
    _step(torch.optim.SGD, lr=0.1, foreach=True),
    _step(torch.optim.AdamW, lr=0.1, foreach=True),
    _step(torch.optim.AdamW, lr=0.1, fused=True),
]
# Writes that torch counts on plain tensors, so that backward of an earlier forward raises.
COUNTED = [_add, _copy, _foreach_copy, _foreach_of_locals, _local, *WRITES[9:12]]
KEEPS: dict[str, Callable[[Any], None]] = {
    "as by default": lambda model: None,
    "after forward": lambda model: model.set_reshard_after_forward(False),
    "after backward": lambda model: model.set_reshard_after_backward(False),
    "after both": lambda model: (model.set_reshard_after_forward(False), model.set_reshard_after_backward(False)),
}


def _batch(seed: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))


def _pair(keep: str, **options: Any) -> tuple[nn.Module, Any, tuple[Params, Params]]:
    """Return the plain and the compiled model, and the parameters that an optimizer would be given."""
    torch.manual_seed(0)
    plain = Net()
    torch.manual_seed(0)
    model = graphshard.compile(Net(), world_mesh(), backend="eager", **options)
    KEEPS[keep](model)
    return plain, model, (list(plain.parameters()), list(model.parameters()))


def _write(write: Callable[[Params], None], both: tuple[Params, Params]) -> None:
    with torch.no_grad():
        for params in both:
            write(params)


def _full(value: Tensor | None) -> Tensor | None:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _compare_a_step(plain: nn.Module, model: nn.Module, seed: int, case: str) -> None:
    """Check that losses, parameters and gradients of a forward and backward are equal, and drop the gradients."""
    expected, found = (each(_batch(seed)) for each in (plain, model))
    expected.backward()
    found.backward()
    assert torch.equal(expected, found), f"{case}: loss {found.item()}, plain torch has {expected.item()}"
    for (name, one), other in zip(plain.named_parameters(), model.parameters()):
        assert torch.equal(one, _full(other)), f"{case}: {name}"
        assert torch.equal(one.grad, _full(other.grad)), f"{case}: gradient of {name}"
        one.grad = other.grad = None


def _between_backwards(rank: int, world_size: int, keep: str, options: dict[str, Any]) -> None:
    plain, model, params = _pair(keep, **options)
    for number, write in enumerate(WRITES):
        for _ in range(2):
            _compare_a_step(plain, model, number, f"{keep}, {write.__name__}")
            _write(write, params)


def _between_calls(rank: int, world_size: int, keep: str) -> None:
    """The first of two calls with gradients has no backward."""
    plain, model, params = _pair(keep)
    for number, write in enumerate(WRITES):
        for _ in range(3):
            for each in (plain, model):
                each(_batch(100 + number))
            _write(write, params)
            _compare_a_step(plain, model, number, f"{keep}, {write.__name__}")


def _after_unshard(rank: int, world_size: int, keep: str) -> None:
    plain, model, params = _pair(keep)
    for number, write in enumerate(WRITES):
        for module in model.modules():
            if isinstance(module, torch.distributed.fsdp.FSDPModule):
                module.unshard()
        _write(write, params)
        _compare_a_step(plain, model, number, f"{keep}, {write.__name__}")


def _between_forward_and_backward(rank: int, world_size: int, keep: str) -> None:
    plain, model, params = _pair(keep)
    for number, write in enumerate(WRITES):
        if write not in COUNTED and not write.__name__.startswith("AdamW"):
            continue
        losses = [each(_batch(number)) for each in (plain, model)]
        _write(write, params)
        if write in COUNTED:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                losses[0].backward()
        with pytest.raises(ParameterError, match=r"modified by an inplace operation: parameter \S+ of Net was") as e:
            losses[1].backward()
        how = "updated by an optimizer" if "{" in write.__name__ and "False" not in write.__name__ else "written to"
        assert how in str(e.value), (write.__name__, e.value)
        for param in itertools.chain(*params):
            param.grad = None
    _compare_a_step(plain, model, 0, keep)


def _between_compiled_steps(rank: int, world_size: int, keep: str) -> None:
    plain, model, params = _pair(keep)
    expected, given = (torch.optim.SGD(each, lr=0.1, momentum=0.9) for each in params)
    step = graphshard.compile_step(model, given, accumulate=2)
    for number, write in enumerate(WRITES):
        for _ in range(2):
            batches = _batch(number), _batch(number + 50)
            losses = [plain(batch) for batch in batches]
            for loss in losses:
                loss.backward()
            expected.step()
            expected.zero_grad()
            case = f"{keep}, {write.__name__}"
            assert torch.equal(torch.stack(losses), step(*batches)), case
            for one, other in zip(*params):
                assert torch.equal(one, _full(other)), case
            _write(write, params)


@pytest.mark.parametrize("keep", KEEPS)
def test_between_compiled_steps(ranks: Ranks, keep: str) -> None:
    """Two microbatches a step."""
    ranks(2).run(_between_compiled_steps, keep)


@pytest.mark.parametrize("keep", KEEPS)
def test_between_backwards(ranks: Ranks, keep: str) -> None:
    ranks(2).run(_between_backwards, keep, {})


@pytest.mark.parametrize("keep", KEEPS)
def test_between_calls(ranks: Ranks, keep: str) -> None:
    ranks(2).run(_between_calls, keep)


@pytest.mark.parametrize("keep", KEEPS)
def test_after_unshard(ranks: Ranks, keep: str) -> None:
    ranks(2).run(_after_unshard, keep)


@pytest.mark.parametrize("keep", KEEPS)
def test_between_forward_and_backward(ranks: Ranks, keep: str) -> None:
    ranks(2).run(_between_forward_and_backward, keep)


def test_offloaded(ranks: Ranks) -> None:
    ranks(2).run(_between_backwards, "after both", {"offload_policy": CPUOffloadPolicy()})
