"""`gather_ahead`: gathers of the next forward start during updates, with the bits of the separate step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

import graphshard
from graphshard.errors import ParameterError
from graphshard.runtime.step_overlap import GatherPrefetch, _Gather
from tests.distributed.test_checkpoint import Net
from tests.distributed.test_compile_step import (
    ADAMW,
    SGD,
    Odd,
    _assert_same_state,
    _input,
    _loss,
    _odd_loss,
    _separate,
    _separate_by_name,
    _twice,
)
from tests.distributed.twins import POLICIES, AliveBytes, assert_same, example_llama, params_of, twins, world_mesh
from tests.ranks import Ranks


class _Counted:
    """Counts gathers started ahead, during updates and after them, and gathers that a forward takes."""

    def __init__(self) -> None:
        self.started = self.finished = self.taken = 0

    def __enter__(self) -> _Counted:
        self._own = _Gather.begin, GatherPrefetch.finish, _Gather.take
        begin, finish, take = self._own

        def counted_begin(gather: _Gather) -> None:
            self.started += gather.under_way is None
            begin(gather)

        def counted_finish(ahead: GatherPrefetch) -> None:
            before = self.started
            finish(ahead)
            self.finished += self.started - before

        def counted_take(gather: _Gather, inputs: list[Any]) -> Any:
            self.taken += gather.under_way is not None
            return take(gather, inputs)

        _Gather.begin, _Gather.take = counted_begin, counted_take  # type: ignore[method-assign]
        GatherPrefetch.finish = counted_finish  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        _Gather.begin, GatherPrefetch.finish, _Gather.take = self._own  # type: ignore[method-assign]


def _llama(rank: int, world_size: int, policy: str, shape: tuple[int, ...], n: int, reshard: bool) -> tuple[int, int]:
    torch.manual_seed(0)
    model, batch = example_llama()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    pair = twins(model, mesh, mp_policy=POLICIES[policy], reshard_after_forward=reshard)
    optims = [ADAMW(model.parameters(), lr=0.02) for model in pair]
    clip_norm = 1.0 if n > 1 else None
    step = graphshard.compile_step(pair[0], optims[0], accumulate=n, clip_norm=clip_norm, gather_ahead=True)
    torch.manual_seed(1 + rank)
    with _Counted() as counted:
        for number in range(4):
            calls = [batch() for _ in range(n)]
            loss = step(*calls) if n > 1 else step(**calls[0])
            assert step.updated_in_backward is (clip_norm is None)
            assert torch.equal(loss, _separate_by_name(pair[1], optims[1], calls, clip_norm)[0])
            _assert_same_state(pair, optims, f"step {number}")
    assert counted.started % 4 == 0
    assert counted.taken == counted.started * 3 // 4
    return counted.started // 4, counted.finished // 4


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("shape", "n", "reshard"), [((2,), 1, True), ((2,), 2, False), ((2, 2), 1, True)], ids=["fsdp", "clipped", "hsdp"]
)
@pytest.mark.slow
def test_llama(ranks: Ranks, policy: str, shape: tuple[int, ...], n: int, reshard: bool) -> None:
    """The next step takes all gathers, and all except the last parameter's start during updates."""
    for started, finished in ranks(2 * len(shape)).run(_llama, policy, shape, n, reshard):
        assert started >= 1
        assert finished == 0


def _between(rank: int, world_size: int) -> dict[str, int]:
    model = Net()
    pair = [graphshard.compile(one, world_mesh(), backend="eager") for one in (model, copy.deepcopy(model))]
    optims = [ADAMW(model.parameters(), lr=0.02) for model in pair]
    step = graphshard.compile_step(pair[0], optims[0], _loss, gather_ahead=True)
    taken = {}
    for name, change in CHANGES.items():
        pair[0].reshard()
        with _Counted() as counted:
            for number in range(2):
                x = _input(rank, number)
                assert torch.equal(step(x), _separate(pair[1], optims[1], [(x,)])[0]), name
                _assert_same_state(pair, optims, f"{name}, step {number}")
                for model, optim in zip(pair, optims):
                    change(model, optim, x)
            step(x)
            _separate(pair[1], optims[1], [(x,)])
            _assert_same_state(pair, optims, f"after {name}")
        assert counted.started
        taken[name] = counted.taken
    return taken


def _write(model: nn.Module, *_: Any) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


def _write_shards(model: nn.Module, *_: Any) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().mul_(0.5)


def _load(model: nn.Module, *_: Any) -> None:
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})


def _assign(model: nn.Module, *_: Any) -> None:
    """Replace memory, as loading with assign=True does."""
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()}, assign=False)
    for param in model.parameters():
        param._local_tensor = param._local_tensor + 1


def _through_data(model: nn.Module, *_: Any) -> None:
    for param in model.parameters():
        param.data.mul_(0.5)
    model.reshard(units=["*", ""])


def _evaluate(model: nn.Module, optim: Any, x: Tensor) -> None:
    with torch.no_grad():
        model(x)


def _other_shape(model: nn.Module, optim: Any, x: Tensor) -> None:
    _loss(model, x[:2]).backward()
    model.zero_grad()


def _setting(model: nn.Module, *_: Any) -> None:
    model.set_reshard_after_forward(False)


def _by_hand(model: nn.Module, *_: Any) -> None:
    model.unshard(async_op=True)  # unsharded after the wait


CHANGES: dict[str, Callable[..., None]] = {
    "nothing": lambda *_: None,
    "written": _write,
    "shards written": _write_shards,
    "loaded": _load,
    "other memory": _assign,
    "through data": _through_data,
    "evaluated": _evaluate,
    "other shape": _other_shape,
    "unsharded": _by_hand,
    "setting": _setting,
}


@pytest.mark.slow
def test_changes_between_steps(ranks: Ranks) -> None:
    """Writes, loading, other programs and settings: parameters are gathered again, with the same bits."""
    for taken in ranks(2).run(_between):
        assert taken.pop("nothing") > 1
        # The same program follows the first change and the second.
        assert taken == {**dict.fromkeys(taken, 0), "other shape": 1, "unsharded": 1, "setting": 1}


def _not_recorded(rank: int, world_size: int) -> None:
    model = graphshard.compile(Net(), world_mesh(), backend="eager")
    step = graphshard.compile_step(model, SGD(model.parameters(), lr=0.02), _loss, gather_ahead=True)
    x = _input(rank)
    step(x)
    model.blocks[0].weight.data.mul_(0.5)
    with pytest.raises(ParameterError, match=r"gather_ahead: of blocks\.0\.weight.* torch does not record"):
        step(x)
    step(x)  # gathers again


def test_an_unrecorded_write(ranks: Ranks) -> None:
    """The change is detected by value before the parameters are used."""
    ranks(2).run(_not_recorded)


def _after_backward(rank: int, world_size: int) -> dict[str, tuple[bool, int, int]]:
    found = {}
    for name, (model, loss, make) in BEHIND.items():
        torch.manual_seed(0)
        net = model()
        pair = [graphshard.compile(one, world_mesh(), backend="eager") for one in (net, copy.deepcopy(net))]
        optims = [make(one.parameters()) for one in pair]
        step = graphshard.compile_step(pair[0], optims[0], loss, gather_ahead=True)
        with _Counted() as counted:
            for number in range(2):
                seed = torch.Generator().manual_seed(2 * number + rank)
                x = torch.randint(11, (2, 4), generator=seed) if model is Odd else _input(rank, number)
                assert torch.equal(step(x), _separate(pair[1], optims[1], [(x,)], loss)[0])
                assert_same(*map(params_of, pair), f"{name}, step {number}")
        found[name] = step.updated_in_backward, counted.started, counted.taken
    return found


def _muon(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in params if p.dim() == 2 and len(p) > 1], lr=0.02)


def _adamw(params: Any) -> torch.optim.Optimizer:
    return ADAMW(params, lr=0.02)


BEHIND: dict[str, tuple[type[nn.Module], Any, Any]] = {
    "odd": (Odd, _odd_loss, _adamw),
    "muon": (Net, _loss, _muon),
    "twice": (Net, _twice, _adamw),
}


@pytest.mark.slow
def test_updates_after_backward(ranks: Ranks) -> None:
    """Gathers also start after updates; with several calls in a loss the next step has another program."""
    for found in ranks(2).run(_after_backward):
        assert [updated for updated, _, _ in found.values()] == [True, False, False]
        assert all(started > 0 for _, started, _ in found.values())
        assert [taken > 0 for _, _, taken in found.values()] == [True, True, False]


def _memory(rank: int, world_size: int) -> list[float]:
    """Return the peak memory of a step with updates in backward, less the memory at rest, in sizes of the model."""
    most = []
    for gather_ahead in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(6)))
        model = graphshard.compile(model, world_mesh(), backend="eager", units=["*"])
        step = graphshard.compile_step(model, SGD(model.parameters(), lr=0.1), _loss, gather_ahead=gather_ahead)
        x = torch.randn(1, 256)
        for _ in range(2):
            step(x)
        weights = [param.to_local().detach() for param in model.parameters()]
        with AliveBytes([x, *weights], 0.6 * 6 * 256 * 256 * 4) as mode:
            step(x)
        most.append(mode.most / (6 * 256 * 256 * 4))
    return most


@pytest.mark.slow
def test_peak_memory(ranks: Ranks) -> None:
    """The gathered parameters exist while nothing else is gathered, so the peak does not rise."""
    for without, ahead in ranks(2).run(_memory):
        assert ahead <= without < 0.9


def _offloaded(rank: int, world_size: int) -> list[int]:
    """On a CPU mesh nothing is copied, so gathers start normally; without shards there is nothing to start."""
    started = []
    for shape, options in (((2,), {"offload_policy": CPUOffloadPolicy(pin_memory=False)}), ((2, 1), {})):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        pair = twins(Net(), mesh, **options)
        optims = [ADAMW(model.parameters(), lr=0.02) for model in pair]
        step = graphshard.compile_step(pair[0], optims[0], _loss, gather_ahead=True)
        with _Counted() as counted:
            for number in range(2):
                x = _input(rank, number)
                assert torch.equal(step(x), _separate(pair[1], optims[1], [(x,)])[0])
                _assert_same_state(pair, optims, f"step {number}")
        started.append(counted.started)
    return started


def test_offloaded_and_replicated(ranks: Ranks) -> None:
    for offloaded, replicated in ranks(2).run(_offloaded):
        assert offloaded > 0
        assert replicated == 0
