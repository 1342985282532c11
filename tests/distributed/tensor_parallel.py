"""Tensor parallel models and their plans, and pairs of them: compiled by graphshard, and sharded by FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import graphshard
from tests.distributed.twins import assert_same, fsdp2, grads_of, load_example, local, params_of

VOCAB = 96

Make: TypeAlias = Callable[[DeviceMesh], nn.Module]
Batch: TypeAlias = Callable[[], tuple[Any, ...]]


class Mlp(nn.Module):
    """Two matmuls: the first is sharded column-wise, the second row-wise."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Mlps(nn.Module):
    """Parallelized blocks, and a head that is not parallelized."""

    def __init__(self, depth: int = 2, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp(width) for _ in range(depth))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).square().mean()


def mlps(tp: DeviceMesh, depth: int = 2) -> nn.Module:
    """Build the same MLPs on all ranks and parallelize them."""
    torch.manual_seed(1)
    model = Mlps(depth)
    for layer in model.layers:
        parallelize_module(layer, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def rows() -> tuple[Tensor]:
    """Return inputs of the MLPs."""
    return (torch.randn(3, 8),)


def mesh_of(*shape: int) -> DeviceMesh:
    """Build a mesh of data axes and an innermost tensor axis."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "dp", "tp")[-len(shape) :])


def data_of(mesh: DeviceMesh) -> DeviceMesh:
    """Return the data axes."""
    return mesh["dp"] if mesh.ndim == 2 else mesh["replicate", "dp"]


def pair_of(make: Make, mesh: DeviceMesh, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Build the model twice, with the same units: compiled by graphshard, and sharded by FSDP2."""
    theirs = fsdp2(make(mesh["tp"]), data_of(mesh), **options)
    return graphshard.compile(make(mesh["tp"]), mesh, backend="eager", **options), theirs


def placed(model: nn.Module) -> dict[str, str]:
    """Return the placements of parameters and gradients."""
    named = [*model.state_dict().items(), *((f"{name}.grad", grad) for name, grad in grads_of(model).items())]
    return {
        name: f"{t.placements} {tuple(t.shape)} {t.stride()} {t.device_mesh.mesh_dim_names} {t.device_mesh.mesh}"
        for name, t in named
        if isinstance(t, DTensor)
    }


def train_alike(
    pair: Sequence[nn.Module],
    mesh: DeviceMesh,
    batch: Batch,
    *,
    steps: int = 3,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    clip: bool = True,
    run: Callable[..., Tensor] = lambda model, *inputs: model(*inputs),
) -> None:
    """Train with clipped gradients; check equal bits and placements. Ranks of the tensor axis see the same batch."""
    optims = [optimizer(model.parameters(), lr=0.01) for model in pair]
    place = data_of(mesh).get_coordinate()
    assert place is not None
    for step in range(steps):
        seen = []
        before = {name: local(param).detach().clone() for name, param in params_of(pair[0]).items()}
        for model, optim in zip(pair, optims):
            torch.manual_seed(100 * step + 10 * place[0] + place[-1])
            loss = run(model, *batch())
            loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
            loss.backward()
            grads = {name: local(grad).clone() for name, grad in grads_of(model).items() if grad is not None}
            lies = placed(model)
            norms = _clip(model) if clip else {}
            optim.step()
            optim.zero_grad()
            seen.append(({"loss": loss.detach(), **norms}, grads, lies))
        (numbers, grads, lies), (their_numbers, their_grads, their_lies) = seen
        assert_same(numbers, their_numbers, f"step {step}")
        assert_same(grads, their_grads, f"gradients of step {step}")
        assert lies == their_lies
        assert_same(params_of(pair[0]), params_of(pair[1]), f"parameters after step {step}")
        assert any(not torch.equal(local(p), before[name]) for name, p in params_of(pair[0]).items())
    assert_same(pair[0].state_dict(), pair[1].state_dict(), "at the end")


def _clip(model: nn.Module) -> dict[str, Tensor]:
    """Clip gradients per mesh, because torch's function adds up norms on one mesh only."""
    norms = {}
    for index, mesh in enumerate(dict.fromkeys(p.device_mesh for p in model.parameters())):
        params = [p for p in model.parameters() if p.device_mesh == mesh]
        norms[f"norm {index}"] = nn.utils.clip_grad_norm_(params, 0.1).full_tensor()
    return norms


def llama(tp: DeviceMesh, layers: int = 2, *, cut_logits: bool = False) -> nn.Module:
    """Build the model of examples/ with Llama's usual plan, including sequence parallelism.

    With `cut_logits` the logits are DTensors, sharded along the vocabulary, as `loss_parallel` expects.
    """
    torch.manual_seed(1)
    config = load_example("llama").LlamaConfig(
        layers=layers, dim=16, heads=4, kv_heads=2, hidden=24, seq=8, vocab=VOCAB
    )
    model = load_example("llama").Llama(config)
    of_model = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=Shard(1),
            output_layouts=Shard(-1) if cut_logits else Replicate(),
            use_local_output=not cut_logits,
        ),
    }
    parallelize_module(model, tp, of_model)
    of_layer = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed_forward.gate": ColwiseParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for layer in model.layers:
        parallelize_module(layer, tp, of_layer)
    return model


class Tied(nn.Module):
    """Tied embedding and head, and checkpointed layers; one weight is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList([Mlp(), Mlp()])
        self.head = nn.Linear(8, 12, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return self.head(x).logsumexp(-1).mean()


def tied(tp: DeviceMesh) -> nn.Module:
    """Shard embedding and head along the vocabulary."""
    torch.manual_seed(1)
    model = Tied()
    ends = {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, tp, ends)
    model.head.weight = model.embed.weight
    for layer in model.layers:
        parallelize_module(layer, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model.layers[0].down.weight.requires_grad_(False)
    return model


def words() -> tuple[Tensor]:
    """Return inputs of the tied model."""
    return (torch.randint(0, 12, (2, 4)),)


def tokens() -> tuple[Tensor, Tensor]:
    """Return inputs and targets of the Llama."""
    return torch.randint(0, VOCAB, (2, 8)), torch.randint(0, VOCAB, (2, 8))
