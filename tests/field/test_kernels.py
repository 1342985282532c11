"""Attention and kernels that no tracer looks into, as models of 2026 have them.

FSDP2 runs all of these in eager mode. A program must have its bits, and be one program: before, a kernel without a fake
implementation split the module, and its gathers overlapped with nothing.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, and_masks, create_block_mask, flex_attention
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard.errors import ArgumentError
from graphshard.module import _split_module
from tests.distributed.twins import world_mesh
from tests.field.trials import assert_equal, gradients, on_fsdp2, on_graphshard, on_plain_torch, parameters
from tests.ranks import RankError, Ranks

LENGTH, WIDTH = 16, 8
Given: TypeAlias = Callable[[int], tuple[Any, ...]]


def _x(step: int, length: int = LENGTH) -> Tensor:
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(step))


def _train(given: Given, reasons: list[str], model: nn.Module) -> list[Tensor | None]:
    """Train three steps; the second one accumulates, and runs backward of one call twice."""
    optimizer, numbers = torch.optim.SGD(model.parameters(), lr=0.1), list[Tensor | None]()
    for step in range(3):
        loss = model(*given(step))
        loss.backward(retain_graph=step == 1)
        if step == 1:
            loss.backward()
        numbers += [loss.detach(), *gradients(model)]
        optimizer.step()
        optimizer.zero_grad()
    if hasattr(model, "_graphshard"):
        reasons += [program.reason for program in graphshard.programs(model)]
    return [*numbers, *parameters(model)]


def _compare(build: Callable[[], nn.Module], given: Given, **options: Any) -> list[str]:
    """Compare with plain torch, or with FSDP2 in mixed precision; return why programs were captured."""
    reasons: list[str] = []
    train = functools.partial(_train, given, reasons)
    ours = on_graphshard(build, train, **options)
    assert_equal(ours, on_fsdp2(build, train, **options) if options else on_plain_torch(build, train))
    return reasons


# --- FlexAttention ---------------------------------------------------------------------------------------------------


def _causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def _mask(step: int, length: int = LENGTH) -> BlockMask:
    """Return a mask of packed documents, by a new function over a new tensor, as torchtitan makes for each batch."""
    generator = torch.Generator().manual_seed(step)
    documents = torch.randint(0, 2, (2, length), generator=generator).cumsum(1)

    def within(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return documents[b, i] == documents[b, j]

    return create_block_mask(and_masks(_causal, within), 2, None, length, length, device="cpu")


class _Attention(nn.Module):
    attend: Any = staticmethod(flex_attention)

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def score_mod(self) -> Callable[..., Tensor] | None:
        return None

    def forward(self, x: Tensor, mask: BlockMask | None) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 6, 4).transpose(1, 2).chunk(3, dim=1)
        attended = self.attend(q, k, v, block_mask=mask, score_mod=self.score_mod())
        return x + self.out(attended.transpose(1, 2).flatten(2))


class _Alibi(_Attention):
    """The scores read a buffer: no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.tensor([0.1, -0.2]))

    def score_mod(self) -> Callable[..., Tensor]:
        return lambda score, b, h, i, j: score + self.slopes[h] * (i - j)


class _LearnedBias(_Attention):
    """The scores read a parameter, and a buffer before it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))
        self.bias = nn.Parameter(torch.randn(2, 2 * LENGTH))

    def score_mod(self) -> Callable[..., Tensor]:
        return lambda score, b, h, i, j: score * self.scale[h] + self.bias[h, i - j + LENGTH]


class _Sinks(_Attention):
    """Attention sinks, by the logsumexp, as gpt-oss has them."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor, mask: BlockMask | None) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 6, 4).transpose(1, 2).chunk(3, dim=1)
        attended, aux = flex_attention(q, k, v, block_mask=mask, return_aux=AuxRequest(lse=True))
        attended = attended * torch.sigmoid(aux.lse - self.sinks[:, None])[..., None]
        return x + self.out(attended.transpose(1, 2).flatten(2))


class _Layers(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(block() for _ in range(2)), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = self.run(layer, x, mask[index] if isinstance(mask, list) else mask)
        return self.head(x).square().mean()

    def run(self, layer: nn.Module, x: Tensor, mask: Any) -> Tensor:
        return layer(x, mask)  # type: ignore[no-any-return]


class _Checkpointed(_Layers):
    def run(self, layer: nn.Module, x: Tensor, mask: Any) -> Tensor:
        return checkpoint(layer, x, mask, use_reentrant=False)  # type: ignore[no-any-return]


def _with_mask(step: int) -> tuple[Any, ...]:
    return _x(step), _mask(step)


ATTENTIONS: dict[str, tuple[Callable[[], nn.Module], Given]] = {
    "documents": (lambda: _Layers(_Attention), _with_mask),
    "longer": (lambda: _Layers(_Attention), lambda step: (_x(step, 16 + 4 * step), _mask(step, 16 + 4 * step))),
    "a mask for each layer": (lambda: _Layers(_Attention), lambda step: (_x(step), [_mask(step), _mask(step + 9)])),
    "alibi": (lambda: _Layers(_Alibi), _with_mask),
    "learned bias": (lambda: _Layers(_LearnedBias), _with_mask),
    "sinks": (lambda: _Layers(_Sinks), _with_mask),
    "checkpointed": (lambda: _Checkpointed(_Attention), _with_mask),
}


def _any_device(*_: Tensor) -> None:
    """Let attention be differentiated on a CPU: torch rejects it although its operators support it."""


def _attend(rank: int, world_size: int, name: str) -> None:
    warnings.filterwarnings("ignore", message="(?s).*flex_attention called without torch.compile")
    with mock.patch.object(flex, "_validate_device", _any_device):
        reasons = _compare(*ATTENTIONS[name])
    assert len(reasons) == (2 if name == "longer" else 1)


def _attend_on_inductor(rank: int, world_size: int, names: list[str]) -> None:
    warnings.filterwarnings("ignore", message="(?s).*flex_attention called without torch.compile")
    with mock.patch.object(flex, "_validate_device", _any_device):
        for name in names:
            build, given = ATTENTIONS[name]
            reasons: list[str] = []
            train = functools.partial(_train, given, reasons)
            ours, plain = on_graphshard(build, train, backend="inductor"), on_plain_torch(build, train)
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
            assert len(reasons) == 1


@pytest.mark.slow
def test_flex_attention_with_inductor(ranks: Ranks) -> None:
    """Its C++ template computes forward; masks of each batch need no new program there, either."""
    ranks(2).run(_attend_on_inductor, ["documents", "a mask for each layer", "learned bias"])


class _Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(**sizes, **heads, attn_implementation="flex_attention")
        self.model = transformers.LlamaForCausalLM(config)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
        return loss


def _attend_in_transformers(rank: int, world_size: int) -> None:
    warnings.simplefilter("ignore")
    given = importlib.import_module("transformers.integrations.flex_attention")
    ids = [torch.randint(32, (2, LENGTH), generator=torch.Generator().manual_seed(step)) for step in range(3)]
    mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 4]])).long()
    with (
        mock.patch.object(flex, "_validate_device", _any_device),
        mock.patch.object(given.WrappedFlexAttention, "__call__", return_value=flex_attention),
    ):
        for others in ((), (mask,)):
            reasons: list[str] = []
            train = functools.partial(_train, lambda step: (ids[step], *others), reasons)  # noqa: B023
            ours = on_graphshard(_Llama, train)
            with torch.compiler.set_stance("force_eager"):
                assert_equal(ours, on_fsdp2(_Llama, train))
            assert reasons == ["first call"]


@pytest.mark.slow
def test_flex_attention_of_transformers(ranks: Ranks) -> None:
    """transformers makes the mask in forward, with a warning that names a class, which Dynamo refuses to defer."""
    ranks(2).run(_attend_in_transformers)


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.quick_cases("documents", "alibi", "learned bias")
def test_flex_attention(ranks: Ranks, name: str) -> None:
    """New masks of each batch need no new program; gradients reach the parameters that score_mod reads."""
    ranks(2).run(_attend, name)


# --- kernels ---------------------------------------------------------------------------------------------------------

_LIBC = ctypes.CDLL(None)
_LIBC.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def _launch(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Copy a tensor as a kernel would that torch knows nothing of."""
    source = x.contiguous()
    out = torch.empty_like(source) if out is None else out
    _LIBC.memcpy(out.data_ptr(), source.data_ptr(), source.numel() * source.element_size())
    return out


class _Norm(torch.autograd.Function):
    """Saves an input and a parameter, as Liger's RMSNorm does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _launch(x) * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return _launch(grad) * weight + ctx.eps, (_launch(grad) * x).sum((0, 1)), None


class _InPlace(torch.autograd.Function):
    """Writes to its input, of which the view is saved, as Liger's cross entropy does; and to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        _launch(x.tanh(), out=x)
        ctx.save_for_backward(x.detach().transpose(0, 1), weight[2:])
        return (x * weight).cos()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, part = ctx.saved_tensors
        if grad.is_contiguous():
            _launch(grad * 0.5, out=grad)
        return grad, (grad * x.transpose(0, 1)).sum((0, 1)) * part.sum()


class _Several(torch.autograd.Function):
    """Returns several results, one an index and one None; saves a new tensor, and one as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Any:
        inner, ctx.weight = _launch(x).tanh(), weight
        ctx.save_for_backward(inner[:, 1:], inner)
        best = inner.argmax(-1)
        ctx.mark_non_differentiable(best)
        return inner * weight, best, None, inner.mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *others: Tensor) -> Any:
        part, inner = ctx.saved_tensors
        return grad * inner * ctx.weight + others[-1] * part.mean(), (grad * inner).sum((0, 1))


@torch.compiler.disable
def _disabled(x: Tensor, weight: Tensor) -> Tensor:
    return _launch(x.detach()) + x.tanh() * weight


@torch.compiler.allow_in_graph
def _allowed(x: Tensor, weight: Tensor) -> Tensor:
    return _launch(x.detach()) + x.tanh() * weight


@torch.library.custom_op("graphshard_tests::without_fake", mutates_args=())
def _without_fake(x: Tensor, weight: Tensor) -> Tensor:
    return _launch(x) * weight


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    return _launch(grad) * weight, (grad * x).sum((0, 1))


_without_fake.register_autograd(_differentiate, setup_context=_save)


class _OnNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.from_numpy(np.asarray(_launch(x))).cos() * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum((0, 1))


class _Block(nn.Module):
    def __init__(self, kernel: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.weight = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH))
        self.kernel = kernel

    def forward(self, x: Tensor, _: Any) -> Tensor:
        return x + self.b(self.kernel(self.a(x), self.weight))  # type: ignore[no-any-return]


class _Disabled(nn.Module):
    """A module whose forward is not to be traced, as those of TransformerEngine; it counts, and keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(WIDTH, WIDTH), 0
        self.register_buffer("seen", torch.zeros(WIDTH))

    @torch.compiler.disable
    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        self.calls += 1
        self.seen += x.detach().mean((0, 1))
        return self.inner(_launch(x.detach()) + x.tanh() * weight) * self.calls + self.seen


def _several(x: Tensor, weight: Tensor) -> Tensor:
    y, best, nothing, total = _Several.apply(x, weight)
    assert nothing is None
    return (y.tanh() + total) * (best[..., None] + 1)


def _in_place(x: Tensor, weight: Tensor) -> Tensor:
    y = _InPlace.apply(x, weight)
    return x + y * 2  # x is what the function has written


KERNELS: dict[str, Callable[[], Any]] = {
    "autograd function": lambda: lambda x, weight: _Norm.apply(x, weight, 0.1),
    "several results": lambda: _several,
    "in place": lambda: _in_place,
    "disabled": lambda: _disabled,
    "disabled module": _Disabled,
    "allowed in graph": lambda: _allowed,
    "operator without a fake": lambda: _without_fake,
    "numpy": lambda: _OnNumpy.apply,
}
if TorchVersion(torch.__version__) < "2.13":
    del KERNELS["numpy"]  # its Dynamo fails in another way, and the module is split
if TorchVersion(torch.__version__) >= "2.14":
    del KERNELS["allowed in graph"]  # likewise


def _run(rank: int, world_size: int, name: str, net: type[_Layers], given: Given, **options: Any) -> list[str]:
    return _compare(lambda: net(lambda: _Block(KERNELS[name]())), given, **options)


def _one_length(step: int) -> tuple[Any, ...]:
    return (_x(step),)


def _lengths(step: int) -> tuple[Any, ...]:
    return (_x(step, LENGTH + 4 * step),)


def _kernels(rank: int, world_size: int, names: list[str]) -> None:
    for name in names:
        assert _run(rank, world_size, name, _Layers, _one_length) == ["first call"], name


def test_kernels(ranks: Ranks) -> None:
    """Functions that launch kernels run as they are, forward and backward; the module is not split."""
    ranks(2).run(_kernels, list(KERNELS))


def _otherwise(rank: int, world_size: int) -> None:
    """Train with checkpoints, which run the function again; with other lengths; and in mixed precision."""
    assert len(_run(rank, world_size, "autograd function", _Checkpointed, _one_length)) == 1
    assert len(_run(rank, world_size, "several results", _Layers, _lengths)) == 2
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    assert len(_run(rank, world_size, "autograd function", _Layers, _one_length, mp_policy=policy)) == 1


def test_kernels_in_checkpoints_with_other_lengths_and_dtypes(ranks: Ranks) -> None:
    ranks(2).run(_otherwise)


def _on_inductor(rank: int, world_size: int, names: list[str]) -> None:
    for name in names:
        build, train = lambda: _Layers(lambda: _Block(KERNELS[name]())), functools.partial(_train, _one_length, [])  # noqa: B023
        ours, plain = on_graphshard(build, train, backend="inductor"), on_plain_torch(build, train)
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_kernels_between_code_of_inductor(ranks: Ranks) -> None:
    ranks(2).run(_on_inductor, list(KERNELS))


def test_a_file_cannot_hold_a_function(tmp_path: Path) -> None:
    model = _Layers(lambda: _Block(_disabled))
    with pytest.raises(ArgumentError, match="model: _disabled runs as it is, and a file cannot"):
        graphshard.export(model, (2,), tmp_path / "net.gshard", example_inputs=_one_length(0))


# --- what runs in Python ---------------------------------------------------------------------------------------------


@torch.compiler.disable
def _dropout(x: Tensor, weight: Tensor) -> Tensor:
    return F.dropout(x, 0.3) * weight


@torch.compiler.disable
def _checking(x: Tensor, weight: Tensor) -> Tensor:
    if x.min() > 0:
        raise ValueError("no entry is negative")
    return x * weight


def _watched(x: Tensor, weight: Tensor) -> Tensor:
    _watch(x)
    return x * weight


@torch.compiler.disable
def _watch(x: Tensor) -> None:
    _SEEN.append(float(x.sum()))


_SEEN: list[float] = []

SPLIT: dict[str, tuple[Any, str]] = {
    "draws": (
        _dropout,
        r"test_kernels.py:\d+ .*_dropout runs as it is. It draws random numbers. .* Draw before the call",
    ),
    "raises": (_checking, r"_checking runs as it is. It was run with made-up numbers .* raised ValueError: no entry"),
    "returns nothing": (_watched, "_watch runs as it is. It returns no tensor."),
}


def _split(rank: int, world_size: int) -> None:
    for kernel, message in SPLIT.values():
        build = functools.partial(_Layers, functools.partial(_Block, kernel))
        with mock.patch.object(_split_module.log, "warning") as warning:
            _compare(build, _one_length)
        said = [call.args[0] % call.args[1:] for call in warning.call_args_list]
        assert any(re.search(message, each) for each in said), said


def test_other_functions_split_the_module(ranks: Ranks) -> None:
    """With the bits of eager mode; the warning says why."""
    ranks(2).run(_split)


@torch.compiler.disable
def _positive(x: Tensor, weight: Tensor) -> Tensor:
    return x[x > 0] * weight.mean()


def _varies(rank: int, world_size: int) -> None:
    model = graphshard.compile(_Layers(lambda: _Sum(_positive)), world_mesh(), backend="eager")
    model(_x(0))


class _Sum(_Block):
    def forward(self, x: Tensor, _: Any) -> Tensor:
        return x + self.kernel(self.a(x), self.weight).sum()


def test_results_must_depend_on_shapes_only(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"_positive returns or keeps .*\n?.*when its call was captured"):
        ranks(2).run(_varies)
