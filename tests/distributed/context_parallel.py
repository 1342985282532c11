"""Models with context parallelism: each rank of the context axis has a part of every sequence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

VOCAB, LENGTH, WIDTH, HEADS = 37, 8, 16, 4

Attention = Callable[[Tensor, Tensor, Tensor, DeviceMesh | None], Tensor]


def whole(q: Tensor, k: Tensor, v: Tensor, axis: DeviceMesh | None) -> Tensor:
    """Compute attention over all positions on one rank: q, k and v are [batch, heads, length, width]."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def gathered(q: Tensor, k: Tensor, v: Tensor, axis: DeviceMesh | None) -> Tensor:
    """Gather the keys and values of all ranks along the sequence, for the queries of this rank."""
    assert axis is not None
    group, length = axis.get_group(), q.shape[2]
    k, v = (
        collectives.wait_tensor(collectives.all_gather_tensor_autograd(each.contiguous(), 2, group)) for each in (k, v)
    )
    first = axis.get_local_rank() * length
    positions = torch.arange(k.shape[2], device=q.device)
    sees = positions[first : first + length, None] >= positions
    return F.scaled_dot_product_attention(q, k, v, attn_mask=sees)


def _swapped(x: Tensor, axis: DeviceMesh, cut: int, joined: int) -> Tensor:
    """All-to-all that splits dim `cut` over the ranks and concatenates dim `joined`."""
    size = axis.size()
    sent = torch.stack(x.chunk(size, cut)).contiguous()
    got = collectives.all_to_all_single_autograd(sent.flatten(0, 1), None, None, axis.get_group())
    return torch.cat(collectives.wait_tensor(got).view_as(sent).unbind(), joined)


def by_heads(q: Tensor, k: Tensor, v: Tensor, axis: DeviceMesh | None) -> Tensor:
    """Give each rank all positions of some heads (Ulysses)."""
    assert axis is not None
    q, k, v = (_swapped(each, axis, 1, 2) for each in (q, k, v))
    return _swapped(whole(q, k, v, None), axis, 2, 1)


class _ToTheNext(torch.autograd.Function):
    """Ring shift: sends a tensor to the next rank, and the gradient to the previous one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: DeviceMesh) -> Tensor:
        ctx.axis = axis
        return _sent(x, axis, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sent(grad, ctx.axis, -1), None


def _sent(x: Tensor, axis: DeviceMesh, by: int) -> Tensor:
    size = axis.size()
    pairs = [(rank + by) % size for rank in range(size)]
    return collectives.wait_tensor(collectives.permute_tensor(x.flatten(), pairs, axis.get_group())).view_as(x)


def ring(q: Tensor, k: Tensor, v: Tensor, axis: DeviceMesh | None) -> Tensor:
    """Pass keys and values around the ring, and weigh each part by its sum of exponentials."""
    assert axis is not None
    rank, size, length = axis.get_local_rank(), axis.size(), q.shape[2]
    parts, weights = [], []
    for step in range(size):
        if step:
            k, v = _ToTheNext.apply(torch.stack((k, v)), axis).unbind()
        first = (rank - step) % size * length
        own, theirs = (torch.arange(begin, begin + length, device=q.device) for begin in (rank * length, first))
        sees = own[:, None] >= theirs
        scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~sees, -1e4)
        weights.append(scores.logsumexp(-1, keepdim=True))
        parts.append(scores.softmax(-1) @ v)
    shares = torch.cat(weights, -1).softmax(-1)
    return sum(part * shares[..., index, None] for index, part in enumerate(parts))


ATTENTIONS: dict[str, Attention] = {"gathered": gathered, "by heads": by_heads, "ring": ring}


class Block(nn.Module):
    def __init__(self, attention: Attention, axis: DeviceMesh | None) -> None:
        super().__init__()
        self.attention, self.axis = attention, axis
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return x + self.out(self.attention(q, k, v, self.axis).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """tokens, targets: [batch, positions of this rank]; the loss is the mean over these."""

    def __init__(self, attention: Attention, axis: DeviceMesh | None, depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block(attention, axis) for _ in range(depth))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


NAMES = ("dp_replicate", "dp_shard", "cp")


def mesh_of(*shape: int) -> DeviceMesh:
    """Build a mesh of the last axes of (replicas, shards, context)."""
    return init_device_mesh("cpu", shape, mesh_dim_names=NAMES[-len(shape) :])


def sequences(step: int, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """Return tokens and targets that the ranks of a context axis share: [2, positions]."""
    data = mesh.get_rank() // mesh.size(mesh.ndim - 1)
    tokens = torch.randint(VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(10 * step + data))
    return tokens[:, :-1], tokens[:, 1:]


def own(sequence: Tensor, axis: DeviceMesh) -> Tensor:
    """Return this rank's part of a sequence."""
    return sequence.chunk(axis.size(), 1)[axis.get_local_rank()]
