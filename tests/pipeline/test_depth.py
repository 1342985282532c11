"""Properties that must not grow with the depth of a model of equal blocks."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from tests.distributed.twins import load_example


def program_of(layers: int, **options) -> graphshard.Program:
    """Compile the example's model at a depth, for the ranks of the fake world."""
    llama = load_example("llama")
    model = llama.Llama(llama.LlamaConfig(layers=layers, dim=32, heads=2, seq=16))
    tokens = torch.zeros(2, 16, dtype=torch.long)
    mesh = init_device_mesh("cpu", (4,))
    graphshard.compile(model, mesh, backend="eager", example_inputs=(tokens, tokens), **options)
    (program,) = graphshard.programs(model)
    return program


@pytest.mark.slow
def test_distinct_regions(fake_world):
    """A region is compiled once for all blocks: 8 layers have as few as 4, and call them twice as often."""
    fake_world(4)
    four, eight = program_of(4), program_of(8)
    assert eight.num_distinct_regions == four.num_distinct_regions
    assert eight.regions.keys() == four.regions.keys()
    assert eight.num_regions > 1.5 * four.num_regions


@pytest.mark.slow
def test_distinct_regions_of_32_layers(fake_world):
    """The same regions, by key, at 32 layers."""
    fake_world(4)
    assert program_of(32).regions.keys() == program_of(4).regions.keys()


@pytest.mark.parametrize("reshard", [None, True])
@pytest.mark.quick_cases("None")
def test_gathered_parameters(fake_world, reshard):
    """With resharding at most two blocks are gathered at a time, plus the root, which FSDP2 also keeps."""
    fake_world(4)
    program = program_of(6, reshard_after_forward=reshard)
    for phase, units in program.peak_gathered.items():
        assert len(units) >= 2, (phase, units)
        assert len([unit for unit in units if unit]) <= 2, (phase, units)


@pytest.mark.slow
def test_gathered_parameters_are_kept_without_resharding(fake_world):
    """Without resharding the counter counts all blocks, and backward gathers nothing."""
    fake_world(4)
    program = program_of(4, reshard_after_forward=False)
    assert set(program.peak_gathered["forward"]) == {"", *(f"layers.{i}" for i in range(4))}
    assert program.peak_gathered["backward"] == ()
