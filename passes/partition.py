"""Split the joint graph into forward and backward.

AOTAutograd's min-cut partitioner decides what is saved, under the marks of `reshard_after_forward`. Placeholders get
readable names here: the partitioner was the last to read meaning from their names.

    joint      %w = wait_tensor(%g)              forward    %w = wait_tensor(%g)
               %y = mm(%x, %w)                              %y = mm(%x, %w)
               %dx = mm(%dy, t(%w))                         return %y as output:0, %s as param:w
               return %y, %dx                    backward   %w = wait_tensor(all_gather_into_tensor(%s))
                                                            %dx = mm(%dy, t(%w))
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from graphshard.ir.graph import base_of, erase_dead, fake, is_communication, is_idle_draw, is_part, is_view
from graphshard.ir.param_table import ParamTable
from graphshard.ir.program import Phase, Program, Slot
from graphshard.ir.recompute import IN_FORWARD, RANDOM_STATE, SAVE
from graphshard.ir.sizes import lift_sizes
from graphshard.ir.strides import laid_out
from graphshard.ir.subgraph import give_attributes, take_attributes
from graphshard.ir.transport import gather_epilogue
from graphshard.passes.accumulate_gradients import mark_sums
from graphshard.passes.base import Pass
from graphshard.passes.reshard_after_forward import until_landed
from graphshard.torch_compat.aot_autograd import min_cut_partition, run_and_save_rng_state, run_with_rng_state
from graphshard.torch_compat.symbolic_sizes import hint


@dataclass(frozen=True)
class Partition(Pass):
    """Requires: a joint graph.  Preserves: numerics; nodes that are cheap to recompute may appear in both graphs."""

    name: ClassVar[str] = "partition"

    def rewrite(self, program: Program) -> int:
        joint = program.phases.get("joint")
        if joint is None:
            return 0
        num_outputs = sum(not slot.is_of_backward for slot in joint.outputs)
        slots = {node.name: slot for node, slot in joint.slot_of().items()}
        grads = {slot.name: grad for grad, slot in zip(joint.results, joint.outputs) if slot.of == "param"}
        for node, slot in joint.slot_of().items():
            if slot.kind in ("param", "gathered"):
                spec = program.params[slot.name]
                chain = until_landed(node, spec) if slot.kind == "param" else []
                landed = reversed(chain[-1 - len(gather_epilogue(spec)) :] if chain else [])  # a scalar has none
                slots |= {n.name: Slot("saved", spec.name, "gathered", left) for left, n in enumerate(landed)}
                mark_sums(chain[-1] if chain else node, grads.get(slot.name))
        for node in filter(is_idle_draw, joint.module.graph.nodes):
            node.meta.pop("recompute", None)  # nothing draws again, so no generator state is saved
        forward, backward = _split(joint, num_outputs)
        _name_random_states(forward, backward, num_outputs)
        _drop_idle(forward, backward, num_outputs)
        saved = [slots.get(node.name) or Slot("saved", node.name) for node in _results(forward)[num_outputs:]]
        given, read = ([n.name for n in module.graph.find_nodes(op="placeholder")] for module in (forward, backward))
        inputs = tuple(slots[name] for name in given), tuple(slots.get(name) or Slot("saved", name) for name in read)
        program.phases = {
            "forward": Phase(forward, inputs[0], (*joint.outputs[:num_outputs], *saved)),
            "backward": Phase(backward, inputs[1], joint.outputs[num_outputs:]),
        }
        _return_shown(program.phases["forward"], slots, program.params)
        for phase in program.phases.values():
            lift_sizes(phase, program.sizes)
            _rename_placeholders(phase)
            for node in phase.module.graph.nodes:
                for mark in ("recompute", "ac_graph_id", "partitioner_tag", IN_FORWARD):
                    node.meta.pop(mark, None)
        names = {node.name for node in forward.graph.nodes if node.op == "call_function"}
        for node in backward.graph.nodes:
            again = node.op == "call_function" and (node.name in names or node.target is run_with_rng_state)
            if again and not (is_view(node) or is_part(node) or is_communication(node)):
                node.meta["recomputed"] = True
        _unalias(program.phases["backward"], program.params)
        return 1


def _split(joint: Phase, num_outputs: int) -> tuple[GraphModule, GraphModule]:
    """Run the partitioner; nodes that are marked to be computed in forward are results of the joint graph for it."""
    marked = [node for node in joint.module.graph.nodes if node.meta.get(IN_FORWARD)]
    for node in marked:
        node.meta["recompute"] = SAVE
    output, results = joint.module.graph.output_node(), joint.results
    output.meta.pop("desc", None)  # one for each result
    joint.set_results([*results[:num_outputs], *marked, *results[num_outputs:]])
    subgraphs = give_attributes(joint.module)  # the partitioner looks for these
    forward, backward = min_cut_partition(joint.module, num_outputs + len(marked))
    for module in (forward, backward):
        take_attributes(module, subgraphs)
    results = _results(forward)
    forward.graph.output_node().args = ((*results[:num_outputs], *results[num_outputs + len(marked) :]),)
    return forward, backward


def _name_random_states(forward: GraphModule, backward: GraphModule, num_outputs: int) -> None:
    """Name generator states, and complete the fake values, of random operators that backward runs again.

        %s, %y = run_and_save_rng_state(bernoulli, %x)        %y = run_with_rng_state(%s, bernoulli, %x)

    The partitioner has the states in the same order in both graphs, but under other names and with few fake values.
    Backward has lost the nodes of the region that it does not need, but not the states.
    """
    saved = _results(forward)[num_outputs:]
    names = {node.name for node in saved}
    from_rng = (node for node in saved if node.target is operator.getitem)
    states = [node for node in from_rng if node.all_input_nodes[0].target is run_and_save_rng_state]
    inputs = [n for n in backward.graph.find_nodes(op="placeholder") if "tangent" not in n.name]
    unnamed = [node for node in inputs if node.name not in names]
    for index, (state, placeholder) in enumerate(zip(states, unnamed, strict=True)):
        draw = state.all_input_nodes[0]
        (value,) = (user for user in draw.users if user is not state)
        # The partitioner makes the size of a state dynamic.
        like = fake(state).new_empty([hint(fake(state).shape[0])])
        draw.meta = {**value.meta, "val": (like, value.meta["val"])}
        for redraw in placeholder.users:
            redraw.meta = dict(value.meta)
        state.meta = {**value.meta, "val": like}
        placeholder.meta.update({"val": like, RANDOM_STATE: True})
        for node in (draw, state):
            node.meta.pop("number", None)  # the value keeps its own
        state.name = placeholder.name = placeholder.target = f"random_state_{index}"


def _results(module: GraphModule) -> list[Node]:
    return list(module.graph.output_node().args[0])  # type: ignore[arg-type]


def _drop_idle(forward: GraphModule, backward: GraphModule, num_outputs: int) -> None:
    """Drop saved values that backward does not read, such as a parameter that was only marked to be kept."""
    forwards = {node.name for node in forward.graph.nodes}
    erase_dead(backward.graph, random=[node for node in backward.graph.nodes if node.name in forwards])
    idle = {n.name: n for n in backward.graph.find_nodes(op="placeholder") if not n.users and "tangent" not in n.name}
    results = _results(forward)
    saved = [node for node in results[num_outputs:] if node.name not in idle]
    forward.graph.output_node().args = ((*results[:num_outputs], *saved),)
    erase_dead(forward.graph)
    for node in idle.values():
        backward.graph.erase_node(node)


def _return_shown(forward: Phase, slots: Mapping[str, Slot], params: ParamTable) -> None:
    """Let forward return the full parameters that modules show, unless backward reads them in any form."""
    saved = {slot.name for slot in forward.outputs if slot.is_full}
    named = [(node, slots.get(node.name)) for node in forward.module.graph.nodes]
    landed = [(node, slot.name) for node, slot in named if slot and slot.of == "gathered" and slot.index == 0]
    shown = [(node, name) for node, name in landed if params[name].shows and name not in saved]
    forward.set_results([*forward.results, *(node for node, _ in shown)])
    forward.outputs = (*forward.outputs, *(Slot("shown", name) for _, name in shown))


def _unalias(backward: Phase, params: ParamTable) -> None:
    """Copy gradients that share memory with a tangent or each other, or whose layout is not the parameter's.

    `.grad` is written in place, and contiguous in FSDP2.
    """
    results = backward.results
    seen: set[Node] = set()
    for index, (node, slot) in enumerate(zip(backward.results, backward.outputs, strict=True)):
        if not isinstance(node, Node):
            continue
        base = base_of(node)
        order = params[slot.name].order if slot.of == "param" else ()
        misplaced = slot.of == "param" and not (fake(node).permute(order) if order else fake(node)).is_contiguous()
        if base.op == "placeholder" or base in seen or misplaced:
            results[index] = laid_out(node, order)
        seen.add(base)
    backward.set_results(results)


def _rename_placeholders(phase: Phase) -> None:
    taken: set[str] = {n.name for n in phase.module.graph.nodes}
    for node, slot in phase.slot_of().items():
        stem = re.sub(r"\W", "_", slot.name if slot.kind in ("param", "buffer", "saved") else str(slot))
        name = stem if not stem[:1].isdigit() else f"_{stem}"
        if name != node.name:
            while name in taken:
                name += "_"
            taken.add(name)
            node.name = node.target = name
