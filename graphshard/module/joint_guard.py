"""Guard of the one program of a joint program's module: it serves each call with inputs like the captured ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from graphshard.codec.joint_reader import joint_inputs, wrong_call
from graphshard.exported.exported_program import joint_of
from graphshard.ir.program import Program
from graphshard.module.held import BufferMemory
from graphshard.runtime.step import Executable


class JointGuard:
    """Guard of a program that was not traced, and the call itself; see `TracedGuard`.

    Attributes:
        moved: always false, as the module has no forward that could be replaced.
    """

    moved = False

    def __init__(self, program: Program, module: nn.Module, executable: Executable) -> None:
        exported = joint_of(module)
        assert exported is not None
        self._expected = joint_inputs(exported)
        self._executable = executable
        self._memory = BufferMemory(executable.program, module, ())

    def change(self, scope: Mapping[str, Any]) -> str:
        """Return why the program does not serve a call, in words; "" if it does."""
        return wrong_call(self._expected, pytree.tree_leaves((scope["args"], scope["kwargs"])))

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call."""
        tensors = pytree.tree_leaves((args, kwargs))
        self._memory.check(tensors)
        return pytree.tree_unflatten(self._executable(tensors), self._executable.program.out_spec)
