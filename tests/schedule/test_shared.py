"""Values that share memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

import graphshard
from graphshard.cost.kernels import num_bytes
from graphshard.ir.collective_regions import CollectiveRegions
from graphshard.ir.program import Program
from graphshard.pipeline.instrumentation import saved_by_unit
from graphshard.schedule._program_memory import base_bytes, owners, saved_memory
from graphshard.schedule.memory_timeline import tensors
from tests.helpers import captured, through


class Attend(nn.Module):
    """Backward reads the result of attention twice: for attention itself, and for the next matmul."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """Backward reads both matmul results for their gradients and for the gradient of their combination."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def explained(model: nn.Module, **options: object) -> graphshard.Explanation:
    batch = torch.zeros(4, 8, 16, device="meta")
    return graphshard.explain(model.to("meta"), (2,), example_inputs=(batch,), hardware="cpu-gloo", **options)


def saved_names(program: Program) -> dict[str, list[str]]:
    """Group the saved values that share memory under the first one."""
    found: dict[str, list[str]] = {}
    for slot, saved in saved_memory(program).items():
        found.setdefault(saved.slot.name, []).append(slot.name)
    return found


@pytest.mark.slow
def test_values_that_forward_saves() -> None:
    """Two views of one value, the parts of one matmul, and a view of the input, which exists anyway."""
    program = through(captured(nn.Sequential(Attend(16), Attend(16)), (torch.ones(4, 8, 16),)), "partition")
    forward = program.phases["forward"]
    made = dict(zip((slot.name for slot in forward.outputs), forward.results))
    groups = saved_names(program)
    sizes = {saved.slot.name: saved.num_bytes for saved in saved_memory(program).values()}
    twice = [name for name, same in groups.items() if any("detach" in other for other in same)]
    assert len(twice) == 2, "of each layer attention's result"
    assert [sizes[name] for name in twice] == [4 * 8 * 16 * 4] * 2
    products = [name for name, same in groups.items() if len(same) == 3]
    assert [sizes[name] for name in products] == [4 * 8 * 3 * 16 * 4] * 2, "queries, keys and values"
    views = [name for name, size in sizes.items() if not size]
    assert [made[name].all_input_nodes[0].op for name in views] == ["placeholder"]
    for name, phase in program.phases.items():
        assert saved_memory(replace(program, phases={name: phase})) == {}


def test_saved_memory_of_units_is_counted_once() -> None:
    """In the table by unit, the result of attention is one value, and the matmul that q, k and v come from is
    another.
    """
    program = through(captured(nn.Sequential(Attend(16), Attend(16)), (torch.ones(4, 8, 16),)), "plan")
    held = {memory.slot: memory.num_bytes for memory in saved_memory(program).values()}
    assert sum(row.saved_bytes for row in saved_by_unit(program)) == sum(held.values())
    assert [row.saved["mm"] for row in saved_by_unit(program)] == [2, 1], "the last product of the first is read again"


def forward_numbers(program: Program) -> dict[str, str]:
    """Return the numbers of the nodes that forward saves, as reports show them, by the names of their slots."""
    forward = program.phases["forward"]
    pairs = zip(forward.results, forward.outputs)
    return {s.name: f"%{n.meta['number']}" for n, s in pairs if s.kind == "saved" and isinstance(n, Node)}


def test_backward_counts_memory_once() -> None:
    """The planner, the operators and the timeline agree: nothing is added between the phases."""
    program = through(captured(nn.Sequential(Attend(16), Attend(16)), (torch.ones(4, 8, 16),)), "partition")
    backward = program.phases["backward"]
    layout, saved = CollectiveRegions.of(backward), saved_memory(program)
    cuts = (0, len(layout.compute))
    slots = backward.slot_of()
    held = {memory.slot: memory.num_bytes for memory in saved.values()}
    each = sum(num_bytes(node) for node, slot in slots.items() if slot in saved)
    more = each - sum(held.values())
    assert more >= 2 * 4 * 8 * 16 * 4
    first = [base_bytes(backward, layout, (0, 1, *cuts[1:]), [], {}, {}, saved=known)[0] for known in ({}, saved)]
    assert first[0] - first[1] == more

    found = explained(nn.Sequential(Attend(16), Attend(16)))
    began = found._timeline.phases["backward"][0]
    made = forward_numbers(found._program)
    sizes = {
        made[memory.slot.name]: memory.num_bytes
        for memory in saved_memory(found._program).values()
        if memory.num_bytes and memory.slot.name in made
    }
    kept = [t for t in tensors(found._program, found._timeline) if t.what == "saved for backward"]
    kept = [t for t in kept if t.name.split()[-1] in sizes]
    assert sizes
    assert {t.name.split()[-1]: t.num_bytes for t in kept} == sizes
    assert len(kept) == len(sizes)
    assert all(t.start < began < t.end for t in kept), "forward has made it"


def test_regions_that_share_a_saved_value() -> None:
    """A saved matmul result read by two backward regions exists once, and the first region does not free it."""
    found = explained(nn.Sequential(Gated(16), Gated(16)), activation=[torch.ops.aten.mm.default])
    program = found._program
    backward = program.phases["backward"]
    owner = owners(program, backward, saved_memory(program))
    seen = [node for node in backward.module.graph.nodes if node.name.startswith("_unsafe_view")]
    assert seen
    assert all(node.all_input_nodes[0].op == "call_module" for node in seen)
    assert {owner[node].op for node in seen} == {"placeholder"}
    names = {f"%{node.meta['number']}" for node in seen}
    held = tensors(program, found._timeline)
    assert not [tensor for tensor in held if tensor.name.split()[0] in names]
    ends = {tensor.name.split()[-1]: tensor.end for tensor in held if tensor.what == "saved for backward"}
    made = forward_numbers(program)
    for node in seen:
        last = max(found._timeline.node_times[user] for user in node.users)
        assert ends[made[backward.slot_of()[owner[node]].name]] >= last


def test_nodes_of_a_phase() -> None:
    """A view shares the memory of its base; a part of a region has separate memory."""
    program = explained(nn.Sequential(Attend(16), Attend(16)))._program
    owner = owners(program, program.phases["forward"])
    results = [node for node in program.phases["forward"].results if isinstance(node, Node)]
    views = [node for node in results if node.name.startswith(("transpose", "detach"))]
    assert views
    assert all(owner[node] is not node and owner[owner[node]] is owner[node] for node in views)
