"""Loading on real ranks what another process exported: the bits of in-process compilation, and nothing is compiled."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard.errors import ArtifactError
from tests.distributed.twins import fsdp2, world_mesh
from tests.exported import WIDTH, Net, Small, batch, hf_llama, nothing_is_compiled
from tests.ranks import RankError, Ranks

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def net_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export the full-featured model for 1, 2 and 4 ranks in a process without process group or weights."""
    return exported_elsewhere("net", tmp_path_factory)


@pytest.fixture(scope="module")
def microbatches_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export the full-featured model for steps of several microbatches, on one axis and on two."""
    return exported_elsewhere("microbatches", tmp_path_factory)


@pytest.fixture(scope="module")
def regathered_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export the full-featured model for 4 ranks, with gathers among 2 ranks in backward."""
    return exported_elsewhere("regathered", tmp_path_factory)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export the model of few regions, compiled."""
    return exported_elsewhere("small", tmp_path_factory)


def exported_elsewhere(what: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(what) / f"{what}.gshard"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "tests.exported", what, str(path)], cwd=ROOT, env=environment, check=True)
    return path


def first_ranks(*shape: int) -> DeviceMesh | None:
    """Build a mesh of the first ranks; return None on the others, which take part in its creation."""
    count = math.prod(shape)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = DeviceMesh("cpu", torch.arange(count).view(shape), mesh_dim_names=names)
    return mesh if dist.get_rank() < count else None


def bits(model: nn.Module) -> list[Tensor]:
    """Return shards, gradients and buffers."""
    found: list[Tensor] = [buffer.clone() for buffer in model.buffers()]
    for param in model.parameters():
        found.append(param.detach().to_local().clone())
        if param.grad is not None:
            found.append(param.grad.to_local().clone())
    return found


def train(model: nn.Module, rank: int, steps: int = 3) -> list[Tensor]:
    """Train some steps with momentum and dropout; return the losses."""
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        optim.zero_grad()
        loss = model(*batch(10 * step + rank))["loss"]
        loss.backward()
        optim.step()
        losses.append(loss.detach())
    return losses


def _train_loaded(rank: int, world_size: int, path: Path) -> list[int]:
    """Train on the first 1, 2 and 4 ranks; `compile(backend="eager")` has FSDP2's bits."""
    sizes = []
    for size in (1, 2, 4):
        mesh = first_ranks(size)
        if mesh is None:
            continue
        torch.manual_seed(1)
        model = Net()
        twin = fsdp2(copy.deepcopy(model), mesh)
        with nothing_is_compiled():
            graphshard.load(path, model, mesh)
            assert isinstance(model, Net)
            found = train(model, rank)
        assert all(map(torch.equal, found, train(twin, rank)))
        assert all(map(torch.equal, bits(model), bits(twin)))
        sizes.append(size)
    return sizes


def _use_all_programs(rank: int, world_size: int, path: Path) -> None:
    mesh = first_ranks(world_size)
    torch.manual_seed(1)
    model = Net()
    twin = graphshard.compile(copy.deepcopy(model), mesh, backend="eager")
    graphshard.load(path, model, mesh)
    assert all(map(torch.equal, train(model, rank), train(twin, rank)))
    assert all(map(torch.equal, bits(model), bits(twin)))
    _other_programs(model, twin, rank)


def _other_programs(model: nn.Module, twin: nn.Module, rank: int) -> None:
    """Run inference, a submodule, gradients of other outputs, and a copy: all from the file, with equal bits."""
    with nothing_is_compiled():
        loaded = _use(model, rank)
        torch.manual_seed(5)
        again = copy.deepcopy(model)(*batch(7))["loss"]
    compiled = _use(twin, rank)
    torch.manual_seed(5)
    assert torch.equal(again, copy.deepcopy(twin)(*batch(7))["loss"])
    assert len(loaded) == len(compiled)
    assert all(map(torch.equal, loaded, compiled))
    with pytest.raises(ArtifactError, match=r"no program for this call of the model: .*\[3, 2\]"):
        model(*(tensor.T.contiguous() for tensor in batch(7)))


def _use(model: nn.Module, rank: int) -> list[Tensor]:
    found = []
    for outputs in (("logits",), ("loss", "logits")):
        torch.manual_seed(2)
        model.zero_grad()
        result = model(*batch(rank))
        sum(result[name].square().sum() for name in outputs).backward()
        found += bits(model)
    torch.manual_seed(3)
    part = model.layers[1](torch.ones(2, 3, WIDTH))
    part.sum().backward()
    model.eval()
    with torch.no_grad():
        logits = model(batch(rank)[0])
    model.train()
    return [*found, part.detach(), logits, *bits(model)]


@pytest.mark.slow
def test_one_file_trains_on_1_2_and_4_ranks(ranks: Ranks, net_file: Path) -> None:
    assert ranks(4).run(_train_loaded, net_file) == [[1, 2, 4], [2, 4], [4], [4]]


def test_every_program_has_the_bits_of_compile(ranks: Ranks, net_file: Path) -> None:
    """Training, inference, a submodule, other gradients, and a copy, on two ranks."""
    ranks(2).run(_use_all_programs, net_file)


def _load_llama(rank: int, world_size: int, path: Path) -> None:
    model = hf_llama()
    text = torch.arange(16).reshape(2, 8)
    compiled = graphshard.compile(copy.deepcopy(model), world_mesh(), backend="eager")
    with nothing_is_compiled():
        loss = graphshard.load(path, model)(input_ids=text, labels=text).loss
    loss.backward()
    assert torch.equal(loss, compiled(input_ids=text, labels=text).loss)
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.slow
def test_a_causal_model_of_transformers(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Its generation_config holds the hash of an object, which differs in another process."""
    ranks(1).run(_load_llama, exported_elsewhere("llama", tmp_path_factory))


def _train_on_two_axes(rank: int, world_size: int, path: Path) -> list[tuple[int, ...]]:
    shapes = []
    for shape in ((2, 2), (2, 1), (1, 2)):
        mesh = first_ranks(*shape)
        if mesh is None:
            continue
        torch.manual_seed(1)
        model = Net()
        twin = graphshard.compile(copy.deepcopy(model), mesh, backend="eager")
        with nothing_is_compiled():
            graphshard.load(path, model, mesh)
            found = train(model, rank)
        assert all(map(torch.equal, found, train(twin, rank)))
        assert all(map(torch.equal, bits(model), bits(twin)))
        shapes.append(shape)
    return shapes


@pytest.mark.slow
def test_one_file_trains_on_shapes_of_two_axes(ranks: Ranks, microbatches_file: Path) -> None:
    """Both axes, replication only, and sharding only."""
    shapes = [(2, 2), (2, 1), (1, 2)]
    assert ranks(4).run(_train_on_two_axes, microbatches_file) == [shapes, shapes, shapes[:1], shapes[:1]]


# Settings before a microbatch that is not the last one, and before the last.
SETTINGS = ("set_requires_gradient_sync", "set_requires_all_reduce")


def _accumulate(model: nn.Module, rank: int, setting: str, output: str) -> list[Tensor]:
    """Return the state after each step of 3, 2, 1 and 4 microbatches; gradients exist only after the last one."""
    optim = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    found = []
    for count in (3, 2, 1, 4):
        optim.zero_grad()
        for microbatch in range(count):
            getattr(model, setting)(microbatch == count - 1)
            torch.manual_seed(10 * count + microbatch)
            model(*batch(10 * count + microbatch + 100 * rank))[output].square().mean().backward()
            found.append(torch.tensor([param.grad is not None for param in model.parameters()]))
        found += bits(model)
        optim.step()
    assert all(tensor.isfinite().all() for tensor in found)
    return found


def _accumulate_part(model: nn.Module, rank: int, setting: str) -> list[Tensor]:
    """Run two microbatches of a submodule."""
    model.zero_grad()
    for last in (False, True):
        getattr(model, setting)(last)
        torch.manual_seed(rank)
        model.layers[1](torch.randn(2, 3, WIDTH)).square().sum().backward()
    return bits(model)


def _train_microbatches(rank: int, world_size: int, path: Path, shapes: list[tuple[int, ...]]) -> list[list[bool]]:
    synced = []
    for shape in shapes:
        mesh = first_ranks(*shape)
        if mesh is None:
            continue
        for setting in SETTINGS[: len(shape)]:
            torch.manual_seed(1)
            model = Net()
            twin = graphshard.compile(copy.deepcopy(model), mesh, backend="eager")
            # The default gradient, and one requested at export.
            outputs = ("loss", "logits") if shape == (2,) else ("loss",)
            with nothing_is_compiled():
                graphshard.load(path, model, mesh)
                loaded = [_accumulate(model, rank, setting, output) for output in outputs]
                loaded.append(_accumulate_part(model, rank, setting))
            compiled = [_accumulate(twin, rank, setting, output) for output in outputs]
            compiled.append(_accumulate_part(twin, rank, setting))
            for ours, theirs in zip(loaded, compiled, strict=True):
                assert len(ours) == len(theirs)
                assert all(map(torch.equal, ours, theirs)), (shape, setting)
            synced.append([bool(item.any()) for item in loaded[0][:3]])
    return synced


@pytest.mark.slow
def test_microbatches_have_the_bits_of_compile(ranks: Ranks, microbatches_file: Path) -> None:
    """Without sync on 1 and 2 ranks; a single rank has nothing to wait for."""
    alone, together = [True, True, True], [False, False, True]
    found = ranks(2).run(_train_microbatches, microbatches_file, [(1,), (2,)])
    assert found == [[alone, together], [together]]


@pytest.mark.slow
def test_microbatches_on_two_axes_have_the_bits_of_compile(ranks: Ranks, microbatches_file: Path) -> None:
    """Without sync, and reduced over shards only."""
    found = ranks(4).run(_train_microbatches, microbatches_file, [(2, 2)])
    assert found == [[[False, False, True]] * 2] * 4


def _compile_what_is_missing(
    rank: int, world_size: int, path: Path, shape: tuple[int, ...], reshard_after_forward: int | None = None
) -> None:
    """Backwards that the file lacks start from its programs: the passes before the partition do not run again."""
    mesh = first_ranks(*shape)
    torch.manual_seed(1)
    model = Net()
    options = {"backend": "eager", "reshard_after_forward": reshard_after_forward}
    twin = graphshard.compile(copy.deepcopy(model), mesh, **options)
    with mock.patch("graphshard.module.tracer.run_pipeline", side_effect=AssertionError("passes run")):
        graphshard.compile(model, mesh, **options, artifact=path)
        found = [_accumulate(model, rank, setting, "logits") for setting in SETTINGS[: len(shape)]]
    for setting, ours in zip(SETTINGS, found):
        assert all(map(torch.equal, ours, _accumulate(twin, rank, setting, "logits"))), setting


@pytest.mark.slow
def test_compile_adds_missing_programs(ranks: Ranks, net_file: Path, microbatches_file: Path) -> None:
    """Steps of microbatches on two ranks; on two axes, gradients of another output."""
    ranks(2).run(_compile_what_is_missing, net_file, (2,))
    ranks(4).run(_compile_what_is_missing, microbatches_file, (2, 2))


@pytest.mark.slow
def test_a_missing_backward_gathers_among_neighbors(ranks: Ranks, regathered_file: Path) -> None:
    """The neighbor axis is part of the program in the file."""
    ranks(4).run(_compile_what_is_missing, regathered_file, (4,), 2)


def _sync_on_one_rank(rank: int, world_size: int, path: Path) -> None:
    model = graphshard.load(path, Net(), first_ranks(2, 2))
    if rank == 0:
        model.set_requires_gradient_sync(False)
    else:
        model.set_requires_all_reduce(False)
    model(*batch())["loss"].backward()


def test_ranks_that_accumulate_in_different_ways(ranks: Ranks, microbatches_file: Path) -> None:
    """An error instead of a hang."""
    with pytest.raises(RankError, match="made a different program than rank"):
        ranks(4).run(_sync_on_one_rank, microbatches_file)


def _train_native(rank: int, world_size: int, path: Path) -> list[str]:
    mesh = first_ranks(world_size)
    torch.manual_seed(1)
    model = Small()
    twin = copy.deepcopy(model)
    with nothing_is_compiled():
        graphshard.load(path, model, mesh)
        _train_small(model, rank)
        _accumulate_small(model, rank)
    codes = [type(call.fn).__name__ for call in model._graphshard.tracer.compiled.values()]
    graphshard.compile(twin, mesh)
    _train_small(twin, rank)
    _accumulate_small(twin, rank)
    assert all(map(torch.equal, bits(model), bits(twin)))
    return codes


def _train_small(model: nn.Module, rank: int) -> None:
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optim.zero_grad()
        model(torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * step + rank))).backward()
        optim.step()


def _accumulate_small(model: nn.Module, rank: int) -> None:
    """Run one step of three microbatches."""
    model.zero_grad()
    for microbatch in range(3):
        model.set_requires_gradient_sync(microbatch == 2)
        model(torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * microbatch + rank))).backward()


@pytest.mark.slow
def test_compiled_regions_run_without_a_compiler(ranks: Ranks, small_file: Path) -> None:
    for world_size in (1, 2):
        codes, *_ = ranks(world_size).run(_train_native, small_file)
        assert "KeptRegion" in codes
