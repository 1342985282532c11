"""Scheduling problems of transformers, from their shapes: no graph, no tensors.

A layer is four items forward (projections into attention; attention and its output; into the feed-forward; out of it)
and the same four backwards, with twice the multiplications. Matrices are sent in bfloat16, gradients in float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from graphshard.cost.costs import Costs
from graphshard.ir.mesh import Axis
from graphshard.ir.plan import CollectiveKind
from graphshard.schedule import Chain, Link, Problem, Transfer
from graphshard.schedule.axis_links import make_link


@dataclass(frozen=True)
class Shape:
    """Shape of a decoder, or of a similar encoder.

    Attributes:
        experts: feed-forwards of every `expert_every`th layer, of which a token uses `active`.
        head_dim: 0 is for dim / heads.
        gated: feed-forwards have three matrices, not two.
        tied: the head's matrix is the embedding's.
    """

    name: str
    layers: int
    dim: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int = 128256
    experts: int = 0
    active: int = 2
    expert_every: int = 2
    head_dim: int = 0
    gated: bool = True
    tied: bool = False

    def is_expert(self, layer: int) -> bool:
        return self.experts > 0 and layer % self.expert_every == self.expert_every - 1


LLAMA_8B = Shape("Llama-3 8B", 32, 4096, 14336, 32, 8)
LLAMA_70B = Shape("Llama-3 70B", 80, 8192, 28672, 64, 8)
LLAMA_405B = Shape("Llama-3 405B", 126, 16384, 53248, 128, 8)
MOE = Shape("MoE 32x16", 32, 4096, 14336, 32, 8, experts=16)
LLAMA_1B = Shape("Llama-3.2 1B", 16, 2048, 8192, 32, 8, tied=True)
QWEN = Shape("Qwen3-30B-A3B", 48, 2048, 768, 32, 4, 151936, experts=128, active=8, expert_every=1, head_dim=128)
GEMMA = Shape("Gemma-2 9B", 42, 3584, 14336, 16, 8, 256000, head_dim=256, tied=True)
VIT = Shape("ViT-22B", 48, 6144, 24576, 48, 48, 588, gated=False)  # patches of 14 x 14 instead of a vocabulary
GPT = Shape("GPT-2 XL", 48, 1600, 6400, 25, 25, 50257, gated=False, tied=True)
SHAPES = (LLAMA_8B, LLAMA_70B, LLAMA_405B, MOE, LLAMA_1B, QWEN, GEMMA, VIT, GPT)
# More, from their authors' descriptions, for large tables.
MORE = (
    Shape("Llama-3.2 3B", 28, 3072, 8192, 24, 8, tied=True),
    Shape("Mistral 7B", 32, 4096, 14336, 32, 8, 32000),
    Shape("Mixtral 8x7B", 32, 4096, 14336, 32, 8, 32000, experts=8, expert_every=1),
    Shape("Qwen2.5 0.5B", 24, 896, 4864, 14, 2, 151936, tied=True),
    Shape("Qwen2.5 7B", 28, 3584, 18944, 28, 4, 152064),
    Shape("Qwen2.5 32B", 64, 5120, 27648, 40, 8, 152064),
    Shape("Gemma-2 2B", 26, 2304, 9216, 8, 4, 256000, head_dim=256, tied=True),
    Shape("Phi-3 mini", 32, 3072, 8192, 32, 32, 32064),
    Shape("MPT-7B", 32, 4096, 16384, 32, 32, 50432, gated=False, tied=True),
    Shape("OPT-13B", 40, 5120, 20480, 40, 40, 50272, gated=False, tied=True),
    Shape("GPT-3 175B", 96, 12288, 49152, 96, 96, 50257, gated=False, tied=True),
)


@dataclass(frozen=True)
class Item:
    """Compute between two uses of parameters: elements by name; multiply-adds and saved bytes per token."""

    unit: str
    sizes: dict[str, int]
    work: float
    attention: float = 0.0
    saved: int = 0


def items(shape: Shape, seq: int) -> Iterator[Item]:
    """Yield the items of the forward pass in order."""
    dim, head_dim = shape.dim, shape.head_dim or shape.dim // shape.heads
    query, kv = head_dim * shape.heads, head_dim * shape.kv_heads
    yield Item("", {"embed": shape.vocab * dim}, 0.0, saved=0)
    for layer in range(shape.layers):
        unit = f"layers.{layer}"
        into = {"norm1": dim, "wq": dim * query, "wk": dim * kv, "wv": dim * kv}
        yield Item(unit, into, dim * (query + 2 * kv), saved=2 * dim + 2 * (query + 2 * kv))
        yield Item(unit, {"wo": query * dim}, query * dim, attention=2 * seq * query / 2, saved=4 * dim)
        copies = shape.experts if shape.is_expert(layer) else 1
        used = shape.active if shape.is_expert(layer) else 1
        names = ("w1", "w3") if shape.gated else ("w1",)
        up = {"norm2": dim, **dict.fromkeys(names, copies * dim * shape.ffn)}
        saved = 2 * dim + 2 * len(names) * used * shape.ffn
        yield Item(unit, up, len(names) * used * dim * shape.ffn, saved=saved)
        yield Item(unit, {"w2": copies * dim * shape.ffn}, used * dim * shape.ffn, saved=2 * dim)
    head = {} if shape.tied else {"head": shape.vocab * dim}
    yield Item("", {"norm": dim, **head}, shape.vocab * dim, saved=2 * shape.vocab)


def link_of(costs: Costs, ranks: int) -> Link:
    """Return the link of one axis over which all ranks shard."""
    return make_link(costs, Axis("shard", ranks, "shard"))


def problem(shape: Shape, costs: Costs, ranks: int, tokens: int, seq: int, link: Link) -> Problem:
    """Return the step without its optimizer, one transfer per parameter.

    The root's parameters stay gathered between forward and backward, all others are gathered again, as is FSDP2's
    default. `tokens` is per rank.
    """
    found = list(items(shape, seq))
    rate, bandwidth = costs.profile.rate("bfloat16"), costs.profile.memory_bandwidth

    def seconds(item: Item, times: float) -> float:
        multiplied = 2 * item.work * tokens * times / (rate.peak * min(rate.matmul, costs.profile.sustained))
        speed = rate.attention["flash"].forward if times == 1 else rate.attention["flash"].backward
        attended = 2 * item.attention * tokens * (times if times == 1 else 2.5) / (rate.peak * speed)
        return multiplied + attended + 3 * times * item.saved * tokens / bandwidth + costs.profile.kernel_seconds

    total = sum(size for item in found for size in item.sizes.values())
    state = 16 * total // ranks  # float32 parameters, gradients, and Adam's two states
    saved = list(itertools.accumulate(item.saved * tokens for item in found))
    end = len(found)
    forward = Chain(
        "forward",
        tuple(seconds(item, 1) for item in found),
        tuple(state + s for s in saved),
        tuple(_transfer("gather", item, name, at, end, ranks) for at, item in enumerate(found) for name in item.sizes),
    )
    root = 2 * sum(size for item in found if not item.unit for size in item.sizes.values())
    backwards = list(enumerate(reversed(found)))
    backward = Chain(
        "backward",
        tuple(seconds(item, 2) for item in reversed(found)),
        tuple(state + root + s + item.saved * tokens for s, item in zip(reversed(saved), reversed(found))),
        tuple(
            _transfer("gather", item, name, at, end, ranks)
            for at, item in backwards
            if item.unit
            for name in item.sizes
        ),
        tuple(_transfer("reduce", item, name, at + 1, end, ranks) for at, item in backwards for name in item.sizes),
    )
    return Problem((forward, backward), link)


def _transfer(kind: CollectiveKind, item: Item, name: str, at: int, end: int, ranks: int) -> Transfer:
    width = 2 if kind == "gather" else 4
    num_bytes = width * item.sizes[name]
    small = num_bytes // ranks < 64 * 1024
    return Transfer(
        name=f"{item.unit}.{name}".strip("."),
        num_bytes=num_bytes,
        at=at,
        last=-1 if kind == "reduce" else at if item.unit else end - 1,
        num_small=int(small),
        small_bytes=num_bytes if small else 0,
    )


def joined(chain: Chain) -> Chain:
    """Group transfers needed or ready at the same position: a smaller problem with an equally good solution."""
    return replace(chain, gathers=_joined(chain.gathers), reductions=_joined(chain.reductions))


def _joined(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
    groups = [list(group) for _, group in itertools.groupby(transfers, key=lambda t: (t.at, t.last))]
    return tuple(merged(group) for group in groups)


def merged(group: list[Transfer]) -> Transfer:
    """Return several transfers as one."""
    return replace(
        group[0],
        num_bytes=sum(t.num_bytes for t in group),
        last=max(t.last for t in group),
        num_tensors=sum(t.num_tensors for t in group),
        num_small=sum(t.num_small for t in group),
        small_bytes=sum(t.small_bytes for t in group),
    )
