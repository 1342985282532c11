"""`graphshard.uncompiled`: eager results match FSDP2, with caches and copies, and training continues afterwards."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import graphshard
from tests.distributed import tensor_parallel
from tests.distributed.nets import Block, Net, Tied
from tests.distributed.twins import BF16, assert_same, params_of, twins, world_mesh
from tests.ranks import Ranks


class _Blocks(nn.Module):
    """State left by forward, random numbers, and a cache that the caller passes on."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 9)
        self.blocks = nn.ModuleList(Block(9, 5) for _ in range(3))
        self.register_buffer("mean", torch.zeros(9))
        self.scale = nn.Parameter(torch.tensor([0.7]))
        self.calls = 0
        self.seen: list[str] = []

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        self.calls += 1
        x = self.stem(x)
        for block in self.blocks:
            x = nn.functional.dropout(block(x), 0.2)
        if self.training:
            self.mean.lerp_(x.detach().float().mean(0), 0.1)
        x = (x - self.mean) * self.scale
        if cache is not None:
            cache.append(x)
            x = torch.cat(cache).mean(0)
        self.seen.append(str(x.dtype))
        return x


def _replicas() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))


CASTS = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32, cast_forward_inputs=True)
# Options, and the mesh.
SETTINGS: dict[str, tuple[dict[str, Any], Callable[[], DeviceMesh]]] = {
    "fp32": ({}, world_mesh),
    "output dtype": ({"mp_policy": CASTS}, world_mesh),
    "policy for each unit": (
        {"mp_policy": {"blocks.0": CASTS, "blocks.2": CASTS, "": MixedPrecisionPolicy()}},
        world_mesh,
    ),
    "offloaded": ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, world_mesh),
    "replicas": ({"mp_policy": CASTS}, _replicas),
}


def _called(model: nn.Module, hooks: list[str]) -> list[Tensor]:
    """Call without gradients; record the inputs of a hook on the root and on a unit."""
    handles = [
        model.register_forward_hook(lambda module, args, result: hooks.append(f"root {result.dtype}")),
        model.blocks[1].register_forward_pre_hook(lambda module, args: hooks.append(f"unit {args[0].dtype}")),
    ]
    results = []
    with torch.no_grad():
        for step in range(3):
            torch.manual_seed(step)
            cache: list[Tensor] = []
            results += [model(torch.randn(3, 4)), model(torch.randn(3, 4), cache), model(torch.randn(3, 4), cache)]
            model.eval()
            results += [model(torch.randn(3, 4), cache), *cache]
            model.train()
    for handle in handles:
        handle.remove()
    return results


def _trained(model: nn.Module, step: int) -> None:
    torch.manual_seed(step)
    model(torch.randn(3, 4)).float().square().mean().backward()
    for param in model.parameters():
        with torch.no_grad():
            param -= 0.1 * param.grad
    model.zero_grad()


def _compare_with_fsdp2(rank: int, world_size: int, setting: str, reshard: bool) -> None:
    options, mesh = SETTINGS[setting]
    torch.manual_seed(0)
    ours, theirs = twins(_Blocks(), mesh(), **options)
    hooks: tuple[list[str], list[str]] = ([], [])
    for step in range(2):
        with graphshard.uncompiled(ours, reshard_after_forward=reshard):
            results = _called(ours, hooks[0])
        assert_same(dict(enumerate(results)), dict(enumerate(_called(theirs, hooks[1]))), f"{setting}, results")
        assert hooks[0] == hooks[1]
        assert (ours.calls, ours.seen) == (theirs.calls, theirs.seen)
        for model in (ours, theirs):
            _trained(model, step)
        assert_same(params_of(ours), params_of(theirs), f"{setting}, parameters")
        assert_same(dict(ours.named_buffers()), dict(theirs.named_buffers()), f"{setting}, buffers")
    assert len(graphshard.programs(ours)) == 2  # a counter in forward becomes an input


@pytest.mark.parametrize("reshard", [False, True], ids=["at once", "unit by unit"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.quick_cases("fp32-at once")
def test_results_and_later_training_match_fsdp2(ranks: Ranks, setting: str, reshard: bool) -> None:
    """With a cache that the model writes to, lists, counters, buffers, dropout, casts and hooks; and training."""
    ranks(2).run(_compare_with_fsdp2, setting, reshard)


def _generated(rank: int, world_size: int) -> None:
    """Generate tokens with a transformers model and its cache; ranks generate different numbers of tokens."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    ours, theirs = twins(transformers.LlamaForCausalLM(config), world_mesh(), mp_policy=BF16)
    prompt = torch.randint(0, 61, (2, 5))
    options = {"do_sample": True, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
    found = []
    for step, model in enumerate((theirs, ours)):
        if step:
            model.generate = graphshard.uncompiled(model)(model.generate)
        torch.manual_seed(2)
        found.append(model.generate(prompt, max_new_tokens=9, **options))
    assert torch.equal(found[0].sequences, found[1].sequences)
    assert_same(*(dict(enumerate(each.logits)) for each in found), "logits")
    assert not graphshard.programs(ours)
    assert ours.generate(prompt, max_new_tokens=3 + 4 * rank, **options).sequences.shape[1] == 8 + 4 * rank
    ours(input_ids=prompt, labels=prompt).loss.backward()
    assert len(graphshard.programs(ours)) == 1


def test_generation_with_a_cache(ranks: Ranks) -> None:
    """This captured again at each length, and failed with a cache."""
    ranks(2).run(_generated)


def _on_a_tensor_axis(rank: int, world_size: int, reshard: bool) -> None:
    mesh = tensor_parallel.mesh_of(2, 2)
    ours, theirs = tensor_parallel.pair_of(tensor_parallel.llama, mesh)
    torch.manual_seed(rank // 2)
    tokens = tensor_parallel.tokens()
    with graphshard.uncompiled(ours, reshard_after_forward=reshard), torch.no_grad():
        assert torch.equal(ours(*tokens), theirs(*tokens))
        if not reshard:  # unsharded on the data axis
            split = [param for param in ours.layers.parameters() if isinstance(param, DTensor)]
            assert {param.device_mesh.ndim for param in split} == {1}


@pytest.mark.parametrize("reshard", [False, True], ids=["at once", "unit by unit"])
def test_a_tensor_axis(ranks: Ranks, reshard: bool) -> None:
    ranks(4).run(_on_a_tensor_axis, reshard)


def _held(rank: int, world_size: int) -> None:
    """The block shows full parameters under their names, tied ones once, and plain copies; everything is restored."""
    torch.manual_seed(0)
    plain = Tied()
    model = graphshard.compile(copy.deepcopy(plain), world_mesh(), backend="eager")
    model.note = "before"
    before, cls = dict(model.named_parameters(remove_duplicate=False)), type(model)
    with graphshard.uncompiled(model):
        with graphshard.uncompiled(model):  # may be a method called within a block
            assert type(model) is Tied
        assert type(model.blocks[0]) is Block
        assert model.head.weight is model.embed.weight
        assert all(isinstance(param, nn.Parameter) for param in model.parameters())
        assert_same(model.state_dict(), plain.state_dict(), "state")
        twin = copy.deepcopy(model)
        model.note = "within"
    assert (type(model), model.note) == (cls, "within")
    assert all(param is before[name] for name, param in model.named_parameters(remove_duplicate=False))
    assert {type(param) for param in twin.parameters()} == {nn.Parameter}
    tokens = torch.randint(0, 7, (2, 3))
    for net in (plain, twin):
        net(tokens).square().sum().backward()
    assert_same(
        {n: p.grad for n, p in params_of(twin).items()}, {n: p.grad for n, p in params_of(plain).items()}, "copy"
    )
    graphshard.compile(twin, world_mesh(), backend="eager")
    for net in (model, twin):
        net.zero_grad()
        net(tokens).square().sum().backward()
    assert torch.equal(model.embed.weight.grad.full_tensor(), twin.embed.weight.grad.full_tensor())


def test_modules_show_full_parameters(ranks: Ranks) -> None:
    ranks(2).run(_held)


def _wrapped(rank: int, world_size: int) -> None:
    """Replace the forward of a compiled model with a wrapper, like Accelerate."""
    torch.manual_seed(0)
    plain = Net()
    model = graphshard.compile(copy.deepcopy(plain), world_mesh(), backend="eager")
    inner = type(model).forward
    model.forward = types.MethodType(lambda self, x: inner(self, x).double(), model)
    x = torch.randn(2, 4)
    with graphshard.uncompiled(model):
        found = model(x)
        kept = model.blocks[0]
        model.blocks[0].forward = types.MethodType(lambda self, x: 2 * type(self).forward(self, x), kept)
        doubled = model(x)
    assert torch.equal(found, plain(x).double())
    assert not torch.equal(found, doubled)
    assert torch.equal(model(x), doubled)
    assert torch.equal(model.blocks[0](torch.ones(2, 8)), 2 * plain.blocks[0](torch.ones(2, 8)))


def test_replaced_forwards(ranks: Ranks) -> None:
    """Replaced before or within the block: they remain afterwards, for programs, too."""
    ranks(1).run(_wrapped)


def _during_a_step(rank: int, world_size: int) -> None:
    """Open a block between a forward and its backward, and between microbatches."""
    torch.manual_seed(0)
    ours, theirs = twins(Net(), world_mesh())
    for model in (ours, theirs):
        torch.manual_seed(1)
        first, x = model(torch.randn(2, 4)).square().sum(), torch.randn(2, 4)
        if model is ours:
            with graphshard.uncompiled(model):
                expected = model(x)
                first.backward()
                assert torch.equal(model(x), expected)
        else:
            first.backward()
        model(x).square().sum().backward()
    assert_same(
        {n: p.grad for n, p in params_of(ours).items()}, {n: p.grad for n, p in params_of(theirs).items()}, "step"
    )


def test_between_forward_and_backward(ranks: Ranks) -> None:
    ranks(2).run(_during_a_step)
