"""The module of an exported program, or of a `.pt2` file, that is given in place of a module.

A joint program, such as `graphshard.programs(model)[0].exported`, becomes a `JointModule`. It has the parameters and
buffers, and no forward: what runs is the joint graph, which the tracer takes from it in place of a capture
(`codec/joint_export.py`).
"""

from __future__ import annotations

import os
import re
from typing import Any, ClassVar

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from graphshard.errors import ArgumentError, UnsupportedError
from graphshard.exported.program_module import HOME, module_from, state_of
from graphshard.exported.pt2_reader import read_program
from graphshard.utils.text import users_class

# Class of the module that `graphshard.export` exports to a .pt2 file.
_OF_INFERENCE = "graphshard.aot.pt2._InferenceModule"
_GRADIENTS = (OutputKind.GRADIENT_TO_PARAMETER, OutputKind.GRADIENT_TO_USER_INPUT, OutputKind.LOSS_OUTPUT)

# The entry of `meta["custom"]` that holds what graphshard writes into a program.
OURS = "graphshard"


def module_of(model: Any) -> Any:
    """Return the module of an exported program or of a `.pt2` file; anything else as it is.

    Raises:
        ArgumentError: the file cannot be read, or the program was not exported for training, or its state dict does
            not fit.
        UnsupportedError: the program has something that cannot be called from a module.
    """
    if isinstance(model, (str, os.PathLike)):
        model = read_program(model)
    if not isinstance(model, ExportedProgram):
        return model
    if facts_of(model) is not None or any(spec.kind in _GRADIENTS for spec in model.graph_signature.output_specs):
        return joint_module(model)
    _check_for_training(model)
    return module_from(model)


def _check_for_training(program: ExportedProgram) -> None:
    if program.dialect != "TRAINING":
        raise ArgumentError(
            f"model: the program is of torch.export's dialect {program.dialect}, for inference: run_decompositions() "
            "has taken away the operators that autograd differentiates. Give the program that torch.export.export "
            "returned, and save that to a .pt2 file."
        )
    mutated = [spec for spec in program.graph_signature.output_specs if spec.kind is not OutputKind.USER_OUTPUT]
    if mutated:
        raise ArgumentError(
            f"model: the program returns {mutated[0].target} ({mutated[0].kind.name}), which a program for training "
            "writes in place. Export the module again with torch.export.export."
        )
    kinds = [kind for node in program.graph.nodes for _, kind in (node.meta.get("nn_module_stack") or {}).values()]
    if _OF_INFERENCE in kinds:
        raise ArgumentError(
            "model: the program was written by graphshard.export for inference: forward ran in eval() mode and without "
            "gradients. Give the program that torch.export.export makes of the module."
        )


# --- modules of joint programs ------------------------------------------------------------------------------------


class JointModule(nn.Module):
    """Parameters and buffers of a joint program."""

    _joint: ClassVar[ExportedProgram]

    def forward(self, *inputs: torch.Tensor) -> Any:
        raise UnsupportedError(
            f"{users_class(self).__name__} was made of a joint program, which has no forward to run without "
            "graphshard.compile. Call what compile returns, outside of graphshard.uncompiled."
        )

    def train(self, mode: bool = True) -> JointModule:
        """Keep the mode of the capture.

        Raises:
            UnsupportedError: eval() is asked for.
        """
        if not mode:
            raise UnsupportedError(
                f"{users_class(self).__name__} was made of a joint program, which keeps the mode of its capture. "
                "Compile the module in eval() mode instead."
            )
        super().train(mode)
        return self


def joint_module(exported: ExportedProgram) -> JointModule:
    """Make the module of a joint program.

    Raises:
        ArgumentError: graphshard did not write it, or it cannot be compiled from.
    """
    facts = facts_of(exported)
    if facts is None:
        raise ArgumentError(
            "model: the program is a joint graph, with gradients among its results, and not one of graphshard's. Give "
            "the program that torch.export.export made of the module."
        )
    why_not = facts.get("why_not")
    if why_not:
        raise ArgumentError(
            f"model: the joint program cannot be compiled from: {why_not}. Compile the module, or the program that "
            "torch.export.export makes of it."
        )
    name = re.sub(r"\W", "_", str(facts.get("model"))) or "JointProgram"
    root: JointModule = type(name, (JointModule,), {"__module__": HOME, "_joint": exported})()
    state = state_of(exported)
    stored = {name: getattr(torch, str(dtype), None) for name, dtype in facts["stored"].items()}
    for path, dtype in stored.items():
        if isinstance(dtype, torch.dtype) and path in state.tensors:
            param = state.tensors[path]
            state.tensors[path] = nn.Parameter(param.detach().to(dtype), requires_grad=param.requires_grad)
    first = {name: names[0] for names in facts["ties"] for name in names}
    for path, tensor in state.tensors.items():
        tensor = state.tensors.get(first.get(path, path), tensor)
        owner: nn.Module = root
        *parts, attribute = path.split(".")
        for part in parts:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(attribute, tensor)
        elif path not in state.constants:
            owner.register_buffer(attribute, tensor)
    return root


def joint_of(module: nn.Module) -> ExportedProgram | None:
    """Return the joint program that a module was made of; None for others."""
    return type(module)._joint if isinstance(module, JointModule) else None


def facts_of(exported: ExportedProgram) -> dict[str, Any] | None:
    """Return what graphshard has written into a joint program in addition to its graph; None for others."""
    facts = exported.graph_module.meta.get("custom", {}).get(OURS)
    return facts if isinstance(facts, dict) else None
