"""Property tests of random modules and programs on real ranks.

For any parameters, full tensors survive sharding, saving and loading, and training is data parallel. Any program trains
as with FSDP2, bit for bit; `benchmarks/fuzz.py` runs more of them.
"""

from __future__ import annotations

import copy
import math
import tempfile
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import graphshard
from tests.distributed.nets import data_parallel, full, hashes_agree, rows, train
from tests.distributed.random_programs import from_json, random_program, smaller, to_json
from tests.distributed.random_runs import differences
from tests.distributed.twins import world_mesh
from tests.ranks import Ranks


@dataclass(frozen=True)
class Spec:
    """One parameter of a random module."""

    shape: tuple[int, ...]
    dim: int
    order: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    ignored: bool
    tied: bool


@dataclass(frozen=True)
class Case:
    specs: tuple[Spec, ...] = field(default_factory=tuple)
    num_blocks: int = 0
    backward_gathers: bool | None = None


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float64, torch.int8]))
    return Spec(
        shape=shape,
        dim=draw(st.integers(-len(shape), len(shape) - 1)),
        order=tuple(draw(st.permutations(range(len(shape))))),
        dtype=dtype,
        trainable=dtype.is_floating_point and draw(st.booleans()),
        ignored=draw(st.sampled_from([False, False, False, True])),
        tied=draw(st.booleans()),
    )


CASES = st.builds(
    Case,
    specs=st.lists(specs(), min_size=1, max_size=5).map(tuple),
    num_blocks=st.integers(0, 2),
    backward_gathers=st.sampled_from([None, True, False]),
)


def _parameter(spec: Spec) -> nn.Parameter:
    memory = torch.randn([spec.shape[d] for d in spec.order]).mul(2).to(spec.dtype)
    value = memory.permute(sorted(range(len(spec.shape)), key=spec.order.__getitem__))
    return nn.Parameter(value, requires_grad=spec.trainable)


class Piece(nn.Module):
    """Mixes its parameters, each with different weights, with the input."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__()
        self.params = nn.ParameterList(params)

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for index, param in enumerate(self.params):
            weights = torch.cos(torch.arange(param.numel(), dtype=torch.float32) + index)
            total = total + torch.tanh((param.float().reshape(-1) * weights).sum() + x) / (index + 1)
        return total


class Random(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = [_parameter(spec) for spec in case.specs]
        self.first = Piece(made)
        self.blocks = nn.ModuleList(
            Piece([p if spec.tied else _parameter(spec) for p, spec in zip(made, case.specs)])
            for _ in range(case.num_blocks)
        )
        self.scale = nn.Parameter(torch.ones(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x * self.scale.sum(0))
        for block in self.blocks:
            x = block(x)
        return x


def _compile(case: Case) -> tuple[nn.Module, nn.Module]:
    """Compile the module, and return it and a copy."""
    model = Random(case)
    reference = copy.deepcopy(model)
    spec_of = {id(p): spec for piece in (model.first, *model.blocks) for p, spec in zip(piece.params, case.specs)}
    ignored = [p for p in model.parameters() if id(p) in spec_of and spec_of[id(p)].ignored]
    for param, twin in zip(model.parameters(), reference.parameters(), strict=True):
        if any(param is other for other in ignored):
            twin.requires_grad_(False)  # each rank would train it separately
            param.requires_grad_(False)
    return reference, graphshard.compile(
        model,
        world_mesh(),
        backend="eager",
        ignored_params=ignored,
        shard_placement_fn=lambda p: Shard(spec_of[id(p)].dim) if id(p) in spec_of else None,
        reshard_after_forward=case.backward_gathers,
    )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous(), b.contiguous())


def _round_trip(rank: int, world_size: int, case: Case, folder: str) -> None:
    reference, model = _compile(case)
    originals = dict(reference.named_parameters(remove_duplicate=False))
    for name, value in model.state_dict().items():
        assert _same_bits(full({name: value})[name], originals[name].detach()), name
        if isinstance(value, DTensor):
            dense = math.prod(value.to_local().shape) == value.to_local().numel()
            assert dense, name
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    for name, param in model.named_parameters(remove_duplicate=False):
        assert _same_bits(full({name: param})[name], originals[name].detach()), name
    batches = [[rows(r + 10 * step) for r in range(world_size)] for step in range(3)]
    got = full(train(model, [inputs[rank] for inputs in batches], lr=0.01))
    for name, value in data_parallel(reference, batches, lr=0.01).items():
        actual = got[name]
        assert (actual is None) == (value is None), name
        if value is not None:
            loose = 2e-2 if value.dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(actual, value, rtol=loose, atol=loose, msg=lambda m, n=name: f"{n}: {m}")
    hashes_agree(model)


def _together(rank: int, world_size: int, case: Case, folder: str) -> None:
    """Raise an error of one rank on all ranks, so that hypothesis can continue with other cases."""
    error: Any = None
    try:
        _round_trip(rank, world_size, case, folder)
    except AssertionError as caught:
        error = caught
    dist.barrier()
    if error is not None:
        raise error


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@given(case=CASES)
@settings(
    deadline=None,
    max_examples=6,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@pytest.mark.slow
def test_random_modules(ranks: Ranks, world_size: int, case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks(world_size).run(_together, case, folder)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.slow
def test_random_programs(ranks: Ranks, seed: int) -> None:
    program = random_program(seed)
    found = ranks(program.world_size).run(differences, program)
    assert not any(found), f"python -m benchmarks.fuzz --replay '{to_json(program)}'"


# Failures found by random programs, shrunk.
FOUND = {
    "uses of a parameter in the first of two microbatches": (
        '{"first":{},"last":{"pieces":[{"kind":"weights","size":2,"flag":true}]},"policy":"bf16","sync":[false,true]}'
    ),
    "a region recomputes random numbers and saves sizes": (
        '{"blocks":[{"pieces":[{"kind":"dropout"},{"kind":"linear","size":2}]}],'
        '"calls":[{"block":0,"checkpoint":"plain"}],"sizes":[[3,6],[4,5]],"dynamic":true}'
    ),
    "group norm is given transposed gradients": (
        '{"width":2,"first":{"pieces":[{"kind":"norm","size":2}]},"last":{},"output":"two","input_grad":true}'
    ),
    "batch norm lays out its result contiguously": (
        '{"width":2,"first":{"pieces":[{"kind":"batch_norm"}]},'
        '"blocks":[{"pieces":[{"kind":"attribute","flag":true},{"kind":"conv"}]}],"calls":[{"block":0}],"last":{}}'
    ),
    "a unit that Python runs is called twice": (
        '{"width":1,"first":{},"blocks":[{"pieces":[{"kind":"penalty"}]},{"pieces":[{"kind":"linear","size":1}]}],'
        '"calls":[{"block":0},{"block":1},{"block":1}],"last":{},"policy":"bf16"}'
    ),
    "a selective checkpoint, run by Python, around a unit that draws in a region": (
        '{"width":2,"first":{},"blocks":[{"pieces":[{"kind":"function","size":1}]},'
        '{"pieces":[{"kind":"checkpoint","size":1}]}],'
        '"calls":[{"block":1,"checkpoint":"selective"},{"block":0}],"last":{}}'
    ),
}


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.quick_cases(
    "a region recomputes random numbers and saves sizes",
    "a selective checkpoint, run by Python, around a unit that draws in a region",
)
def test_programs_that_failed_before(ranks: Ranks, name: str) -> None:
    program = from_json(FOUND[name])
    found = ranks(program.world_size).run(differences, program)
    assert not any(found)


def test_programs_are_data() -> None:
    """Programs survive JSON, seeds are stable, and shrunk programs are different and no longer."""
    for seed in range(50):
        program = random_program(seed)
        assert from_json(to_json(program)) == program == random_program(seed)
        assert all(candidate != program for candidate in smaller(program))
