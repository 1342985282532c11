"""Watch the operators of a forward for what no program can keep, and for checks that it has to make when it runs.

torch.linalg.inv(x)    raises if x is singular: a value, which a trace does not know. So the status that the
                       operator returns is a result of the program, and is checked after each call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from graphshard.capture.untraceable import Untraceable
from graphshard.ir.program import Check
from graphshard.ir.torch_internals import depends_on_values, memory_of, written_by


class Watch(TorchDispatchMode):
    """Raises Untraceable where a forward does what no program can keep.

    Args:
        params: the traced parameters by name.

    Attributes:
        checks: what is to be checked after each call, with the traced status.
    """

    supports_higher_order_operators = True

    def __init__(self, params: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._params = {memory_of(tensor): name for name, tensor in params.items()}
        self.checks: list[tuple[Check, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            raise Untraceable("operator", f"operator {func}")
        if func is torch.ops.aten._linalg_check_errors.default:
            self.checks.append((Check(args[1], kwargs["is_matrix"]), args[0]))
            return None
        if isinstance(func, OpOverload) and func._schema.is_mutable:
            for name in (self._params.get(memory_of(tensor)) for tensor in written_by(func, args, kwargs)):
                if name is not None:
                    raise Untraceable("write", f"parameter {name}, operator {func}")
        result = func(*args, **kwargs)
        if isinstance(func, OpOverload) and depends_on_values(func, result):
            raise Untraceable("shape" if isinstance(result, torch.Tensor) else "value", f"operator {func}")
        return result
