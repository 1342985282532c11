"""Floats that calls give, for Inductor, whose code takes sizes and tensors only.

    %lr = input: 0.1                        %t: f64[] = input: tensor(0.1)
    %y: f32[8] = mul.Tensor(%x, %lr)        %u = _local_scalar_dense(%t)
                                            %y: f32[8] = mul.Tensor(%x, %u)

`numbers_as_tensors` then lets operators read the tensor, where that has the result of a number.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from graphshard.ir.graph import aten
from graphshard.lower.unknown import ValueInterpreter
from graphshard.torch_compat.fake_tensors import fake_mode_of
from graphshard.torch_compat.symbolic_sizes import new_symbols_dropped


def float_inputs(module: GraphModule) -> list[int]:
    """Return the places of floats among the inputs of a region."""
    inputs = module.graph.find_nodes(op="placeholder")
    return [place for place, node in enumerate(inputs) if isinstance(node.meta["val"], torch.SymFloat)]


def floats_as_tensors(module: GraphModule) -> GraphModule:
    """Return the module with a tensor without dimensions for each input that is a float, and that reads it."""
    places = float_inputs(module)
    if not places:
        return module
    graph = copy.deepcopy(module.graph)
    inputs = graph.find_nodes(op="placeholder")
    mode = next(fake_mode_of(node.meta["val"]) for node in inputs if isinstance(node.meta["val"], torch.Tensor))
    for place in places:
        with graph.inserting_after(inputs[-1]):
            read = graph.call_function(aten._local_scalar_dense.default, (inputs[place],))
        inputs[place].replace_all_uses_with(read)
        read.args = (inputs[place],)
        with mode:
            inputs[place].meta["val"] = torch.empty((), dtype=torch.float64)
    found = GraphModule(module, graph)
    with mode, torch.no_grad(), new_symbols_dropped(mode):
        ValueInterpreter(found).run(*(node.meta["val"] for node in inputs))
    return found


def with_float_inputs(run: Callable[[list[Any]], Any], places: list[int]) -> Callable[[list[Any]], Any]:
    """Return the function that is given floats at places among its inputs, for one that takes tensors there."""
    if not places:
        return run

    def call(inputs: list[Any]) -> Any:
        for place in places:
            inputs[place] = torch.tensor(inputs[place], dtype=torch.float64)
        return run(inputs)

    call.__dict__.update(source_code=getattr(run, "source_code", ""))
    return call
