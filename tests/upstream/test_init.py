"""Counterparts of test_fully_shard_init.py: from a module to shards, and operations before the first step."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import graphshard
from graphshard.errors import ArgumentError
from tests.distributed.twins import OURS, assert_same, grads_of, groups_of, local, sharded_alike
from tests.ranks import Ranks
from tests.upstream.lockstep import own_rows, squares, stack, train_alike

Shard = Callable[..., Any]

# --- parameters of units ------------------------------------------------------------------------------------


def _shared() -> nn.Sequential:
    """Share a weight between three blocks."""
    model = stack()
    model[0].up.weight = model[1].up.weight
    model[2].up.weight = model[1].up.weight
    return model


def _twice() -> nn.Sequential:
    """Use one block twice, and a layer of one block in another."""
    blocks = stack(4)
    blocks[3].up = blocks[2].up
    return nn.Sequential(blocks[0], blocks[0], blocks[2], blocks[3])


def _root_only(shard: Shard, model: Any) -> None:
    shard(model)


def _first(shard: Shard, model: Any) -> None:
    shard(model[0])
    shard(model)


def _inside_of_first(shard: Shard, model: Any) -> None:
    shard(model[0].up)
    shard(model[0].down)
    shard(model)


def _list(shard: Shard, model: Any) -> None:
    shard([model[0], model[1]])
    shard(model)


def _apart(shard: Shard, model: Any) -> None:
    shard([model[1], model[3]])
    shard(model)


UNITS: dict[str, tuple[Callable[[], nn.Module], Callable[[Shard, Any], None]]] = {
    "single": (stack, _root_only),
    "nested": (stack, _first),
    "names": (stack, _inside_of_first),
    "duplicate": (_twice, _root_only),
    "list": (functools.partial(stack, 5), _list),
    "list with gaps": (functools.partial(stack, 5), _apart),
    "shared": (_shared, _root_only),
}


def _units_of(model: nn.Module) -> list[frozenset[str]]:
    """Return the parameters of FSDP2's units, by name."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module._get_fsdp_state()._lazy_init()
            break
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = {id(group): group for unit in units for group in groups_of(unit)}
    return [frozenset(param._param_fqn for param in group.fsdp_params) for group in groups.values()]


def _belong(rank: int, world_size: int, case: str) -> None:
    make, parallelize = UNITS[case]
    ours, theirs = sharded_alike(parallelize, make())
    for model in (ours, theirs):
        squares(model(own_rows(0))).backward()
    assert_same(grads_of(ours), grads_of(theirs), "gradients")
    (program,) = graphshard.programs(ours)
    units: dict[str, set[str]] = {}
    for row in program.params:
        units.setdefault(row.unit, set()).add(row.name)
        assert row.names == tuple(
            name
            for name, param in ours.named_parameters(remove_duplicate=False)
            if param is ours.get_parameter(row.name)
        )
    assert set(map(frozenset, units.values())) == set(_units_of(theirs))


@pytest.mark.parametrize("case", UNITS)
@pytest.mark.quick_cases("shared")
def test_parameters_belong_to_the_innermost_unit(ranks: Ranks, case: str) -> None:
    """`TestFullyShardManagedModulesAndStates.test_managed_modules_single`,
    `TestFullyShardManagedModulesAndStates.test_managed_modules_nested`,
    `TestFullyShardManagedModulesAndStates.test_managed_modules_duplicate`,
    `TestFullyShardManagedModulesAndStates.test_managed_modules_list_of_mlps`,
    `TestFullyShardManagedModulesAndStates.test_managed_states_shared_params_and_buffers`,
    `TestFullyShardManagedModulesAndStates.test_managed_states_nested_fully_shard`,
    `TestFullyShardManagedModulesAndStates.test_managed_states_list_of_mlps`,
    `TestFullyShardParamModuleInfos.test_get_param_module_infos_shared_params`,
    `TestFullyShardParamModuleInfos.test_get_param_module_infos_duplicates`,
    `TestFullyShardParamModuleInfos.test_get_param_module_infos_list_of_mlps`,
    `TestFullyShardShardedParameterTensor.test_shard_tensor_parameters` and
    `TestFullyShardLazyInit.test_fully_shard_module_and_param_fqns`."""
    ranks(2).run(_belong, case)


def _replicated_inside(rank: int, world_size: int) -> None:
    """Shard around a replicated part. FSDP2 ignores it; in a compiled model its hooks would not run."""
    model = stack()
    replicate(model[0])
    OURS(model[2])
    with pytest.raises(ArgumentError, match=r"torch's replicate was applied to its submodule '0', whose gr"):
        OURS(model)
    assert not isinstance(model[0].up.weight, DTensor)
    around = replicate(nn.Sequential(OURS(stack(1)), nn.Linear(8, 8)))
    squares(around(own_rows(0))).backward()
    assert all(isinstance(grad, DTensor) == name.startswith("0") for name, grad in grads_of(around).items())


def test_rejects_a_replicated_part(ranks: Ranks) -> None:
    """`TestFullyShardManagedModulesAndStates.test_managed_modules_nested_fully_shard_and_replicate`."""
    ranks(2).run(_replicated_inside)


# --- before the first call ----------------------------------------------------------------------------------


def _part_first(rank: int, world_size: int) -> None:
    """Call a part before the root is sharded; FSDP2 then rejects the root."""
    model, plain = stack(), stack()
    OURS(model[0])
    squares(model[0](own_rows(0))).backward()
    OURS(model)
    model.zero_grad()
    squares(model(own_rows(1))).backward()
    squares(plain(own_rows(1))).backward()
    for name, param in plain.named_parameters():
        dist.all_reduce(param.grad, dist.ReduceOp.AVG)
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), param.grad)


@pytest.mark.slow
def test_a_part_may_be_called_before_the_root_is_sharded(ranks: Ranks) -> None:
    """`TestFullyShardLazyInit.test_fully_shard_double_lazy_init`."""
    ranks(2).run(_part_first)


def _no_root(rank: int, world_size: int) -> None:
    """Call each module of a group that has no root; FSDP2 requires one."""
    plain = stack(2)
    ours, theirs = sharded_alike(lambda shard, model: shard([model[0], model[1]]), copy.deepcopy(plain))
    with pytest.raises(RuntimeError, match="single root module"):
        theirs(own_rows(0))
    squares(ours(own_rows(0))).backward()
    squares(plain(own_rows(0))).backward()
    for name, param in plain.named_parameters():
        dist.all_reduce(param.grad, dist.ReduceOp.AVG)
        torch.testing.assert_close(ours.get_parameter(name).grad.full_tensor(), param.grad)


def test_a_group_without_a_root(ranks: Ranks) -> None:
    """`TestFullyShardLazyInit.test_fully_shard_multi_module_root`."""
    ranks(2).run(_no_root)


class _Normed(nn.Module):
    """A model that computes a parameter from others once these have values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.scale = nn.Parameter(torch.empty(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * self.scale

    def start(self) -> None:
        with torch.no_grad():
            scale = torch.linalg.norm(self.first.weight, dim=1) + torch.linalg.norm(self.second.weight, dim=1)
        self.scale = nn.Parameter(scale)


def _computed(rank: int, world_size: int) -> None:
    def parallelize(shard: Shard, model: Any) -> None:
        for module in (model.first, model.second, model):
            shard(module)

    with torch.device("meta"):
        model = _Normed()
    pair = sharded_alike(parallelize, model)
    for each in pair:
        each.first.to_empty(device="cpu")
        each.second.to_empty(device="cpu")
        for layer in (each.first, each.second):
            nn.init.constant_(layer.weight, 0.25)
        each.start()
    train_alike(pair, steps=2)


def test_a_parameter_that_is_computed_from_shards(ranks: Ranks) -> None:
    """`TestFullyShardLazyInit.test_reset_sharded_param_in_lazy_init`."""
    ranks(2).run(_computed)


class _WithBuffer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.register_buffer("scale", torch.empty(dim))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()) * self.scale


def _from_meta(rank: int, world_size: int) -> None:
    """Initialize parameters with the same number of rows as ranks, fewer, or one, also under a meta default device."""
    for dim, policy in ((8, {}), (3, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}), (1, {})):
        with torch.device("meta"):
            model = nn.Sequential(_WithBuffer(dim), _WithBuffer(dim))
            for module in (*model, model):
                OURS(module, **policy)
        assert all(param.is_meta and isinstance(param, DTensor) for param in model.parameters())
        model.to_empty(device="cpu")
        optim = torch.optim.Adam(model.parameters(), lr=1e-2)
        for tensor in (*map(local, model.parameters()), *model.buffers()):
            tensor.detach().fill_(1337)
        with graphshard.checkpoint.unsharded_init():
            for module in model.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
        assert not any((tensor == 1337).any() for tensor in (*map(local, model.parameters()), *model.buffers()))
        assert torch.equal(model[0].scale, torch.ones(dim))
        model(torch.ones(4, dim)).square().sum().backward()
        assert all(param.grad is not None for param in model.parameters())
        before = model[1].up.weight.full_tensor()
        optim.step()
        assert dim == 1 or not torch.equal(model[1].up.weight.full_tensor(), before)  # one unit may be dead


@pytest.mark.slow
def test_sharded_and_initialized_from_the_meta_device(ranks: Ranks) -> None:
    """`TestFullyShardMetaDeviceInit.test_meta_device_1d_init`."""
    ranks(4).run(_from_meta)


# --- meshes -------------------------------------------------------------------------------------------------


def _of_groups(rank: int, world_size: int) -> None:
    """Check that meshes made from process groups train like meshes of `init_device_mesh`."""
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shard = DeviceMesh.from_group(whole.get_group("shard"), "cpu", mesh_dim_names=("shard",))
    groups = [whole.get_group("replicate"), whole.get_group("shard")]
    both = DeviceMesh.from_group(groups, "cpu", mesh=torch.arange(4).view(2, 2), mesh_dim_names=("replicate", "shard"))
    for made, reference in ((shard, whole["shard"]), (both, whole)):
        models = stack(2), stack(2)
        for model, mesh in zip(models, (made, reference)):
            for module in (*model, model):
                OURS(module, mesh=mesh)
            squares(model(own_rows(0))).backward()
        assert_same(*({n: local(g) for n, g in grads_of(model).items()} for model in models), str(made))
        for actual, expected in zip(*(model.parameters() for model in models)):
            assert torch.equal(actual.device_mesh.mesh, expected.device_mesh.mesh)


@pytest.mark.slow
def test_meshes_made_of_process_groups(ranks: Ranks) -> None:
    """`TestFullyShardProcessGroupInit.test_1d_process_group_init` and
    `TestFullyShardProcessGroupInit.test_2d_process_group_init`."""
    ranks(4).run(_of_groups)


def _everything(model: nn.Module) -> Iterable[Tensor]:
    return map(local, (*model.parameters(), *model.buffers()))


def _broadcast(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    group = mesh.get_group("replicate")

    def parallelize(shard: Shard, model: Any) -> None:
        for module in (*model, model):
            shard(module, mesh=mesh)

    model = stack(2)
    model.register_buffer("buffer", torch.arange(3.0))
    pair = sharded_alike(parallelize, model)
    for each in pair:
        for tensor in _everything(each):
            if mesh.get_local_rank("replicate"):
                tensor.detach().fill_(1337)
            dist.broadcast(tensor.detach(), src=dist.get_process_group_ranks(group)[0], group=group)
            assert not (tensor == 1337).any()
    train_alike(pair, steps=2)


@pytest.mark.slow
def test_one_replica_gives_its_values_to_the_others(ranks: Ranks) -> None:
    """`TestFullyShardHSDPBroadcast.test_hsdp_broadcast_across_replicas`."""
    ranks(4).run(_broadcast)


def _replicas_by_hook(rank: int, world_size: int) -> None:
    """Average gradients of two worlds of two ranks in a hook; the result equals HSDP."""
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    between = whole.get_group("replicate")
    models = stack(2), stack(2)
    calls = []

    def average(gradient: Tensor) -> None:
        calls.append(gradient.numel())
        dist.all_reduce(gradient, group=between)
        gradient.div_(2)

    for model, mesh in zip(models, (whole["shard"], whole)):
        for module in (*model, model):
            OURS(module, mesh=mesh)
    for block in models[0]:
        block.set_all_reduce_hook(average)
    for model in models:
        squares(model(own_rows(0))).backward()
    assert len(calls) == 2
    for hooked, replicated in zip(*(model.parameters() for model in models)):
        torch.testing.assert_close(local(hooked.grad), local(replicated.grad))


@pytest.mark.slow
def test_a_hook_that_averages_over_replicas(ranks: Ranks) -> None:
    """`TestHSDPWithCustomHook.test_custom_hsdp_all_reduce_hook`."""
    ranks(4).run(_replicas_by_hook)
