"""Full parameters that modules show in the place of their shards, as FSDP2's do while parameters are gathered.

FSDP2's are parameters of their own: an optimizer that is made of them trains nothing, flags and hooks that are set on
them are lost with them, and `zero_grad` and clipping do not reach the shards. Here they are the shards in all but their
values: `grad` and `requires_grad` are the shard's, copies and pickles are of the shard, and what cannot be passed on is
an error.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import Self

from graphshard.errors import UnsupportedError
from graphshard.ir.mesh import axes_around
from graphshard.ir.param_table import ParamSpec
from graphshard.torch_compat.dtensor import dtensor_of
from graphshard.torch_compat.operators import make_subclass

# What a parameter that is shown gathered has its shard as.
_SHARD = "_graphshard_shard"


def behind(param: nn.Parameter | None) -> nn.Parameter | None:
    """The shard behind a parameter that is shown gathered, or the parameter."""
    return param if param is None else param.__dict__.get(_SHARD, param)


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
        """Show a tensor.

        Args:
            path: the parameter's name in the model.
        """
        shown = make_subclass(cls, full.detach(), shard.requires_grad)
        shown._graphshard_shard, shown._path, shown._nothing = shard, path, full.new_empty(0)
        shown._written, shown._dtype = shown._version, full.dtype
        shown._follow(shard.requires_grad)
        return shown

    def fits(self, full: torch.Tensor, shard: nn.Parameter) -> bool:
        """Whether this can show a tensor of a shard; making a parameter anew takes several times as long."""
        alike = full.dtype is self._dtype and shard.requires_grad == self._flag
        return alike and shard is self._graphshard_shard

    def show(self, full: torch.Tensor) -> None:
        """Show another tensor."""
        self.data = full
        self._written = self._version

    def let_go(self) -> None:
        """Show nothing, and hold no memory."""
        self.data = self._nothing

    def check_not_written(self) -> None:
        """Raise UnsupportedError if somebody wrote to it, which backward would use and the shard not see."""
        if self._version != self._written:
            raise UnsupportedError(
                f"the gathered parameter {self._path} was written to after a forward that has kept it. The shard does "
                "not see that. Call reshard() before, and write to the shard."
            )

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Asked by an optimizer that is made of it."""
        raise self._refused("was given to an optimizer, or asked whether it is a leaf of autograd")

    @property
    def grad(self) -> torch.Tensor | None:
        """The shard's."""
        return self._graphshard_shard.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self._graphshard_shard.grad = value

    @property
    def requires_grad(self) -> bool:
        """The shard's."""
        return self._graphshard_shard.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> ShownParameter:
        """As of the shard."""
        self._graphshard_shard.requires_grad_(requires_grad)
        self._follow(requires_grad)
        return self

    def register_hook(self, hook: Any) -> NoReturn:
        """No gradient comes here."""
        raise self._refused("was given a hook")

    register_post_accumulate_grad_hook = register_hook

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return copy.deepcopy(self._graphshard_shard, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._graphshard_shard.__reduce_ex__(protocol)

    def _follow(self, requires_grad: bool) -> None:
        """Let autograd take it for what the shard is, so that what computes with it outside of forward is told."""
        self._flag = requires_grad
        torch.Tensor.requires_grad_(self, requires_grad)
        if requires_grad:
            torch.Tensor.register_hook(self, functools.partial(_refuse_gradient, self._path))

    def _refused(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"the gathered parameter {self._path} {what}, and gradients go to its shard. Do that before the model is "
            "called or unsharded, or call reshard() first."
        )


class WholeParameter(ShownParameter):
    """A full parameter that is taken for what it is where it is copied or written down, and not for its shard."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        memo[id(self)] = whole = nn.Parameter(self.data.clone(), self.requires_grad)
        return whole

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)


def shown_dtensor(full: torch.Tensor, shard: nn.Parameter, row: ParamSpec, path: str) -> nn.Parameter:
    """A parameter that is split over the tensor axis, as the DTensor that it was before it was sharded.

    Raises:
        UnsupportedError: the mesh that it was on is not found.
    """
    assert row.split is not None
    assert isinstance(shard, DTensor)
    shape, mesh = torch.Size(row.split.shape), axes_around(shard.device_mesh, row.split.found_on)
    whole = dtensor_of(full, mesh, row.split.found_placed, shape, row.stride_of(shape))
    shown = nn.Parameter(whole, requires_grad=shard.requires_grad)
    vars(shown)[_SHARD] = shard
    if shard.requires_grad:
        shown.register_hook(functools.partial(_refuse_gradient, path))
    return shown


def _refuse_gradient(path: str, _: torch.Tensor) -> NoReturn:
    raise UnsupportedError(
        f"a gradient reached the gathered parameter {path}, which modules show after unshard() or a forward: something "
        "outside of the model's forward computed with it. Compute that in forward, or under torch.no_grad()."
    )
