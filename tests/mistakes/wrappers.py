"""Mistakes with wrappers: DDP, DataParallel and FSDP1 within a compiled model, around it, and their methods."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from tests.mistakes.table import Net, X, Y, compiled, mistake


@mistake("Compile the module in it, without this wrapper")
def compile_ddp(mesh: DeviceMesh) -> None:
    compiled(mesh, nn.parallel.DistributedDataParallel(Net()))


@mistake("its submodule '0' is a DistributedDataParallel")
def compile_around_ddp(mesh: DeviceMesh) -> None:
    compiled(mesh, nn.Sequential(nn.parallel.DistributedDataParallel(Net())))


@mistake("it is a DataParallel")
def compile_data_parallel(mesh: DeviceMesh) -> None:
    compiled(mesh, nn.DataParallel(Net()))


@mistake("it is a FullyShardedDataParallel")
def compile_fsdp1(mesh: DeviceMesh) -> None:
    compiled(mesh, FullyShardedDataParallel(Net(), device_id=torch.device("cpu")))


@mistake("graphshard reduces gradients itself. Leave DistributedDataParallel out")
def ddp_after_compile(mesh: DeviceMesh) -> None:
    nn.parallel.DistributedDataParallel(compiled(mesh))


@mistake("Call torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)")
def clip_method(mesh: DeviceMesh) -> None:
    compiled(mesh).clip_grad_norm_(1.0)


@mistake("graphshard.compile returns the model itself, not a wrapper with the model in module. Use the model")
def module_of_ddp(mesh: DeviceMesh) -> None:
    model = compiled(mesh)
    assert not hasattr(model, "module")
    _ = model.module


@mistake("Read full parameters with param.full_tensor(), or within graphshard.unsharded(model)")
def summon_full_params(mesh: DeviceMesh) -> None:
    compiled(mesh).summon_full_params()


def _fsdp1(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"))


def _attributes(model: nn.Module) -> list[tuple[str, int]]:
    return [(name, id(value)) for part in model.modules() for name, value in vars(part).items()]


@mistake("FullyShardedDataParallel of a compiled model: graphshard has sharded it. Leave FullyShardedDataParallel out")
def fsdp1_after_compile(mesh: DeviceMesh) -> None:
    _fsdp1(compiled(mesh))


@mistake("and train the compiled model. The model is as before")
def fsdp1_around_compiled(mesh: DeviceMesh) -> None:
    """Nothing is changed before the error."""
    model = compiled(mesh)
    value, before = model(X, Y), _attributes(model)
    try:
        _fsdp1(nn.Sequential(model))
    except Exception as error:
        same = _attributes(model) == before and torch.equal(model(X, Y), value)
        raise RuntimeError(f"{error} The model is {'as before' if same else 'broken'}") from None


@mistake("FullyShardedDataParallel of a compiled model: graphshard has sharded it")
def fsdp1_of_a_unit(mesh: DeviceMesh) -> None:
    _fsdp1(compiled(mesh, units=["layers.*"]).layers[0])


@mistake("checkpoint.state_dict.get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, ")
def state_dict_type(mesh: DeviceMesh) -> None:
    """torch looks for modules of FSDP1, finds none, and does nothing."""
    model = compiled(mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            model.state_dict()


@mistake("FullyShardedDataParallel.set_state_dict_type of a compiled model: The values of model.state_dict() ")
def set_state_dict_type(mesh: DeviceMesh) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        FullyShardedDataParallel.set_state_dict_type(nn.Sequential(compiled(mesh)), StateDictType.SHARDED_STATE_DICT)


@mistake("state_dict.get_optimizer_state_dict(model, optimizer), or set_optimizer_state_dict")
def optimizer_state_of_fsdp1(mesh: DeviceMesh) -> None:
    model = compiled(mesh)
    FullyShardedDataParallel.optim_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.1))


@mistake("Read full parameters with param.full_tensor(), or within graphshard.unsharded(model)")
def summon_full_params_of_fsdp1(mesh: DeviceMesh) -> None:
    with FullyShardedDataParallel.summon_full_params(compiled(mesh)):
        pass
