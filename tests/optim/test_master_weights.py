"""`MasterWeights`: bits of float32 copies of an unsharded or FSDP2 model, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

import graphshard
from graphshard.errors import ArgumentError, UnsupportedError
from graphshard.optim import MasterWeights, MatrixOptimizer
from graphshard.optim.master_weights import round_stochastically
from tests.distributed.tensor_parallel import mesh_of, mlps
from tests.distributed.test_checkpoint import Net
from tests.distributed.twins import assert_same, params_of, twins, world_mesh
from tests.optim.matrix_optimizers import MoonlightMuon
from tests.ranks import Ranks

BF16 = torch.bfloat16


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class _Copies:
    """What people write by hand: float32 copies of a model's shards, an optimizer of them, and rounding."""

    def __init__(self, model: nn.Module, make: Callable[[Any], Optimizer]) -> None:
        self.params = list(model.parameters())
        self.copies = [nn.Parameter(param.detach().float()) for param in self.params]
        self.optimizer = make(self.copies)

    @torch.no_grad()
    def step(self) -> None:
        for param, copy in zip(self.params, self.copies):
            copy.grad = None if param.grad is None else param.grad.float()
        self.optimizer.step()
        for param, copy in zip(self.params, self.copies):
            param.copy_(copy)
            param.grad = None


def _adamw(params: Any) -> Optimizer:
    params = list(params)
    return AdamW([{"params": params[:2], "weight_decay": 0.3}, {"params": params[2:], "lr": 0.1}], lr=0.05)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": _adamw,
    "sgd": lambda params: SGD(params, lr=0.1, momentum=0.9),
    # torch has no update of shards without a row.
    "muon": lambda params: Muon([param for param in params if param.ndim == 2 and len(param) >= 4], lr=0.1),
}
HOST = [0.0, 0.5, 1.0]


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _input(rank: int, step: int) -> Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + rank)).to(BF16)


def _train(rank: int, world_size: int, name: str, shape: tuple[int, ...], host: float, whole: dict[str, Any]) -> bool:
    """Train beside a copy of the model that FSDP2 has sharded; return whether updates ran in backward."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    whole = dict(whole)
    pair = twins(Net().to(BF16), mesh, offload_policy=whole.pop("offload_policy", OffloadPolicy()))
    optimizer, by_hand = MasterWeights(OPTIMIZERS[name](pair[0].parameters()), host_fraction=host), None
    by_hand = _Copies(pair[1], OPTIMIZERS[name])
    schedules = [ExponentialLR(each, 0.5) for each in (optimizer, by_hand.optimizer)]
    step = graphshard.compile_step(pair[0], optimizer, _loss, **whole) if whole else None
    microbatches = whole.get("accumulate", 1)
    for number in range(3):
        batches = [_input(rank, 5 * number + each) for each in range(microbatches)]
        for each, x in enumerate(batches):
            pair[1].set_requires_gradient_sync(each == microbatches - 1)
            _loss(pair[1], x).backward()
        if "clip_norm" in whole:
            nn.utils.clip_grad_norm_(pair[1].parameters(), whole["clip_norm"])
        by_hand.step()
        pair[1].zero_grad()
        if step is not None:
            step(*batches)
        else:
            _loss(pair[0], batches[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(*map(params_of, pair), f"step {number}")
        for schedule in schedules:
            schedule.step()
    ours, theirs = optimizer.state_dict()["state"], by_hand.optimizer.state_dict()["state"]
    copies = {number: values.pop("master_weight") for number, values in ours.items()}
    given = [param for group in by_hand.optimizer.param_groups for param in group["params"]]
    assert_same(copies, {number: given[number].detach() for number in copies}, "copies")
    for number, state in theirs.items():
        assert_same(dict(sorted(ours[number].items())), dict(sorted(state.items())), f"state of {number}")
    return step is not None and step.updated_in_backward


CASES = [
    *((name, shape, 0.0, {}) for name in OPTIMIZERS for shape in [(2,), (3,), (2, 2)]),
    *(("adamw", (2,), host, {}) for host in HOST[1:]),
    *(("adamw", (2,), host, {"gather_ahead": True}) for host in HOST),
    ("adamw", (2,), 0.5, {"accumulate": 2, "clip_norm": 0.01}),
    ("muon", (2,), 0.0, {"accumulate": 2}),
    ("adamw", (2,), 0.5, {"accumulate": 1, "offload_policy": CPUOffloadPolicy(pin_memory=False)}),
]


@pytest.mark.parametrize(("name", "shape", "host", "whole"), CASES, ids=str)
@pytest.mark.quick_cases("adamw-(3,)-0.0-{}", "muon-(2,)-0.0-{}", "adamw-(2,)-0.5-{'gather_ahead': True}")
def test_fsdp2_bits(ranks: Ranks, name: str, shape: tuple[int, ...], host: float, whole: dict[str, Any]) -> None:
    """Parameters, copies and states, with groups and schedules, and `compile_step` if it has options."""
    ran = ranks(torch.Size(shape).numel()).run(_train, name, shape, host, whole)
    assert set(ran) == {name == "adamw" and "gather_ahead" in whole}


# --- stochastic rounding ---------------------------------------------------------------------------------------------


def _set_gradients(model: nn.Module, step: int) -> None:
    torch.manual_seed(step)
    for param in model.parameters():
        grad = torch.randn(param.shape).to(param.dtype)
        sharded = isinstance(param, DTensor)
        param.grad = distribute_tensor(grad, param.device_mesh, param.placements) if sharded else grad


def _rounded(model: nn.Module, options: dict[str, Any]) -> dict[str, Tensor]:
    optimizer = MasterWeights(_adamw(model.parameters()), rounding="stochastic", **options)
    for step in range(3):
        _set_gradients(model, step)
        optimizer.step()
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
    state = optimizer.state_dict()["state"]
    assert all("master_weight" not in values for values in state.values())
    assert all(values["exp_avg"].dtype is torch.float32 for values in state.values())
    return {name: _full(param.detach()) for name, param in model.named_parameters()}


def _rounded_sharded(rank: int, world_size: int, shape: tuple[int, ...], options: dict[str, Any]) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    torch.manual_seed(0)
    return _rounded(graphshard.compile(Net().to(BF16), mesh, backend="eager"), options)


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("host", HOST)
@pytest.mark.quick_cases("0.0-(2, 2)", "0.5-(3,)")
def test_rounds_alike_on_any_ranks(ranks: Ranks, host: float, shape: tuple[int, ...]) -> None:
    """Bits of the unsharded model, on all replicas, on device and host."""
    torch.manual_seed(0)
    expected = _rounded(Net().to(BF16), {"seed": 5})
    for found in ranks(torch.Size(shape).numel()).run(_rounded_sharded, shape, {"seed": 5, "host_fraction": host}):
        assert_same(found, expected, str(shape))
    torch.manual_seed(0)
    other = _rounded(Net().to(BF16), {"seed": 6})
    assert any(not torch.equal(other[name], value) for name, value in expected.items())


def _tensor_parallel(rank: int, world_size: int) -> None:
    mesh = mesh_of(2, 2)
    model = graphshard.compile(mlps(mesh["tp"]).to(BF16), mesh["dp"], backend="eager")
    whole = nn.Module()
    for name, param in model.named_parameters():
        whole.register_parameter(name.replace(".", "_"), nn.Parameter(_full(param.detach()).clone()))
    sharded = {name.replace(".", "_"): value for name, value in _rounded(model, {}).items()}
    assert_same(sharded, _rounded(whole, {}), "tp")


def test_tensor_axes(ranks: Ranks) -> None:
    """Parameters that are cut along a tensor axis and a data axis round as whole ones."""
    ranks(4).run(_tensor_parallel)


def test_expected_values() -> None:
    """The mean over keys is the number; what bfloat16 has stays; so do infinity and NaN."""
    torch.manual_seed(0)
    value = torch.randn(512) * torch.logspace(-30, 30, 512)
    whole = [(0, 512)]
    step = 2.0 ** (torch.frexp(value).exponent - 8)
    mean = sum(round_stochastically(value, whole, (512,), key).double() for key in range(2000)) / 2000
    assert ((mean - value) / step).abs().max() < 5 * 0.5 / 2000**0.5
    exact = value.to(BF16)
    assert torch.equal(round_stochastically(exact.float(), whole, (512,), 1), exact)
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0])
    kept = round_stochastically(special, [(0, 5)], (5,), 3)
    assert torch.equal(kept.view(torch.int16), special.to(BF16).view(torch.int16))


# --- other writes, state ---------------------------------------------------------------------------------------------


@torch.no_grad()
def _double(param: Tensor, how: str) -> None:
    if how == "copy_":
        param.copy_(2 * param)
    elif how == ".data":
        param.data.mul_(2)
    elif how == "foreach":
        torch._foreach_mul_([param], 2)
    else:
        assert isinstance(param, DTensor)
        param._local_tensor.mul_(2)


def _written(rank: int, world_size: int, how: str, host: float) -> None:
    model = graphshard.compile(Net().to(BF16), world_mesh(), backend="eager")
    optimizer = MasterWeights(SGD(model.parameters(), lr=0.1), host_fraction=host)
    for step in range(2):
        _set_gradients(model, step)
        optimizer.step()
    written, *others = model.parameters()
    _double(written, how)
    expected = [(written.detach().float() - 0.1 * torch.ones_like(written).float()).to(BF16)]
    state = optimizer.state_dict()["state"]
    expected += [(state[n + 1]["master_weight"] - 0.1).to(BF16) for n in range(len(others))]
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert_same(dict(enumerate(model.parameters())), dict(enumerate(expected)), how)


@pytest.mark.parametrize("how", ["copy_", ".data", "foreach", "_local_tensor"])
@pytest.mark.parametrize("host", [0.0, 1.0])
@pytest.mark.quick_cases("0.0-.data", "1.0-foreach")
def test_written_parameters(ranks: Ranks, how: str, host: float) -> None:
    """A step starts from what was written, in whatever way; other copies keep what rounding has cut off."""
    ranks(2).run(_written, how, host)


def _save(rank: int, world_size: int, path: Path, steps: int, resume: bool, host: float) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = graphshard.compile(Net(8).to(BF16), world_mesh(), backend="eager")
    optimizer = MasterWeights(_adamw(model.parameters()), host_fraction=host)
    if resume:
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=path)
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        model.load_state_dict(state["model"])
    for step in range(steps):
        _set_gradients(model, step + 2 * resume)
        optimizer.step()
    if not resume:
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=path)
    return {name: _full(param.detach()) for name, param in model.named_parameters()}


def test_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    """Saved on two ranks by DCP, and resumed on three with copies on the host: bits of training on without a stop."""
    whole = ranks(2).run(_save, tmp_path / "other", 4, False, 0.0)[0]
    ranks(2).run(_save, tmp_path / "saved", 2, False, 0.0)
    assert_same(ranks(3).run(_save, tmp_path / "saved", 2, True, 0.5)[0], whole, "resumed")


def _owned(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = graphshard.compile(Net().to(BF16), world_mesh(), backend="eager")
    plain = Net().to(BF16)
    plain.load_state_dict({name: _full(param) for name, param in model.state_dict().items()})
    optimizer = MasterWeights(MatrixOptimizer(MoonlightMuon(model.parameters())))
    by_hand = _Copies(plain, MoonlightMuon)
    for step in range(3):
        _set_gradients(model, step)
        _set_gradients(plain, step)
        optimizer.step()
        by_hand.step()
        assert_same(
            {name: _full(param.detach()) for name, param in model.named_parameters()}, params_of(plain), f"step {step}"
        )
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 3, dtype=BF16))]})


def test_owners_of_copies(ranks: Ranks) -> None:
    """Owners update whole copies in float32."""
    ranks(2).run(_owned)


def test_no_copies_of_float32() -> None:
    """Parameters in float32 on the device are updated as they are."""
    net = nn.Linear(4, 4)
    optimizer = MasterWeights(AdamW(net.parameters()), rounding="stochastic")
    assert [group["params"] for group in optimizer.wrapped.param_groups] == [list(net.parameters())]
    assert "MasterWeights(AdamW" in repr(optimizer)


def _refused(make: Callable[[nn.Module], Any], error: type[Exception]) -> str:
    with pytest.raises(error) as info:
        make(nn.Linear(4, 4).to(BF16))
    return str(info.value)


def test_wrong_arguments() -> None:
    """Errors name what was passed, and what to pass."""
    text = _refused(lambda net: MasterWeights(net), ArgumentError)
    assert text.startswith("optimizer must be a torch.optim.Optimizer such as torch.optim.AdamW, got a Linear")
    text = _refused(lambda net: MasterWeights(AdamW(net.parameters()), rounding="down"), ArgumentError)
    assert text == "rounding must be one of 'nearest', 'stochastic', got 'down'."
    text = _refused(lambda net: MasterWeights(AdamW(net.parameters()), host_fraction=2), ArgumentError)
    assert text == "host_fraction must be a part of all elements, at most 1, got 2."
    half = _refused(lambda net: MasterWeights(AdamW(net.half().parameters()), rounding="stochastic"), UnsupportedError)
    assert "parameter 0 of group 0, of shape [4, 4], is float16" in half
    assert "Take rounding='nearest', or model.to(torch.bfloat16)." in half
    matrix = _refused(
        lambda net: MasterWeights(MatrixOptimizer(SGD(net.parameters())), host_fraction=0.5), UnsupportedError
    )
    assert "Leave host_fraction at 0" in matrix
    optimizer = SGD(nn.Linear(4, 4).parameters(), momentum=0.9)
    _set_gradients(nn.Linear(4, 4), 0)
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    with pytest.raises(ArgumentError, match=r"SGD has made a step. Wrap it before the first one"):
        MasterWeights(optimizer)


@pytest.mark.parametrize(
    ("options", "parameters", "copies", "state"),
    [({}, 2, 4, 8), ({"rounding": "stochastic"}, 2, 0, 8)],
    ids=["nearest", "stochastic"],
)
def test_bytes_per_element(options: dict[str, Any], parameters: int, copies: int, state: int) -> None:
    """What the documentation's table says."""
    param = nn.Parameter(torch.ones(1000, dtype=BF16))
    optimizer = MasterWeights(AdamW([param]), **options)
    param.grad = torch.ones_like(param)
    optimizer.step()
    kept = [value for value in optimizer.state[param].values() if value.ndim]
    copy = optimizer.wrapped.param_groups[0]["params"][0]
    found = [sum(each.untyped_storage().nbytes() for each in tensors) for tensors in ([param], [copy], kept)]
    assert found == [1000 * each for each in (parameters, copies, state)]
