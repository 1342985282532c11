"""Make what torch.export returns a function of flat tensors: no attributes, no tied copies, no aliased outputs."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.fx.graph import CodeGen

from graphshard.ir.graph import is_view
from graphshard.ir.params import ParamTable

# Export states dtypes that hold by construction, and sizes that are checked before a program is chosen for a call.
_ASSERTIONS = (
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
)


def lift_constants(graph_module: GraphModule, module: nn.Module, fake_mode: Any) -> dict[str, torch.Tensor]:
    """Tensors held as plain attributes become buffers of the graph, and inputs of the program.

    The program reads the module's own tensor where there is one; others were made while the forward was traced.
    """
    constants: dict[str, torch.Tensor] = {}
    originals = {name: sub.__dict__ for name, sub in module.named_modules()}
    for prefix, owner in graph_module.named_modules():
        for name, value in list(owner.__dict__.items()):
            if isinstance(value, torch.Tensor):
                own = originals.get(prefix, {}).get(name)
                constants[f"{prefix}.{name}" if prefix else name] = own if isinstance(own, torch.Tensor) else value
                delattr(owner, name)
                owner.register_buffer(name, fake_mode.from_tensor(value, static_shapes=True))
    return constants


def tie(graph_module: GraphModule, params: ParamTable) -> None:
    """One parameter per row: export leaves tied weights as one attribute per name."""
    names = {name: row.name for row in params for name in row.names}
    first: dict[str, torch.fx.Node] = {}
    for node in graph_module.graph.find_nodes(op="get_attr"):
        name = names.get(node.target)
        if name is None:
            continue
        if name in first:
            node.replace_all_uses_with(first[name])
            graph_module.graph.erase_node(node)
        else:
            node.target = name
            first[name] = node
    for name, canonical in names.items():
        if name != canonical:
            owner, _, attribute = name.rpartition(".")
            delattr(graph_module.get_submodule(owner), attribute)
    graph_module.recompile()


def flatten_signature(graph_module: GraphModule, leaves: list[Any]) -> None:
    """Take a flat list of tensors and return a flat list: other inputs were captured by value."""
    graph = graph_module.graph
    for target in _ASSERTIONS:
        for node in graph.find_nodes(op="call_function", target=target):
            graph.erase_node(node)
    graph.set_codegen(CodeGen())
    for node, leaf in zip(graph.find_nodes(op="placeholder"), leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            graph.erase_node(node)
    graph_module.recompile()


def unalias_outputs(graph_module: GraphModule) -> None:
    """Copy outputs that share memory with an input or with another output.

    The program is a function of its inputs. FSDP2 would hand out the alias; writing to it in place is the only
    way to tell the difference.
    """
    graph = graph_module.graph
    (output,) = graph.find_nodes(op="output")
    results = list(output.args[0])
    seen = set()
    for index, node in enumerate(results):
        if not isinstance(node, torch.fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        base = _owner(node)
        if base.op != "call_function" or base in seen:
            with graph.inserting_before(output):
                results[index] = graph.call_function(torch.ops.aten.clone.default, (node,))
                results[index].meta = copy.copy(node.meta)
        seen.add(base)
    output.args = (tuple(results),)
    graph_module.recompile()


def _owner(node: torch.fx.Node) -> torch.fx.Node:
    """The value whose memory a value of the exported graph may share, through views and writes in place."""
    while node.op == "call_function" and (is_view(node) or _writes(node)):
        node = node.all_input_nodes[0]
    return node


def _writes(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
