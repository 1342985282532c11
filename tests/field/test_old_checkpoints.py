"""Checkpoints of earlier versions of a model, whose names and shapes change while they are loaded: full tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.field.trials import assert_equal, full, gradients, on_fsdp2, on_graphshard, on_plain_torch, parameters
from tests.ranks import Ranks

# Rows of parameters are not the same on both ranks.
_SIZE = 3


class _Attention(nn.Module):
    """One projection, where earlier versions had three."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(_SIZE, 3 * _SIZE), nn.Linear(_SIZE, _SIZE)
        self.register_buffer("loaded", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        out: Tensor = self.out(q * k + v)
        return out


def _join(state: dict[str, Any], prefix: str) -> None:
    """Join the projections, and take the new name of a layer."""
    for kind in ("weight", "bias"):
        if f"{prefix}q.{kind}" in state:
            state[f"{prefix}qkv.{kind}"] = torch.cat([state.pop(f"{prefix}{name}.{kind}") for name in "qkv"])
            state[f"{prefix}out.{kind}"] = state.pop(f"{prefix}projection.{kind}")
    state[f"{prefix}loaded"] = torch.ones(1)


class _WithHook(_Attention):
    """The public form of the hook."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(lambda module, state, prefix, *_: _join(state, prefix))


class _WithPrivateHook(_Attention):
    """The private form, as in gpt-fast's attention, which joins `wq`, `wk` and `wv`."""

    def __init__(self) -> None:
        super().__init__()
        self._register_load_state_dict_pre_hook(lambda state, prefix, *_: _join(state, prefix))


class _Overridden(_Attention):
    """As in litgpt's attention, for its earlier checkpoints."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        _join(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


class _Copying(_Attention):
    """Copies values itself."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        _join(state_dict, prefix)
        with torch.no_grad():
            self.qkv.weight.copy_(state_dict[f"{prefix}qkv.weight"])
            self.qkv.weight.mul_(2)
            state_dict[f"{prefix}qkv.weight"] = (self.qkv.weight + state_dict[f"{prefix}qkv.weight"]) / 2
        super()._load_from_state_dict(state_dict, prefix, *args)


class _Resized(_Attention):
    """Interpolates positions of another length, as Swin and ViT do."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(5, _SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.positions[: len(x)])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        _join(state_dict, prefix)
        positions = torch.linspace(0, 1, 2 * _SIZE).view(2, _SIZE)
        assert self.positions.shape == (5, _SIZE)
        resized = nn.functional.interpolate(positions.t()[None], size=5)
        state_dict[f"{prefix}positions"] = resized[0].t()
        super()._load_from_state_dict(state_dict, prefix, *args)


def _doubled(module: nn.Module, _: Any) -> None:
    assert isinstance(module, _Attention)
    module.out.weight.data.mul_(2)


class _WithPostHook(_WithHook):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_doubled)


def _build(block: type[_Attention]) -> nn.Module:
    return nn.Sequential(block(), block(), nn.LayerNorm(_SIZE))


def _checkpoint(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = {f"{name}.{kind}": (_SIZE,) * dims for kind, dims in (("weight", 2), ("bias", 1)) for name in "qkv"}
    shapes |= {"projection.weight": (_SIZE, _SIZE), "projection.bias": (_SIZE,)}
    values = {
        f"{i}.{name}": torch.randn(shape, generator=generator) for i in range(2) for name, shape in shapes.items()
    }
    values |= {"2.weight": torch.rand(_SIZE, generator=generator), "2.bias": torch.zeros(_SIZE)}
    return {name: value.to(dtype) for name, value in values.items()}


def _whole(model: nn.Module) -> None:
    model.load_state_dict(_checkpoint())


def _assigned(model: nn.Module) -> None:
    model.load_state_dict(_checkpoint(), assign=True)


def _partly(model: nn.Module) -> None:
    state = {name: value for name, value in _checkpoint(torch.bfloat16).items() if not name.startswith("2.")}
    result = model.load_state_dict({**state, "head": torch.ones(1)}, strict=False)
    assert set(result.missing_keys) == {"2.weight", "2.bias"}
    assert result.unexpected_keys == ["head"]


def _by_parts(model: nn.Module) -> None:
    for index in range(2):
        prefix = f"{index}."
        part = {name[2:]: value for name, value in _checkpoint().items() if name.startswith(prefix)}
        model.get_submodule(str(index)).load_state_dict(part)
    model.get_submodule("0.out").load_state_dict({"weight": torch.eye(_SIZE), "bias": torch.ones(_SIZE)})


def _after_a_call(model: nn.Module) -> None:
    model(torch.ones(2, _SIZE)).sum().backward()
    model.zero_grad()
    _whole(model)


def _by_a_late_hook(model: nn.Module) -> None:
    for block in list(model.children())[:2]:
        block.register_load_state_dict_pre_hook(lambda module, state, prefix, *_: _join(state, prefix))
    _whole(model)


CASES: dict[str, tuple[type[_Attention], Callable[[nn.Module], None]]] = {
    "hook": (_WithHook, _whole),
    "hook, assigned": (_WithHook, _assigned),
    "hook, not strict": (_WithHook, _partly),
    "hook, parts": (_WithHook, _by_parts),
    "hook, after a call": (_WithHook, _after_a_call),
    "private hook": (_WithPrivateHook, _whole),
    "private hook, assigned": (_WithPrivateHook, _assigned),
    "override": (_Overridden, _whole),
    "override, assigned": (_Overridden, _assigned),
    "override that copies": (_Copying, _whole),
    "override that resizes": (_Resized, _whole),
    "hook after loading": (_WithPostHook, _whole),
    "hook registered after compile": (_Attention, _by_a_late_hook),
}


def _training(load: Callable[[nn.Module], None]) -> Callable[[nn.Module], list[Tensor | None]]:
    def train(model: nn.Module) -> list[Tensor | None]:
        load(model)
        found: list[Tensor | None] = [*parameters(model), *model.buffers()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            loss = model(torch.randn(2, _SIZE)).square().mean()
            loss.backward()
            found += [loss, *(grad if grad is None else full(grad) for grad in gradients(model))]
            optimizer.step()
            optimizer.zero_grad()
        return found

    return train


def _trial(rank: int, world_size: int, name: str) -> None:
    block, load = CASES[name]
    expected = on_plain_torch(lambda: _build(block), _training(load))
    assert_equal(on_graphshard(lambda: _build(block), _training(load)), expected)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick_cases("hook", "hook, parts", "override, assigned", "override that copies")
def test_values_that_change_while_loading(ranks: Ranks, name: str) -> None:
    ranks(2).run(_trial, name)


def _on_fsdp2(rank: int, world_size: int) -> None:
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        on_fsdp2(lambda: _build(_WithHook), _training(_whole))


@pytest.mark.slow
def test_fsdp2_takes_shards_only(ranks: Ranks) -> None:
    ranks(2).run(_on_fsdp2)
