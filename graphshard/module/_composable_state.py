"""What torch's functions that work with other kinds of data parallelism find on a unit of a compiled model."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

from torch.distributed.fsdp import FullyShardedDataParallel

from graphshard.errors import UnsupportedError

if TYPE_CHECKING:
    from graphshard.module._fsdp_module import UnitRef

_FILE_OF_FSDP1 = FullyShardedDataParallel.__init__.__code__.co_filename
_DTENSORS = "The values of model.state_dict() are DTensors"
_CHECKPOINT = "torch.distributed.checkpoint.state_dict"
_OPTIONS = "options=StateDictOptions(full_state_dict=True, cpu_offload=True)"
# Functions of FSDP1's class, and the remedy.
_REMEDIES = {
    "__init__": "graphshard has sharded it. Leave FullyShardedDataParallel out, and train the compiled model.",
    "summon_full_params": "Read full parameters with param.full_tensor(), or within graphshard.unsharded(model).",
    "optim": f"Call {_CHECKPOINT}.get_optimizer_state_dict(model, optimizer), or set_optimizer_state_dict.",
    "state_dict": f"{_DTENSORS}; full tensors are in {_CHECKPOINT}.get_model_state_dict(model, {_OPTIONS}).",
}


class UnitRegistry(dict[str, Any]):
    """Names of the composable functions that were applied to a unit; it refuses the functions of FSDP1's class.

    Around a compiled model FSDP1 would change the model before it fails, and its functions for state dicts do nothing:
    they look for modules of FSDP1. They ask for "replicate" at each module. So does `fsdp_modules`, which DCP calls.
    """

    def __contains__(self, name: object) -> bool:
        if name == "replicate":
            _reject_fsdp1()
        return super().__contains__(name)


def _reject_fsdp1() -> None:
    """Raise UnsupportedError if a function of FSDP1's class other than `fsdp_modules` is running."""
    frame, called = sys._getframe(2), ""
    while frame.f_back is not None:
        if frame.f_code.co_filename == _FILE_OF_FSDP1 and frame.f_code.co_name != "fsdp_modules":
            called = frame.f_code.co_name
        frame = frame.f_back
    for name, remedy in _REMEDIES.items() if called else ():
        if name in called:
            method = "" if called == "__init__" else f".{called}"
            raise UnsupportedError(f"FullyShardedDataParallel{method} of a compiled model: {remedy}")


class UnitState:
    """Stand-in for FSDP2's state of a module, for torch's functions that ask for it.

    Stages of `torch.distributed.pipelining` let the state of each unit reduce gradients after the last microbatch.
    """

    def __init__(self, unit: UnitRef) -> None:
        self._unit = unit
        self._state_ctx = self._fsdp_param_group = self  # the latter for stages of torch 2.11
        self.all_states = self._fsdp_param_groups = [self]

    def post_backward(self) -> None:
        self._unit.runner.finish()

    def _root_post_backward_final_callback(self) -> None:
        """Do nothing: reductions were waited for."""

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitState:
        """Return self: the copy of a module gets another state."""
        return self

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # copying asks for such names
            raise AttributeError(name)
        raise UnsupportedError(
            f"{name} of FSDP2's state is asked for, and a model that graphshard has compiled has none. For "
            "register_fsdp_forward_method use graphshard.register_forward_method."
        )
