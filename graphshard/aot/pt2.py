"""A forward-only program for one rank as PyTorch's own `ExportedProgram`, in a `.pt2` that needs no graphshard."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphshard.aot.exporter import in_mode
from graphshard.errors import ArgumentError
from graphshard.frontend.graph_breaks import raise_break
from graphshard.frontend.inputs import apart
from graphshard.ir.graph_break import GraphBreak
from graphshard.ir.param_table import places_of
from graphshard.ir.program import Phase, Program
from graphshard.module.tracer import Tracer
from graphshard.pipeline.instrumentation import Observer
from graphshard.torch_compat.torch_ops import pytree
from graphshard.utils.files import replacing


def export_pt2(tracer: Tracer, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], path: Path) -> None:
    """Write the program that one rank runs in inference, with the model's weights, for `torch.export.load`.

    Casts of the precision policy are in the graph; parameters and buffers keep their names and dtypes.

    Raises:
        ArgumentError: a parameter is on the meta device: the file holds the weights.
    """
    meta = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if meta:
        raise ArgumentError(
            f"{path} is to hold the weights, and {meta[0]} is on the meta device. Load the weights first, or export a "
            ".gshard file."
        )
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    leaves = tracer.on_device(apart(leaves), structure)
    call_args, call_kwargs = pytree.tree_unflatten(leaves, structure)
    with in_mode(model, False), torch.no_grad():
        observer = Observer(tracer.options.level, None, tracer.pipeline.passes)
        try:
            program, _ = tracer.trace(model, call_args, call_kwargs, observer, "exported", grad=False)
        except GraphBreak as error:
            raise_break(error)
        dynamic = _shapes_for_args(model, args, kwargs, tracer.options.dynamic_shapes)
        module = _InferenceModule(program, model)
        exported = torch.export.export(module, call_args, call_kwargs, dynamic_shapes=dynamic, strict=False)
    with replacing(path) as temporary, temporary.open("wb") as file:
        torch.export.save(exported, file)


def _shapes_for_args(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], shapes: Any) -> Any:
    """Return `dynamic_shapes` of the model's forward for `_InferenceModule.forward`."""
    if shapes is None:
        return None
    if not isinstance(shapes, Mapping):
        return {"args": tuple(shapes)}
    names = list(inspect.signature(type(model).forward).parameters)[1 : len(args) + 1]
    positional = {"args": tuple(shapes.get(name) for name in names)} if args else {}
    return {**positional, **{name: shapes.get(name) for name in kwargs}}


class _InferenceModule(nn.Module):
    """Forward of one rank as a module whose parameters and buffers have the model's names."""

    def __init__(self, program: Program, model: nn.Module) -> None:
        super().__init__()
        program.phases["forward"].module.recompile()  # after what passes did to the graph
        # In lists, so that they are not submodules. Dynamo's bytecode leaves attributes on a copy of the model.
        self._program = [program]
        tensors = (*model.parameters(), *model.buffers())
        self._model = [copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})]
        self._replay = None if program.trace is None else program.trace.replay(self._run_traced)
        for name, param in places_of(model).items():
            self._owner(name).register_parameter(name.rpartition(".")[2], param)
        for name, buffer in model.named_buffers(remove_duplicate=False):
            self._owner(name).register_buffer(name.rpartition(".")[2], buffer)

    def _owner(self, name: str) -> nn.Module:
        """Return the module that holds a parameter, and create it if there is none."""
        owner: nn.Module = self
        for part in name.split(".")[:-1]:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        return owner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._replay is not None:
            return self._replay(self._model[0], args, kwargs)
        # Inputs of a graph that Dynamo did not trace are the tensors of the call.
        return self._run([leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)])

    def _run_traced(self, *inputs: Any) -> Any:
        """Run the graph on the inputs that Dynamo's bytecode reads; the bytecode makes the output from the results."""
        taken = [inputs[index] for index in self._program[0].taken]
        return self._run([torch.tensor(value) if isinstance(value, float) else value for value in taken])

    def _run(self, tensors: list[Any]) -> Any:
        (program,) = self._program
        phase: Phase = program.phases["forward"]
        sizes = {size.name: size.source for size in program.sizes}
        inputs: list[Any] = []
        for slot in phase.inputs:
            if slot.kind == "param":
                inputs.append(self.get_parameter(slot.name))
            elif slot.kind == "input":
                inputs.append(tensors[int(slot.name)])
            elif slot.kind == "size":
                given, dim = sizes[slot.name]
                inputs.append(tensors[given] if dim < 0 else tensors[given].shape[dim])
            else:
                constant = program.constants.get(slot.name)
                inputs.append(constant if constant is not None else self.get_buffer(slot.name))
        results = []
        for value, slot in zip(phase.module(*inputs), phase.outputs, strict=True):
            if slot.kind == "output":
                results.append(value)
            elif slot.of == "buffer":
                self.get_buffer(slot.name).copy_(value)
        for check in reversed(program.checks):
            check(results.pop())
        return pytree.tree_unflatten(results, program.out_spec)
