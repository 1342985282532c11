"""torchao's float8 and NF4 weights match FSDP2 bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import graphshard
from tests.distributed.extended import BF16, even, train_and_compare_with_fsdp2
from tests.distributed.twins import local, world_mesh
from tests.ranks import Ranks


def _in_float8() -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # Emulated, because CPUs have no float8 matmuls. Blocks have biases: FSDP2 gathers a lone float8 tensor as float8,
    # which gloo does not support.
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    model = even()
    for block in model.blocks:
        block[2].bias = nn.Parameter(torch.zeros(8))
    return convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: isinstance(module, nn.Linear) and "blocks" in name
    )


def _train_in_float8(rank: int, world_size: int) -> None:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    # The method reduces the largest element over the ranks, ...
    ours = train_and_compare_with_fsdp2(_in_float8, world_mesh())
    (program,) = graphshard.programs(ours)
    assert any("graphshard.all_reduce" in line for line in str(program.forward.code).splitlines())
    # ... or reads the scale from an attribute of the shard, which changes between steps.
    ours = train_and_compare_with_fsdp2(
        _in_float8, world_mesh(), steps=3, after_step=precompute_float8_dynamic_scale_for_fsdp, mp_policy=BF16
    )
    first, second = graphshard.programs(ours)
    assert "methods of a parameter" in second.reason
    assert "graphshard.all_reduce" not in str(second.forward.code)
    assert first.plan is not None
    assert {b.num_bytes for b in first.plan.buckets if "blocks.0.0.weight" in b.members and b.kind == "gather"} == {256}
    assert type(local(ours.blocks[0][0].weight)).__name__ == "WeightWithDynamicFloat8CastTensor"


@pytest.mark.slow
def test_float8(ranks: Ranks) -> None:
    ranks(2).run(_train_in_float8)


class Adapted(nn.Module):
    """A frozen four-bit weight with a trained adapter."""

    def __init__(self, dim: int, out: int) -> None:
        from torchao.quantization import to_nf4

        super().__init__()
        self.weight = nn.Parameter(to_nf4(torch.randn(out, dim), 16, 16), requires_grad=False)
        self.down, self.up = nn.Linear(dim, 2, bias=False), nn.Linear(2, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

        return linear_nf4(x, self.weight) + self.up(self.down(x))


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Adapted(64, 128), nn.ReLU(), Adapted(128, 64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def _quantized() -> nn.Module:
    torch.manual_seed(0)
    return Quantized()


def _train_quantized(rank: int, world_size: int) -> None:
    ours = train_and_compare_with_fsdp2(_quantized, world_mesh(), dim=64)
    assert type(local(ours.blocks[0][0].weight)).__name__ == "NF4Tensor"
    train_and_compare_with_fsdp2(_quantized, world_mesh(), dim=64, reshard_after_forward=False, mp_policy=BF16)


def test_nf4(ranks: Ranks) -> None:
    ranks(2).run(_train_quantized)
