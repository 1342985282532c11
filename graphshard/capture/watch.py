"""Watch the operators of a forward for what no program can keep, and for checks that it has to make when it runs.

torch.linalg.inv(x)    raises if x is singular: a value, which a trace does not know. So the status that the
                       operator returns is a result of the program, and is checked after each call.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphshard.capture.draws import draws
from graphshard.capture.guards import line_that_catches
from graphshard.capture.lines import user_place
from graphshard.capture.untraceable import Untraceable
from graphshard.ir.checks import Check, Condition
from graphshard.ir.program import Slot
from graphshard.ir.subclasses import has_traced, shard_in
from graphshard.ir.tracing_internals import arguments_of, keep_strides, memory_of, written_by
from graphshard.ir.wanted import still_wanted

_NESTED = {
    torch.ops.aten._nested_tensor_from_mask.default,
    torch.ops.aten._nested_tensor_from_mask_left_aligned.default,
}
_EMBEDDINGS = {torch.ops.aten.embedding.default, torch.ops.aten._embedding_bag.default}


class Made(NamedTuple):
    """A tensor that an operator made, as long as it is alive, and the line of the user's that called the operator."""

    tensor: weakref.ref[torch.Tensor]
    place: tuple[str, int] | None


class Watch(TorchDispatchMode):
    """Raises Untraceable where a forward does what no program can keep.

    Args:
        given: the traced tensors that forward finds.

    Attributes:
        checks: what is to be checked after each call, with the traced status.
        made: what operators made.
        foreign: lines that wrote to a tensor that is not traced.
    """

    supports_higher_order_operators = True

    def __init__(self, given: Mapping[Slot, torch.Tensor]) -> None:
        super().__init__()
        self._given = {memory_of(tensor): slot for slot, tensor in given.items()}
        self.made: list[Made] = []
        self.checks: list[tuple[Check | Condition, torch.Tensor]] = []
        self.foreign: list[tuple[str, int] | None] = []
        self._branch: int | None = None  # how many tensors were made before it began

    @contextlib.contextmanager
    def branch(self, taken: torch.Tensor) -> Iterator[None]:
        """What runs in the block counts only if `taken`, but runs anyway."""
        outer, self._branch, first = self._branch, len(self.made), len(self.checks)
        try:
            yield
        finally:
            self._branch = outer
        self.checks[first:] = [(check, check.where(taken, status)) for check, status in self.checks[first:]]

    def assume(self, value: torch.Tensor, expected: bool, line: str, *, of_size: bool = False) -> None:
        """A value has this truth value, or the forward raises an exception at a line; or a size is another."""
        self.checks.append((Condition(line, expected, of_size), value.reshape(()).to(torch.bool)))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        still_wanted()
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            raise Untraceable("operator", f"operator {func}")
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise Untraceable("generator", f"operator {func}")
        if getattr(func, "namespace", "") == "c10d":  # by a process group's own method, or a name that was not found
            raise Untraceable("collective", f"operator {func}")
        if func in _NESTED:
            raise Untraceable("nested", f"operator {func}")
        if func in _EMBEDDINGS and arguments_of(func, args, kwargs).get("sparse"):
            raise Untraceable("sparse", f"operator {func}")
        if func is torch.ops.aten._linalg_check_errors.default:
            self.checks.append((Check(args[1], kwargs["is_matrix"], line_that_catches(sys._getframe(1))), args[0]))
            return None
        if draws(func, args, kwargs):
            given = pytree.arg_tree_leaves(*args, **kwargs)
            if any(isinstance(arg, DTensor) and arg.device_mesh.device_type != "cpu" for arg in given):
                raise Untraceable("distributed draw", f"operator {func}")
        if self._branch is not None and torch.Tag.nondeterministic_seeded in func.tags:
            raise Untraceable("branch", f"operator {func}")
        written: list[tuple[torch.Tensor, tuple[int, ...]]] = []
        if isinstance(func, OpOverload) and func._schema.is_mutable:
            written = [(tensor, tensor.stride()) for tensor in written_by(func, args, kwargs)]
            if self._branch is not None:
                self._check_own(func, args, kwargs)
            if not all(has_traced(tensor) for tensor, _ in written):
                self.foreign.append(user_place())
            for slot in (self._given.get(memory_of(shard_in(tensor))) for tensor, _ in written):
                if slot is not None and slot.kind == "param":
                    raise Untraceable("write", f"parameter {slot.name}, operator {func}")
        result = func(*args, **kwargs)
        for tensor, stride in written:
            if len(stride) == tensor.dim() and torch.Tag.inplace_view not in func.tags:
                keep_strides(tensor, stride)
        place = user_place()
        self.made += [Made(weakref.ref(t), place) for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        return result

    def check_foreign(self) -> None:
        """Raise Untraceable if forward wrote to a tensor that nothing gives it: that of the capture."""
        for place in self.foreign:
            raise Untraceable("write foreign", "a tensor that belongs to no module", place)

    def _check_own(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise Untraceable where a branch writes to what it has not made."""
        before = [each.tensor() for each in self.made[: self._branch]]
        foreign = {*self._given} | {memory_of(tensor) for tensor in before if tensor is not None}
        if any(memory_of(tensor) in foreign for tensor in written_by(func, args, kwargs)):
            raise Untraceable("branch", f"operator {func}")


class WatchHooks(TorchFunctionMode):
    """Watches what hooks of tensors are given, too: they run after the forward."""

    def __init__(self, made: list[Made]) -> None:
        super().__init__()
        self._made = made

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.register_hook:
            tensor, hook = args
            place = user_place()

            def watched(grad: torch.Tensor) -> torch.Tensor | None:
                self._made.append(Made(weakref.ref(grad), place))
                return hook(grad)

            args = (tensor, watched)
        return func(*args, **(kwargs or {}))


def check_nothing_kept(made: Iterable[Made]) -> None:
    """Raise Untraceable if a tensor of a trace is still alive after it: code keeps it where no call will renew it."""
    if any(each.tensor() is not None for each in made):
        gc.collect()  # graphs of autograd hold each other
    for each in made:
        if (tensor := each.tensor()) is not None:
            shape = list(tensor.shape)
            raise Untraceable("kept", f"a tensor of shape {shape}", line=each.place)
