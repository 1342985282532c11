"""State dicts and torch.distributed.checkpoint work as with FSDP2, and between the two."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import graphshard
from graphshard.errors import ArgumentError
from graphshard.torch_compat.torch_ops import pytree
from tests.distributed.test_checkpoint import Net, steps, trainer
from tests.distributed.twins import assert_same, fsdp2, twins, world_mesh
from tests.ranks import Ranks


class _Tied(nn.Module):
    """An embedding that is also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.out = nn.Linear(5, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.out(x)


def _cloned(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() for name, value in state.items()}


def _full(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def _perturb(model: nn.Module) -> None:
    with torch.no_grad():
        for value in [*model.parameters(), *model.buffers()]:
            value.add_(1)


def _refused(error: type[Exception], load: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(error) as caught:
        load(*args, **options)
    return str(caught.value)


# --- state_dict and load_state_dict -------------------------------------------------------------------------


def _aliases(rank: int, world_size: int) -> None:
    """Before, between and after steps, the values are the parameters."""
    pair = twins(Net(), world_mesh())
    optims = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in pair]
    before = None
    for step in range(3):
        states = [model.state_dict() for model in pair]
        assert_same(*states, f"state dicts after step {step}")
        for name, theirs in states[1].items():
            ours = states[0][name]
            assert type(ours) is type(theirs), name
            if isinstance(ours, DTensor):
                assert (ours.placements, ours.device_mesh) == (theirs.placements, theirs.device_mesh), name
                assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride()), name
        assert list(states[0]) == list(Net().state_dict())
        for name, param in pair[0].named_parameters():
            assert states[0][name].to_local().data_ptr() == param.to_local().data_ptr(), name
        for name, buffer in pair[0].named_buffers():
            assert states[0][name].data_ptr() == buffer.data_ptr(), name
        # A state dict taken earlier sees later steps.
        before = before or states[0]
        assert_same(before, states[0], f"the first state dict after step {step}")
        for model, optim in zip(pair, optims):
            steps(model, optim, step, step + 1)
    assert pair[0].blocks[0].weight.to_local().shape[0] != pair[0].blocks[0].weight.shape[0] / world_size
    empty = pair[0].head.weight.to_local().numel() == 0
    assert empty == (rank > 0)


@pytest.mark.slow
def test_values_are_the_parameters(ranks: Ranks) -> None:
    """With uneven shards, and one that has only a row, on the first rank."""
    ranks(3).run(_aliases)


def _load_layouts(rank: int, world_size: int) -> None:
    mesh = world_mesh()
    model, twin = twins(Net(), mesh)
    optims = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (model, twin)]
    assert steps(model, optims[0], 0, 1) == steps(twin, optims[1], 0, 1)  # initializes FSDP2 and compiles
    saved = _cloned(model.state_dict())
    full = _full(saved)

    def as_parameter(name: str, value: Tensor) -> Tensor:
        return nn.Parameter(value) if isinstance(saved[name], DTensor) else value

    def replicated(name: str, value: Tensor) -> Tensor:
        return distribute_tensor(value, mesh, [Replicate()]) if isinstance(saved[name], DTensor) else value

    layouts = {
        "shards": lambda: _cloned(saved),
        "full": lambda: _cloned(full),
        "full, as parameters": lambda: {name: as_parameter(name, value.clone()) for name, value in full.items()},
        "replicated": lambda: {name: replicated(name, value.clone()) for name, value in full.items()},
    }
    losses = []
    for layout, make in layouts.items():
        for assign in (False, True):
            _perturb(model)
            state = make()
            original = copy.copy(state)
            result = model.load_state_dict(state, assign=assign)
            assert (result.missing_keys, result.unexpected_keys) == ([], [])
            assert all(state[name] is original[name] for name in state), "the caller's state dict was changed"
            assert_same(dict(model.state_dict()), saved, f"{layout}, {assign=}")
            for name, param in model.named_parameters():
                assert param.placements == (Shard(0),), name
                if layout == "full":
                    assert param.to_local().untyped_storage().nbytes() <= 8 * 3 * 4, f"{name} keeps the full tensor"
            optim = torch.optim.SGD(model.parameters(), lr=0.1)
            losses.append(steps(model, optim, 5, 7))
    twin.load_state_dict(_cloned(saved))
    expected = steps(twin, torch.optim.SGD(twin.parameters(), lr=0.1), 5, 7)
    assert losses == [expected] * len(losses)
    # FSDP2's errors for the same.
    message = _refused(RuntimeError, twin.load_state_dict, full)
    assert 'parameter named "blocks.0.weight"' in message
    assert "mixed torch.Tensor and DTensor" in message
    assert "_local_tensor" in _refused(AttributeError, twin.load_state_dict, full, assign=True)


def test_load_state_dict_accepts_any_layout(ranks: Ranks) -> None:
    """Full tensors are sharded, other placements redistributed, with and without assign; FSDP2 rejects them."""
    ranks(3).run(_load_layouts)


class _Images(nn.Module):
    """Convolutions whose weights are channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(5, 5, 3, padding=1) for _ in range(2)).to(
            memory_format=torch.channels_last
        )
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = torch.tanh(conv(x))
        return self.head(x.mean((2, 3)))


def _load_inner_dims(rank: int, world_size: int) -> None:
    plain = _Images()
    full = _cloned(plain.state_dict())
    assert full["convs.0.weight"].is_contiguous(memory_format=torch.channels_last)

    def second_dim(param: nn.Parameter) -> Shard:
        return Shard(min(1, param.dim() - 1))

    model = graphshard.compile(plain, world_mesh(), backend="eager", shard_placement_fn=second_dim)
    x = torch.randn(2, 5, 4, 4, generator=torch.Generator().manual_seed(rank))
    expected = model(x)
    for assign in (False, True):
        for values in (full, {name: value.contiguous() for name, value in full.items()}):
            _perturb(model)
            assert not torch.equal(model(x), expected)
            model.load_state_dict(values, assign=assign)
            assert model.convs[0].weight.placements == (Shard(1),)
            assert_same(_full(model.state_dict()), full, f"{assign=}")
            assert torch.equal(model(x), expected)
            model(x).sum().backward()


@pytest.mark.slow
def test_load_full_tensors_into_shards_of_inner_dims(ranks: Ranks) -> None:
    """With uneven shards of dim 1, channels_last and contiguous."""
    ranks(3).run(_load_inner_dims)


def _load_errors(rank: int, world_size: int) -> None:
    mesh = world_mesh()
    pair = twins(Net(), mesh)
    model = pair[0]
    saved = _cloned(model.state_dict())
    missing = {name: value for name, value in saved.items() if name != "head.bias"}
    surplus = saved | {"other": torch.zeros(1)}
    wrong = saved | {"head.weight": torch.zeros(2, 7), "blocks.0.bias": saved["blocks.0.bias"].to_local()}
    for net in pair:
        assert 'Missing key(s) in state_dict: "head.bias"' in _refused(RuntimeError, net.load_state_dict, missing)
        assert 'Unexpected key(s) in state_dict: "other"' in _refused(RuntimeError, net.load_state_dict, surplus)
        assert net.load_state_dict(missing, strict=False).missing_keys == ["head.bias"]
        assert net.load_state_dict(surplus, strict=False).unexpected_keys == ["other"]
        message = _refused(RuntimeError, net.load_state_dict, wrong)
        assert "size mismatch for head.weight" in message
        assert "size mismatch for blocks.0.bias" in message
    assert_same(dict(model.state_dict()), saved, "after errors")
    other = init_device_mesh("cpu", (world_size, 1))
    elsewhere = distribute_tensor(torch.zeros(7, 7), other, [Shard(0), Replicate()])
    for assign in (False, True):
        values = {name: value + 1 for name, value in saved.items()} | {"blocks.1.weight": elsewhere}
        message = _refused(ArgumentError, model.load_state_dict, values, assign=assign)
        assert message.startswith("state_dict['blocks.1.weight'] is a DTensor on DeviceMesh")
        assert "Pass its full_tensor(), or load through torch.distributed.checkpoint" in message
        assert_same(dict(model.state_dict()), saved, "nothing is loaded after the error")


def test_load_state_dict_rejects(ranks: Ranks) -> None:
    """Strict, shapes and meshes."""
    ranks(2).run(_load_errors)


class _Wrapper(nn.Module):
    """A compiled module inside another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.ones(1))


def _tied_and_nested(rank: int, world_size: int) -> None:
    pair = twins(_Tied(), world_mesh())
    for net in pair:
        state = net.state_dict()
        assert {"embed.weight", "out.weight"} <= set(state)
        assert state["embed.weight"].to_local().data_ptr() == state["out.weight"].to_local().data_ptr()
    assert_same(*(dict(net.state_dict()) for net in pair), "tied")
    tokens = torch.arange(6).reshape(2, 3)
    full = {name: value.clone() for name, value in _full(pair[0].state_dict()).items()}
    _perturb(pair[0])
    pair[0].load_state_dict(full)
    assert pair[0].out.weight is pair[0].embed.weight
    assert torch.equal(*(net(tokens) for net in pair))
    wrapper = _Wrapper(pair[0])
    nested = {"scale": torch.zeros(1)} | {f"inner.{name}": value for name, value in full.items()}
    _perturb(wrapper)
    wrapper.load_state_dict(nested)
    assert_same(dict(pair[0].state_dict()), dict(pair[1].state_dict()), "loaded through a parent")
    assert wrapper.scale.item() == 0


def test_tied_weights_and_parents(ranks: Ranks) -> None:
    """A tied weight has both names and shares memory; a parent module also loads full tensors."""
    ranks(2).run(_tied_and_nested)


# --- torch.distributed.checkpoint.state_dict ----------------------------------------------------------------


OPTIONS = {
    "sharded": StateDictOptions(),
    "sharded on the CPU": StateDictOptions(cpu_offload=True),
    "full": StateDictOptions(full_state_dict=True),
    "full on rank 0": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "trainable only": StateDictOptions(ignore_frozen_params=True, strict=False),
    "flat optimizer": StateDictOptions(flatten_optimizer_state_dict=True),
}


def _leaves(state: Any) -> dict[str, Any]:
    leaves, _ = pytree.tree_flatten_with_path(state)
    return {pytree.keystr(path): leaf for path, leaf in leaves}


def _options(rank: int, world_size: int) -> None:
    plain = Net()
    plain.blocks[0].bias.requires_grad_(False)
    pair = twins(plain, world_mesh())
    optims = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in pair]
    others = twins(Net(), world_mesh())
    for model in others:
        model.blocks[0].bias.requires_grad_(False)
    for model, optim in zip(pair, optims):
        steps(model, optim, 0, 2)
    expected = [
        _leaves(pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, get_state_dict(*both)))
        for both in zip(pair, optims)
    ]
    for name, options in OPTIONS.items():
        states = [get_state_dict(model, optim, options=options) for model, optim in zip(pair, optims)]
        assert_same(*map(_leaves, states), name)
        assert_same(
            _leaves(get_model_state_dict(pair[0], options=options)), _leaves(states[0][0]), f"model's own, {name}"
        )
        assert_same(_leaves(get_optimizer_state_dict(pair[0], optims[0], options=options)), _leaves(states[0][1]), name)
        if name == "full on rank 0":
            assert bool(states[0][0]) == (rank == 0)
        if name == "full":
            assert not any(isinstance(value, DTensor) for value in _leaves(states[0]).values())
        broadcast = name == "full on rank 0"
        target = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True) if broadcast else options
        for source in (0, 1):  # each one's state loads into either
            for model in others:
                _perturb(model)
                optim = torch.optim.AdamW(model.parameters(), lr=0.5)
                model_state, optim_state = copy.deepcopy(states[source])
                set_model_state_dict(model, model_state, options=target)
                set_optimizer_state_dict(model, optim, optim_state, options=target)
                loaded = _leaves(get_state_dict(model, optim))
                if name == "trainable only":
                    loaded = {key: value for key, value in loaded.items() if "blocks.0.bias" not in key}
                    assert_same(loaded, {k: v for k, v in expected[0].items() if k in loaded}, name)
                else:
                    assert_same(loaded, expected[0], f"loaded: {name}")
                assert optim.param_groups[0]["lr"] == 0.01
    assert_same(*expected, "nothing was changed")


@pytest.mark.slow
def test_state_dict_options(ranks: Ranks) -> None:
    """Sharded, full, on the CPU, on rank 0 only and broadcast from there; all equal to FSDP2's."""
    ranks(3).run(_options)


def _rank_0_init(rank: int, world_size: int) -> None:
    """Create the values on rank 0; the others have a meta model."""
    torch.manual_seed(11)
    values = Net().state_dict() if rank == 0 else {}
    models = []
    for shard in (
        lambda model: graphshard.compile(model, world_mesh(), backend="eager"),
        lambda model: fsdp2(model, world_mesh()),
    ):
        with torch.device("meta"):
            model = Net()
        shard(model)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, dict(values), options=options)
        assert not any(value.is_meta for value in [*model.parameters(), *model.buffers()])
        models.append(model)
    assert_same(*(dict(model.state_dict()) for model in models), "broadcast from rank 0")
    torch.manual_seed(11)
    expected = Net()
    assert_same(_full(models[0].state_dict()), dict(expected.state_dict()), "broadcast from rank 0")
    losses = [steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 0, 2) for model in models]
    assert losses[0] == losses[1]
    # Manually, with assign=True: each rank has the full tensors, or its shards.
    for values in (
        dict(expected.state_dict()),
        _cloned(graphshard.compile(copy.deepcopy(expected), world_mesh()).state_dict()),
    ):
        with torch.device("meta"):
            model = Net()
        graphshard.compile(model, world_mesh(), backend="eager")
        model.load_state_dict(values, assign=True)
        assert steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 0, 2) == losses[0]


@pytest.mark.slow
def test_meta_model_gets_its_values_from_rank_0(ranks: Ranks) -> None:
    ranks(3).run(_rank_0_init)


# --- torch.distributed.checkpoint ---------------------------------------------------------------------------


def _state(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optim_state = get_state_dict(model, optim)
    return {"model": model_state, "optim": optim_state}


def _dcp_save(rank: int, world_size: int, impl: str, folder: Path) -> tuple[dict[str, Tensor], list[float]]:
    model, optim = trainer(impl, seed=1)
    steps(model, optim, 0, 2)
    dcp.save(_state(model, optim), checkpoint_id=folder)
    saved = _full(_leaves(_state(model, optim)))
    saved = copy.deepcopy(saved)
    return saved, steps(model, optim, 2, 5)


def _dcp_load(
    rank: int, world_size: int, impl: str, folder: Path, again: Path | None
) -> tuple[dict[str, Tensor], list[float]]:
    model, optim = trainer(impl, seed=2)
    steps(model, optim, 7, 8)
    state = _state(model, optim)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
    if again is not None:
        dcp.save(_state(model, optim), checkpoint_id=again)
    loaded = copy.deepcopy(_full(_leaves(_state(model, optim))))
    return loaded, steps(model, optim, 2, 5)


@pytest.mark.parametrize(("writer", "reader"), [("graphshard", "fsdp2"), ("fsdp2", "graphshard")])
@pytest.mark.quick_cases("fsdp2-graphshard")
def test_checkpoints_match_fsdp2(ranks: Ranks, tmp_path: Path, writer: str, reader: str) -> None:
    """Either reads the other's checkpoint, and continues training like the writer, bit for bit."""
    saved, losses = ranks(2).run(_dcp_save, writer, tmp_path)[0]
    for impl in (reader, writer):
        loaded, resumed = ranks(2).run(_dcp_load, impl, tmp_path, None)[0]
        assert_same(loaded, saved, f"loaded by {impl}")
        assert resumed == losses


@pytest.mark.slow
def test_resharding(ranks: Ranks, tmp_path: Path) -> None:
    """From 2 to 3 to 4 to 2 ranks; both resume from each checkpoint with equal results, and no state is lost."""
    saved, losses = ranks(2).run(_dcp_save, "graphshard", tmp_path / "2")[0]
    source = "2"
    for world_size, name in [(3, "3"), (4, "4"), (2, "2 again")]:
        results = [
            ranks(world_size).run(_dcp_load, "graphshard", tmp_path / source, tmp_path / name)[0],
            ranks(world_size).run(_dcp_load, "fsdp2", tmp_path / source, None)[0],
        ]
        for impl, (loaded, resumed) in zip(("graphshard", "fsdp2"), results):
            assert_same(loaded, saved, f"loaded by {impl} on {world_size} ranks")
            assert resumed == results[0][1], f"trained by {impl} on {world_size} ranks"
        source = name
    assert results[0][1] == losses


def _async(rank: int, world_size: int, folder: Path) -> None:
    """Later steps do not leak into the checkpoint that is being written."""
    model, optim = trainer("graphshard", seed=1)
    steps(model, optim, 0, 2)
    expected = copy.deepcopy(_leaves(_state(model, optim)))
    # A separate group: the writing thread launches collectives, and so does training.
    future = dcp.async_save(_state(model, optim), checkpoint_id=folder, process_group=dist.new_group())
    rest = steps(model, optim, 2, 6)
    future.result()
    again, optim = trainer("graphshard", seed=2)
    state = _state(again, optim)
    dcp.load(state, checkpoint_id=folder)
    assert_same(_leaves(state), expected, "saved while training")
    set_state_dict(again, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert steps(again, optim, 2, 6) == rest


@pytest.mark.slow
def test_async_save_during_training(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_async, tmp_path)
