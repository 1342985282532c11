"""Options of a model that is given as an exported program: what the program says that the user left open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from graphshard.exported.exported_program import facts_of, joint_of, module_of
from graphshard.exported.program_module import ProgramModule
from graphshard.ir.errors import UnsupportedError
from graphshard.ir.units import MODULE_SEPARATOR
from graphshard.options.options import Options


def resolve_model(model: Any, options: Options) -> tuple[Any, Options]:
    """Return the module of a program or a `.pt2` file, and options with its dynamic shapes; a module as it is.

    Raises:
        ArgumentError: the program cannot be compiled.
        UnsupportedError: the program has something that cannot be called from a module, or casts that do not fit the
            mixed-precision policy.
    """
    module = module_of(model)
    if not isinstance(model, torch.nn.Module) and isinstance(module, ProgramModule):
        if options.dynamic_shapes is None:
            options = replace(options, dynamic_shapes=module.program_inputs().dynamic_shapes())
        _check_precision(module, options.mp_policy)
    joint = joint_of(module) if not isinstance(model, torch.nn.Module) else None
    facts = None if joint is None else facts_of(joint)
    if facts is not None and options.units is None and facts["units"]:
        units = [tuple(unit.split(MODULE_SEPARATOR)) if MODULE_SEPARATOR in unit else unit for unit in facts["units"]]
        options = replace(options, units=units)
    return module, options


def example_of(model: Any) -> tuple[Any, Any]:
    """Return the example inputs and keyword inputs that a program holds; two times None for others."""
    examples = model.program_examples() if isinstance(model, ProgramModule) else None
    return (None, None) if examples is None else examples


def _check_precision(module: ProgramModule, spec: Any) -> None:
    """Raise UnsupportedError for a cast of which nobody knows whether it was to the dtype of a parameter.

    `x.to(weight.dtype)` and `x.float()` are the same in a program. With a policy they are not.
    """
    policies = list(spec.values()) if isinstance(spec, Mapping) else [spec]
    wanted = {policy.param_dtype for policy in policies if policy is not None} - {None}
    own = {param.dtype for param in module.parameters() if param.is_floating_point()}
    for dtype, place in module.program_casts():
        if dtype in own and wanted - {dtype}:
            others = ", ".join(sorted(str(other) for other in wanted - {dtype}))
            raise UnsupportedError(
                f"mp_policy: the program names {dtype} in {place}. At export that may have been the dtype of a "
                f"parameter, which mp_policy changes to {others}, or a constant. Export a copy of the module with "
                f"parameters in {others}, compile that program, and call .to({dtype}) on what compile returns "
                f"to store parameters in {dtype}; or compile the module itself."
            )
