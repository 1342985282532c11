"""What code of the user's does while backward is traced: hooks, and the backward of a `torch.autograd.Function`.

    y.register_hook(lambda grad: grad * self.scale)       the program holds while self.scale is what it is
    y.register_hook(lambda grad: grad * self.mask)        a buffer, or an attribute: an input of the program
    y.register_hook(lambda grad: self.norm.copy_(grad))   an error: AOTAutograd would leave it out

Forward is over then, and its modules hold their own tensors again, not those that are traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphshard.capture.learned import Learned, Rerun
from graphshard.capture.lines import user_place
from graphshard.capture.outer import OF_TORCH, attributes_of
from graphshard.capture.untraceable import Untraceable
from graphshard.capture.witness import PLAIN, is_container, text_at, witness_of
from graphshard.ir.operators import CHECKED
from graphshard.ir.program import Slot
from graphshard.ir.state import ModuleState, Place, Read, Write
from graphshard.ir.subclasses import has_traced
from graphshard.ir.torch_internals import replaced
from graphshard.ir.tracing_internals import contents_now, memory_of


class _Given(NamedTuple):
    """A tensor of the trace, and what it held when forward was over."""

    slot: Slot
    tensor: torch.Tensor
    contents: Any


class InBackward(TorchFunctionMode):
    """Watches what runs after a forward, in the same trace.

    Args:
        module: that is traced.
        learned: by earlier runs; tensors that only backward reads are added.
    """

    def __init__(self, module: nn.Module, learned: Learned) -> None:
        super().__init__()
        self._names = {id(sub): name for name, sub in module.named_modules()}
        self._places: dict[int, Place] = {}  # of modules
        self._learned = learned
        self._by_id: dict[int, torch.Tensor] = {}
        self._given: list[_Given] = []
        self._reads: dict[Place, Any] = {}
        self._unknown: dict[int, tuple[torch.Tensor, list[Place]]] = {}
        self._set: set[Place] = set()  # by forward
        self._runs = False

    def forward_begins(self) -> None:
        """What runs from now on is forward."""
        self._runs = False
        self._given.clear()
        self._by_id.clear()

    def forward_ends(
        self,
        by_id: Mapping[int, torch.Tensor],
        given: Mapping[Slot, torch.Tensor],
        writes: Iterable[Write],
        places: Mapping[int, Place],
    ) -> None:
        """What runs from now on is backward.

        Args:
            by_id: traced tensors by the identities of those that modules hold.
            given: all that the forward was given.
            writes: what it has left on modules, which is put back by now.
            places: of modules that it could reach, by identity.
        """
        self._runs = True
        self._places = dict(places)
        self._set = {write.place for write in writes}
        self._by_id.update(by_id)
        self._given += [_Given(slot, tensor, contents_now(tensor)) for slot, tensor in given.items()]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """In the block a forward is traced, and differentiated.

        Raises, in the block or at its end:
            Untraceable: backward writes to what is given to the forward, or reads what that sets.
            Rerun: something was learned.
        """
        find: Any = nn.Module.__getattribute__

        def look_up(owner: nn.Module, name: str) -> Any:
            if not self._runs or id(owner) not in self._places or name in OF_TORCH or name.startswith("__"):
                return find(owner, name)
            if self._places[id(owner)].then("attribute", name) in self._set:
                raise Untraceable("read in backward", f"{name}, which forward sets")
            value = find(owner, name)
            self._note(owner, name, value)
            return value

        run: Any = torch.autograd._engine_run_backward

        def run_watched(*args: Any, **kwargs: Any) -> Any:
            # torch.autograd.grad has taken away all modes, as it is a function that they may see.
            with self, _Checked() if self._runs else contextlib.nullcontext():
                return run(*args, **kwargs)

        watched = replaced(torch.autograd, "_engine_run_backward", run_watched)
        try:
            with replaced(nn.Module, "__getattribute__", look_up), watched:
                yield
            self._check_written()
            self._learn()
        except Exception:
            self._learn()  # what is not traced yet may be the reason
            raise
        finally:
            self.forward_begins()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._runs:
            return func(*args, **kwargs)
        if any(id(leaf) in self._by_id for leaf in pytree.arg_tree_leaves(*args, **kwargs)):
            args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: self._by_id.get(id(t), t), (args, kwargs))
        result = func(*args, **kwargs)
        if str(getattr(func, "__name__", "")).endswith("_"):  # of __setitem__, too
            self._check_written()
        return result

    def state(self, state: ModuleState) -> ModuleState:
        """What forward reads and leaves, with what backward reads."""
        reads = (Read(place, text_at(place, v, self._names), (), witness_of(v)) for place, v in self._reads.items())
        known = {read.place for read in state.reads}
        return replace(state, reads=(*state.reads, *(read for read in reads if read.place not in known)))

    def _learn(self) -> None:
        if self._unknown:
            self._learned.tensors.update(self._unknown)
            raise Rerun

    def _check_written(self) -> None:
        """Raise Untraceable if something that was given to forward is not what it was when that was over."""
        for slot, tensor, contents in self._given:
            if contents_now(tensor) is not contents:
                self._given.clear()
                raise Untraceable("write in backward", f"{slot.kind} {slot.name}", user_place())

    def _note(self, owner: nn.Module, name: str, value: Any) -> None:
        attributes = attributes_of(owner)
        place = self._places[id(owner)].then("attribute" if name in attributes else "class", name)
        if isinstance(value, torch.Tensor):
            if name in attributes and id(value) not in self._by_id and not has_traced(value):
                self._unknown.setdefault(id(value), (value, []))[1].append(place)
        elif isinstance(value, PLAIN) or is_container(value):
            self._reads.setdefault(place, value)
        elif name in attributes and not callable(value) and isinstance(getattr(value, "__dict__", None), dict):
            for key, item in vars(value).items():  # of a configuration
                if isinstance(item, PLAIN):
                    self._reads.setdefault(place.then("attribute", key), item)


class _Checked(TorchDispatchMode):
    """Lets what backward computes with torch.linalg be checked when it runs: a gradient of eig solves an equation."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, torch.Tensor] = {}  # by the memory of its status

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._linalg_check_errors.default:
            made = self._made.get(memory_of(args[0]))
            if made is None:
                raise Untraceable("other", f"operator {func} in backward")
            made.copy_(CHECKED(made, args[0], args[1], kwargs["is_matrix"]))
            return None
        result = func(*args, **kwargs)
        if isinstance(func, OpOverload) and func._schema.returns and func._schema.returns[-1].name == "info":
            self._made[memory_of(result[-1])] = result[0]
        return result
