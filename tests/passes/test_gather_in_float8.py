"""Gathers in eight bits: what travels, and how close the result is."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from graphshard.errors import PassError
from graphshard.graph import collectives, fake
from graphshard.passes.gather_in_float8 import GatherInFloat8
from graphshard.pipeline import run_pass
from graphshard.program import Program
from tests.helpers import (
    COALESCED,
    PACKED,
    Blocks,
    assert_gradients,
    captured,
    full_gradients,
    mean_gradients,
    step,
    through,
)

BATCHES = [(torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)),) for seed in (0, 1)]


def _quantised(model: Blocks, params: tuple[str, ...] = ("*",), **options: object) -> Program:
    program = through(captured(model, BATCHES[0], **options), "partition")
    run_pass(GatherInFloat8(params), program)
    return program


def test_a_byte_for_each_element_and_a_scale_for_each_shard() -> None:
    program = _quantised(Blocks(2, 8))
    for phase in program.phases.values():
        for collective in collectives(phase):
            if collective.kind == "gather":
                (sent,) = collective.node.all_input_nodes
                assert (fake(sent).dtype, list(fake(sent).shape)) == (torch.uint8, [4 * 8 + 4])
    assert not program.history[-1].exact


@pytest.mark.parametrize("planner", [COALESCED, PACKED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_close(planner: object, dtype: torch.dtype) -> None:
    model = Blocks(2, 8)
    policy = MixedPrecisionPolicy(dtype, torch.float32)
    program = through(_quantised(model, mp_policy=policy), "reorder", planner=planner)
    found = full_gradients(program, step(program, model, BATCHES))
    for name, wanted in mean_gradients(model, BATCHES).items():
        assert torch.nn.functional.cosine_similarity(found[name].flatten(), wanted.flatten(), dim=0) > 0.99
        assert not torch.equal(found[name], wanted)


def test_some_parameters() -> None:
    """Others, and uneven ones, travel as they are; their gradients are exact."""
    model = Blocks(2, 8, bias=True)
    program = through(_quantised(model, ("layers.9.*",)), "reorder")
    assert_gradients(program, model, BATCHES)
    program = _quantised(model, ("*.bias",))
    kinds = {(c.params[0], fake(c.node.all_input_nodes[0]).dtype) for c in collectives(program.phases["forward"])}
    assert ("layers.0.bias", torch.uint8) in kinds
    assert ("layers.0.weight", torch.float32) in kinds
    through(program, "reorder", planner=PACKED)


def test_uneven_parameters_are_left_alone() -> None:
    program = through(captured(Blocks(2, 8), BATCHES[0], world_size=3), "partition")
    run_pass(GatherInFloat8(), program)
    assert program.history[-1].rewrites == 0


def test_it_comes_after_the_partition() -> None:
    with pytest.raises(PassError, match="insert this pass after 'partition' and before 'plan'"):
        run_pass(GatherInFloat8(), captured(Blocks(2, 8), BATCHES[0]))
