"""Numbers that are read of tensors without dimensions, for Inductor, whose kernels take sizes and tensors only.

%n = _local_scalar_dense(%t)
%y = mul.Tensor(%x, %n)                 %y = mul.Tensor(%x, %t)
%z = gt.Scalar(%x, %n)                  %z = gt.Tensor(%x, %t)
"""

from __future__ import annotations

import copy

import torch
from torch.fx import GraphModule, Node

from graphshard.ir.graph import aten
from graphshard.ir.sizes import is_size
from graphshard.torch_compat.operators import OpOverload


def numbers_as_tensors(module: GraphModule) -> GraphModule:
    """The module with operators that take tensors in the place of such numbers, as far as there are some."""
    reads = module.graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default)
    if not reads:
        return module
    graph = copy.deepcopy(module.graph)
    for read in graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default):
        for user in list(read.users):
            target = _taking_tensors(user, read)
            if target is not None:
                user.target = target
                user.replace_input_with(read, read.all_input_nodes[0])
        if not read.users:
            graph.erase_node(read)
    return GraphModule(module, graph)


def _taking_tensors(user: Node, number: Node) -> OpOverload | None:
    """The operator that computes the same of a tensor in the place of a number; None if there is none."""
    if not isinstance(user.target, OpOverload) or number not in user.args:  # or is one of several sizes
        return None
    packet = user.target.overloadpacket
    overloads = [user.target, *(getattr(packet, n) for n in ("Tensor", "Tensor_Tensor") if n in packet.overloads())]
    index = user.args.index(number)
    for overload in overloads:
        arguments = overload._schema.arguments
        taken = len(arguments) > index and str(arguments[index].type) == "Tensor"
        if taken and len(user.args) <= len(arguments) and _same_dtype(user, number):
            return overload
    return None


def _same_dtype(user: Node, number: Node) -> bool:
    """Whether the result has the dtype that it had: a number may count for less than a tensor."""
    values = [n.meta["val"] for n in user.all_input_nodes if not is_size(n)]
    known = next((value for value in values if isinstance(value, torch.Tensor)), None)
    return known is not None and torch.result_type(known, number.all_input_nodes[0].meta["val"]) == torch.result_type(
        known, 1.0 if isinstance(number.meta["val"], torch.SymFloat) else 1
    )
