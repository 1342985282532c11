"""What forward saves for backward and what backward computes again, by unit: `Program.saved_table()`.

unit      saved                  bytes  computed again in backward
(root)    embedding 1             4096
layers.0  add 1, random state 1   9152  mm 3, mul 1, native_layer_norm 1
total                            13248
"""

from __future__ import annotations

from collections import Counter

from torch.fx import Node

from graphshard.cost.kernels import num_bytes
from graphshard.ir.collective_regions import saved_values
from graphshard.ir.graph import base_of, is_alias, is_part, module_of
from graphshard.ir.program import Program, UnitMemory
from graphshard.ir.units import unit_of
from graphshard.torch_compat.aot_autograd import run_and_save_rng_state
from graphshard.torch_compat.operators import OpOverload


def saved_by_unit(program: Program) -> tuple[UnitMemory, ...]:
    """The table of a program that is partitioned and not lowered yet; empty for one without gradients."""
    if not {"forward", "backward"} <= set(program.phases):
        return ()
    units = program.params.units
    saved: dict[str, Counter[str]] = {}
    recomputed: dict[str, Counter[str]] = {}
    total: Counter[str] = Counter()
    # Two values that are saved may have one memory: what attention returns goes to two that read it.
    for node in dict.fromkeys(base_of(value, is_alias) for value in saved_values(program.phases["forward"])):
        unit = unit_of(module_of(node), units)
        saved.setdefault(unit, Counter())[_operator(node)] += 1
        total[unit] += num_bytes(node)
    for node in program.phases["backward"].module.graph.nodes:
        if node.meta.get("recomputed"):
            recomputed.setdefault(unit_of(module_of(node), units), Counter())[_operator(node)] += 1
    found = [unit for unit in ("", *units) if unit in saved or unit in recomputed]
    empty: Counter[str] = Counter()
    return tuple(
        UnitMemory(u, dict(saved.get(u, empty)), total[u], dict(recomputed.get(u, empty))) for u in dict.fromkeys(found)
    )


def _operator(node: Node) -> str:
    """Name of the operator that made a value; a random one that runs again goes by its own name."""
    node = base_of(node)
    if is_part(node):
        if node.all_input_nodes[0].target is run_and_save_rng_state and node.args[1] == 0:
            return "random state"
        return _operator(node.all_input_nodes[0])
    operators = [a for a in (node.target, *node.args) if isinstance(a, OpOverload)]
    return operators[0]._opname if operators else str(getattr(node.target, "__name__", node.target))
