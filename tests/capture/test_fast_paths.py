"""Modules of torch that ask by themselves whether they are traced, and then compute in another way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from graphshard.ir.errors import CaptureError
from graphshard.ir.program import Program
from tests.helpers import captured

X = torch.ones(2, 3, 4)


class _Calls(nn.Module):
    """Calls a module that is no unit: FSDP2 has no hooks on it, for which torch would take the long way."""

    def __init__(self, module: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.module = module
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.module, x)


def _targets(program: Program) -> set[object]:
    return {node.target for node in program.phases["forward"].module.graph.nodes}


def test_attention() -> None:
    module = _Calls(
        nn.MultiheadAttention(4, 2, batch_first=True), lambda attention, x: attention(x, x, x, need_weights=False)[0]
    )
    program = captured(module.eval(), (X,), grad=False, world_size=1)
    assert torch.ops.aten._native_multi_head_attention.default in _targets(program)


def test_encoder_layer() -> None:
    module = _Calls(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), lambda layer, x: layer(x))
    program = captured(module.eval(), (X,), grad=False, world_size=1)
    assert torch.ops.aten._transformer_encoder_layer_fwd.default in _targets(program)


def _encoder(*, nested: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested)
    return _Calls(encoder, lambda module, x: module(x, src_key_padding_mask=x[..., 0] < 0)).eval()


def test_nested_tensors_are_refused() -> None:
    """Eager mode leaves zeros in the padding; the way without nested tensors has other values there."""
    with pytest.raises(CaptureError, match=r"(?s)test_fast_paths\.py.*enable_nested_tensor=False"):
        captured(_encoder(nested=True), (X,), grad=False, world_size=1)
    captured(_encoder(nested=False), (X,), grad=False, world_size=1)
