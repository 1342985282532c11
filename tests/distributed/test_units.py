"""The model and its units are `FSDPModule`s: code for FSDP2 works on each of them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

import graphshard
from graphshard.errors import ArgumentError, UnsupportedError
from graphshard.module._fsdp_module import GraphshardFSDPModule
from tests.distributed.twins import assert_same, grads_of, twins, world_mesh
from tests.helpers import Blocks
from tests.ranks import Ranks


class Net(Blocks):
    """A net with parameters in the root."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__(depth, 8)
        self.stem = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.stem(x).tanh())


def _batch(rank: int) -> Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(rank))


def _units(model: nn.Module) -> dict[str, FSDPModule]:
    return {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}


def _identity(rank: int, world_size: int) -> None:
    ours, theirs = twins(Net(), world_mesh())
    assert _units(ours).keys() == _units(theirs).keys() == {"", "layers.0", "layers.1", "layers.2"}
    for unit, other in zip(_units(ours).values(), _units(theirs).values()):
        assert type(unit).__name__ == type(other).__name__
        assert isinstance(unit, type(other).__mro__[2])
        for module in (unit, other):
            assert "fully_shard" in (_get_registry(module) or {})
            with pytest.raises(AssertionError, match="can only be applied to a module once"):
                fully_shard(module, mesh=world_mesh())
    assert type(ours.layers[0]) is type(ours.layers[1])
    for model in (ours, theirs):
        made = type(model.layers[0])(8, 8)
        assert type(made) is nn.Linear
    assert type(copy.copy(ours.layers[0])) is type(ours.layers[0])
    twin = copy.deepcopy(ours)
    assert [type(unit) for unit in _units(twin).values()] == [type(unit) for unit in _units(ours).values()]
    twin.layers[0].set_requires_gradient_sync(False)
    for model in (ours, twin):
        model(_batch(rank)).backward()
    assert ours.layers[0].weight.grad is not None
    assert twin.layers[0].weight.grad is None


class _Own(nn.Linear):
    """A layer with a custom copy method."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Own:
        twin = type(self)(self.in_features, self.out_features)
        twin.weight, twin.bias = copy.deepcopy((self.weight, self.bias), memo)
        twin.copied = True
        return twin


def _own_copies(rank: int, world_size: int) -> None:
    model = Net()
    model.layers[1] = _Own(8, 8)
    graphshard.compile(model, world_mesh(), backend="eager")
    twin = copy.deepcopy(model)
    assert twin.layers[1].copied
    assert type(twin.layers[1]) is type(model.layers[1])
    for each in (model, twin):
        each(_batch(rank)).backward()
    assert_same(grads_of(twin), grads_of(model), "gradients")


@pytest.mark.slow
def test_units_use_the_copy_methods_of_their_classes(ranks: Ranks) -> None:
    ranks(2).run(_own_copies)


@pytest.mark.slow
def test_the_model_and_its_units_are_fsdp_modules(ranks: Ranks) -> None:
    """By class, name and torch's registry; all units of a class have one class; a copy has new units."""
    ranks(2).run(_identity)


def test_overrides_all_methods_of_fsdp2() -> None:
    """They would need FSDP2's state, which does not exist."""
    own = {name for name, value in vars(FSDPModule).items() if callable(value) and name != "__new__"}
    found = {
        name
        for cls in GraphshardFSDPModule.__mro__[: GraphshardFSDPModule.__mro__.index(FSDPModule)]
        for name in vars(cls)
    }
    assert own <= found


def _finalized_by_hand(rank: int, world_size: int) -> None:
    """Like torch 2.15's FSDP2 with manual finalization: here each backward finalizes automatically, or manually."""
    model, twin = twins(Net(), world_mesh())
    model.set_manual_backward_finalization(True)
    model(_batch(rank)).sum().backward()
    twin(_batch(rank)).sum().backward()
    model.finalize_backward()
    handle = model.finalize_backward(async_op=True)
    assert handle is not None
    handle.wait()
    assert_same(grads_of(model), grads_of(twin), "gradients")

    before = {name: grad.clone() for name, grad in grads_of(model).items() if grad is not None}
    model.set_requires_gradient_sync(False)
    model(_batch(rank)).sum().backward()
    model.finalize_backward()  # nothing to reduce yet
    assert_same(grads_of(model), before, "gradients meanwhile")
    model.set_requires_gradient_sync(True)
    hooks: list[torch.Tensor] = []
    next(model.parameters()).register_post_accumulate_grad_hook(hooks.append)
    model.finalize_backward()
    assert_same(grads_of(model), {name: 2 * grad for name, grad in before.items()}, "gradients of two")
    assert len(hooks) == 1
    with pytest.raises(UnsupportedError, match=r"set_keep_unsharded_storage is not .* keeps it over micro"):
        model.set_keep_unsharded_storage(True)

    model.set_requires_gradient_sync(False)
    model(_batch(rank)).sum().backward()
    model.set_requires_gradient_sync(True)
    twin = copy.deepcopy(model)  # has accumulated gradients but no programs
    with pytest.raises(UnsupportedError, match=r"^finalize_backward: the gradient of layers\.0\.weight was add"):
        twin.finalize_backward()


def test_manual_backward_finalization(ranks: Ranks) -> None:
    ranks(2).run(_finalized_by_hand)


def _divide(unit: Any, name: str) -> None:
    unit.set_force_sum_reduction_for_comms(True)  # gloo cannot divide while it sums
    getattr(unit, name)(4.0)


SCOPES: dict[str, Callable[[Any], None]] = {
    "divide by another number, in the root": lambda m: _divide(m, "set_gradient_divide_factor"),
    "divide by another number, in a unit": lambda m: _divide(m.layers[1], "set_gradient_divide_factor"),
    "by its former name": lambda m: _divide(m.layers[1], "set_reduce_scatter_divide_factor"),
    "add up, in a unit": lambda m: m.layers[1].set_force_sum_reduction_for_comms(True),
    "reduce all but a unit": lambda m: m.layers[0].set_requires_gradient_sync(False),
    "reduce nothing": lambda m: m.set_requires_gradient_sync(False),
    "reduce all but the root": lambda m: m.set_requires_gradient_sync(False, recurse=False),
    "keep a unit": lambda m: m.layers[1].set_reshard_after_forward(False),
    "gather the root again": lambda m: m.set_reshard_after_forward(True, False),
    "gather a unit": lambda m: m.layers[2].unshard(),
    "gather the root": lambda m: m.unshard(async_op=True).wait(),
    "to another dtype": lambda m: m.layers[1].to(torch.float32),
}


def _scope(rank: int, world_size: int, name: str) -> None:
    pair = twins(Net(), world_mesh())
    for model in pair:
        model(_batch(rank)).backward()
        model.zero_grad()
        SCOPES[name](model)
        model(_batch(rank)).backward()
    assert_same(*map(grads_of, pair), name)
    for model in pair:
        model.set_requires_gradient_sync(True)
        model.set_is_last_backward(True)
        model(_batch(rank)).backward()
    assert_same(*map(grads_of, pair), f"{name}, and after that")


@pytest.mark.parametrize("name", SCOPES)
@pytest.mark.quick_cases("by its former name")
def test_methods_have_the_scope_of_fsdp2s(ranks: Ranks, name: str) -> None:
    ranks(2).run(_scope, name)


def _nested(rank: int, world_size: int) -> None:
    """Use units in a unit, and a unit of two modules."""
    model = Net(4)
    graphshard.compile(model, world_mesh(), backend="eager", units=["layers", "layers.1", ("layers.2", "layers.3")])
    model.layers.set_requires_gradient_sync(False)
    model(_batch(rank)).backward()
    assert [p.grad is None for p in model.layers.parameters()] == [True] * 4
    model.layers.set_requires_gradient_sync(True, units=["1"])
    model.layers[3].set_requires_gradient_sync(True)
    model(_batch(rank)).backward()
    assert [layer.weight.grad is None for layer in model.layers] == [True, False, False, False]


@pytest.mark.slow
def test_units_in_units(ranks: Ranks) -> None:
    ranks(2).run(_nested)


def _prefetched(rank: int, world_size: int) -> list[str]:
    ours, theirs = twins(Net(4), world_mesh())
    for model in (ours, theirs):
        layers = model.layers
        layers[0].set_modules_to_forward_prefetch([layers[1], layers[2]])
        layers[1].set_modules_to_forward_prefetch([layers[3]])
        layers[3].set_modules_to_backward_prefetch([layers[2], layers[1]])
        model(_batch(rank)).backward()
    assert_same(grads_of(ours), grads_of(theirs), "gradients")
    (program,) = graphshard.programs(ours)
    assert program.plan is not None
    before = [f"{event.action} {event.bucket}" for event in program.plan.events["forward"]]
    ours.layers[0].set_modules_to_forward_prefetch([])
    ours(_batch(rank)).backward()
    assert program is not graphshard.programs(ours)[-1]
    return before


@pytest.mark.slow
def test_prefetched_units(ranks: Ranks) -> None:
    """The configured gathers start when a unit's parameters arrive; changing them plans again."""
    for events in ranks(2).run(_prefetched):
        arrived = events.index("wait gather layers.0 in forward")
        following = [event for event in events[arrived + 1 :] if event.startswith("start")]
        assert following[:3] == [f"start gather layers.{unit} in forward" for unit in (1, 2, 3)]


ERRORS: dict[str, Callable[[Any], None]] = {
    r"set_modules_to_forward_prefetch: modules must be a list of units, got a Linear": (
        lambda m: m.set_modules_to_forward_prefetch(m.layers[0])
    ),
    r"set_modules_to_backward_prefetch: modules: a Linear is not a unit of the model that layers\.0 is of\. Units": (
        lambda m: m.layers[0].set_modules_to_backward_prefetch([nn.Linear(1, 1)])
    ),
    r"reset_iter_state: layers\.0 is a unit\. Call it on the model": lambda m: m.layers[0].reset_iter_state(),
    r"units: 'layers\.0\.block' names no unit": lambda m: m.layers[0].unshard(units=["block"]),
    r"^_pre_forward of FSDP2's state is asked for.* use graphshard\.register_forward_method": (
        lambda m: _registered(m.layers[0]).other(_batch(0))
    ),
    r"^_comm_ctx of FSDP2's state is asked for, and a model that graphshard has compiled has none": (
        lambda m: fully_shard.state(m)._comm_ctx
    ),
    r"a Linear is not compiled": lambda m: graphshard.programs(m.layers[0]),
    r"Linear is a part of a compiled model": lambda m: graphshard.compile(m.layers[0]),
    r"its submodule '0' is already compiled": lambda m: graphshard.compile(nn.Sequential(m.layers[0])),
    r"layers\.0 is a part of a compiled model and cannot be copied alone": lambda m: copy.deepcopy(m.layers[0]),
}


def _registered(module: Any) -> Any:
    """Register with torch's function."""
    module.other = module.forward
    register_fsdp_forward_method(module, "other")
    return module


def _wrong(rank: int, world_size: int) -> None:
    model = graphshard.compile(Net(2), world_mesh(), backend="eager")
    for message, call in ERRORS.items():
        with pytest.raises((ArgumentError, UnsupportedError, copy.Error)) as caught:
            call(model)
        assert re.search(message, str(caught.value)), str(caught.value)
    own = graphshard.Pipeline().replace(
        "plan", graphshard.passes.MakePlan(lambda program: graphshard.PlanByUnit()(program))
    )
    model = graphshard.compile(Net(2), world_mesh(), backend="eager", passes=own)
    with pytest.raises(UnsupportedError, match="a planner in passes= decides when collectives start"):
        model.layers[0].set_modules_to_forward_prefetch([model.layers[1]])


def test_rejects_operations_on_units(ranks: Ranks) -> None:
    ranks(2).run(_wrong)
