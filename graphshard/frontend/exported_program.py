"""An exported program, or a `.pt2` file, given in place of a module."""

from __future__ import annotations

import os
from typing import Any

from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from graphshard.frontend.joint_module import facts_of, joint_module
from graphshard.frontend.program_module import module_from
from graphshard.frontend.pt2_reader import read_program
from graphshard.ir.errors import ArgumentError

# Class of the module that `graphshard.export` exports to a .pt2 file.
_OF_INFERENCE = "graphshard.artifact.plain._Plain"
_GRADIENTS = (OutputKind.GRADIENT_TO_PARAMETER, OutputKind.GRADIENT_TO_USER_INPUT, OutputKind.LOSS_OUTPUT)


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
