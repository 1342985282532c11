"""Gradients of gradients with tensor axes, and while microbatches add up gradients.

DTensor and FSDP2 compute wrong ones silently: `DTensor.from_local` redistributes gradients outside of autograd. Plain
torch without tensor parallelism is the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.torch_version import TorchVersion

import graphshard
from graphshard.errors import UnsupportedError
from tests.distributed.tensor_parallel import mesh_of
from tests.distributed.twins import fsdp2
from tests.field import test_gradients_of_gradients as losses
from tests.field import test_local_tensors
from tests.field.trials import full
from tests.ranks import Ranks

WIDTH, HIDDEN = 6, 12
Loss = Callable[[nn.Module], Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _parallel(tp: DeviceMesh, by_sequence: bool) -> Net:
    model, rows = Net(), Shard(0)
    for block in model.blocks:
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if by_sequence:
            plan["up"] = ColwiseParallel(input_layouts=rows)
            plan["down"] = RowwiseParallel(output_layouts=rows, use_local_output=False)
            plan["norm"] = SequenceParallel(sequence_dim=0, use_local_output=False)
            whole: dict[str, Any] = {"input_layouts": Replicate(), "desired_output_layouts": Replicate()}
            parts: dict[str, Any] = {"desired_input_layouts": rows, "output_layouts": rows}
            parallelize_module(block, tp, PrepareModuleInputOutput(**whole, **parts, use_local_input=False))
        parallelize_module(block, tp, plan)
    return model


def _alternating() -> Loss:
    """Return a loss that penalizes gradients in every second call."""
    calls = []

    def loss(model: nn.Module) -> Tensor:
        calls.append(1)
        return losses._forces(model) if len(calls) % 2 == 0 else losses._r1(model).detach() + model(_batch()).mean()

    return loss


def _loss_of(name: str) -> Loss:
    return _alternating() if name == "_alternating" else getattr(losses, name)  # type: ignore[no-any-return]


def _batch() -> Tensor:
    return torch.rand(4, 3, dtype=torch.float64)


def _train(model: Any, loss_of: Loss, microbatches: int, steps: int = 2) -> list[Tensor | None]:
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.01), list[Tensor | None]()
    for step in range(steps):
        for number in range(microbatches):
            if isinstance(model, torch.distributed.fsdp.FSDPModule):
                model.set_requires_gradient_sync(number == microbatches - 1)
            torch.manual_seed(10 * step + number)
            loss = loss_of(model)
            loss.backward()
            found.append(full(loss))
        found += [None if param.grad is None else full(param.grad) for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found


def _close(ours: Sequence[Tensor | None], expected: Sequence[Tensor | None], what: str) -> None:
    torch.testing.assert_close(list(ours), list(expected), rtol=1e-9, atol=1e-12, msg=lambda text: f"{what}: {text}")


def _equal(rank: int, world_size: int, by_sequence: bool, microbatches: int, chosen: Sequence[str]) -> None:
    mesh = mesh_of(world_size // 2, 2)
    for name in chosen:
        model = graphshard.compile(_parallel(mesh["tp"], by_sequence), mesh, backend="eager")
        ours, expected = (_train(each, _loss_of(name), microbatches) for each in (model, Net()))
        _close(ours, expected, name)


INPUTS = ["_forces", "_physics"]
PARAMETERS = ["_hessian_vector", "_maml"]


@pytest.mark.parametrize("chosen", [INPUTS, PARAMETERS], ids=["inputs", "parameters"])
@pytest.mark.parametrize("by_sequence", [False, True], ids=["features", "sequence"])
@pytest.mark.quick_cases("features-inputs")
def test_two_tensor_ranks(ranks: Ranks, by_sequence: bool, chosen: list[str]) -> None:
    ranks(2).run(_equal, by_sequence, 1, chosen)


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [INPUTS, PARAMETERS], ids=["inputs", "parameters"])
@pytest.mark.parametrize("by_sequence", [False, True], ids=["features", "sequence"])
def test_data_and_tensor_ranks(ranks: Ranks, by_sequence: bool, chosen: list[str]) -> None:
    ranks(4).run(_equal, by_sequence, 1, chosen)


@pytest.mark.slow
@pytest.mark.parametrize("by_sequence", [False, True], ids=["features", "sequence"])
def test_microbatches_on_a_tensor_axis(ranks: Ranks, by_sequence: bool) -> None:
    """The program leaves partial sums of gradients of norms, and calls by operators whole gradients, in one step."""
    ranks(4).run(_equal, by_sequence, 3, ["_alternating", "_maml"])


def _fsdp2_is_wrong(rank: int, world_size: int) -> None:
    """See torch's gradients: of a plain tensor-parallel model, and with FSDP2."""
    mesh = mesh_of(1, 2)
    expected = _train(Net(), losses._forces, 1, steps=1)
    theirs: Any = fsdp2(_parallel(mesh["tp"], False), mesh["dp"])
    theirs.set_reshard_after_backward(False)
    for model in (_parallel(mesh["tp"], False), theirs):
        with pytest.raises(AssertionError, match="wrong"):
            _close(_train(model, losses._forces, 1, steps=1), expected, "wrong")


def test_torch_computes_others(ranks: Ranks) -> None:
    ranks(2).run(_fsdp2_is_wrong)


def _on_data_axes(rank: int, world_size: int) -> None:
    from torch.distributed.fsdp import DataParallelMeshDims

    mesh = mesh_of(1, 2)
    model = distribute_module(Net(), mesh)
    graphshard.compile(model, mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"), backend="eager")
    loss = model(DTensor.from_local(_batch(), mesh, [Shard(0), Replicate()])).to_local().mean()
    with pytest.raises(UnsupportedError, match=r"create_graph=True.*.* was distributed over data axes, too"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.12", reason="torch 2.11 has no DataParallelMeshDims")
def test_rejects_parameters_on_data_axes(ranks: Ranks) -> None:
    """DTensor itself computes others than plain torch."""
    ranks(2).run(_on_data_axes)


def _own_collectives(rank: int, world_size: int) -> None:
    mesh = mesh_of(1, 2)
    model = graphshard.compile(test_local_tensors.Net([mesh.get_group("tp")]), mesh["dp"], backend="eager")
    x = torch.rand(2, test_local_tensors.WIDTH, requires_grad=True)
    message = r"create_graph=True.*all_reduce at .*test_local_tensors\.py:\d+: dist\.all_reduce.* no gradient"
    with pytest.raises(UnsupportedError, match=message):
        torch.autograd.grad(model(x), x, create_graph=True)


def test_rejects_collectives_without_gradients(ranks: Ranks) -> None:
    """Plain torch warns, and computes wrong gradients."""
    ranks(2).run(_own_collectives)


# --- microbatches ------------------------------------------------------------------------------------------------


def _microbatches(rank: int, world_size: int, chosen: Sequence[str]) -> None:
    """Accumulate without communication, or over two axes; gradients of parameters with a graph are reduced at once."""
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    for name in chosen:
        loss_of = getattr(losses, name)
        model = graphshard.compile(Net(), mesh if world_size > 2 else mesh["replicate"], backend="eager")
        _close(_train(model, loss_of, 3), _train(Net(), loss_of, 3), name)


@pytest.mark.parametrize("chosen", [["_forces"], ["_both"], ["_maml"], ["_hessian_vector"]], ids=lambda each: each[0])
@pytest.mark.quick_cases("_maml")
def test_microbatches(ranks: Ranks, chosen: list[str]) -> None:
    ranks(2).run(_microbatches, chosen)


@pytest.mark.slow
def test_microbatches_with_replicas(ranks: Ranks) -> None:
    ranks(4).run(_microbatches, ["_both"])


def _other_weights(model: nn.Module) -> Tensor:
    """Return the loss of a call with other weights, which gradients flow through, and of a call with the model's."""
    scaled = {name: param * 0.5 for name, param in model.named_parameters()}
    return torch.func.functional_call(model, scaled, (_batch(),)).square().mean() + model(_batch()).mean()


def _calls_with_other_weights(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    model = graphshard.compile(Net(), mesh, backend="eager")
    _close(_train(model, _other_weights, 3), _train(Net(), _other_weights, 3), "functional_call")


def test_microbatches_of_functional_calls(ranks: Ranks) -> None:
    """What is left for the last microbatch belongs to the model's parameters, not to others of the same names."""
    ranks(2).run(_calls_with_other_weights)
