"""Code that branches on values of inputs and buffers, or uses them as numbers, trains with the bits of FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import graphshard
from tests.distributed.nets import full
from tests.distributed.twins import assert_same, grads_of, params_of, twins, world_mesh
from tests.ranks import Ranks

MASK = nn.Transformer.generate_square_subsequent_mask(3)


class _Decoder(nn.Module):
    """`nn.Transformer` checks by value whether a mask is causal."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.core = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.register_buffer("mask", MASK, persistent=False)

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        x = self.stem(x).unflatten(0, (2, 3))
        return self.core(x, x, tgt_mask=self.mask)


class _Encoder(nn.Module):
    """A mask created in forward from constant floats."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.core = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        x = self.stem(x).unflatten(0, (2, 3))
        return self.core(x, mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]))


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 5)


class _Queue(_Net):
    """A queue as in MoCo: features of earlier steps, partly overwritten in each step."""

    pointer: Tensor
    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.ones(5, 12))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        features = F.normalize(self.second(self.first(x)), dim=1)
        scores = features @ self.queue.clone()
        with torch.no_grad():
            start = int(self.pointer)
            self.queue[:, start : start + len(x)] = features.T
            self.pointer[0] = (start + len(x)) % self.queue.shape[1]
        return scores


class _Initialized(_Net):
    """A step counter, and a center set by the first batch: buffers that forward writes before it reads them."""

    ready: Tensor
    center: Tensor
    step: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ready", torch.tensor(False))
        self.register_buffer("center", torch.zeros(4))
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        self.step += 1
        if not self.ready:
            self.center.copy_(x.mean(0))
            self.ready.fill_(True)
        y = self.first(x - self.center)
        return self.second(y) if self.step > 2 else y


class _Branches(_Net):
    """Each rank decides separately."""

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        y = self.second(self.first(x))
        if (number % 2 == 0).all():
            return y.relu()
        return y.tanh() if 3 in number else y.sigmoid()


class _Numbers(_Net):
    """A size, an index of a list, the number of iterations, and numbers read by C++."""

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        y = self.first(x[: int(number.max()) + 1])
        for _ in range(1 + number[0]):
            y = self.second(y)
        weights = F.one_hot(number).float()
        return y * [0.1, 0.2, 0.3][number[1]] * weights.sum() + len(number.tolist())


class _Groups(_Net):
    """A loop over values, masks of data-dependent sizes, numpy, and a string."""

    def forward(self, x: Tensor, number: Tensor) -> dict[str, Tensor]:
        y = self.second(self.first(x))
        parts = [y[torch.arange(len(y)) % 4 == group].mean(0) * group for group in number.unique()]
        for row, column in (number[:, None] == number).nonzero():
            parts.append(y[row] * (1 + column))
        scale = float(number.numpy().mean())
        return {f"{len(parts)} of {number[0].item()}": torch.stack(parts) * scale}


class _Attribute(_Net):
    """A tensor that is not a buffer, and that changes between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.flag = torch.tensor([0.0])

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        y = self.second(self.first(x))
        return y.relu() if torch.equal(self.flag, torch.tensor([1.0])) else y


class _Autocast(_Net):
    """The branch condition is computed in the precision of eager mode."""

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            product = x.T @ torch.full((len(x), 1), 1.001)
            y = self.second(self.first(x))
        assert product.dtype == torch.bfloat16
        return y.relu() if product.float().sum() > 0.25 else y


# With the maximum number of programs that six steps need.
NETS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "decoder": (_Decoder, 3),
    "encoder": (_Encoder, 3),
    "queue": (_Queue, 2),
    "initialised": (_Initialized, 3),
    "branches": (_Branches, 3),
    "numbers": (_Numbers, 6),
    "groups": (_Groups, 6),
    "attribute": (_Attribute, 2),
    "autocast": (_Autocast, 2),
}


def _train(rank: int, world_size: int, name: str) -> int:
    torch.manual_seed(1)
    pair = twins(NETS[name][0](), world_mesh())
    seen: list[list[dict[str, Any]]] = [[], []]
    for model, found in zip(pair, seen):
        optim = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(6):
            torch.manual_seed(10 * step + rank)
            if name == "attribute":
                model.flag.fill_(step % 2)
            inputs = torch.randn(6, 4), torch.tensor([(step + rank) % 3, 1, 3 - rank * (step % 2)])
            result = model(*inputs)
            if isinstance(result, dict):
                ((key, result),) = result.items()
                found.append({"key": key})
            loss = result.float().square().mean()
            loss.backward()
            found.append({"loss": loss.detach(), **full({f"gradient of {n}": g for n, g in grads_of(model).items()})})
            optim.step()
            optim.zero_grad()
        found.append({n: p.clone() for n, p in full(params_of(model)).items()})
        found.append({n: b.clone() for n, b in model.named_buffers()})
    for index, both in enumerate(zip(*seen)):
        assert_same(*both, f"{name}, {index}")
    return len(graphshard.programs(pair[0]))


@pytest.mark.parametrize("name", NETS)
@pytest.mark.quick_cases("encoder", "queue")
def test_values_are_read_as_in_eager_mode(ranks: Ranks, name: str) -> None:
    most = NETS[name][1]
    assert all(count <= most for count in ranks(2).run(_train, name))


def _not_kept(rank: int, world_size: int, folder: str) -> list[str]:
    """A cached program would be guarded by values of another launch."""
    made = []
    for _ in range(2):
        torch.manual_seed(1)
        model = graphshard.compile(_Branches(), world_mesh(), backend="eager", cache=folder)
        model(torch.ones(2, 4), torch.tensor([2 + dist.get_rank()])).sum().backward()
        made += [program.reason for program in graphshard.programs(model)]
    return made


def test_programs_with_value_guards_are_not_cached(ranks: Ranks, tmp_path: Any) -> None:
    assert ranks(2).run(_not_kept, str(tmp_path)) == [["first call", "first call"]] * 2
