"""Full parameters as modules show them: shards in all but their values.

FSDP2's are separate parameters: an optimizer that is made of them trains nothing, and flags and hooks are lost with
them. Here `grad` and `requires_grad` are the shard's, copies and pickles are of the shard, and what cannot be passed on
is an error.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import Self

from graphshard.errors import UnsupportedError
from graphshard.ir.mesh import axes_around
from graphshard.ir.param_table import ParamSpec
from graphshard.runtime.shards import SHARD_ATTRIBUTE, ParamRef
from graphshard.torch_compat.dtensor import dtensor_of
from graphshard.torch_compat.torch_ops import make_subclass, pytree, use_count, without_torch_function


class ShownParameter(nn.Parameter):
    """A full parameter that a module shows. It shares memory with what programs read or have left to backward."""

    _graphshard_shard: nn.Parameter
    _path: str
    _written: int
    _flag: bool
    _nothing: torch.Tensor
    _dtype: torch.dtype

    @classmethod
    def of(cls, full: torch.Tensor, shard: nn.Parameter, path: str) -> Self:
        """Show a tensor as the parameter that is called `path` in the model."""
        shown = make_subclass(cls, full.detach(), False)
        shown._graphshard_shard, shown._path, shown._nothing = shard, path, full.new_empty(0)
        shown._written, shown._dtype, shown._flag = shown._version, full.dtype, shard.requires_grad
        return shown

    def fits(self, dtype: torch.dtype, shard: nn.Parameter) -> bool:
        """Return whether this can show a tensor of a shard; to make a new parameter takes several times as long."""
        alike = dtype is self._dtype and shard.requires_grad == self._flag
        return alike and shard is self._graphshard_shard

    def show(self, full: torch.Tensor) -> None:
        """Show another tensor."""
        self.data = full
        self._written = self._version

    def check_not_written(self) -> None:
        """Raise UnsupportedError if it was written to, which backward would use and the shard not see."""
        if self._version != self._written:
            raise UnsupportedError(
                f"the gathered parameter {self._path} was written to after a forward that has kept it. The shard does "
                "not see that. Call reshard() before, and write to the shard."
            )

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """False: autograd adds gradients to the shard."""
        return False

    @property
    def retains_grad(self) -> bool:  # type: ignore[override]
        """Refuse: an optimizer that is made of what is not a leaf asks for it."""
        raise self._refused("was given to an optimizer")

    @property
    def grad(self) -> torch.Tensor | None:
        """Gradient of the shard."""
        return self._graphshard_shard.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self._graphshard_shard.grad = value

    @property
    def requires_grad(self) -> bool:
        """Flag of the shard."""
        return self._graphshard_shard.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> ShownParameter:
        """Set the flag of the shard."""
        self._graphshard_shard.requires_grad_(requires_grad)
        self.follow(requires_grad)
        return self

    def register_hook(self, hook: Any) -> NoReturn:
        """Refuse: gradients of the model's calls go to the shard."""
        raise self._refused("was given a hook")

    register_post_accumulate_grad_hook = register_hook

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return copy.deepcopy(self._graphshard_shard, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._graphshard_shard.__reduce_ex__(protocol)

    @property
    def is_unconnected(self) -> bool:
        """Whether gradients of it would not reach the shard, which is trained."""
        return self._flag and self.grad_fn is None

    def release(self) -> None:
        """Free the memory, and leave the graph of autograd, which has not saved this."""
        torch.Tensor.detach_(self)
        self.data = self._nothing

    def follow(self, requires_grad: bool) -> None:
        """Let autograd see the shard's flag; a gradient that would not reach the shard is an error."""
        self._flag = requires_grad
        if self.grad_fn is None:
            torch.Tensor.requires_grad_(self, requires_grad)
        elif not requires_grad:
            torch.Tensor.detach_(self)
        if requires_grad and self.grad_fn is None:
            torch.Tensor.register_hook(self, functools.partial(_refuse_gradient, self._path))

    def _refused(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"the gathered parameter {self._path} {what}, and gradients go to its shard. Do that before the model is "
            "called or unsharded, or call reshard() first."
        )


class WholeParameter(ShownParameter):
    """A full parameter that is copied and pickled itself, not as its shard."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        memo[id(self)] = whole = nn.Parameter(self.data.clone(), self.requires_grad)
        return whole

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)


class AttributeParameter(ShownParameter):
    """A full parameter where an attribute of its module is read, gathered when something computes with it.

        loss = F.linear(hidden, model.embed.weight)     full, as FSDP2's root is until backward
        model.parameters()                              shards

    It has no memory until then, so code that reads the memory of tensors without torch's functions gets an error of
    torch.

    Attributes:
        fetch: returns the full parameter that `ref` refers to; None if it is there.
    """

    ref: ParamRef
    fetch: Callable[[ParamRef], torch.Tensor] | None = None

    @classmethod
    def of_shard(cls, ref: ParamRef, dtype: torch.dtype, device: torch.device) -> Self:
        """Show a parameter that is not gathered."""
        empty = torch.empty((), dtype=dtype, device=device).expand(ref.row.shape)
        empty.untyped_storage().resize_(0)
        shown = cls.of(empty, ref.param, ref.name)
        shown._nothing = empty
        return shown

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Gather the parameter to compute with it. Writes, `data` and `torch.autograd.grad` are for the shard."""
        kwargs = kwargs or {}
        if _asks_about(func):
            with without_torch_function():
                return func(*args, **kwargs)
        attributes = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        is_write = _is_write(func)
        if is_write or func is torch.autograd.grad:
            for each in attributes if is_write else ():
                each.fetch = each._gather_written
            args, kwargs = pytree.tree_map_only(cls, lambda shown: shown._graphshard_shard, (args, kwargs))
            return func(*args, **kwargs)
        with without_torch_function():
            for each in attributes:
                if each.fetch is not None:
                    fetch, each.fetch = each.fetch, None
                    each.show(fetch(each.ref))
            return func(*args, **kwargs)

    def register_hook(self, hook: Any) -> Any:
        """Register a hook of the gradient of the shard."""
        return self._graphshard_shard.register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Register a hook of the accumulated gradient of the shard."""
        return self._graphshard_shard.register_post_accumulate_grad_hook(hook)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return a text without values, which would have to be gathered."""
        return f"<full parameter {self._path}: {list(self.shape)}, {self.dtype}>"

    def __getattr__(self, name: str) -> Any:
        """Return what DTensors have, of the shard."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._graphshard_shard, name)

    @property
    def is_unconnected(self) -> bool:
        """Whether gradients of it would not reach the shard, which is trained."""
        with without_torch_function():
            return super().is_unconnected

    def _gather_written(self, _: ParamRef) -> torch.Tensor:
        shard: Any = self._graphshard_shard
        full: torch.Tensor = shard.detach().full_tensor().to(self._dtype)
        return full

    def end(self) -> bool:
        """Free the memory; return whether nothing else holds it, so that it can be shown again.

        Raises:
            UnsupportedError: a view of it was written to, which the shard does not see.
        """
        with without_torch_function():
            is_free = use_count(self) == 1
            if is_free:
                self.fetch = _too_late
            self.check_not_written()
            if is_free:
                self.release()
            return is_free


# Asked without gathering, like properties that are not in `_COMPUTED`.
_ABOUT = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        *("size", "dim", "ndimension", "numel", "nelement", "element_size", "get_device", "is_same_size"),
        *("is_floating_point", "is_complex", "is_signed", "__len__", "__hash__"),
    )
)
_COMPUTED = frozenset(getattr(torch.Tensor, name) for name in ("T", "mT", "H", "mH", "real", "imag", "data"))


def _asks_about(func: Callable[..., Any]) -> bool:
    is_property = getattr(func, "__name__", "") == "__get__"
    return func in _ABOUT or (is_property and getattr(func, "__self__", None) not in _COMPUTED)


def _is_write(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    of_data = name in ("__get__", "__set__") and getattr(func, "__self__", None) is torch.Tensor.data
    return of_data or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _too_late(ref: ParamRef) -> NoReturn:
    raise UnsupportedError(
        f"the full parameter {ref.name} was read as an attribute of its module before the last forward or backward, "
        "and is used after that. Read the attribute again."
    )


def shown_dtensor(full: torch.Tensor, shard: nn.Parameter, row: ParamSpec, path: str) -> nn.Parameter:
    """Make a parameter that is split over the tensor axis the DTensor that it was before it was sharded."""
    assert row.split is not None
    assert isinstance(shard, DTensor)
    shape, mesh = torch.Size(row.split.shape), axes_around(shard.device_mesh, row.split.found_on)
    whole = dtensor_of(full, mesh, row.split.found_placed, shape, row.stride_of(shape))
    shown = nn.Parameter(whole, requires_grad=shard.requires_grad)
    vars(shown)[SHARD_ATTRIBUTE] = shard
    if shard.requires_grad:
        shown.register_hook(functools.partial(_refuse_gradient, path))
    return shown


def _refuse_gradient(path: str, _: torch.Tensor) -> NoReturn:
    raise UnsupportedError(
        f"a gradient reached the gathered parameter {path}, which modules show after unshard() or a forward: something "
        "outside of the model's forward computed with it. Compute that in forward, or under torch.no_grad()."
    )
